"""The graph that is built, against the weights computed with by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from examples.prepare import MODEL, WEIGHTS, _fetch
from examples.torchfile import read_legacy_tensors

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def weights(photos: list[Path]) -> dict[str, Array]:
    return read_legacy_tensors(_fetch(WEIGHTS))


def normalised(x: Array, weights: dict[str, Array], name: str) -> Array:
    """BatchNorm by its definition, not folded."""
    mean, variance, gain, bias = (
        weights[f"{name}.{part}"].astype(np.float64)[:, None, None]
        for part in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / np.sqrt(variance + 1e-3) * gain + bias


def convolved(x: Array, kernel: Array, stride: int, *, by_channel: bool = False) -> Array:
    """A convolution of one picture [c, h, w] with TensorFlow's SAME padding, one kernel position after another."""
    size, side = kernel.shape[-1], x.shape[1]
    out_side = -(-side // stride)
    missing = max((out_side - 1) * stride + size - side, 0)
    padded = np.pad(x, ((0, 0), (missing // 2, missing - missing // 2), (missing // 2, missing - missing // 2)))
    out: Array = np.zeros((kernel.shape[0], out_side, out_side))
    for row in range(size):
        for column in range(size):
            window = padded[:, row : row + out_side * stride : stride, column : column + out_side * stride : stride]
            window = window[:, :out_side, :out_side]
            at = kernel[:, :, row, column].astype(np.float64)
            out += window * at[:, :1, None] if by_channel else np.einsum("oc,chw->ohw", at, window)
    return out


def relu6(x: Array) -> Array:
    return np.clip(x, 0, 6)


def test_the_first_blocks_compute_what_the_weights_say(weights: dict[str, Array]) -> None:
    """Stem, the block without expansion, one of stride 2 and one with a residual: all that the others are made of."""
    x = np.random.default_rng(3).uniform(-1, 1, (3, 224, 224)).astype(np.float32)

    def conv(x: Array, name: str, norm: str, stride: int = 1, *, by_channel: bool = False) -> Array:
        return normalised(convolved(x, weights[f"{name}.weight"], stride, by_channel=by_channel), weights, norm)

    def block(x: Array, index: int, stride: int, *, expands: bool = True) -> Array:
        name = f"_blocks.{index}"
        out = relu6(conv(x, f"{name}._expand_conv", f"{name}._bn0")) if expands else x
        out = relu6(conv(out, f"{name}._depthwise_conv", f"{name}._bn1", stride, by_channel=True))
        out = conv(out, f"{name}._project_conv", f"{name}._bn2")
        return out + x if out.shape == x.shape else out

    stem = relu6(conv(x.astype(np.float64), "_conv_stem", "_bn0", 2))
    expected = block(block(block(stem, 0, 1, expands=False), 1, 2), 2, 1)

    model = onnx.load(MODEL)
    model.graph.output.append(onnx.helper.make_tensor_value_info("_blocks.2.add", onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (got,) = session.run(["_blocks.2.add"], {"pixels": x[np.newaxis]})
    np.testing.assert_allclose(got[0], expected, atol=2e-4)


def test_the_graph_has_the_size_of_the_network(weights: dict[str, Array]) -> None:
    assert len(weights) == 296
    kinds = [node.op_type for node in onnx.load(MODEL).graph.node]
    assert (kinds.count("Conv"), kinds.count("Clip"), kinds.count("Add")) == (49, 33, 9)


def test_the_batch_dimension_is_open_and_the_origin_is_told(photos: list[Path]) -> None:
    model = onnx.load(MODEL)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert {entry.key: entry.value for entry in model.metadata_props}["license"] == "Apache-2.0"
