"""Typed tensor contents to raw bytes and back.

The float and bool lists of a serialized InferTensorContents are packed: a tag, a length, then the very bytes of the raw
form. They are cut out of the message's wire form and put into one, which is a hundred times faster than a Python float
for each element. Integers are varints there and go through numpy.
"""

import struct
from typing import Any, Final

import numpy as np

from tensorline.errors import InvalidTensorError
from tensorline.protocol.infer import shown
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.tensor import BYTES, DATATYPES

__all__ = ["can_be_typed", "decode_contents", "encode_contents", "raw_field", "varint"]

Raw = bytes | memoryview

_FIELDS: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
# The datatype that an error calls each field by, and what numpy reads it as.
_DATATYPE_OF_FIELD: Final = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": BYTES,
}
_NUMBERS: Final = {field.name: field.number for field in pb.InferTensorContents.DESCRIPTOR.fields}
_PACKED: Final = {
    name: bytes([_NUMBERS[name] << 3 | 2]) for name in ("bool_contents", "fp32_contents", "fp64_contents")
}
_LENGTH: Final = struct.Struct("<I")


def can_be_typed(datatype: str) -> bool:
    """Whether a list of InferTensorContents holds this datatype; FP16 and BF16 have none."""
    return datatype in _FIELDS


def decode_contents(name: str, model: str, datatype: str, contents: pb.InferTensorContents) -> bytes:
    """Raw form of an input's typed contents; a message without elements is no bytes.

    INT8, INT16, UINT8 and UINT16 keep the low bits of what comes, as Triton does: 300 is 44 in INT8.

    Raises:
        InvalidTensorError: a list that does not fit the datatype.
    """
    expected = _FIELDS.get(datatype)
    lists = contents.ListFields()
    for field, _ in lists:
        if field.name != expected:
            raise _unexpected(name, model, datatype, field.name)
    return _raw(contents, expected, lists[0][1], datatype) if lists and expected else b""


def _raw(contents: pb.InferTensorContents, field: str, values: Any, datatype: str) -> bytes:
    if field == "bytes_contents":
        return b"".join([part for element in values for part in (_LENGTH.pack(len(element)), element)])
    if field in _PACKED:
        size = len(values) * DATATYPES[datatype].itemsize
        head = _PACKED[field] + varint(size)
        wire = contents.SerializeToString()
        if wire.startswith(head):
            return wire[len(head) : len(head) + size]
    wide = np.fromiter(values, DATATYPES[_DATATYPE_OF_FIELD[field]], len(values))
    return wide.astype(DATATYPES[datatype], copy=False).tobytes()


def _unexpected(name: str, model: str, datatype: str, field: str) -> InvalidTensorError:
    expected = datatype if datatype in DATATYPES else "<invalid>"
    hint = "" if datatype in _FIELDS or datatype not in DATATYPES else "; send it in raw_input_contents"
    return InvalidTensorError(
        f"unexpected explicit tensor data for input tensor '{shown(name)}' for model '{shown(model)}' of type "
        f"'{_DATATYPE_OF_FIELD[field]}', expected datatype '{expected}'{hint}"
    )


def encode_contents(datatype: str, data: Raw) -> pb.InferTensorContents:
    """Typed contents of a tensor in raw form.

    Raises:
        ValueError: FP16, BF16, or bytes that are no such tensor.
    """
    field = _FIELDS.get(datatype)
    if field is None:
        raise ValueError(f"datatype {datatype} has no typed contents")
    if field in _PACKED:
        if datatype == "BOOL":  # any byte but 0 is true in raw form; packed, 0x80 and more would not be a bool
            data = (np.frombuffer(data, np.uint8) != 0).tobytes()
        if len(data) % DATATYPES[datatype].itemsize:
            raise ValueError(f"{len(data)} bytes are no whole number of {datatype} elements")
        return pb.InferTensorContents.FromString(raw_field(_PACKED[field], data))
    contents = pb.InferTensorContents()
    if field == "bytes_contents":
        contents.bytes_contents.extend(_elements(data))
    else:
        getattr(contents, field).extend(np.frombuffer(data, DATATYPES[datatype]).tolist())
    return contents


def _elements(data: Raw) -> list[bytes]:
    found: list[bytes] = []
    view, at, size = memoryview(data), 0, len(data)
    while at < size:
        if size - at < 4:
            raise ValueError("a BYTES tensor ends inside a length")
        end = at + 4 + _LENGTH.unpack_from(view, at)[0]
        if end > size:
            raise ValueError("a BYTES tensor ends inside a string")
        found.append(bytes(view[at + 4 : end]))
        at = end
    return found


def raw_field(tag: bytes, data: Raw) -> bytes:
    """One length-delimited field of a protobuf message, from its one-byte tag."""
    return b"".join((tag, varint(len(data)), data))


def varint(number: int) -> bytes:
    """Protobuf's base-128 form of a number of 0 or more."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
