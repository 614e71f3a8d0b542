"""JSON as clients must write it: parsed exactly, bounded in depth, each member asked for by its kind."""

import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar, overload

import orjson

from tensorline.errors import InvalidTensorError
from tensorline.protocol.infer import shown

__all__ = ["DEPTH_LIMIT", "NON_FINITE", "kind_name", "member", "parse_json", "parse_object"]

DEPTH_LIMIT: Final = 100
NON_FINITE: Final = ("NaN", "Infinity", "-Infinity")

_BARE: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|-?Infinity\b|NaN\b', re.DOTALL)
_KINDS: Final[Mapping[type, str]] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}
_MISSING: Final = object()

T = TypeVar("T")


def parse_json(raw: bytes) -> Any:
    """
    Raises:
        InvalidTensorError: no JSON, or too deep.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        value = _parse_with_bare(raw, error)
    if raw.count(b"[") + raw.count(b"{") > DEPTH_LIMIT:
        _check_depth(value)
    return value


def parse_object(raw: bytes, *, is_optional: bool = False) -> dict[str, Any]:
    """
    Args:
        is_optional: No body at all is an empty object.
    Raises:
        InvalidTensorError: as `parse_json`, or no object.
    """
    if is_optional and not raw:
        return {}
    value = parse_json(raw)
    if not isinstance(value, dict):
        raise InvalidTensorError(f"the request body is {kind_name(value)}, an object is wanted")
    return value


def _parse_with_bare(raw: bytes, error: orjson.JSONDecodeError) -> Any:
    """Once more with NaN and Infinity in quotes, where they stand bare."""
    if b"NaN" in raw or b"Infinity" in raw:
        quoted = _BARE.sub(lambda found: found[0] if found[0][:1] == b'"' else b'"%b"' % found[0], raw)
        try:
            return orjson.loads(quoted)
        except orjson.JSONDecodeError as again:
            error = again
    elif not raw.strip():
        raise InvalidTensorError("failed to parse the request JSON buffer: The document is empty.")
    if "depth limit" in error.msg:
        raise _too_deep() from None
    raise InvalidTensorError(f"failed to parse the request JSON buffer: {error}") from None


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(DEPTH_LIMIT):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
            if type(child) is list or type(child) is dict
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidTensorError:
    return InvalidTensorError(f"JSON nesting depth exceeds maximum allowed limit ({DEPTH_LIMIT})")


def kind_name(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


@overload
def member(holder: Mapping[str, Any], key: str, kind: type[T], where: str = "") -> T: ...
@overload
def member(holder: Mapping[str, Any], key: str, kind: type[T], where: str = "", *, default: T) -> T: ...


def member(holder: Mapping[str, Any], key: str, kind: type[T], where: str = "", *, default: object = _MISSING) -> Any:
    """
    Args:
        where: Goes into the error: "of input 'x'".
    Raises:
        InvalidTensorError: the member is missing and has no default, or is of another kind. true is no integer.
    """
    value = holder.get(key, default)
    if type(value) is kind or (value is default and value is not _MISSING):
        return value
    got = "it is missing" if value is _MISSING else f"it is {kind_name(value)}"
    of = f" {where}" if where else ""
    raise InvalidTensorError(f"Unable to parse '{shown(key)}'{of}: {got}, {_KINDS[kind]} is wanted")
