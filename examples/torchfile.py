"""Read a PyTorch weight file of the old format (before zip files, PyTorch < 1.6) without PyTorch."""

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["TorchFileError", "read_legacy_tensors"]

MAGIC: Final = 0x1950A86A20F9469CFC6C
PROTOCOL: Final = 1001

STORAGES: Final[Mapping[str, np.dtype[Any]]] = {
    "FloatStorage": np.dtype("<f4"),
    "DoubleStorage": np.dtype("<f8"),
    "HalfStorage": np.dtype("<f2"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
}

Array = NDArray[Any]


class TorchFileError(Exception):
    """The file is not what it claims to be, or asks for more than tensors."""


@dataclass(frozen=True, slots=True)
class _Storage:
    """What a persistent id in the pickle says of a block of numbers."""

    dtype: np.dtype[Any]
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class _Lazy:
    """A tensor whose numbers come later in the file. Offset and strides count elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Unpickler(pickle.Unpickler):
    """Knows the three kinds of name that a file of tensors needs; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise TorchFileError(f"the pickle names {module}.{name}, which a file of tensors does not need")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _location, count, view = pid
        if kind != "storage" or view is not None:
            raise TorchFileError("the file holds something other than plain storages")
        return _Storage(dtype, str(key), int(count))


def _rebuild_tensor(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> _Lazy:
    return _Lazy(storage, offset, tuple(shape), tuple(strides))


def read_legacy_tensors(raw: bytes) -> dict[str, Array]:
    """Tensors by name, each a dense copy in row-major order.

    Raises:
        TorchFileError: another format, a name outside the allow-list, or a tensor outside of its storage.
    Source: torch.serialization._legacy_load: five pickles (magic, protocol, system info, tensors, storage keys), then
        for each key an 8-byte little-endian element count and the numbers.
    """
    file = io.BytesIO(raw)
    magic, protocol, system, tensors, keys = (_Unpickler(file).load() for _ in range(5))
    if magic != MAGIC or protocol != PROTOCOL or not system.get("little_endian"):
        raise TorchFileError("not a PyTorch file of the old format, or one from a big-endian machine")
    dtypes = {lazy.storage.key: lazy.storage.dtype for lazy in tensors.values()}
    numbers: dict[str, Array] = {}
    for key in keys:
        count = int.from_bytes(file.read(8), "little")
        block = file.read(count * dtypes[key].itemsize)
        numbers[key] = np.frombuffer(block, dtypes[key], count)  # refuses a block that is cut short
    return {name: _materialise(name, lazy, numbers[lazy.storage.key]) for name, lazy in tensors.items()}


def _materialise(name: str, lazy: _Lazy, numbers: Array) -> Array:
    if math.prod(lazy.shape) == 0:
        return np.empty(lazy.shape, numbers.dtype)
    last = lazy.offset + sum((size - 1) * stride for size, stride in zip(lazy.shape, lazy.strides, strict=True))
    # as_strided itself would read past the end of the block.
    if min((lazy.offset, *lazy.strides)) < 0 or last >= numbers.size:
        raise TorchFileError(f"tensor {name} lies outside of its storage")
    strides = [stride * numbers.itemsize for stride in lazy.strides]
    view = np.lib.stride_tricks.as_strided(numbers[lazy.offset :], lazy.shape, strides, writeable=False)
    return np.array(view, order="C")  # ascontiguousarray would turn a scalar into [1]
