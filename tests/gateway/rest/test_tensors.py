"""A tensor's elements as JSON and in raw form."""

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.rest.strict_json import parse_json
from gateway.rest.tensors import decode_elements, encode_elements
from tensorline.errors import InvalidTensorError
from tensorline.tensor import DATATYPES, Tensor, decode_array

EDGES: dict[str, list[Any]] = {
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "UINT16": [0, 65535],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [0, 2**53 + 1, 2**63, 2**64 - 1],
    "INT8": [-128, 127],
    "INT16": [-(2**15), 2**15 - 1],
    "INT32": [-(2**31), 2**31 - 1],
    "INT64": [-(2**63), 2**53 + 1, 2**63 - 1],
    "FP32": [0.0, -1.5, 3.4028234663852886e38, 1.401298464324817e-45],
    "FP64": [0.1, 1.7976931348623157e308, 5e-324, -0.0],
    "BYTES": ["", "a\0b", "café", "[{NaN"],
}


def decode(datatype: str, values: list[Any], shape: tuple[int, ...] | None = None) -> bytes:
    return bytes(decode_elements("x", datatype, shape or (len(values),), values))


def encode(datatype: str, raw: bytes, shape: tuple[int, ...]) -> Any:
    return orjson.loads(
        orjson.dumps(encode_elements(Tensor("y", datatype, shape, raw)), option=orjson.OPT_SERIALIZE_NUMPY)
    )


@pytest.mark.parametrize("datatype", EDGES)
def test_edges_come_back_exactly(datatype: str) -> None:
    values = EDGES[datatype]
    written = parse_json(orjson.dumps(values))
    raw = decode(datatype, written)
    assert encode(datatype, raw, (len(values),)) == values
    assert encode(datatype, memoryview(b"." + raw)[1:], (len(values),)) == values  # type: ignore[arg-type]


@pytest.mark.parametrize("datatype", EDGES)
def test_no_elements(datatype: str) -> None:
    for shape, data in (((0,), []), ((2, 0), [[], []]), ((0, 3), [])):
        assert decode(datatype, data, shape) == b""
        assert encode(datatype, b"", shape) == []


@settings(max_examples=50)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_fp32_is_written_to_its_last_digit(values: list[float]) -> None:
    array = np.array(values, np.float32)
    told = encode("FP32", array.tobytes(), array.shape)
    assert told == [float(value) for value in array]  # as a reader of 64 bits has them
    assert decode("FP32", told, array.shape) == array.tobytes()


def test_nested_data_is_flat_in_row_major_order() -> None:
    for data in ([[1, 2], [3, 4]], [1, 2, 3, 4], [[[1, 2, 3, 4]]], [[1, 2, 3], [4]]):
        assert decode("INT8", data, (2, 2)) == b"\1\2\3\4"


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_numbers_that_json_does_not_have(datatype: str) -> None:
    values = ["NaN", 1, "-Infinity", 0.5, "Infinity"]
    array = decode_array(datatype, (5,), decode(datatype, values))
    np.testing.assert_array_equal(array, np.array([np.nan, 1, -np.inf, 0.5, np.inf]))
    assert encode(datatype, array.tobytes(), (5,)) == ["NaN", 1.0, "-Infinity", 0.5, "Infinity"]


def test_raw_booleans_are_true_unless_zero() -> None:
    assert encode("BOOL", b"\0\1\2\xff", (4,)) == [False, True, True, True]


REFUSED = [
    ("INT8", [1, 300], "element 1 is 300, INT8 takes integers from -128 to 127"),
    ("UINT8", [-1], "element 0 is -1, UINT8 takes integers from 0 to 255"),
    ("UINT64", [2**64 - 1, -1], "element 1 is -1, UINT64 takes"),
    ("INT64", [1, 2**63], "element 1 is 9223372036854775808"),
    ("INT32", [1, 1.0], "element 1 is 1.0, INT32 takes integers"),
    ("INT32", [1, 1.5], "element 1 is 1.5"),
    ("INT32", [True], "element 0 is a boolean"),
    ("INT32", ["1"], "element 0 is '1'"),
    ("INT32", [None], "element 0 is null"),
    ("BOOL", [True, 1], "element 1 is an integer, BOOL takes true or false"),
    ("BOOL", ["true"], "element 0 is 'true', BOOL takes true or false"),
    ("FP32", [0, 1e39], r"element 1 is 1e\+39, FP32 takes numbers of at most 3.4028235e\+38"),
    ("FP32", [True], "element 0 is a boolean, FP32 takes numbers, or one of NaN, Infinity, -Infinity in quotes"),
    ("FP64", ["nan"], "element 0 is 'nan'"),
    ("FP64", [None], "element 0 is null"),
    ("BYTES", ["a", 1], "element 1 is an integer, BYTES takes strings"),
    ("BYTES", [{"b64": "aa"}], "element 0 is an object"),
    ("FP32", [[1], 2], "it mixes arrays and elements"),
]


@pytest.mark.parametrize(("datatype", "values", "told"), REFUSED)
def test_elements_that_do_not_fit(datatype: str, values: list[Any], told: str) -> None:
    with pytest.raises(InvalidTensorError, match=f"^Unable to parse 'data' of input 'x': {told}"):
        decode(datatype, values)


def test_an_integer_that_64_bits_do_not_hold_is_refused_not_rounded() -> None:
    for text in (b"[18446744073709551616]", b"[-9223372036854775809]"):
        for datatype in ("INT64", "UINT64"):
            with pytest.raises(InvalidTensorError, match=f"{datatype} takes integers"):
                decode(datatype, parse_json(text))


def test_another_number_of_elements_than_the_shape_has() -> None:
    told = r"Shape does not match true shape of 'data' field: it has 3 elements, shape \[2, 2\] has 4"
    with pytest.raises(InvalidTensorError, match=told):
        decode("FP32", [1, 2, 3], (2, 2))
    with pytest.raises(InvalidTensorError, match="has 1237940039285380274899124224"):
        decode("FP32", [1], (2**30, 2**30, 2**30))


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_datatypes_with_binary_form_alone(datatype: str) -> None:
    with pytest.raises(InvalidTensorError, match=f"receiving {datatype} data via JSON is not supported"):
        decode(datatype, [1.0])
    with pytest.raises(InvalidTensorError, match=f"sending {datatype} data via JSON is not supported"):
        encode_elements(Tensor("y", datatype, (1,), b"\0\0"))


def test_an_unknown_datatype() -> None:
    with pytest.raises(
        InvalidTensorError, match=f"datatype 'fp32', which is unknown; use one of {', '.join(DATATYPES)}"
    ):
        decode("fp32", [1.0])


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(InvalidTensorError, match="output 'y' has elements that are not UTF-8"):
        encode_elements(Tensor("y", "BYTES", (1,), b"\2\0\0\0\xff\xfe"))
