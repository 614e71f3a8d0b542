"""What an ONNX model takes and gives, held against what its config.pbtxt says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tensorline.config.model import ModelConfig, TensorSpec
from tensorline.errors import ConfigError
from tensorline.stage.builtin import batched

__all__ = ["ModelTensor", "check_signature", "model_tensors"]

DATATYPES: Final[Mapping[str, str]] = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
"""ONNX Runtime's type names. No BF16: its Python interface cannot share an array of them."""


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """An input or output as the model file declares it. `shape`: -1 is any size; None: of any rank."""

    name: str
    datatype: str
    """Protocol name, or ONNX Runtime's own for a type that the protocol does not have."""
    shape: tuple[int, ...] | None


def model_tensors(nodes: Sequence[Any]) -> tuple[ModelTensor, ...]:
    """From what `InferenceSession.get_inputs()` and `get_outputs()` give: names, type names, shapes with symbols."""
    return tuple(
        ModelTensor(
            node.name,
            DATATYPES.get(node.type, node.type),
            # A model that leaves the rank open shows as an empty shape, like a scalar: nothing is checked for either.
            tuple(size if isinstance(size, int) else -1 for size in node.shape) if node.shape else None,
        )
        for node in nodes
    )


def check_signature(
    config: ModelConfig, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor]
) -> dict[str, tuple[int, ...]]:
    """Shapes of the configured tensors by name, with the batch dimension; -1 only where both sides leave a size open.

    Raises:
        ConfigError: a name that the model does not have, an input that the configuration lacks, or another datatype or
            shape; the text says what both sides have.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for kind, specs, tensors in (("input", config.inputs, inputs), ("output", config.outputs, outputs)):
        by_name = {tensor.name: tensor for tensor in tensors}
        for spec in specs:
            if spec.name not in by_name:
                raise ConfigError(f"{kind} '{spec.name}' is not in the model file, which has {_names(by_name)}")
            shapes[spec.name] = _agreed_shape(config, kind, spec, by_name[spec.name])
    configured = {spec.name for spec in config.inputs}
    for tensor in inputs:
        if tensor.name not in configured:
            raise ConfigError(f"the model file needs input '{tensor.name}', which the configuration does not have")
    if not config.outputs:
        raise ConfigError(f"the configuration has no output; the model file has {_names({t.name: t for t in outputs})}")
    return shapes


def _agreed_shape(config: ModelConfig, kind: str, spec: TensorSpec, tensor: ModelTensor) -> tuple[int, ...]:
    if spec.datatype != tensor.datatype:
        raise ConfigError(f"{kind} '{spec.name}' is {spec.datatype}, but {tensor.datatype} in the model file")
    wanted = batched(config, spec)
    if tensor.shape is None:
        return wanted
    if config.max_batch_size > 0 and tensor.shape[0] > 0:
        raise ConfigError(
            f"{kind} '{spec.name}' has shape {list(tensor.shape)} in the model file, whose first dimension is fixed: "
            f"max_batch_size is {config.max_batch_size}, but such a model cannot batch; set it to 0"
        )
    pairs = list(zip(wanted, tensor.shape, strict=False))
    if len(wanted) != len(tensor.shape) or any(-1 not in pair and pair[0] != pair[1] for pair in pairs):
        note = " (the first is the batch dimension)" if config.max_batch_size > 0 else ""
        raise ConfigError(
            f"{kind} '{spec.name}' has shape {list(wanted)}{note}, but {list(tensor.shape)} in the model file"
        )
    return tuple(max(pair) for pair in pairs)


def _names(by_name: Mapping[str, ModelTensor]) -> str:
    return ", ".join(f"'{name}'" for name in by_name) or "none"
