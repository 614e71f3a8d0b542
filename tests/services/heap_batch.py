"""A batch whose arena is the heap, and models written in a line: what the tests of backends run with."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tensorline.config.load import config_from_text
from tensorline.stage.backend import Device, ModelDirectory, ParameterValue
from tensorline.tensor import DATATYPES, Array

CPU = Device("cpu", 0)


class HeapBatch:
    """Keeps the promises of `tensorline.stage.backend.Batch`: inputs are read-only, `empty` hands out dirty memory."""

    def __init__(self, inputs: Mapping[str, Array], rows: int = 1, outputs: Sequence[str] = ()) -> None:
        self.inputs: Mapping[str, Array] = {name: _read_only(array) for name, array in inputs.items()}
        self.rows = rows
        self.parameters: Sequence[Mapping[str, ParameterValue]] = [{}]
        self.request_ids: Sequence[str] = [""]
        self.requested_outputs = frozenset(outputs)
        self.made: dict[str, Array] = {}

    def is_cancelled(self) -> bool:
        return False

    def empty(self, name: str, datatype: str, shape: tuple[int, ...]) -> Array:
        assert datatype != "BYTES", "a BYTES array cannot be made ahead of its elements"
        dtype = DATATYPES[datatype]
        raw = np.full(int(np.prod(shape)) * dtype.itemsize, 0xA5, np.uint8)  # an element left unwritten shows
        self.made[name] = array = raw.view(dtype).reshape(shape)
        return array


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


def bytes_array(*elements: bytes, shape: tuple[int, ...] | None = None) -> Array:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array.reshape(shape or (len(elements), 1))


def model(text: str, path: Path = Path("m"), version: int = 1) -> ModelDirectory:
    """The model that a config.pbtxt of this text makes."""
    return ModelDirectory(config_from_text(text, path.name), version, path, path / str(version))


def tensor(name: str, datatype: str, *dims: int) -> str:
    """An entry of `input [ ... ]` or `output [ ... ]`. `datatype` as in the protocol."""
    kind = "STRING" if datatype == "BYTES" else datatype
    return f'{{ name: "{name}" data_type: TYPE_{kind} dims: {list(dims)} }}'


def parameters(**values: object) -> str:
    return " ".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }}' for k, v in values.items())
