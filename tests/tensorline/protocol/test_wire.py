"""Requests and responses as bytes: the same values as through protobuf's messages, without its copies."""

from collections.abc import AsyncIterator, Callable

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tensorline.errors import InternalError, TensorlineError
from tensorline.protocol import wire
from tensorline.protocol.codec import decode_request, encode_response
from tensorline.protocol.infer import InferRequest, InferResponse
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.protocol.stubs.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tensorline.tensor import Tensor, encode_array


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LARGE", 0)


def request(size: int, count: int = 1) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m", id="é", model_version="2")
    for index in range(count):
        message.inputs.add(name=f"x{index}", datatype="UINT8", shape=[size])
        message.raw_input_contents.append(bytes([index]) * size)
    message.parameters["ratio"].double_param = 0.5
    message.outputs.add(name="y")
    return message


def values(decoded: InferRequest) -> tuple[object, ...]:
    """Views compare equal to the bytes that they show."""
    named = (decoded.model, decoded.version, decoded.id)
    return (*named, decoded.inputs, decoded.outputs, decoded.parameters, decoded.regions, decoded.is_typed)


def by_protobuf(data: bytes) -> InferRequest:
    try:
        return decode_request(pb.ModelInferRequest.FromString(data))
    except DecodeError:
        raise InternalError("Unable to parse request") from None


def outcome(decode: Callable[[bytes], InferRequest], data: bytes) -> object:
    """What came out, or the error."""
    try:
        return values(decode(data))
    except TensorlineError as err:
        return type(err), str(err)


@pytest.mark.parametrize("size", [0, 1, 127, 128, wire.LARGE - 200, wire.LARGE, 3 * wire.LARGE])
@pytest.mark.parametrize("count", [1, 3])
def test_a_request_decodes_to_the_same_values(size: int, count: int) -> None:
    message = request(size, count)
    decoded = wire.decode_request_wire(message.SerializeToString())
    assert values(decoded) == values(decode_request(message))
    assert not decoded.is_typed


def test_a_large_tensor_is_not_copied() -> None:
    data = request(1 << 20).SerializeToString()
    found = wire.decode_request_wire(data).inputs[0].data
    assert isinstance(found, memoryview)
    assert found.obj is data
    assert found.readonly


@pytest.mark.usefixtures("all_are_large")
@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda more: request(3, 2).SerializeToString() + more))
def test_it_accepts_and_refuses_what_protobuf_does(data: bytes) -> None:
    assert outcome(wire.decode_request_wire, data) == outcome(by_protobuf, data)


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("cut", range(0, 60, 3))
def test_a_request_that_is_cut_short(cut: int) -> None:
    data = request(40).SerializeToString()[: -cut - 1]
    assert outcome(wire.decode_request_wire, data) == outcome(by_protobuf, data)


@pytest.mark.usefixtures("all_are_large")
def test_a_message_of_very_many_fields_is_left_to_protobuf() -> None:
    data = b"\xa0\x1f\x01" * (wire.FIELDS_TAKEN + 1) + request(5).SerializeToString()
    decoded = wire.decode_request_wire(data)
    assert type(decoded.inputs[0].data) is bytes
    assert values(decoded) == values(decode_request(request(5)))


@pytest.mark.parametrize("is_typed", [False, True])
@pytest.mark.parametrize("datatype", ["FP32", "FP16"])
def test_a_response_is_the_same_message(is_typed: bool, datatype: str) -> None:
    array = np.arange(6, dtype=np.float32 if datatype == "FP32" else np.float16)
    outputs = [Tensor("y", datatype, (2, 3), encode_array(array)), Tensor("e", "INT8", (0,), b"")]
    response = InferResponse("m", "1", "é", outputs, {"sequence_id": 0, "sequence_end": False})
    encoded = wire.encode_response_wire(response, is_typed=is_typed)
    assert pb.ModelInferResponse.FromString(encoded) == encode_response(response, is_typed=is_typed)


async def echo(data: bytes, context: object) -> bytes:
    decoded = wire.decode_request_wire(data)
    return wire.encode_response_wire(InferResponse(decoded.model, "1", decoded.id, decoded.inputs))


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_client_sees_no_difference(address: str) -> None:
    message = request(5 << 20)
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        answer = await GRPCInferenceServiceStub(channel).ModelInfer(message)
    assert answer.raw_output_contents[0] == message.raw_input_contents[0]
    assert (answer.outputs[0].name, list(answer.outputs[0].shape), answer.id) == ("x0", [5 << 20], "é")
