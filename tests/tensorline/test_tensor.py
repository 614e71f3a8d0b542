import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensorline.errors import InvalidTensorError
from tensorline.tensor import (
    BYTES,
    DATATYPES,
    ELEMENT_LIMIT,
    RANK_LIMIT,
    Array,
    Handle,
    Tensor,
    datatype_of,
    decode_array,
    decode_bytes_tensor,
    element_count,
    encode_array,
    encode_bytes_tensor,
    expected_byte_size,
)

NUMBERS = [name for name in DATATYPES if name != BYTES]
SHAPES = st.lists(st.integers(0, 4), max_size=5).map(tuple)


def elements(*values: object, shape: tuple[int, ...] | None = None) -> Array:
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array.reshape(shape if shape is not None else (len(values),))


@given(st.sampled_from(NUMBERS), SHAPES, st.data())
def test_numbers_come_back_bit_for_bit(datatype: str, shape: tuple[int, ...], data: st.DataObject) -> None:
    size = element_count(shape) * DATATYPES[datatype].itemsize
    raw = data.draw(st.binary(min_size=size, max_size=size))
    array = decode_array(datatype, shape, raw)
    assert (array.dtype, array.shape) == (DATATYPES[datatype], shape)
    assert bytes(encode_array(array)) == raw
    assert datatype_of(array.dtype) == datatype


@given(hnp.arrays(np.object_, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4), elements=st.binary()))
def test_bytes_come_back_byte_for_byte(array: Array) -> None:
    raw = encode_bytes_tensor(array)
    back = decode_bytes_tensor(raw, array.shape)
    assert back.shape == array.shape
    assert back.reshape(-1).tolist() == array.reshape(-1).tolist()
    assert encode_array(back) == raw


def test_bytes_that_are_not_text() -> None:
    values = [b"a\0b", b"\0\0", b"", b"\xff\xfe\x00", "café".encode()]
    raw = encode_bytes_tensor(elements(*values))
    assert raw == b"".join(struct.pack("<I", len(value)) + value for value in values)
    assert decode_array(BYTES, (5,), raw).tolist() == values


@pytest.mark.parametrize(("datatype", "pattern"), [("FP16", 0x3C01), ("BF16", 0x3F81), ("FP16", 0x7E01)])
def test_half_floats_keep_their_bits(datatype: str, pattern: int) -> None:
    raw = struct.pack("<H", pattern)
    assert bytes(encode_array(decode_array(datatype, (1,), raw))) == raw


@pytest.mark.parametrize("datatype", NUMBERS)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), ()])
def test_tensors_of_no_elements_and_scalars_have_their_shape(datatype: str, shape: tuple[int, ...]) -> None:
    array = decode_array(datatype, shape, b"\0" * element_count(shape) * DATATYPES[datatype].itemsize)
    assert array.shape == shape
    assert len(encode_array(array)) == array.nbytes


def test_an_array_is_a_view_and_read_only_where_its_bytes_are() -> None:
    raw = bytearray(8)
    decode_array("INT64", (1,), memoryview(raw))[0] = 7
    assert raw[0] == 7
    with pytest.raises(ValueError, match="read-only"):
        decode_array("INT64", (1,), bytes(raw))[0] = 8


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2],
        np.arange(6, dtype=np.float32)[::-1].reshape(2, 3),
    ],
    ids=["big-endian", "fortran", "strided", "reversed"],
)
def test_any_layout_is_encoded_dense_row_major_and_little_endian(array: Array) -> None:
    assert bytes(encode_array(array)) == struct.pack("<6f", *array.reshape(-1).tolist())
    assert datatype_of(array.dtype) == "FP32"


def test_a_dense_array_is_encoded_without_a_copy() -> None:
    array = np.arange(4, dtype=np.int32)
    assert np.shares_memory(np.frombuffer(encode_array(array), np.int32), array)


@pytest.mark.parametrize(
    ("dtype", "datatype"), [("S3", BYTES), ("U3", BYTES), (object, BYTES), ("q", "INT64"), (ml_dtypes.bfloat16, "BF16")]
)
def test_the_datatype_of_a_numpy_dtype(dtype: object, datatype: str) -> None:
    assert datatype_of(np.dtype(dtype)) == datatype  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", ["c8", "M8[s]", "V4", [("a", "i4")]])
def test_a_dtype_that_the_protocol_lacks_is_refused(dtype: object) -> None:
    with pytest.raises(InvalidTensorError, match="has no tensor datatype; use one of BOOL, "):
        datatype_of(np.dtype(dtype))  # type: ignore[call-overload]


def test_text_is_encoded_as_utf_8_and_a_buffer_by_its_bytes() -> None:
    words = np.array([1, 2], np.int32)
    array = elements("é", bytearray(b"x"), memoryview(b"yz"), memoryview(words.data))
    assert decode_bytes_tensor(encode_bytes_tensor(array), (4,)).tolist() == [
        "é".encode(),
        b"x",
        b"yz",
        words.tobytes(),
    ]
    assert decode_bytes_tensor(encode_bytes_tensor(np.array(["a", "bc"])), (2,)).tolist() == [b"a", b"bc"]


@pytest.mark.parametrize("element", [1, None, 1.5, [b"x"]])
def test_an_element_that_is_neither_bytes_nor_text_is_refused(element: object) -> None:
    array = np.empty(1, np.object_)
    array[0] = element
    with pytest.raises(InvalidTensorError, match=f"a BYTES element is {type(element).__name__}, not bytes or str"):
        encode_bytes_tensor(array)


@pytest.mark.parametrize(
    ("raw", "shape", "reason"),
    [
        (b"", (1,), "expected 1 string elements, got 0"),
        (b"\1\0\0\0a", (2,), "expected 2 string elements, got 1"),
        (b"\1\0\0\0a" * 3, (2,), "unexpected number of string elements 3, expecting 2"),
        (b"\1\0\0", (1,), "incomplete string length indicator, expecting 4 bytes but only 3 bytes available"),
        (b"\5\0\0\0ab", (1,), "incomplete string data, expecting string of length 5 but only 2 bytes available"),
        (b"\xff\xff\xff\xffab", (1,), "expecting string of length 4294967295 but only 2"),
        (b"\1\0\0\0a", (1 << 39,), f"expected {1 << 39} string elements, got 1"),
        (b"x", (0,), "unexpected number of string elements 1, expecting 0"),
    ],
)
def test_malformed_bytes_say_what_is_wrong(raw: bytes, shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(InvalidTensorError, match=reason):
        decode_array(BYTES, shape, raw)


@given(st.binary(max_size=64), SHAPES)
def test_any_bytes_either_decode_or_are_refused(raw: bytes, shape: tuple[int, ...]) -> None:
    try:
        array = decode_array(BYTES, shape, raw)
    except InvalidTensorError:
        return
    assert encode_bytes_tensor(array) == raw


@pytest.mark.parametrize(
    ("datatype", "shape", "reason"),
    [
        ("FP33", (1,), "datatype 'FP33' is unknown; use one of BOOL, "),
        ("x" * 1000, (1,), "datatype 'x{64}' is unknown"),
        ("FP32", (1,) * (RANK_LIMIT + 1), "shape has 33 dimensions, at most 32 are allowed"),
        ("FP32", (2, -1), r"shape \[2, -1\] has a negative dimension"),
        ("INT8", (ELEMENT_LIMIT + 1,), f"which exceed maximum size {ELEMENT_LIMIT}"),
        ("FP32", (1 << 62, 1 << 62), "which exceed maximum size"),
        # numpy multiplies the dimensions without the zeros, and overflows.
        ("FP32", (0, 1 << 62), "which exceed maximum size"),
        (BYTES, (1 << 62, 0), "which exceed maximum size"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_before_anything_is_made(
    datatype: str, shape: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(InvalidTensorError, match=reason):
        expected_byte_size(datatype, shape)
    with pytest.raises(InvalidTensorError, match=reason):
        decode_array(datatype, shape, b"")


def test_a_rank_of_32_is_taken() -> None:
    assert decode_array("INT8", (1,) * RANK_LIMIT, b"\1").shape == (1,) * RANK_LIMIT


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    with pytest.raises(InvalidTensorError, match=r"FP32 of shape \[2\]. Expected 8, got 7"):
        decode_array("FP32", (2,), b"\0" * 7)


def test_the_byte_size_is_the_handles_or_the_datas() -> None:
    handle = Handle(b"a" * 16, 64, 128, 40, 1)
    assert Tensor("x", "INT8", (40,), None, handle).byte_size == 40
    assert Tensor("x", "INT8", (2,), b"ab").byte_size == 2
    assert Tensor("x", "INT8", (2,)).byte_size == 0
