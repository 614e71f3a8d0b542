"""Parameters of a JSON request, its tensors and outputs, as values with the kinds that the protocol gives them."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.rest.strict_json import kind_name
from tensorline.errors import InvalidTensorError
from tensorline.protocol.infer import LIMITS, ParameterValue, RequestOptions, shown
from tensorline.protocol.parameters import RESERVED_PREFIX, Kinds, split_options

__all__ = ["BINARY_OUTPUT", "kinds_of", "request_parameters"]

BINARY_OUTPUT: Final = "binary_data_output"

_INT64_MAX: Final = (1 << 63) - 1


def request_parameters(given: Mapping[str, Any]) -> tuple[dict[str, ParameterValue], RequestOptions]:
    """A request's custom parameters and the reserved ones.

    Raises:
        InvalidTensorError: too many, a value of a kind that no parameter has, a reserved key of another kind, or any
            that begins with "triton_".
        UnsupportedError: a string sequence id of more than 128 bytes.
    Source: protocol.md §13.3, errors.md §5.
    """
    if len(given) > LIMITS.parameters:
        raise InvalidTensorError(f"request has {len(given)} parameters, at most {LIMITS.parameters} are allowed")
    for key in given:
        if key.startswith(RESERVED_PREFIX):
            raise InvalidTensorError(
                f"parameter keys starting with '{RESERVED_PREFIX}' are reserved, got '{shown(key)}'"
            )
    return split_options({key: _request_kind(key, value) for key, value in given.items()})


def kinds_of(given: Mapping[str, Any]) -> Kinds:
    """Of a tensor's parameters. JSON does not tell signed from unsigned: an integer is an int64_param, however large.

    Raises:
        InvalidTensorError: an object, an array, or null.
    """
    return {key: _kind(key, value) for key, value in given.items()}


def _request_kind(key: str, value: Any) -> tuple[str, ParameterValue]:
    kind, value = _kind(key, value)
    is_large = kind == "int64_param" and isinstance(value, int) and value > _INT64_MAX
    # Of a correlation id all 64 bits count.
    return ("uint64_param" if is_large and key != "sequence_id" else kind), value


def _kind(key: str, value: Any) -> tuple[str, ParameterValue]:
    if isinstance(value, bool):
        return "bool_param", value
    if isinstance(value, int):
        return "int64_param", value
    if isinstance(value, str):
        return "string_param", value
    if isinstance(value, float):
        return "double_param", value
    raise InvalidTensorError(
        f"parameter '{shown(key)}' has invalid type. It should be either 'int', 'bool', 'float' or 'string', it is "
        f"{kind_name(value)}"
    )
