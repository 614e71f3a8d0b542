"""EfficientNet-Lite0 as an ONNX graph, built from its published weights without PyTorch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

__all__ = ["INPUT", "OUTPUT", "build_onnx"]

INPUT: Final = "pixels"
"""FP32 [n, 3, 224, 224], RGB, (x - 127) / 128."""
OUTPUT: Final = "logits"
"""FP32 [n, 1000]."""

BATCH_NORM_EPSILON: Final = 1e-3
OPSET: Final = 17
IR_VERSION: Final = 8  # the one that belongs to opset 17; the onnx package would write its own newest


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks of one kind in a row; the stride is that of the first."""

    repeats: int
    kernel: int
    stride: int
    expansion: int
    inputs: int
    outputs: int


STAGES: Final = (
    Stage(1, 3, 1, 1, 32, 16),
    Stage(2, 3, 2, 6, 16, 24),
    Stage(2, 5, 2, 6, 24, 40),
    Stage(3, 3, 2, 6, 40, 80),
    Stage(3, 5, 1, 6, 80, 112),
    Stage(4, 5, 2, 6, 112, 192),
    Stage(1, 3, 1, 6, 192, 320),
)

Array = NDArray[Any]


@dataclass(slots=True)
class _Graph:
    """Nodes and weights as they are added; a method returns the name of the tensor it makes."""

    weights: Mapping[str, Array]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)

    def constant(self, name: str, array: Array) -> str:
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def node(self, kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def convolution(self, x: str, conv: str, norm: str, *, stride: int = 1, groups: int = 1, relu6: bool = True) -> str:
        """A convolution with its BatchNorm folded in: w' = w·g/√(v+ε), b' = β − m·g/√(v+ε)."""
        weight = self.weights[f"{conv}.weight"].astype(np.float64)
        gain = self.weights[f"{norm}.weight"] / np.sqrt(
            self.weights[f"{norm}.running_var"].astype(np.float64) + BATCH_NORM_EPSILON
        )
        bias = self.weights[f"{norm}.bias"] - self.weights[f"{norm}.running_mean"] * gain
        w = self.constant(f"{conv}.weight", (weight * gain[:, None, None, None]).astype(np.float32))
        b = self.constant(f"{conv}.bias", bias.astype(np.float32))
        out = self.node(
            "Conv",
            [x, w, b],
            conv,
            kernel_shape=list(weight.shape[2:]),
            strides=[stride, stride],
            group=groups,
            auto_pad="SAME_UPPER",  # TensorFlow's padding, with which the weights were trained: uneven at stride 2
        )
        return self.node("Clip", [out, "zero", "six"], f"{conv}.relu6") if relu6 else out

    def block(self, x: str, prefix: str, stage: Stage, stride: int, inputs: int) -> str:
        """Inverted residual: expand 1x1, convolve each channel, project 1x1; no squeeze-and-excitation in Lite."""
        out, wide = x, inputs * stage.expansion
        if stage.expansion != 1:
            out = self.convolution(out, f"{prefix}._expand_conv", f"{prefix}._bn0")
        out = self.convolution(out, f"{prefix}._depthwise_conv", f"{prefix}._bn1", stride=stride, groups=wide)
        out = self.convolution(out, f"{prefix}._project_conv", f"{prefix}._bn2", relu6=False)
        return self.node("Add", [out, x], f"{prefix}.add") if stride == 1 and inputs == stage.outputs else out


def build_onnx(weights: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """The serialized model, its batch dimension dynamic.

    Args:
        weights: The 296 tensors of `efficientnet-lite0-57934424.pth` by name.
        metadata: Written into the model: where it comes from, under which licence.
    """
    graph = _Graph(weights)
    graph.constant("zero", np.zeros((), np.float32))
    graph.constant("six", np.full((), 6, np.float32))
    x = graph.convolution(INPUT, "_conv_stem", "_bn0", stride=2)
    index = 0
    for stage in STAGES:
        for repeat in range(stage.repeats):
            stride, inputs = (stage.stride, stage.inputs) if repeat == 0 else (1, stage.outputs)
            x = graph.block(x, f"_blocks.{index}", stage, stride, inputs)
            index += 1
    x = graph.convolution(x, "_conv_head", "_bn1")
    x = graph.node("GlobalAveragePool", [x], "pool")
    x = graph.node("Flatten", [x], "flat", axis=1)
    classifier = [
        x,
        graph.constant("_fc.weight", weights["_fc.weight"]),
        graph.constant("_fc.bias", weights["_fc.bias"]),
    ]
    graph.node("Gemm", classifier, OUTPUT, transB=1)

    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "efficientnet_lite0",
            [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["batch", 3, 224, 224])],
            [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["batch", 1000])],
            graph.initializers,
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="tensorline examples",
    )
    helper.set_model_props(model, dict(metadata))
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))
