"""Restricted calls and forwarded headers: what the settings say, and what the gRPC server makes of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.forwarding import Forwarding
from gateway.grpc_v2 import KServeFrontEnd, make_grpc_server
from gateway.operations import Operations
from gateway.operations.metadata import Metadata
from gateway.restrictions import CATEGORIES, GRPC_PREFIX, RestrictedError, Restrictions, category_of
from tensorline.errors import ConfigError, InvalidTensorError
from tensorline.protocol.infer import InferRequest
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.protocol.stubs.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.gateway.house import House, add, open_house

pytestmark = pytest.mark.usefixtures("one_loop")

X = np.array([1, 2], np.float32)


def test_every_rpc_has_a_category() -> None:
    rpcs = [method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods]
    assert all(map(category_of, rpcs))
    assert {*rpcs, "Check", "Watch"} == {rpc for rpcs in CATEGORIES.values() for rpc in rpcs}
    assert category_of("ServerReflectionInfo") == ""


def test_entries() -> None:
    restrictions = Restrictions(["health, metadata:Key=a=b:c", "trace:other=x"], prefix=GRPC_PREFIX, what="protocol")
    assert restrictions.is_active
    given: dict[str, str] = {}
    restrictions.check("inference", given.get)
    for category in ("health", "metadata"):
        with pytest.raises(
            RestrictedError, match=r"^This protocol is restricted, expecting header 'triton-grpc-protocol-key'$"
        ):
            restrictions.check(category, given.get)
    given["triton-grpc-protocol-key"] = "a=b:c"
    restrictions.check("health", given.get)
    with pytest.raises(RestrictedError, match="triton-grpc-protocol-other"):
        restrictions.check("trace", given.get)
    restrictions.check("health", {"triton-grpc-protocol-key": b"a=b:c"}.get)
    assert not Restrictions().is_active


@pytest.mark.parametrize(
    "entry", ["health", "health:k", "health:k=", "health:=v", ":k=v", "healthy:k=v", "health,:k=v"]
)
def test_entries_that_are_none(entry: str) -> None:
    with pytest.raises(ConfigError):
        Restrictions([entry])


def test_a_category_has_one_secret_and_no_error_shows_one() -> None:
    for entries in (["health:k=hush", "trace,health:k=hush"], ["nothing:k=hush"], ["k=hush"], ["health,k=hush"]):
        with pytest.raises(ConfigError) as caught:
            Restrictions(entries)
        assert "hush" not in str(caught.value)


def test_headers_become_parameters() -> None:
    request = InferRequest("m", "", "", [], parameters={"x-a": 1, "b": 2})
    forwarding = Forwarding("x-.*|priority|.*-bin")
    headers: list[tuple[str, str | bytes]] = [
        ("x-a", "1"),
        ("X-B", "2"),
        ("ax-a", "3"),
        ("priority", "4"),
        ("x-bin", b"5"),
    ]
    assert forwarding.apply(request, headers).parameters == {"x-a": "1", "b": 2}
    assert forwarding.apply(request, [("other", "1")]) is request
    assert Forwarding("(?i)x-.*").apply(request, headers).parameters == {"x-a": "1", "X-B": "2", "b": 2}
    assert Forwarding().apply(request, headers) is request
    for name in ("triton_x", "Triton_x"):
        with pytest.raises(InvalidTensorError, match=f"header '{name}' cannot be forwarded"):
            Forwarding(".*").apply(request, [(name, "1")])
    with pytest.raises(ConfigError, match=r"header forward pattern '\(' is no regular expression"):
        Forwarding("(")


@asynccontextmanager
async def serving(house: House, restrictions: Restrictions, forwarding: Forwarding) -> AsyncIterator[aio.Channel]:
    operations = Operations(Metadata(house.models, house.readiness, "server 1"))
    server = make_grpc_server(
        KServeFrontEnd(house.service, operations, 1 << 20, forwarding),
        house.readiness,
        max_message_bytes=1 << 20,
        max_streams=10,
        reuse_port=False,
        restrictions=restrictions,
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            yield channel
    finally:
        await server.stop(0.1)


def wire() -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="one")
    message.inputs.add(name="x", datatype="FP32", shape=X.shape)
    message.raw_input_contents.append(X.tobytes())
    return message


async def test_restricted_rpcs() -> None:
    restrictions = Restrictions(["inference,health:key=secret"], prefix=GRPC_PREFIX, what="protocol")
    header = "triton-grpc-protocol-key"
    async with open_house({"one": add(1)}) as house, serving(house, restrictions, Forwarding()) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)

        async def streamed(metadata: Any) -> None:
            call = stub.ModelStreamInfer(iter([wire()]), metadata=metadata)
            assert [response async for response in call]

        async def watched(metadata: Any) -> None:
            call = health.Watch(health_pb2.HealthCheckRequest(), metadata=metadata)
            assert await call.read()
            call.cancel()

        for behave in (
            lambda metadata: stub.ModelInfer(wire(), metadata=metadata),
            lambda metadata: stub.ServerLive(pb.ServerLiveRequest(), metadata=metadata),
            lambda metadata: health.Check(health_pb2.HealthCheckRequest(), metadata=metadata),
            streamed,
            watched,
        ):
            for metadata in ((), ((header, "wrong"),), (("key", "secret"),)):
                with pytest.raises(aio.AioRpcError) as caught:
                    await behave(metadata)
                assert caught.value.code() is StatusCode.UNAVAILABLE
                assert caught.value.details() == f"This protocol is restricted, expecting header '{header}'"
            await behave(((header, "secret"),))
        await stub.ServerMetadata(pb.ServerMetadataRequest())
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.LogSettings(pb.LogSettingsRequest())
        assert caught.value.code() is StatusCode.UNIMPLEMENTED


async def test_forwarded_metadata() -> None:
    seen: list[dict[str, object]] = []
    async with (
        open_house({"one": add(1)}) as house,
        serving(house, Restrictions(), Forwarding("x-.*|triton_.*")) as channel,
    ):
        check = house.service._check

        async def noted(request: InferRequest, *more: Any) -> None:
            seen.append(dict(request.parameters))
            await check(request, *more)

        house.service._check = noted  # type: ignore[method-assign,assignment]
        stub: Any = GRPCInferenceServiceStub(channel)
        metadata = (("x-a", "1"), ("other", "2"), ("x-bin", b"3"))
        await stub.ModelInfer(wire(), metadata=metadata)
        async for response in stub.ModelStreamInfer(iter([wire()]), metadata=metadata):
            assert not response.error_message
        assert seen == [{"x-a": "1"}] * 2
        reserved = (("triton_a", "1"),)
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.ModelInfer(wire(), metadata=reserved)
        assert caught.value.code() is StatusCode.INVALID_ARGUMENT
        async for response in stub.ModelStreamInfer(iter([wire()]), metadata=reserved):
            assert "header 'triton_a' cannot be forwarded" in response.error_message
