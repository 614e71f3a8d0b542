"""The built-in backend `repeat`."""

import time

import numpy as np
import pytest

from tensorline.errors import BackendError, ConfigError, InvalidTensorError
from tensorline.stage.builtin import RepeatInstance
from tests.services.heap_batch import CPU, HeapBatch, model, parameters, tensor

INPUTS = ", ".join([tensor("IN", "INT32", -1), tensor("DELAY", "UINT32", -1), tensor("WAIT", "UINT32", 1)])
OUTPUTS = ", ".join([tensor("OUT", "INT32", -1), tensor("IDX", "UINT32", 1)])


def repeat(inputs: str = INPUTS, outputs: str = OUTPUTS, more: str = "", **values: object) -> RepeatInstance:
    text = f'backend: "repeat" input [ {inputs} ] output [ {outputs} ] {more} {parameters(**values)}'
    return RepeatInstance(model(text), CPU)


def ints(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def uints(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    return np.array(values, np.uint32)


def test_a_response_for_each_element() -> None:
    responses = list(repeat().stream(HeapBatch({"IN": ints(7, -1)})))
    assert [(r["OUT"].tolist(), r["IDX"].tolist()) for r in responses] == [([7], [0]), ([-1], [1])]
    assert list(repeat().stream(HeapBatch({"IN": ints()}))) == []


def test_wide_responses_and_wanted_ones() -> None:
    (response,) = repeat(elements=3).stream(HeapBatch({"IN": ints(4)}, 1, ["OUT"]))
    assert {name: array.tolist() for name, array in response.items()} == {"OUT": [4, 4, 4]}


def test_it_waits() -> None:
    began = time.monotonic()
    stream = repeat().stream(HeapBatch({"IN": ints(1, 2), "DELAY": uints(20), "WAIT": uints(20)}))
    next(stream)
    assert time.monotonic() - began >= 0.04
    list(stream)
    assert time.monotonic() - began >= 0.06


def test_a_cancelled_request_is_not_waited_for() -> None:
    batch = HeapBatch({"IN": ints(1), "DELAY": uints(60_000)})
    batch.is_cancelled = lambda: True  # type: ignore[method-assign]
    assert len(list(repeat().stream(batch))) == 1


def test_it_fails_when_told() -> None:
    stream = repeat(fail_at=1).stream(HeapBatch({"IN": ints(1, 2)}))
    next(stream)
    with pytest.raises(BackendError, match="told to fail at 1"):
        next(stream)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"IN": np.array([1.0])}, "input 'IN' has datatype FP64, model takes INT32"),
        ({}, "input 'IN' is missing"),
        ({"IN": ints(1, 2, 3), "DELAY": uints(1, 2)}, "input 'DELAY' has 2 numbers, one or 3 are wanted"),
        ({"IN": ints(1), "WAIT": uints(1, 2)}, "input 'WAIT' has 2 numbers, one or 1 are wanted"),
    ],
)
def test_what_it_refuses(inputs: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int32]]], text: str) -> None:
    with pytest.raises(InvalidTensorError, match=text):
        list(repeat().stream(HeapBatch(inputs)))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"inputs": tensor("DELAY", "UINT32", -1)}, "needs the input 'IN'"),
        ({"inputs": tensor("IN", "INT64", -1)}, r"knows IN \(INT32\), .*; 'IN' is INT64"),
        ({"outputs": tensor("SUM", "INT32", 1)}, "'SUM' is INT32"),
        ({"more": "max_batch_size: 2"}, "does not batch, max_batch_size is 2"),
        ({"element": "2"}, "did you mean 'elements'"),
        ({"max_streams": "0"}, "allowed: whole numbers from 1 to 256"),
    ],
)
def test_configurations_it_refuses(given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        repeat(**given)
