"""ModelInferRequest to our values, and our values to ModelInferResponse."""

from collections.abc import Mapping, Sequence
from typing import Final

from tensorline.errors import InvalidTensorError, UnsupportedError
from tensorline.protocol.contents import can_be_typed, decode_contents, encode_contents
from tensorline.protocol.infer import (
    LIMITS,
    NO_OPTIONS,
    InferRequest,
    InferResponse,
    Limits,
    ParameterValue,
    RequestedOutput,
    shown,
)
from tensorline.protocol.parameters import decode_parameters, encode_parameters
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.tensor import Tensor

__all__ = ["decode_request", "encode_head", "encode_response", "raw_of"]

_NO_PARAMETERS: Final[Mapping[str, ParameterValue]] = {}
_REGION_KEYS: Final = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")


def decode_request(
    message: pb.ModelInferRequest, limits: Limits = LIMITS, raws: Sequence[bytes | memoryview] = ()
) -> InferRequest:
    """Decode what can be decoded without knowing the model; shapes, sizes and names are `gateway.validation`'s.

    Raw tensor data stays the `bytes` that protobuf hands out.

    Args:
        raws: In place of the message's raw_input_contents, where `tensorline.protocol.wire` took them out.
    Raises:
        InvalidTensorError: a parameter, an input without data or with data twice, typed data of another type, a limit.
        UnsupportedError: a string sequence id over 128 bytes, or a shared-memory region.
    Source: protocol.md §5; errors.md §4, §5.
    """
    model, request_id = message.model_name, message.id
    if len(request_id) * 4 > limits.request_id:
        _check_length("request id", request_id, limits.request_id)
    custom, options = _NO_PARAMETERS, NO_OPTIONS
    if message.parameters:
        custom, options = decode_parameters(message.parameters, limits)
    raws = raws or message.raw_input_contents
    inputs = _raw_inputs(message, raws, limits) if raws else _typed_inputs(message, limits)
    outputs = _requested(message, limits) if message.outputs else ()
    return InferRequest(
        model, message.model_version, request_id, inputs, outputs, custom, options, not raws and bool(inputs)
    )


def _raw_inputs(message: pb.ModelInferRequest, raws: Sequence[bytes | memoryview], limits: Limits) -> list[Tensor]:
    wires = message.inputs
    _check_count("inputs", len(wires), limits.inputs)
    inputs, have = [], len(raws)
    for index, wire in enumerate(wires[:]):  # a list: three times as fast as iterating over protobuf's container
        name = wire.name
        if wire.parameters:
            _refuse_regions(wire.parameters)
        if wire.HasField("contents"):
            raise InvalidTensorError(
                f"contents field must not be specified when using raw_input_contents for input tensor '{shown(name)}' "
                f"for model '{shown(message.model_name)}'"
            )
        if index >= have:
            raise _no_data(message, name, have)
        inputs.append(Tensor(name, wire.datatype, _shape(wire, limits), raws[index]))
    return inputs


def _typed_inputs(message: pb.ModelInferRequest, limits: Limits) -> list[Tensor]:
    _check_count("inputs", len(message.inputs), limits.inputs)
    model, inputs = message.model_name, []
    for wire in message.inputs:
        if wire.parameters:
            _refuse_regions(wire.parameters)
        if not wire.HasField("contents"):
            raise _no_data(message, wire.name)
        data = decode_contents(wire.name, model, wire.datatype, wire.contents)
        inputs.append(Tensor(wire.name, wire.datatype, _shape(wire, limits), data))
    return inputs


def _shape(wire: pb.ModelInferRequest.InferInputTensor, limits: Limits) -> tuple[int, ...]:
    shape = wire.shape
    if len(shape) > limits.rank:  # its product alone would keep us busy
        raise InvalidTensorError(
            f"input '{shown(wire.name)}' has a shape of {len(shape)} dimensions, at most {limits.rank} are allowed"
        )
    return tuple(shape[:])


def _no_data(message: pb.ModelInferRequest, name: str, raws: int = 0) -> InvalidTensorError:
    return InvalidTensorError(
        f"unable to find data for input tensor '{shown(name)}' for model '{shown(message.model_name)}' in request: it "
        f"has no contents, and raw_input_contents has {raws} entries"
    )


def _requested(message: pb.ModelInferRequest, limits: Limits) -> list[RequestedOutput]:
    _check_count("requested outputs", len(message.outputs), limits.outputs)
    return [
        RequestedOutput(wire.name, _classification(wire.name, wire.parameters) if wire.parameters else 0)
        for wire in message.outputs
    ]


def _classification(output: str, parameters: Mapping[str, pb.InferParameter]) -> int:
    _refuse_regions(parameters)
    if "classification" not in parameters:
        return 0
    wanted = parameters["classification"]
    kind = wanted.WhichOneof("parameter_choice")
    if kind != "int64_param":
        raise InvalidTensorError(
            f"invalid value type for 'classification' parameter of output '{shown(output)}': got {kind or 'none'}, "
            "expected int64_param"
        )
    if wanted.int64_param < 1:
        raise InvalidTensorError(
            f"invalid value {wanted.int64_param} for 'classification' parameter of output '{shown(output)}', "
            "expected >= 1"
        )
    return wanted.int64_param


def _refuse_regions(parameters: Mapping[str, pb.InferParameter]) -> None:
    if any(key in parameters for key in _REGION_KEYS):
        raise UnsupportedError("Client shared memory is disabled")


def _check_count(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidTensorError(f"request has {count} {what}, at most {limit} are allowed")


def _check_length(what: str, text: str, limit: int) -> None:
    size = len(text.encode())
    if size > limit:
        raise InvalidTensorError(f"{what} has {size} bytes, at most {limit} are allowed")


def encode_response(response: InferResponse, *, is_typed: bool = False) -> pb.ModelInferResponse:
    """Encode a response whose tensors have their bytes at hand (`data`, no handles).

    Args:
        is_typed: The request's form. One FP16 or BF16 output makes the whole response raw, which every client reads.
    """
    message = encode_head(response)
    if is_typed and all(can_be_typed(tensor.datatype) for tensor in response.outputs):
        for wire, tensor in zip(message.outputs, response.outputs, strict=True):
            wire.contents.CopyFrom(encode_contents(tensor.datatype, raw_of(tensor)))
        return message
    raws = message.raw_output_contents
    for tensor in response.outputs:
        data = raw_of(tensor)
        raws.append(data if isinstance(data, bytes) else bytes(data))
    return message


def encode_head(response: InferResponse) -> pb.ModelInferResponse:
    """A response without the bytes of its tensors."""
    message = pb.ModelInferResponse(model_name=response.model, model_version=response.version, id=response.id)
    if response.parameters:
        encode_parameters(response.parameters, message.parameters)
    outputs = message.outputs
    for tensor in response.outputs:
        outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return message


def raw_of(tensor: Tensor) -> bytes | memoryview:
    if tensor.data is None:
        raise ValueError(f"tensor '{tensor.name}' has no bytes to encode")
    return tensor.data
