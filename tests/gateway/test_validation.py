"""Requests against a model's configuration: what is refused, in which words, and in which order."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.validation import HEAVY_ELEMENTS, RequestChecker
from tensorline.config import config_from_text
from tensorline.errors import InvalidTensorError
from tensorline.protocol.infer import InferRequest, RequestedOutput
from tensorline.tensor import DATATYPES, Tensor, encode_bytes_tensor

ONE = """
backend: "identity" max_batch_size: {batch}
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ {dims} ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ {dims} ] }}, {{ name: "z" data_type: TYPE_FP32 dims: [ 1 ] }} ]
"""
TWO = """
backend: "identity" max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "B" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
OPTIONAL = """
backend: "identity"
input [ { name: "A" data_type: TYPE_INT8 dims: [ -1 ] }, { name: "B" data_type: TYPE_INT8 dims: [ -1 ] optional: true },
        { name: "C" data_type: TYPE_INT8 dims: [ -1 ] optional: true } ]
output [ { name: "y" data_type: TYPE_INT8 dims: [ -1 ] } ]
"""
TEXT = 'backend: "identity" input [ { name: "s" data_type: TYPE_STRING dims: [ -1 ] } ]'
SCALAR = 'backend: "identity" input [ { name: "x" data_type: TYPE_FP32 } ]'


def checker(text: str) -> RequestChecker:
    return RequestChecker(config_from_text(text, "m"))


def one(batch: int = 0, dims: str = "4") -> RequestChecker:
    return checker(ONE.format(batch=batch, dims=dims))


def fp32(name: str, *shape: int, byte_size: int | None = None) -> Tensor:
    size = max(0, int(np.prod(shape))) * 4 if byte_size is None else byte_size
    return Tensor(name, "FP32", shape, b"\0" * size)


def int8(name: str) -> Tensor:
    return Tensor(name, "INT8", (2,), b"\0\0")


def request(*inputs: Tensor, outputs: tuple[str, ...] = (), id: str = "x1") -> InferRequest:
    return InferRequest("m", "", id, inputs, [RequestedOutput(name) for name in outputs])


@pytest.mark.parametrize(
    ("check", "good", "rows"),
    [
        (one(), request(fp32("x", 4)), 1),
        (one(8), request(fp32("x", 3, 4)), 3),
        (one(8), request(fp32("x", 8, 4), outputs=("z", "y")), 8),
        (one(0, "-1"), request(fp32("x", 0)), 1),
        (one(0, "-1, 3"), request(fp32("x", 0, 3)), 1),
        (one(8, "-1"), request(fp32("x", 2, 0)), 2),
        (checker(TWO), request(fp32("B", 2, 4), fp32("A", 2, 4)), 2),
        (checker(OPTIONAL), request(int8("A")), 1),
        (checker(OPTIONAL), request(int8("C"), int8("A")), 1),
        (checker(SCALAR), request(fp32("x", byte_size=4)), 1),
        (checker(TEXT), request(Tensor("s", "BYTES", (0,), b"")), 1),
    ],
)
def test_good_requests_pass(check: RequestChecker, good: InferRequest, rows: int) -> None:
    assert check.check(good) == rows


PREFIX = "[request id: x1] "


@pytest.mark.parametrize(
    ("check", "bad", "text"),
    [
        (
            one(),
            request(),
            PREFIX
            + "expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s) ['x']. "
            "Please provide all required input(s).",
        ),
        (
            checker(TWO),
            request(fp32("A", 1, 4)),
            PREFIX
            + "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['A'], but missing required input(s) "
            "['B']. Please provide all required input(s).",
        ),
        (
            one(),
            request(fp32("x", 4), fp32("q", 4)),
            PREFIX + "expected 1 inputs but got 2 inputs for model 'm'. Got "
            "input(s) ['x','q'], but missing required input(s) []. Please provide only input(s) ['x'].",
        ),
        (checker(OPTIONAL), request(), "expected number of inputs between 1 and 3 but got 0 inputs for model 'm'"),
        # Triton counts only; the names are looked at here.
        (checker(OPTIONAL), request(int8("B")), "but missing required input(s) ['A']"),
        (checker(OPTIONAL), request(int8("B"), int8("D")), "unexpected inference input 'D' for model 'm'"),
        (one(), request(fp32("q", 4)), "unexpected inference input 'q' for model 'm'"),
        (checker(TWO), request(fp32("A", 1, 4), fp32("A", 1, 4)), PREFIX + "input 'A' already exists in request"),
        (
            one(),
            request(Tensor("x", "FP64", (4,), b"\0" * 32)),
            PREFIX + "inference input 'x' data-type is 'FP64', but model 'm' expects 'FP32'",
        ),
        (
            one(),
            request(Tensor("x", "fp32", (4,), b"\0" * 16)),
            "inference input 'x' data-type is '<invalid>', but model 'm'",
        ),
        (one(), request(fp32("x", 5)), PREFIX + "unexpected shape for input 'x' for model 'm'. Expected [4], got [5]."),
        (one(), request(fp32("x", 1, 4)), "Expected [4], got [1,4]."),
        (one(8), request(fp32("x", 4)), "inputs begin with a batch dimension"),
        (one(8), request(fp32("x", 2, 5)), "Expected [-1,4], got [2,5]. Note: max_batch_size is 8"),
        (one(8), request(fp32("x", 2, -1)), PREFIX + "All input dimensions should be specified for input 'x'"),
        (one(8), request(fp32("x", -1, 4)), "All input dimensions should be specified for input 'x'"),
        (one(8), request(fp32("x", byte_size=0)), PREFIX + "input 'x' has no shape but model requires batch dimension"),
        (
            checker(TWO),
            request(fp32("A", 2, 4), fp32("B", 3, 4)),
            PREFIX + "input 'B' batch size does not match other inputs for 'm': 'A' has 2, 'B' has 3",
        ),
        (one(8), request(fp32("x", 9, 4)), PREFIX + "inference request batch-size must be <= 8 for 'm', got 9"),
        (
            one(8),
            request(fp32("x", 0, 4)),
            PREFIX + "input byte size mismatch for input 'x' for model 'm'. Expected 16, got 0:",
        ),
        (one(0, "-1"), request(fp32("x", 1 << 41, byte_size=4)), "exceed maximum size"),
        (
            one(),
            request(fp32("x", 4, byte_size=15)),
            PREFIX + "input byte size mismatch for input 'x' for model 'm'. Expected 16, got 15",
        ),
        (one(), request(fp32("x", 4, byte_size=20)), "Expected 16, got 20"),
        (checker(SCALAR), request(fp32("x", 1)), "Expected [], got [1]."),
        (checker(SCALAR), request(fp32("x", byte_size=8)), "Expected 4, got 8"),
        (one(), request(fp32("x", 4), outputs=("q",)), "unexpected inference output 'q' for model 'm'"),
        (one(), request(fp32("x", 4), outputs=("y", "y")), PREFIX + "output 'y' already exists in request"),
        (one(), request(fp32("q", 4), outputs=("q",)), "unexpected inference output 'q'"),
        (one(8), request(Tensor("x", "FP64", (9, 5), b"")), "batch-size must be <= 8"),
        (one(8), request(Tensor("x", "FP64", (2, 5), b"")), "data-type is 'FP64'"),
        (one(8), request(fp32("x", 2, 5, byte_size=1)), "unexpected shape"),
        (one(), request(fp32("x", 5), id=""), "[request id: <id_unknown>] unexpected shape"),
    ],
)
def test_bad_requests_are_refused_in_order(check: RequestChecker, bad: InferRequest, text: str) -> None:
    with pytest.raises(InvalidTensorError) as caught:
        check.check(bad)
    assert text in str(caught.value)
    if text.startswith("unexpected inference"):
        assert str(caught.value).startswith("unexpected inference"), "these two have no request id"


def raw(*elements: bytes) -> bytes:
    return encode_bytes_tensor(np.array(elements, object))


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data[:-7], "expected {n} string elements for inference input 's' for model 'm', got {less}"),
        (
            lambda data: data + raw(b"q", b"r"),
            "unexpected number of string elements {more} for inference input 's' for model 'm', expecting {n}",
        ),
        (lambda data: data + b"\x01", "unexpected number of string elements {more}"),
        (
            lambda data: data[:-5],
            "incomplete string length indicator for inference input 's' for model 'm', expecting 4 bytes but only 2 "
            "bytes available",
        ),
        (
            lambda data: data[:-1],
            "incomplete string data for inference input 's' for model 'm', expecting string of length 3 but only 2 "
            "bytes available",
        ),
    ],
)
def test_the_ways_of_bytes_to_be_wrong(count: int, change: object, text: str) -> None:
    check = checker(TEXT)
    data = raw(*[b"abc"] * count)
    assert check.check(request(Tensor("s", "BYTES", (count,), data))) == 1
    with pytest.raises(InvalidTensorError) as caught:
        check.check(request(Tensor("s", "BYTES", (count,), change(data))))  # type: ignore[operator]
    assert PREFIX + text.format(n=count, less=count - 1, more=count + 1) in str(caught.value)


def test_a_claim_of_many_elements_costs_nothing() -> None:
    with pytest.raises(InvalidTensorError, match="expected 1099511627776 string elements"):
        checker(TEXT).check(request(Tensor("s", "BYTES", (1 << 40,), raw(b"abc"))))


def test_only_many_elements_are_heavy() -> None:
    check = checker(TEXT)
    photo = Tensor("s", "BYTES", (1,), raw(b"\xff" * (1 << 20)))
    many = Tensor("s", "BYTES", (HEAVY_ELEMENTS + 1,), raw(*[b"ab"] * (HEAVY_ELEMENTS + 1)))
    assert not check.is_heavy(request(photo))
    assert check.is_heavy(request(many))
    assert not check.is_heavy(request(Tensor("s", "BYTES", (1 << 62,) * 1_000_000, b"\0" * (8 * HEAVY_ELEMENTS))))


def test_a_long_name_or_id_leaves_room_for_the_reason() -> None:
    with pytest.raises(InvalidTensorError) as caught:
        one().check(request(fp32("x", 4), fp32("n" * 100_000, 4), id="i" * 60_000))
    assert len(str(caught.value)) < 1024
    assert re.search(r"i…\] expected 1 inputs but got 2", str(caught.value))


@given(
    datatype=st.sampled_from([*DATATYPES, "STRING", "", "fp32"]),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 9), max_size=5).map(tuple),
    data=st.binary(max_size=40),
    name=st.sampled_from(["x", "s", "q"]),
    outputs=st.lists(st.sampled_from(["y", "z", "q"]), max_size=3).map(tuple),
    check=st.sampled_from([one(), one(8), one(8, "-1, 2"), checker(TEXT), checker(SCALAR)]),
)
def test_whatever_comes_is_right_or_refused(
    datatype: str,
    shape: tuple[int, ...],
    data: bytes,
    name: str,
    outputs: tuple[str, ...],
    check: RequestChecker,
) -> None:
    tensor = Tensor(name, datatype, shape, data)
    try:
        rows = check.check(request(tensor, outputs=outputs))
    except InvalidTensorError:
        return
    assert rows >= 1
    want = int(np.prod(shape)) * DATATYPES[datatype].itemsize
    assert datatype == "BYTES" or len(data) == want
