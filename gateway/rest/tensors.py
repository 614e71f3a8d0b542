"""A tensor's elements as JSON and in raw form.

Source: protocol.md §13.3, §13.4.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, NoReturn

import numpy as np

from gateway.rest.strict_json import DEPTH_LIMIT, NON_FINITE, kind_name
from tensorline.errors import InvalidTensorError
from tensorline.protocol.infer import shown
from tensorline.tensor import (
    BYTES,
    DATATYPES,
    Array,
    Tensor,
    decode_bytes_tensor,
    element_count,
    encode_array,
)

__all__ = ["decode_elements", "encode_elements", "flattened"]

_BINARY_ALONE: Final = ("FP16", "BF16")
_FLOATS: Final = ("FP32", "FP64")
_BY_TEXT: Final = {text: float(text) for text in NON_FINITE}


def decode_elements(name: str, datatype: str, shape: tuple[int, ...], data: list[Any]) -> bytes | memoryview:
    """Raw form of an input's `data`, flat or nested in any way.

    Raises:
        InvalidTensorError: another number of elements than the shape has, an element of another kind or out of range,
            a datatype that JSON does not carry.
    """
    if datatype in _BINARY_ALONE:
        raise InvalidTensorError(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input "
            f"{shown(name)}"
        )
    if datatype not in DATATYPES:
        raise InvalidTensorError(
            f"input '{shown(name)}' has datatype '{shown(datatype)}', which is unknown; use one of "
            f"{', '.join(DATATYPES)}"
        )
    elements = flattened(name, data)
    if len(elements) != element_count(shape):
        raise InvalidTensorError(
            f"Unable to parse 'data' of input '{shown(name)}': Shape does not match true shape of 'data' field: it has "
            f"{len(elements)} elements, shape {list(shape)} has {element_count(shape)}"
        )
    kinds = set(map(type, elements))
    if datatype == BYTES:
        return _texts(name, elements, kinds)
    if datatype in _FLOATS:
        return encode_array(_floats(name, datatype, elements, kinds))
    if datatype == "BOOL":
        if not kinds <= {bool}:
            _refuse(name, datatype, elements, (bool,), "true or false")
        return encode_array(np.array(elements, np.bool_))
    return encode_array(_integers(name, datatype, elements, kinds))


def flattened(name: str, data: list[Any]) -> list[Any]:
    """The elements in row-major order.

    Raises:
        InvalidTensorError: arrays and elements side by side.
    """
    for _ in range(DEPTH_LIMIT):
        kinds = set(map(type, data))
        if list not in kinds:
            return data
        if len(kinds) > 1:
            raise InvalidTensorError(f"Unable to parse 'data' of input '{shown(name)}': it mixes arrays and elements")
        data = list(chain.from_iterable(data))
    raise InvalidTensorError(f"JSON nesting depth exceeds maximum allowed limit ({DEPTH_LIMIT})")


def _texts(name: str, elements: list[Any], kinds: set[type]) -> bytes:
    if not kinds <= {str}:
        _refuse(name, BYTES, elements, (str,), "strings")
    encoded = [element.encode() for element in elements]
    return b"".join([part for element in encoded for part in (len(element).to_bytes(4, "little"), element)])


def _integers(name: str, datatype: str, elements: list[Any], kinds: set[type]) -> Array:
    dtype = DATATYPES[datatype]
    bits = 8 * dtype.itemsize
    least, most = (0, (1 << bits) - 1) if dtype.kind == "u" else (-(1 << bits - 1), (1 << bits - 1) - 1)
    if not kinds <= {int}:
        _refuse(name, datatype, elements, (int,), f"integers from {least} to {most}")
    if elements and not (least <= min(elements) and max(elements) <= most):
        index = next(index for index, element in enumerate(elements) if not least <= element <= most)
        _refuse_element(name, datatype, index, str(elements[index]), f"integers from {least} to {most}")
    return np.array(elements, dtype)


def _floats(name: str, datatype: str, elements: list[Any], kinds: set[type]) -> Array:
    if not kinds <= {int, float}:
        elements = [_BY_TEXT.get(element, element) if type(element) is str else element for element in elements]
        if not set(map(type, elements)) <= {int, float}:
            _refuse(name, datatype, elements, (int, float), f"numbers, or one of {', '.join(NON_FINITE)} in quotes")
    wide = np.array(elements, np.float64)
    if datatype == "FP64":
        return wide
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    lost = np.isinf(narrow) & np.isfinite(wide)
    if lost.any():
        index = int(lost.argmax())
        _refuse_element(name, datatype, index, str(elements[index]), "numbers of at most 3.4028235e+38")
    return narrow


def _refuse(name: str, datatype: str, elements: list[Any], taken: Sequence[type], wanted: str) -> NoReturn:
    index = next(index for index, element in enumerate(elements) if type(element) not in taken)
    element = elements[index]
    told = str(element) if type(element) is float else f"'{shown(element)}'" if type(element) is str else ""
    _refuse_element(name, datatype, index, told or kind_name(element), wanted)


def _refuse_element(name: str, datatype: str, index: int, got: str, wanted: str) -> NoReturn:
    raise InvalidTensorError(
        f"Unable to parse 'data' of input '{shown(name)}': element {index} is {shown(got)}, {datatype} takes {wanted}"
    )


def encode_elements(tensor: Tensor) -> Any:
    """What orjson writes as the flat array of the tensor's elements.

    Raises:
        InvalidTensorError: JSON cannot carry them.
    """
    datatype, raw = tensor.datatype, tensor.data or b""
    if datatype in _BINARY_ALONE:
        raise InvalidTensorError(
            f"sending {datatype} data via JSON is not supported. Please use the binary data format for output "
            f"'{tensor.name}'"
        )
    if datatype == BYTES:
        return _decoded_texts(tensor.name, decode_bytes_tensor(raw, tensor.shape).reshape(-1).tolist())
    if not raw:
        return []
    if datatype == "BOOL":  # any byte but 0 is true
        return np.frombuffer(raw, np.uint8) != 0
    array = np.require(np.frombuffer(raw, DATATYPES[datatype]), requirements="A")
    if datatype not in _FLOATS:
        return array
    wide = array.astype(np.float64, copy=False)  # FP32 to its last digit, as Triton writes it
    finite = np.isfinite(wide)
    return wide if finite.all() else [_number(number) for number in wide.tolist()]


def _number(number: float) -> float | str:
    if number != number:
        return "NaN"
    return number if abs(number) != float("inf") else "Infinity" if number > 0 else "-Infinity"


def _decoded_texts(name: str, elements: list[bytes]) -> list[str]:
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        raise InvalidTensorError(
            f"output '{name}' has elements that are not UTF-8, which JSON cannot carry. Please use the binary data "
            "format for it"
        ) from None
