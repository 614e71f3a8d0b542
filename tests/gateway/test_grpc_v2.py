"""The gRPC front end over a real server on a free port: statuses, trailers, limits."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from grpc import StatusCode, aio
from grpc.aio import AioRpcError

from gateway.grpc_v2 import KServeFrontEnd, make_grpc_server
from gateway.operations import Operations
from gateway.operations.metadata import Metadata
from tensorline.errors import BackendError
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.protocol.stubs.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.gateway.house import FP32, House, add, ensemble, open_house
from tests.gateway.test_runner import fail
from tests.tensorline.stage.pair import Model, config

if TYPE_CHECKING:
    from tensorline.protocol.stubs.inference.grpc_service_pb2_grpc import GRPCInferenceServiceAsyncStub

LIMIT = 1 << 16
X = np.array([1, 2], np.float32)


def operations(house: House, server_id: str) -> Operations:
    return Operations(Metadata(house.models, house.readiness, server_id))


@asynccontextmanager
async def serving(house: House) -> "AsyncIterator[GRPCInferenceServiceAsyncStub]":
    front_end = KServeFrontEnd(house.service, operations(house, "server 1"), LIMIT)
    server = make_grpc_server(front_end, house.readiness, max_message_bytes=LIMIT, max_streams=10, reuse_port=False)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield GRPCInferenceServiceStub(channel)
    finally:
        await server.stop(0.1)


def request(model: str, id: str = "") -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, id=id)
    message.inputs.add(name="x", datatype="FP32", shape=X.shape)
    message.raw_input_contents.append(X.tobytes())
    return message


async def refusal(call: object) -> AioRpcError:
    with pytest.raises(AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value


async def test_answers() -> None:
    async with open_house({"one": add(1)}) as house, serving(house) as stub:
        answer = await stub.ModelInfer(request("one", id="7"))
        assert (answer.model_name, answer.model_version, answer.id) == ("one", "1", "7")
        assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [2, 3]
        about = await stub.ServerMetadata(pb.ServerMetadataRequest())
        assert about.name == "server 1"
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live
        house.readiness.accepts = False
        assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name="one"))).ready


@pytest.mark.parametrize(
    ("model", "code", "has_pushback"),
    [
        ("nobody", StatusCode.NOT_FOUND, False),
        ("failing", StatusCode.INTERNAL, False),
        ("half", StatusCode.UNAVAILABLE, True),
    ],
)
async def test_only_what_may_work_later_says_when(model: str, code: StatusCode, has_pushback: bool) -> None:
    half = ensemble("half", ("gone", {"x": "x"}, {"y": "y"}))
    async with open_house({"failing": fail(BackendError("no luck"))}, entries=[half]) as house, serving(house) as stub:
        error = await refusal(stub.ModelInfer(request(model)))
        assert error.code() is code
        keys = [key for key, _ in error.trailing_metadata() or ()]
        assert ("grpc-retry-pushback-ms" in keys) is has_pushback


async def test_a_stopping_gateway_says_so() -> None:
    async with open_house({"one": add(1)}) as house, serving(house) as stub:
        house.service.is_stopping = True
        error = await refusal(stub.ModelInfer(request("one")))
        assert (error.code(), error.details()) == (StatusCode.UNAVAILABLE, "the gateway is shutting down")
        assert dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "100"


async def test_a_response_over_the_limit() -> None:
    """Its request fits; gRPC itself would refuse to send it, with a traceback in the log."""

    made = Model(config(FP32, {"y": "FP32"}), lambda batch: {"y": np.zeros(LIMIT, np.float32)})
    async with open_house({"made": made}) as house, serving(house) as stub:
        error = await refusal(stub.ModelInfer(request("made")))
        assert error.code() is StatusCode.RESOURCE_EXHAUSTED
        assert f"at most {LIMIT} can be sent" in (error.details() or "")
        await house.wait_nothing_held()


async def test_a_bug_is_told_as_internal_and_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    async with open_house({"one": add(1)}) as house, serving(house) as stub:

        def broken(*_: object) -> None:
            raise ZeroDivisionError("row 7 of customers")

        house.models.config = broken  # type: ignore[method-assign, assignment]
        house.models.find = broken  # type: ignore[method-assign, assignment]
        for call in (
            stub.ModelInfer(request("one")),
            stub.ModelMetadata(pb.ModelMetadataRequest(name="one")),
            stub.ModelConfig(pb.ModelConfigRequest(name="one")),
        ):
            error = await refusal(call)
            assert (error.code(), error.details()) == (StatusCode.INTERNAL, "internal error")
        assert caplog.text.count("row 7 of customers") >= 3


async def test_metadata_of_batched_models() -> None:
    batched = Model(config(FP32, {"y": "FP32"}, rows=4), add(1).run)
    async with open_house({"batched": batched, "one": add(1)}) as house, serving(house) as stub:
        found = await stub.ModelMetadata(pb.ModelMetadataRequest(name="batched"))
        assert [list(spec.shape) for spec in (*found.inputs, *found.outputs)] == [[-1, -1], [-1, -1]]
        assert [spec.datatype for spec in found.inputs] == ["FP32"]
        single = await stub.ModelMetadata(pb.ModelMetadataRequest(name="one"))
        assert [list(spec.shape) for spec in single.inputs] == [[-1]]
        whole = (await stub.ModelConfig(pb.ModelConfigRequest(name="batched"))).config
        assert (whole.name, whole.max_batch_size) == ("batched", 4)


async def test_what_is_no_request() -> None:
    async with open_house({"one": add(1)}) as house:
        front_end = KServeFrontEnd(house.service, operations(house, "s"), LIMIT)
        server = make_grpc_server(front_end, house.readiness, max_message_bytes=LIMIT, max_streams=10, reuse_port=False)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method, data, code in (
                ("ModelInfer", b"\xff\xff", StatusCode.INTERNAL),
                ("ModelInfer", b"", StatusCode.NOT_FOUND),
                ("ModelReady", b"", StatusCode.OK),
                ("ModelStatistics", b"", StatusCode.UNIMPLEMENTED),
                ("Nothing", b"", StatusCode.UNIMPLEMENTED),
            ):
                send: Any = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
                assert await send(data).code() is code, method
        await server.stop(0.1)
