"""The shared-memory parameters of a tensor, whatever front end they came through."""

from typing import Final, NoReturn

from tensorline.errors import InvalidTensorError
from tensorline.protocol.infer import RegionUse, shown
from tensorline.protocol.parameters import Kinds

__all__ = ["REGION_KEYS", "refuse_region_and_classification", "region_use"]

REGION: Final = "shared_memory_region"
BYTE_SIZE: Final = "shared_memory_byte_size"
OFFSET: Final = "shared_memory_offset"
REGION_KEYS: Final = (REGION, BYTE_SIZE, OFFSET)


def region_use(what: str, kinds: Kinds) -> RegionUse | None:
    """Where in a client's shared memory the tensor is or is to go; None: in the message.

    Offset and size are any integers here; they are checked against the region when it is used.

    Args:
        what: How an error names the tensor: "input tensor 'x' for model 'm'".
        kinds: All of the tensor's parameters. An integer of JSON has the kind "int64_param", however large.
    Raises:
        InvalidTensorError: a parameter of another type, a size or offset without a region, a region without a size.
    Source: protocol.md §7.2, errors.md §6.
    """
    if REGION not in kinds:
        for key in (BYTE_SIZE, OFFSET):
            if key in kinds:
                raise InvalidTensorError(f"'{key}' can not be specified without '{REGION}' for {what}")
        return None
    kind, region = kinds[REGION]
    if kind != "string_param" or not isinstance(region, str):
        _refuse_kind(REGION, what, kind, "string_param")
    if BYTE_SIZE not in kinds:
        raise InvalidTensorError(f"'{BYTE_SIZE}' must be specified along with '{REGION}' for {what}")
    return RegionUse(region, _integer(OFFSET, what, kinds) if OFFSET in kinds else 0, _integer(BYTE_SIZE, what, kinds))


def refuse_region_and_classification(output: str) -> NoReturn:
    """Raises:
    InvalidTensorError: always; for an output that asks for both.
    """
    raise InvalidTensorError(
        f"output can't set both '{REGION}' and 'classification' for output '{shown(output)}': classes are sent in the "
        "response"
    )


def _integer(key: str, what: str, kinds: Kinds) -> int:
    kind, value = kinds[key]
    if kind != "int64_param" or not isinstance(value, int):
        _refuse_kind(key, what, kind, "int64_param")
    return value


def _refuse_kind(key: str, what: str, kind: str, expected: str) -> NoReturn:
    raise InvalidTensorError(f"invalid value type for '{key}' parameter for {what}: got {kind}, expected {expected}")
