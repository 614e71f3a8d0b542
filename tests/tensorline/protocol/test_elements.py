"""BYTES elements are counted and bounded without being made."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorline.errors import InvalidTensorError
from tensorline.protocol.elements import check_elements
from tensorline.tensor import decode_bytes_tensor, encode_bytes_tensor


def raw(elements: list[bytes]) -> bytes:
    array = np.empty(len(elements), object)
    array[:] = elements
    return encode_bytes_tensor(array)


@given(st.lists(st.binary(max_size=5), max_size=40))
def test_what_is_right_passes(elements: list[bytes]) -> None:
    check_elements(raw(elements), len(elements), "here")
    check_elements(memoryview(raw(elements)), len(elements), "here")


@given(st.binary(max_size=40) | st.lists(st.binary(max_size=3), max_size=40).map(raw), st.integers(0, 40))
def test_it_refuses_what_the_decoder_refuses(data: bytes, want: int) -> None:
    try:
        decode_bytes_tensor(data, (want,))
    except InvalidTensorError:
        with pytest.raises(InvalidTensorError, match="here"):
            check_elements(data, want, "here")
    else:
        check_elements(data, want, "here")


@pytest.mark.parametrize(
    ("data", "want", "text"),
    [
        (raw([b"abc"] * 2), 3, "expected 3 string elements here, got 2"),
        (raw([b"abc"] * 5), 3, "unexpected number of string elements 4 here, expecting 3"),
        (
            raw([b"abc"])[:-5],
            1,
            "incomplete string length indicator here, expecting 4 bytes but only 2 bytes available",
        ),
        (
            raw([b"abc"] * 20)[:-1],
            20,
            "incomplete string data here, expecting string of length 3 but only 2 bytes available",
        ),
        (b"\xff\xff\xff\xff", 1, "expecting string of length 4294967295 but only 0 bytes available"),
        (b"", 1, "expected 1 string elements here, got 0"),
    ],
)
def test_the_errors_say_what_is_wrong(data: bytes, want: int, text: str) -> None:
    with pytest.raises(InvalidTensorError) as caught:
        check_elements(data, want, "here")
    assert text in str(caught.value)
