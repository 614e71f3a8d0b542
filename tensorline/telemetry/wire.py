"""Protobuf's wire format, as far as OTLP spans need it. Values come back as bytes to be joined."""

from struct import Struct
from typing import Final

from tensorline.telemetry.record import Attributes, AttributeValue

__all__ = ["ATTRIBUTE_LIMIT", "AttributeEncoder", "field", "name_and_kind", "varint"]

ATTRIBUTE_LIMIT: Final = 1024
"""Characters of an attribute's value; the rest is cut off."""

_CACHE_LIMIT: Final = 4096
_DOUBLE: Final = Struct("<Bd")
_SMALL: Final = tuple(bytes([n]) if n < 128 else bytes([n & 0x7F | 0x80, n >> 7]) for n in range(1024))


def varint(number: int) -> bytes:
    """Base-128, little end first. A negative number as its 64-bit two's complement, as int64 wants it."""
    if 0 <= number < 1024:
        return _SMALL[number]
    number &= 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(tag: int, payload: bytes) -> bytes:
    """A length-delimited field; `tag` is (number << 3 | 2), numbers under 16."""
    return b"%c%b%b" % (tag, varint(len(payload)), payload)


def name_and_kind(name: str, kind: int) -> bytes:
    return field(0x2A, name[:ATTRIBUTE_LIMIT].encode(errors="replace")) + b"\x30" + varint(kind)  # Span: 5 name, 6 kind


class AttributeEncoder:
    """Encodes `repeated KeyValue` fields with tag `tag`; what was encoded before is looked up.

    Args:
        uncached: Keys whose values are different each time.
    """

    def __init__(self, tag: int, uncached: frozenset[str] = frozenset()) -> None:
        self._tag = tag
        self._uncached = uncached
        self._pairs: dict[tuple[str, AttributeValue], bytes] = {}
        self._keys: dict[str, bytes] = {}

    def encode(self, attributes: Attributes) -> bytes:
        known = self._pairs
        return b"".join(
            [(known.get(pair) if type(pair[1]) is str else None) or self._encode(pair) for pair in attributes]
        )

    def _encode(self, pair: tuple[str, AttributeValue]) -> bytes:
        key, value = pair
        head = self._keys.get(key) or self._head(key)
        encoded = field(self._tag, head + field(0x12, _any_value(value)))  # KeyValue: 2 value
        if type(value) is str and key not in self._uncached:
            if len(self._pairs) >= _CACHE_LIMIT:
                self._pairs.clear()
            self._pairs[pair] = encoded
        return encoded

    def _head(self, key: str) -> bytes:
        head = field(0x0A, key.encode())  # KeyValue: 1 key
        if len(self._keys) < _CACHE_LIMIT:
            self._keys[key] = head
        return head


def _any_value(value: AttributeValue) -> bytes:
    if isinstance(value, str):
        return field(0x0A, value[:ATTRIBUTE_LIMIT].encode(errors="replace"))  # AnyValue: 1 string_value
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"  # 2 bool_value
    if isinstance(value, int):
        return b"\x18" + varint(value)  # 3 int_value
    return _DOUBLE.pack(0x21, value)  # 4 double_value
