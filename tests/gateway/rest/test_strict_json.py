"""JSON as clients must write it."""

import json

import pytest

from gateway.rest.strict_json import member, parse_json, parse_object
from tensorline.errors import InvalidTensorError


def test_integers_of_64_bits_are_exact() -> None:
    assert parse_json(b"[9223372036854775807,-9223372036854775808,18446744073709551615]") == [
        2**63 - 1,
        -(2**63),
        2**64 - 1,
    ]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1,]",
        "{'a':1}",
        "[01]",
        "[1e400]",
        '["\x01"]',
        "nan",
        "[1] 2",
        "[/**/1]",
        "\xef\xbb\xbf[1]",
        '["\\ud800"]',
    ],
)
def test_what_is_no_json(text: str) -> None:
    with pytest.raises(InvalidTensorError, match="failed to parse the request JSON buffer: "):
        parse_json(text.encode("latin-1"))


@pytest.mark.parametrize("text", [b"", b" \n"])
def test_nothing_at_all(text: bytes) -> None:
    with pytest.raises(InvalidTensorError, match="failed to parse the request JSON buffer: The document is empty"):
        parse_json(text)


def test_bare_numbers_that_json_does_not_have_are_read_as_if_quoted() -> None:
    written = json.dumps({"a": [float("nan"), float("inf"), -float("inf"), 1], "NaN, \\": 'NaN \\" Infinity'})
    assert parse_json(written.encode()) == {"a": ["NaN", "Infinity", "-Infinity", 1], "NaN, \\": 'NaN \\" Infinity'}


@pytest.mark.parametrize("text", [b"[-NaN]", b"[NaNa]", b"[+Infinity]", b'["NaN]', b"[NaN,]", b"Infinity Infinity"])
def test_what_looks_like_them_and_is_not(text: bytes) -> None:
    with pytest.raises(InvalidTensorError, match="failed to parse"):
        parse_json(text)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_depth() -> None:
    assert parse_json(nested(100))
    assert parse_json(b"[" + b"[]," * 200 + b"[]]")
    assert parse_json(b'["' + b"[" * 2000 + b'"]')
    for deep in (nested(101), b'{"a":' * 101 + b"1" + b"}" * 101, b'{"a":[' * 51 + b"]}" * 51, nested(100_000)):
        with pytest.raises(InvalidTensorError, match=r"JSON nesting depth exceeds maximum allowed limit \(100\)"):
            parse_json(deep)


def test_a_body_is_an_object() -> None:
    assert parse_object(b"", is_optional=True) == {}
    assert parse_object(b'{"a":1}') == {"a": 1}
    for text, kind in ((b"[]", "an array"), (b"1", "an integer"), (b"null", "null"), (b'"a"', "a string")):
        with pytest.raises(InvalidTensorError, match=f"the request body is {kind}, an object is wanted"):
            parse_object(text, is_optional=True)


def test_members_are_named_when_they_are_wrong() -> None:
    document = {"name": 5, "size": True, "flag": 1}
    with pytest.raises(InvalidTensorError, match=r"^Unable to parse 'shape' of input 'x': it is missing, an array is"):
        member(document, "shape", list, "of input 'x'")
    for key, kind, told in (
        ("name", str, "it is an integer, a string is wanted"),
        ("size", int, "it is a boolean, an integer is wanted"),
        ("flag", bool, "it is an integer, a boolean is wanted"),
    ):
        with pytest.raises(InvalidTensorError, match=told):
            member(document, key, kind)
    assert member(document, "other", str, default="") == ""
