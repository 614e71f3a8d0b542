"""Protobuf messages as JSON values with the fields' own names: integers stay numbers, whatever their size.

protobuf's own JSON puts 64-bit integers in quotes; Triton's does not, and its clients read numbers.
Source: protocol.md §13.1, observability.md §2.
"""

import base64
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb

__all__ = ["message_value"]

_MESSAGE: Final = FieldDescriptor.TYPE_MESSAGE
_ENUM: Final = FieldDescriptor.TYPE_ENUM
_BYTES: Final = FieldDescriptor.TYPE_BYTES
_WHOLE: Final = frozenset(
    {
        pb.ModelStatistics.DESCRIPTOR.full_name,
        pb.InferStatistics.DESCRIPTOR.full_name,
        pb.InferResponseStatistics.DESCRIPTOR.full_name,
        pb.InferBatchStatistics.DESCRIPTOR.full_name,
    }
)
"""Messages whose parts are shown also where they are unset: a statistic without an event is a zero."""
_STATISTICS_ORDER: Final = ("batch_stats", "memory_usage")
"""Fields of ModelStatistics that come last in JSON."""


def message_value(message: Message) -> dict[str, Any]:
    """Every scalar and list of the message, and of its parts those that are set; of a oneof the member that is."""
    kind = message.DESCRIPTOR
    found: dict[str, Any] = {}
    for field in kind.fields:
        is_unset = field.has_presence and not message.HasField(field.name)
        if is_unset and (field.type != _MESSAGE or kind.full_name not in _WHOLE):
            continue
        found[field.name] = _field_value(field, getattr(message, field.name))
    if kind.full_name == pb.ModelStatistics.DESCRIPTOR.full_name:
        for name in _STATISTICS_ORDER:
            found[name] = found.pop(name)
    return found


def _field_value(field: Any, value: Any) -> Any:
    if not field.is_repeated:
        return _value(field, value)
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        of = entry.fields_by_name["value"]
        return {_key(key): _value(of, each) for key, each in sorted(value.items())}
    return [_value(field, each) for each in value]


def _value(field: Any, value: Any) -> Any:
    if field.type == _MESSAGE:
        return message_value(value)
    if field.type == _ENUM:
        number = field.enum_type.values_by_number.get(value)
        return value if number is None else number.name
    if field.type == _BYTES:
        return base64.b64encode(value).decode()
    return value


def _key(key: Any) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)
