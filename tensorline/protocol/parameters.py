"""InferParameter to Python values and back, and the reserved keys of a request."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from tensorline.errors import InvalidTensorError, UnsupportedError
from tensorline.protocol.infer import LIMITS, NO_OPTIONS, Limits, ParameterValue, RequestOptions, shown
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb

__all__ = [
    "RESERVED_KEYS",
    "RESERVED_PREFIX",
    "SEQUENCE_ID_LIMIT",
    "Kinds",
    "decode_parameters",
    "encode_parameters",
    "parameter_kind",
    "split_options",
]

SEQUENCE_ID_LIMIT: Final = 128
RESERVED_PREFIX: Final = "triton_"

_UINT64: Final = 1 << 64
_INT64_MAX: Final = (1 << 63) - 1

# Field of RequestOptions and the oneof members taken, by key.
_RESERVED: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "sequence_id": ("sequence_id", ("int64_param", "string_param")),
    "sequence_start": ("sequence_start", ("bool_param",)),
    "sequence_end": ("sequence_end", ("bool_param",)),
    "priority": ("priority", ("int64_param", "uint64_param")),
    "timeout": ("timeout_us", ("int64_param",)),
    "triton_enable_empty_final_response": ("empty_final_response", ("bool_param",)),
}

RESERVED_KEYS: Final = frozenset(_RESERVED)

Kinds = Mapping[str, tuple[str, ParameterValue]]
"""Value and oneof member by key: what a front end has before keys are told apart."""


def decode_parameters(
    wire: Mapping[str, pb.InferParameter], limits: Limits = LIMITS
) -> tuple[dict[str, ParameterValue], RequestOptions]:
    """Tell a request's custom parameters from the reserved ones.

    Custom uint64 parameters are taken, which Triton refuses: all five kinds travel here.

    Raises:
        InvalidTensorError: a limit, an unset value, a reserved key with another type or an unknown `triton_` key.
        UnsupportedError: a string sequence id of more than 128 bytes.
    Source: protocol.md §5.6, errors.md §5.
    """
    if len(wire) > limits.parameters:
        raise InvalidTensorError(f"request has {len(wire)} parameters, at most {limits.parameters} are allowed")
    return split_options({key: parameter_kind(key, parameter) for key, parameter in wire.items()}, limits)


def parameter_kind(key: str, parameter: pb.InferParameter) -> tuple[str, ParameterValue]:
    """The oneof member that is set, and its value.

    Raises:
        InvalidTensorError: none is.
    """
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidTensorError(
            f"invalid value type for '{shown(key)}': it is unset, expected int64_param, bool_param, or string_param "
            "(double_param and uint64_param are taken too)"
        )
    return kind, getattr(parameter, kind)


def split_options(kinds: Kinds, limits: Limits = LIMITS) -> tuple[dict[str, ParameterValue], RequestOptions]:
    """As `decode_parameters`, for values that are already Python's with the name of their kind ("int64_param")."""
    custom: dict[str, ParameterValue] = {}
    options: dict[str, Any] = {}
    for key, (kind, value) in kinds.items():
        reserved = _RESERVED.get(key)
        if reserved is not None:
            options[reserved[0]] = _option(key, kind, value, reserved[1])
        elif key.startswith(RESERVED_PREFIX):
            raise InvalidTensorError(
                f"parameter keys starting with '{RESERVED_PREFIX}' are reserved, got '{shown(key)}'; allowed is "
                "'triton_enable_empty_final_response'"
            )
        else:
            custom[key] = _custom(key, value, limits)
    return custom, dataclasses.replace(NO_OPTIONS, **options) if options else NO_OPTIONS


def _custom(key: str, value: ParameterValue, limits: Limits) -> ParameterValue:
    if _byte_length(key) > limits.parameter_key:
        raise InvalidTensorError(
            f"parameter key '{shown(key)}' has {_byte_length(key)} bytes, at most {limits.parameter_key} are allowed"
        )
    if isinstance(value, str) and _byte_length(value) > limits.parameter_value:
        raise InvalidTensorError(
            f"parameter '{shown(key)}' has {_byte_length(value)} bytes, at most {limits.parameter_value} are allowed"
        )
    return value


def _option(key: str, kind: str, value: ParameterValue, expected: tuple[str, ...]) -> ParameterValue:
    if kind not in expected:
        raise InvalidTensorError(f"invalid value type for '{key}': got {kind}, expected {' or '.join(expected)}")
    if key == "priority" and isinstance(value, int) and value < 0:
        raise InvalidTensorError(f"invalid value {value} for 'priority', expected value >= 0")
    if key == "sequence_id":
        if isinstance(value, str):
            if _byte_length(value) > SEQUENCE_ID_LIMIT:
                raise UnsupportedError(
                    f"string correlation ID cannot be longer than {SEQUENCE_ID_LIMIT} characters, "
                    f"got {_byte_length(value)} bytes"
                )
        elif isinstance(value, int):
            return value % _UINT64  # negative ids wrap, as Triton's do
    return value


def _byte_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def encode_parameters(values: Mapping[str, ParameterValue], wire: Any) -> None:
    """Put Python values into a `map<string, InferParameter>` field.

    Raises:
        TypeError: a value of another type, or an integer that 64 bits do not hold.
    """
    for key, value in values.items():
        parameter = wire[key]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            if not -_INT64_MAX - 1 <= value < _UINT64:
                raise TypeError(f"parameter '{key}' is {value}, which 64 bits do not hold")
            if value > _INT64_MAX:
                parameter.uint64_param = value
            else:
                parameter.int64_param = value
        elif isinstance(value, str):
            parameter.string_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            raise TypeError(f"parameter '{key}' is {type(value).__name__}, not bool, int, str or float")
