"""ModelInferRequest to our values, and our values to ModelInferResponse."""

from collections.abc import Mapping, Sequence
from typing import Final

from tensorline.errors import InvalidTensorError
from tensorline.protocol.contents import can_be_typed, decode_contents, encode_contents
from tensorline.protocol.infer import (
    LIMITS,
    NO_OPTIONS,
    InferRequest,
    InferResponse,
    Limits,
    ParameterValue,
    RegionUse,
    RequestedOutput,
    shown,
)
from tensorline.protocol.parameters import decode_parameters, encode_parameters
from tensorline.protocol.regions import REGION_KEYS, refuse_region_and_classification, region_use
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.tensor import Tensor

__all__ = ["decode_request", "encode_head", "encode_response", "raw_of"]

_NO_PARAMETERS: Final[Mapping[str, ParameterValue]] = {}

_Inputs = tuple[list[Tensor], dict[str, RegionUse]]


def decode_request(
    message: pb.ModelInferRequest, limits: Limits = LIMITS, raws: Sequence[bytes | memoryview] = ()
) -> InferRequest:
    """Decode what can be decoded without knowing the model; shapes, sizes and names are `gateway.validation`'s.

    Raw tensor data stays the `bytes` that protobuf hands out.

    Args:
        raws: In place of the message's raw_input_contents, where `tensorline.protocol.wire` took them out.
    Raises:
        InvalidTensorError: a parameter, an input without data or with data twice, typed data of another type, a limit.
        UnsupportedError: a string sequence id over 128 bytes.
    Source: protocol.md §5, §7.2; errors.md §4, §5, §6.
    """
    model, request_id = message.model_name, message.id
    if len(request_id) * 4 > limits.request_id:
        _check_length("request id", request_id, limits.request_id)
    custom, options = _NO_PARAMETERS, NO_OPTIONS
    if message.parameters:
        custom, options = decode_parameters(message.parameters, limits)
    raws = raws or message.raw_input_contents
    inputs, regions = _raw_inputs(message, raws, limits) if raws else _typed_inputs(message, limits)
    outputs = _requested(message, limits) if message.outputs else ()
    is_typed = not raws and len(inputs) > len(regions)
    return InferRequest(model, message.model_version, request_id, inputs, outputs, custom, options, is_typed, regions)


def _raw_inputs(message: pb.ModelInferRequest, raws: Sequence[bytes | memoryview], limits: Limits) -> _Inputs:
    """The k-th raw entry is the k-th input's that is in no region.

    Source: protocol.md §5.1.
    """
    wires = message.inputs
    _check_count("inputs", len(wires), limits.inputs)
    inputs, regions, taken, have = [], {}, 0, len(raws)
    for wire in wires[:]:  # a list: three times as fast as iterating over protobuf's container
        name = wire.name
        if wire.parameters and (use := _input_region(message, wire)) is not None:
            regions[name] = use
            inputs.append(Tensor(name, wire.datatype, _shape(wire, limits)))
            continue
        if wire.HasField("contents"):
            raise InvalidTensorError(
                f"contents field must not be specified when using raw_input_contents for input tensor '{shown(name)}' "
                f"for model '{shown(message.model_name)}'"
            )
        if taken >= have:
            raise _no_data(message, name, have)
        inputs.append(Tensor(name, wire.datatype, _shape(wire, limits), raws[taken]))
        taken += 1
    return inputs, regions


def _typed_inputs(message: pb.ModelInferRequest, limits: Limits) -> _Inputs:
    _check_count("inputs", len(message.inputs), limits.inputs)
    model, inputs, regions = message.model_name, [], {}
    for wire in message.inputs:
        if wire.parameters and (use := _input_region(message, wire)) is not None:
            regions[wire.name] = use
            inputs.append(Tensor(wire.name, wire.datatype, _shape(wire, limits)))
            continue
        if not wire.HasField("contents"):
            raise _no_data(message, wire.name)
        data = decode_contents(wire.name, model, wire.datatype, wire.contents)
        inputs.append(Tensor(wire.name, wire.datatype, _shape(wire, limits), data))
    return inputs, regions


def _input_region(message: pb.ModelInferRequest, wire: pb.ModelInferRequest.InferInputTensor) -> RegionUse | None:
    what = f"input tensor '{shown(wire.name)}' for model '{shown(message.model_name)}'"
    use = _region(what, wire.parameters)
    if use is not None and wire.HasField("contents"):
        raise InvalidTensorError(f"unexpected 'content' provided when using shared memory for {what}")
    return use


def _region(what: str, parameters: Mapping[str, pb.InferParameter]) -> RegionUse | None:
    kinds: dict[str, tuple[str, ParameterValue]] = {}
    for key in REGION_KEYS:
        if key in parameters:
            kind = parameters[key].WhichOneof("parameter_choice")
            kinds[key] = ("none", "") if kind is None else (kind, getattr(parameters[key], kind))
    return region_use(what, kinds) if kinds else None


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
        _requested_with(wire.name, wire.parameters) if wire.parameters else RequestedOutput(wire.name)
        for wire in message.outputs
    ]


def _requested_with(output: str, parameters: Mapping[str, pb.InferParameter]) -> RequestedOutput:
    region = _region(f"output '{shown(output)}'", parameters)
    if region is not None and "classification" in parameters:
        refuse_region_and_classification(output)
    return RequestedOutput(output, _classification(output, parameters), region)


def _classification(output: str, parameters: Mapping[str, pb.InferParameter]) -> int:
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


def _check_count(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidTensorError(f"request has {count} {what}, at most {limit} are allowed")


def _check_length(what: str, text: str, limit: int) -> None:
    size = len(text.encode())
    if size > limit:
        raise InvalidTensorError(f"{what} has {size} bytes, at most {limit} are allowed")


def encode_response(response: InferResponse, *, is_typed: bool = False) -> pb.ModelInferResponse:
    """Encode a response whose tensors have their bytes at hand (`data`, no handles).

    Of an output in a region there are none: an empty raw entry, or no contents, as Triton answers.

    Args:
        is_typed: The request's form. One FP16 or BF16 output makes the whole response raw, which every client reads.
    """
    message = encode_head(response)
    if is_typed and all(can_be_typed(tensor.datatype) for tensor in response.outputs):
        for wire, tensor in zip(message.outputs, response.outputs, strict=True):
            if tensor.name not in response.regions:
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
