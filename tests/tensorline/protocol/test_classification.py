"""Top classes as text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorline.errors import InvalidTensorError
from tensorline.protocol.classification import classify, classify_tensor
from tensorline.tensor import BYTES, DATATYPES, Array, Tensor, decode_bytes_tensor, encode_array


def test_floats_have_six_decimals_and_labels_where_there_are_any() -> None:
    scores = np.array([[0.1, 0.7, 0.2], [1e9, -1, 0]], np.float32)
    assert classify(scores, 2, ("cat", "dog"), is_batched=True).tolist() == [
        ["0.700000:1:dog", "0.200000:2"],
        ["1000000000.000000:0:cat", "0.000000:2"],
    ]


def test_without_batching_all_dimensions_are_flattened() -> None:
    assert classify(np.array([[1, 9], [5, 7]], np.int16), 3, is_batched=False).tolist() == ["9:1", "7:3", "5:2"]


def test_batched_items_are_flattened() -> None:
    scores = np.arange(12, dtype=np.uint64).reshape(2, 2, 3)
    assert classify(scores, 1, is_batched=True).tolist() == [["5:5"], ["11:5"]]


def test_equals_go_by_index_and_nan_comes_last() -> None:
    scores = np.array([np.nan, 2, 2, np.inf, 2], np.float64)
    assert classify(scores, 9, is_batched=False).tolist() == [
        "inf:3",
        "2.000000:1",
        "2.000000:2",
        "2.000000:4",
        "nan:0",
    ]
    assert classify(scores, 2, is_batched=False).tolist() == ["inf:3", "2.000000:1"]


@pytest.mark.parametrize(
    ("shape", "is_batched", "result"),
    [((0,), False, (0,)), ((2, 0), True, (2, 0)), ((0, 3), True, (0, 3)), ((), False, (1,)), ((2,), True, (2, 1))],
)
def test_shapes_at_the_edge(shape: tuple[int, ...], is_batched: bool, result: tuple[int, ...]) -> None:
    assert classify(np.zeros(shape, np.float32), 5, is_batched=is_batched).shape == result


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "BOOL"])
def test_types_without_order_or_text_are_refused(datatype: str) -> None:
    with pytest.raises(InvalidTensorError, match=f"class result not available .* unsupported type '{datatype}'"):
        classify(np.zeros(3, DATATYPES[datatype]), 1, is_batched=False)


def test_bytes_are_refused() -> None:
    with pytest.raises(InvalidTensorError, match="unsupported type 'BYTES'"):
        classify_tensor(Tensor("y", BYTES, (1,), b"\0\0\0\0"), 1, is_batched=False)


def test_a_million_elements_and_one_more() -> None:
    assert classify(np.zeros(1_000_000, np.int8), 1, is_batched=False).tolist() == ["0:0"]
    with pytest.raises(InvalidTensorError, match="classification output tensor too large: 1000001"):
        classify(np.zeros(1_000_001, np.int8), 1, is_batched=False)


def test_a_tensor_becomes_text() -> None:
    made = classify_tensor(
        Tensor("y", "FP32", (1, 3), encode_array(np.array([[1, 3, 2]], np.float32))), 2, ("a", "b"), is_batched=True
    )
    assert (made.name, made.datatype, made.shape) == ("y", BYTES, (1, 2))
    assert made.data is not None
    assert decode_bytes_tensor(made.data, made.shape).tolist() == [[b"3.000000:1:b", b"2.000000:2"]]


def by_sorting(row: Array, count: int) -> list[str]:
    order = sorted(range(row.size), key=lambda index: (-int(row[index]), index))
    return [f"{row[index]}:{index}" for index in order[:count]]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60), st.integers(1, 70))
def test_it_agrees_with_sorting(values: list[int], count: int) -> None:
    row = np.array(values, np.int32)
    assert classify(row, count, is_batched=False).tolist() == by_sorting(row, count)
