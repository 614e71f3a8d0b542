"""Small ONNX models, made where a test needs them."""

from pathlib import Path
from typing import Any

from onnx import TensorProto, helper

from tensorline.stage.backend import ModelDirectory
from tests.services.heap_batch import model

TYPES = {
    "FP32": TensorProto.FLOAT,
    "FP16": TensorProto.FLOAT16,
    "FP64": TensorProto.DOUBLE,
    "INT64": TensorProto.INT64,
    "UINT8": TensorProto.UINT8,
    "BOOL": TensorProto.BOOL,
    "BYTES": TensorProto.STRING,
}
Tensors = dict[str, tuple[str, list[Any]]]
"""Datatype and shape by name; a string in a shape is a size that is left open."""


def node(kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return helper.make_node(kind, inputs, outputs, **attributes)


def write_model(folder: Path, nodes: list[Any], inputs: Tensors, outputs: Tensors) -> None:
    """`<folder>/1/model.onnx`."""
    made = helper.make_model(
        helper.make_graph(
            nodes,
            "test",
            [helper.make_tensor_value_info(name, TYPES[kind], shape) for name, (kind, shape) in inputs.items()],
            [helper.make_tensor_value_info(name, TYPES[kind], shape) for name, (kind, shape) in outputs.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "1" / "model.onnx").write_bytes(made.SerializeToString())


def directory(folder: Path, text: str) -> ModelDirectory:
    return model(f'backend: "onnxruntime" default_model_filename: "model.onnx" {text}', folder)
