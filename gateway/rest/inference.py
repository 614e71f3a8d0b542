"""An infer request's body, JSON and binary tensors, to our values, and a response to its body.

Source: protocol.md §13.3 to §13.5, errors.md §10.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from gateway.rest.answers import JSON, Part, Reply
from gateway.rest.parameters import BINARY_OUTPUT, kinds_of, request_parameters
from gateway.rest.strict_json import kind_name, member, parse_object
from gateway.rest.tensors import decode_elements, encode_elements
from tensorline.config.model import ModelConfig
from tensorline.errors import InvalidTensorError
from tensorline.protocol.infer import (
    LIMITS,
    InferRequest,
    InferResponse,
    RegionUse,
    RequestedOutput,
    shown,
)
from tensorline.protocol.regions import refuse_region_and_classification, region_use
from tensorline.tensor import BYTES, DATATYPES, Tensor

__all__ = [
    "HEADER_LENGTH",
    "RestRequest",
    "check_request_id",
    "decode_infer",
    "decode_raw",
    "encode_infer",
    "header_length",
]

HEADER_LENGTH: Final = b"inference-header-content-length"
BINARY_SIZE: Final = "binary_data_size"
BINARY: Final = (b"content-type", b"application/octet-stream")
DIMENSION_LIMIT: Final = 1 << 63
LENGTH_DIGITS: Final = 19


class RestRequest(NamedTuple):
    """A request, and in which form its outputs are wanted."""

    request: InferRequest
    is_binary: bool = False
    """Of outputs that say nothing themselves."""
    binary: Mapping[str, bool] = {}
    """Of outputs that do, by name."""


def header_length(value: bytes | None, body_size: int) -> int | None:
    """Bytes of JSON at the body's begin; None: all of it; 0: none, a raw request.

    Raises:
        InvalidTensorError: no number, or more than the body has.
    """
    if value is None:
        return None
    text = value.decode("latin-1")
    length = int(text) if text.isascii() and text.isdecimal() and len(text) <= LENGTH_DIGITS else -1
    if not 0 <= length <= body_size:
        raise InvalidTensorError(f"inference header size should be in range (0, {body_size}), got: {shown(text)}")
    return length


def check_request_id(request_id: str) -> None:
    """
    Raises:
        InvalidTensorError: it is too long.
    """
    if len(request_id) * 4 > LIMITS.request_id:
        size = len(request_id.encode())
        if size > LIMITS.request_id:
            raise InvalidTensorError(f"request id has {size} bytes, at most {LIMITS.request_id} are allowed")


def decode_infer(model: str, version: str, body: bytes, length: int | None) -> RestRequest:
    """
    Args:
        length: Of the JSON; what follows are binary tensors, which the request's tensors are views of.
    Raises:
        InvalidTensorError, UnsupportedError: as `tensorline.protocol.codec.decode_request`; JSON that is none.
    """
    document = parse_object(body if length is None else body[:length])
    request_id = member(document, "id", str, default="")
    check_request_id(request_id)
    given = member(document, "parameters", dict, default={})
    is_binary = member(given, BINARY_OUTPUT, bool, "of the request's parameters", default=False)
    if BINARY_OUTPUT in given:
        given = {key: value for key, value in given.items() if key != BINARY_OUTPUT}
    custom, options = request_parameters(given)
    inputs = _Inputs(model, memoryview(b"") if length is None else memoryview(body)[length:])
    for wire in _objects(document, "inputs"):
        inputs.add(wire)
    inputs.end()
    outputs, binary = _requested(document)
    request = InferRequest(model, version, request_id, inputs.tensors, outputs, custom, options, False, inputs.regions)
    return RestRequest(request, is_binary, binary)


class _Inputs:
    """The tensors of a request, as they are read one after the other.

    Args:
        binary: What follows the JSON: the bytes of the inputs with a `binary_data_size`, in their order.
    """

    def __init__(self, model: str, binary: memoryview) -> None:
        self.tensors: list[Tensor] = []
        self.regions: dict[str, RegionUse] = {}
        self._model = model
        self._binary = binary
        self._at = 0

    def add(self, wire: dict[str, Any]) -> None:
        name = member(wire, "name", str, "of an input")
        where = f"of input '{shown(name)}'"
        datatype = member(wire, "datatype", str, where)
        shape = _shape(name, member(wire, "shape", list, where))
        data: bytes | memoryview | None = None
        parameters = wire.get("parameters")
        if parameters is None:  # the usual case, without binary data or regions
            if "data" not in wire:
                raise _wrong_sources(name, [])
            data = decode_elements(name, datatype, shape, member(wire, "data", list, where))
        else:
            use = self._region(name, member(wire, "parameters", dict, where))
            sources = ["'data'"] * ("data" in wire) + [f"'{BINARY_SIZE}'"] * (BINARY_SIZE in parameters)
            sources += ["'shared_memory_region'"] * (use is not None)
            if len(sources) != 1:
                raise _wrong_sources(name, sources)
            if use is not None:
                self.regions[name] = use
            elif BINARY_SIZE in parameters:
                data = self._take(name, member(parameters, BINARY_SIZE, int, where))
            else:
                data = decode_elements(name, datatype, shape, member(wire, "data", list, where))
        self.tensors.append(Tensor(name, datatype, shape, data))

    def _region(self, name: str, parameters: dict[str, Any]) -> RegionUse | None:
        return region_use(f"input tensor '{shown(name)}' for model '{shown(self._model)}'", kinds_of(parameters))

    def _take(self, name: str, size: int) -> memoryview:
        left = len(self._binary) - self._at
        if not 0 <= size <= left:
            raise InvalidTensorError(
                f"unexpected size for input '{shown(name)}', expecting {size} bytes of binary data but only {left} "
                "bytes remain in the request body"
            )
        self._at += size
        return self._binary[self._at - size : self._at]

    def end(self) -> None:
        """
        Raises:
            InvalidTensorError: there are bytes that no input has taken.
        """
        left = len(self._binary) - self._at
        if left:
            raise InvalidTensorError(
                f"unexpected additional input data for model '{shown(self._model)}': {left} bytes follow those of its "
                "inputs"
            )


def _objects(holder: dict[str, Any], key: str, limit: int = LIMITS.inputs) -> list[dict[str, Any]]:
    found = member(holder, key, list)
    if len(found) > limit:
        raise InvalidTensorError(f"request has {len(found)} {key}, at most {limit} are allowed")
    for each in found:
        if type(each) is not dict:
            raise InvalidTensorError(f"Unable to parse '{key}': it has {kind_name(each)} in it, objects are wanted")
    return found


def _shape(name: str, given: list[Any]) -> tuple[int, ...]:
    if len(given) > LIMITS.rank:
        raise InvalidTensorError(
            f"input '{shown(name)}' has a shape of {len(given)} dimensions, at most {LIMITS.rank} are allowed"
        )
    for size in given:
        if type(size) is not int or not 0 <= size < DIMENSION_LIMIT:
            told = size if isinstance(size, int | float) else kind_name(size)
            raise InvalidTensorError(
                f"Unable to parse 'shape' of input '{shown(name)}': {told} is no dimension, integers of 0 or more are "
                "wanted"
            )
    return tuple(given)


def _wrong_sources(name: str, sources: list[str]) -> InvalidTensorError:
    set_ones = f"these are set: {', '.join(sources)}" if sources else "But no field is set"
    return InvalidTensorError(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        f"'shared_memory_region' in 'parameters'. {set_ones}, for input '{shown(name)}'"
    )


def _requested(document: dict[str, Any]) -> tuple[list[RequestedOutput], dict[str, bool]]:
    outputs: list[RequestedOutput] = []
    binary: dict[str, bool] = {}
    for wire in _objects(document, "outputs", LIMITS.outputs) if "outputs" in document else ():
        name = member(wire, "name", str, "of an output")
        where = f"of output '{shown(name)}'"
        parameters = member(wire, "parameters", dict, where, default={})
        if not parameters:
            outputs.append(RequestedOutput(name))
            continue
        region = region_use(f"output '{shown(name)}'", kinds_of(parameters))
        if region is not None and "classification" in parameters:
            refuse_region_and_classification(name)
        if "binary_data" in parameters:
            binary[name] = member(parameters, "binary_data", bool, where)
        outputs.append(RequestedOutput(name, _classification(where, parameters), region))
    return outputs, binary


def _classification(where: str, parameters: dict[str, Any]) -> int:
    if "classification" not in parameters:
        return 0
    wanted = member(parameters, "classification", int, where)
    if not 1 <= wanted < DIMENSION_LIMIT:
        raise InvalidTensorError(f"invalid value {wanted} for 'classification' {where}, expected >= 1")
    return wanted


def decode_raw(model: str, version: str, body: bytes, config: ModelConfig) -> RestRequest:
    """A raw request: the whole body is the one input of the model.

    Raises:
        InvalidTensorError: the model has more inputs, or its shape cannot be told from a number of bytes.
    """
    if len(config.inputs) != 1:
        raise InvalidTensorError(
            f"Raw request must only have 1 input to be deduced but got {len(config.inputs)} inputs in '{model}' model "
            "configuration"
        )
    spec = config.inputs[0]
    batch = (1,) if config.max_batch_size > 0 and not spec.is_shape_tensor else ()
    if spec.datatype == BYTES:
        if spec.dims != (1,):
            raise InvalidTensorError(
                f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1], it has "
                f"{list(spec.dims)}"
            )
        data = len(body).to_bytes(4, "little") + body
        tensor = Tensor(spec.name, BYTES, (*batch, 1), data)
    else:
        tensor = Tensor(spec.name, spec.datatype, (*batch, *_raw_dims(spec.name, spec.datatype, spec.dims, body)), body)
    return RestRequest(InferRequest(model, version, "", [tensor]), is_binary=True)


def _raw_dims(name: str, datatype: str, dims: Sequence[int], body: bytes) -> list[int]:
    if list(dims).count(-1) > 1:
        raise InvalidTensorError(
            f"The shape of the raw input '{name}' can not be deduced because there are more than one variable-sized "
            "dimension"
        )
    unit = DATATYPES[datatype].itemsize
    for size in dims:
        unit *= size if size != -1 else 1
    if -1 in dims and unit and len(body) % unit:
        raise InvalidTensorError(
            f"The shape of the raw input '{name}' can not be deduced: {len(body)} bytes are no multiple of {unit}"
        )
    return [len(body) // unit if size == -1 and unit else max(size, 0) for size in dims]


def encode_infer(wanted: RestRequest, response: InferResponse) -> Reply:
    """
    Raises:
        InvalidTensorError: an output that JSON cannot carry, and that was not asked for in binary form.
    """
    head: dict[str, Any] = {"id": response.id} if response.id else {}
    head["model_name"], head["model_version"] = response.model, response.version
    if response.parameters:
        head["parameters"] = response.parameters
    head["outputs"] = outputs = []
    binary: list[Part] = []
    is_binary = False
    for tensor in response.outputs:
        told: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        outputs.append(told)
        if tensor.name in response.regions:
            continue
        if wanted.binary.get(tensor.name, wanted.is_binary):
            is_binary = True
            told["parameters"] = {BINARY_SIZE: tensor.byte_size}
            if tensor.data:
                binary.append(tensor.data)
        else:
            told["data"] = encode_elements(tensor)
    document = orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY)
    if not is_binary:
        return Reply(200, (JSON,), (document,))
    return Reply(200, (BINARY, (HEADER_LENGTH, b"%d" % len(document))), (document, *binary))
