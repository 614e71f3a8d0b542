"""Tensors: their datatypes, their raw form, and where their bytes are."""

import math
import struct
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tensorline.errors import InvalidTensorError

__all__ = [
    "BYTES",
    "DATATYPES",
    "Array",
    "Handle",
    "Tensor",
    "datatype_of",
    "decode_array",
    "decode_bytes_tensor",
    "element_count",
    "encode_array",
    "encode_bytes_tensor",
    "expected_byte_size",
]

Array = NDArray[np.generic]

BYTES: Final = "BYTES"

DATATYPES: Final[Mapping[str, np.dtype[np.generic]]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    BYTES: np.dtype(np.object_),
}
"""numpy dtype of each protocol datatype; BYTES elements are Python `bytes` in an object array."""

_NAMES: Final = {dtype: name for name, dtype in DATATYPES.items()}
ELEMENT_LIMIT: Final = 1 << 40
RANK_LIMIT: Final = 32


class Handle(NamedTuple):
    """Where a tensor's bytes lie in a process's arena.

    `block` is the offset of the block's header in the arena, `offset` that of the first byte: several requests of one
    batch each hold their rows of one block. Offsets and length in bytes.
    """

    arena: bytes
    block: int
    offset: int
    length: int
    generation: int


class Tensor(NamedTuple):
    """A named tensor in flight: its bytes in raw protocol form (`data`), or where they are (`handle`).

    A tuple, as are the other values that a request makes by the dozen: a frozen dataclass costs three times as much to
    make.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview | None = None
    handle: Handle | None = None

    @property
    def byte_size(self) -> int:
        if self.handle is not None:
            return self.handle.length
        return 0 if self.data is None else len(self.data)


def datatype_of(dtype: np.dtype[np.generic]) -> str:
    """Protocol name of a numpy dtype; strings and objects are BYTES.

    Raises:
        InvalidTensorError: the protocol has no such datatype (complex, datetime, structured).
    """
    name = _NAMES.get(dtype)
    if name is not None:
        return name
    if dtype.kind in "SUO":
        return BYTES
    name = _NAMES.get(dtype.newbyteorder("="))
    if name is None:
        raise InvalidTensorError(f"numpy dtype {dtype} has no tensor datatype; use one of {', '.join(DATATYPES)}")
    return name


def element_count(shape: Iterable[int]) -> int:
    """Product of the dimensions, in unbounded integers; 1 for a scalar."""
    return math.prod(shape)


def expected_byte_size(datatype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a dense tensor; None for BYTES, whose size its elements decide.

    Raises:
        InvalidTensorError: unknown datatype, negative dimension, or over the limits of rank and element count.
    """
    dtype = DATATYPES.get(datatype)
    if dtype is None:
        raise InvalidTensorError(f"datatype '{datatype[:64]}' is unknown; use one of {', '.join(DATATYPES)}")
    if len(shape) > RANK_LIMIT:
        raise InvalidTensorError(f"shape has {len(shape)} dimensions, at most {RANK_LIMIT} are allowed")
    if shape and min(shape) < 0:
        raise InvalidTensorError(f"shape {list(shape)} has a negative dimension")
    count = element_count(shape)
    # Also without its zeros: numpy multiplies only the other sizes, and they must not overflow there.
    most = count or element_count(size or 1 for size in shape)
    if most > ELEMENT_LIMIT:
        raise InvalidTensorError(f"shape {list(shape)} has {most} elements, which exceed maximum size {ELEMENT_LIMIT}")
    return None if datatype == BYTES else count * dtype.itemsize


def decode_bytes_tensor(raw: bytes | memoryview, shape: tuple[int, ...]) -> NDArray[np.object_]:
    """Decode a BYTES tensor from its raw wire form.

    Args:
        raw: Elements in row-major order, each a 4-byte little-endian length, then that many bytes.
        shape: Dimensions of the result, none of them -1.
    Returns:
        Object array of `shape`; its elements are copies, so the region behind `raw` may be released.
    Raises:
        InvalidTensorError: `raw` is cut short, or its element count differs from `shape`.
    Source: Triton binary tensor data extension, BYTES elements.
    """
    view, size, want = memoryview(raw), len(raw), element_count(shape)
    # Every element takes at least its length indicator: refuse a claimed shape before anything of its size exists.
    if want * 4 > size:
        have = sum(1 for _ in _elements(view, size, want))
        raise InvalidTensorError(f"expected {want} string elements, got {have}")
    result = np.empty(want, dtype=np.object_)
    filled = 0
    for element in _elements(view, size, want):
        result[filled] = element
        filled += 1
    if filled < want:
        raise InvalidTensorError(f"expected {want} string elements, got {filled}")
    return result.reshape(shape)


def _elements(view: memoryview, size: int, want: int) -> Iterable[bytes]:
    at = seen = 0
    while at < size:
        if seen == want:
            raise InvalidTensorError(f"unexpected number of string elements {want + 1}, expecting {want}")
        if size - at < 4:
            raise InvalidTensorError(
                f"incomplete string length indicator, expecting 4 bytes but only {size - at} bytes available"
            )
        (length,) = struct.unpack_from("<I", view, at)
        at += 4
        if size - at < length:
            raise InvalidTensorError(
                f"incomplete string data, expecting string of length {length} but only {size - at} bytes available"
            )
        yield bytes(view[at : at + length])
        at += length
        seen += 1


def encode_bytes_tensor(array: Array) -> bytes:
    """Raw wire form of an array of `bytes` or `str` elements (text as UTF-8).

    Raises:
        InvalidTensorError: an element is neither.
    """
    parts: list[bytes] = []
    for element in array.reshape(-1).tolist():
        if isinstance(element, str):
            element = element.encode()
        elif not isinstance(element, bytes | bytearray | memoryview):
            raise InvalidTensorError(f"a BYTES element is {type(element).__name__}, not bytes or str")
        raw = bytes(element)
        parts.append(len(raw).to_bytes(4, "little"))
        parts.append(raw)
    return b"".join(parts)


def decode_array(datatype: str, shape: tuple[int, ...], raw: bytes | memoryview) -> Array:
    """View (BYTES: copy) of a tensor's raw bytes as an array of `shape`; read-only when `raw` is.

    Raises:
        InvalidTensorError: unknown datatype, or the byte size does not fit the shape.
    """
    want = expected_byte_size(datatype, shape)
    if want is None:
        return decode_bytes_tensor(raw, shape)
    if len(raw) != want:
        raise InvalidTensorError(
            f"byte size mismatch for {datatype} of shape {list(shape)}. Expected {want}, got {len(raw)}"
        )
    if want == 0:  # frombuffer refuses an empty buffer
        return np.empty(shape, DATATYPES[datatype])
    if datatype == "BF16":  # no buffer format
        return np.frombuffer(raw, np.uint8).view(DATATYPES[datatype]).reshape(shape)
    array = np.frombuffer(raw, DATATYPES[datatype])
    return array if len(shape) == 1 else array.reshape(shape)


def encode_array(array: Array) -> bytes | memoryview:
    """Raw form of an array: a view of its memory when it is dense and little endian, else a copy."""
    datatype = datatype_of(array.dtype)
    if datatype == BYTES:
        return encode_bytes_tensor(array)
    dense = np.ascontiguousarray(array, dtype=DATATYPES[datatype]).reshape(-1)
    return dense.view(np.uint8).data
