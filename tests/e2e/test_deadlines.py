"""Time runs out, clients leave, queues are full, nobody is there: each request has one end, and in time."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.tensor import Array
from tests.e2e.client import Stub, failure, infer, outcome, request
from tests.e2e.mesh import Mesh, running_mesh, until
from tests.e2e.models import chain_repositories, chain_services, ensemble, model

QUEUE_OF_4 = "dynamic_batching { default_queue_policy { max_queue_size: 4 } }"
BIG = 1 << 20


def ms(value: int) -> Array:
    return np.array([[value]], np.int32)


def write_models(root: Path) -> None:
    pre, mid = root / "pre", root / "mid"
    for place, names in ((pre, ("slow", "coop", "narrow")), (mid, ("late",))):
        for name in names:
            backend = "coop" if name == "coop" else "slow"
            text = QUEUE_OF_4 if name == "narrow" else ""
            model(place, name, backend, datatype="INT32", dims="1", batch=1, text=text)
    model(pre, "ident", "identity")
    model(root / "post", "away", "identity")
    ensemble(
        root / "pipelines", "two_slow", [("slow", {"x": "x"}, {"y": "a"}), ("late", {"x": "a"}, {"y": "y"})],
        datatype="INT32", dims="1", batch=1,
    )  # fmt: skip
    ensemble(root / "pipelines", "partly_away", [("ident", {"x": "x"}, {"y": "a"}), ("away", {"x": "a"}, {"y": "y"})])
    ensemble(
        root / "pipelines", "to_narrow", [("coop", {"x": "x"}, {"y": "a"}), ("narrow", {"x": "a"}, {"y": "y"})],
        datatype="INT32", dims="1", batch=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    root = tmp_path_factory.mktemp("repository")
    write_models(root)
    services = chain_services(root)
    async with running_mesh(
        root,
        services=services,
        gateway_repositories=chain_repositories(root),
        gateway_env={"TENSORLINE_MAX_IN_FLIGHT": "64", "TENSORLINE_MAX_BYTES_IN_FLIGHT": str(8 * BIG)},
    ) as mesh:
        yield mesh


@pytest.fixture(scope="module")
async def stub(mesh: Mesh) -> AsyncIterator[Stub]:
    async with mesh.stub() as stub:
        await infer(stub, "slow", x=ms(1))
        yield stub


def ran(mesh: Mesh, id: str, name: str = "pre") -> bool:
    return f"ran {id}\n" in mesh.log(name)


async def test_the_deadline_has_passed_on_arrival(mesh: Mesh, stub: Stub) -> None:  # B10
    series = 'nv_inference_exec_count{model="slow",version="1"}'
    before = (await mesh.metrics())[series]
    for _ in range(200):
        assert (await failure(stub.ModelInfer(request("slow", x=ms(200)), timeout=1e-6))).code is (
            StatusCode.DEADLINE_EXCEEDED
        )
    began = time.monotonic()
    await infer(stub, "slow", x=ms(200))
    assert time.monotonic() - began < 0.5
    await mesh.wait_idle()
    assert (await mesh.metrics())[series] - before <= 3


async def test_the_deadline_passes_in_the_queue(mesh: Mesh, stub: Stub) -> None:
    running = asyncio.ensure_future(infer(stub, "slow", id="d1", x=ms(600)))
    await until(lambda: ran(mesh, "d1"))
    waiting = await failure(stub.ModelInfer(request("slow", id="d2", x=ms(1)), timeout=0.2))
    assert waiting.code is StatusCode.DEADLINE_EXCEEDED
    assert waiting.took_s < 0.45
    await running
    assert (await infer(stub, "slow", id="d3", x=ms(1)))["y"] == ms(1)
    assert not ran(mesh, "d2")
    await mesh.wait_idle()


async def test_the_deadline_passes_in_execution(mesh: Mesh, stub: Stub) -> None:
    running = await failure(stub.ModelInfer(request("coop", id="d4", x=ms(3000)), timeout=0.3))
    assert running.code is StatusCode.DEADLINE_EXCEEDED
    assert running.took_s < 0.55
    await until(lambda: "cancelled d4" in mesh.log("pre"), 0.5)
    assert (await infer(stub, "coop", id="d5", x=ms(1)))["y"] == ms(1)


async def test_later_steps_do_not_start_when_time_is_up(mesh: Mesh, stub: Stub) -> None:
    expired = await failure(stub.ModelInfer(request("two_slow", id="d6", x=ms(400)), timeout=0.2))
    assert expired.code is StatusCode.DEADLINE_EXCEEDED
    await until(lambda: ran(mesh, "d6"))
    await infer(stub, "slow", id="d7", x=ms(1))  # behind it in the queue
    await infer(stub, "late", id="d8", x=ms(1))
    assert not ran(mesh, "d6", "mid")
    await mesh.wait_idle()


async def test_the_server_says_deadline_exceeded_itself(mesh: Mesh) -> None:
    """A client whose clock runs late: it waits longer than it said."""
    async with mesh.stub() as stub:
        call = stub.ModelInfer(request("coop", id="d9", x=ms(2000)), metadata=(("grpc-timeout", "200m"),))
        found = await failure(call)
    assert found.code is StatusCode.DEADLINE_EXCEEDED


async def test_a_cancelled_call_reaches_the_model(mesh: Mesh, stub: Stub) -> None:  # C01
    call = stub.ModelInfer(request("coop", id="c1", x=ms(5000)))
    flying = asyncio.ensure_future(outcome(call))
    await until(lambda: "begun c1" in mesh.log("pre"))
    call.cancel()
    cancelled = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await flying
    quick = asyncio.ensure_future(infer(stub, "coop", id="c2", x=ms(10)))
    await until(lambda: "cancelled c1" in mesh.log("pre"), 0.3)
    await quick
    assert time.monotonic() - cancelled < 0.5
    await mesh.wait_idle()


async def test_a_client_that_vanishes_reaches_the_model(mesh: Mesh) -> None:
    async with mesh.stub() as stub:
        flying = asyncio.ensure_future(infer(stub, "coop", id="c3", x=ms(5000)))
        await until(lambda: "begun c3" in mesh.log("pre"))
    with pytest.raises((asyncio.CancelledError, AioRpcError)):
        await flying
    await until(lambda: "cancelled c3" in mesh.log("pre"), 0.5)
    await mesh.wait_idle()


async def test_cancelled_in_the_queue_never_runs(mesh: Mesh, stub: Stub) -> None:
    running = asyncio.ensure_future(infer(stub, "slow", id="c4", x=ms(300)))
    await until(lambda: ran(mesh, "c4"))
    calls = [stub.ModelInfer(request("slow", id=f"c5-{at}", x=ms(1))) for at in range(20)]
    await asyncio.sleep(0.05)
    for call in calls:
        call.cancel()
    await running
    await infer(stub, "slow", id="c6", x=ms(1))
    assert "ran c5-" not in mesh.log("pre")
    await mesh.wait_idle()


async def test_a_hundred_cancels_at_random_points(mesh: Mesh, stub: Stub) -> None:
    """PY03, in small: with 1 MiB inputs, so that each holds a block of the gateway's arena."""
    rng = np.random.default_rng(7)
    values = np.ones(BIG // 4, np.float32)
    for _ in range(100):
        call = stub.ModelInfer(request("ident", x=values))
        await asyncio.sleep(float(rng.random()) * 0.006)
        call.cancel()
    await mesh.wait_idle()
    assert np.array_equal((await infer(stub, "ident", x=values))["y"], values)


async def test_a_full_queue(mesh: Mesh, stub: Stub) -> None:  # B07
    series = 'tensorline_requests_refused_total{model="narrow",version="1"}'
    before = (await mesh.metrics())[series]
    answers = await asyncio.gather(*(outcome(stub.ModelInfer(request("narrow", x=ms(400)))) for _ in range(20)))
    refused = [answer for answer in answers if answer is not None]
    assert len(answers) - len(refused) == 5  # one runs, four wait
    for each in refused:
        assert each.code is StatusCode.UNAVAILABLE
        assert "Exceeds maximum queue size (4)" in each.text
        assert each.took_s < 0.2
        assert each.trailers["grpc-retry-pushback-ms"] == "100"
    assert (await mesh.metrics())[series] - before == 15
    await mesh.wait_idle()


async def test_a_full_queue_by_http(mesh: Mesh) -> None:  # B07
    body = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [400]}]}
    url = f"http://127.0.0.1:{mesh.http_port}/v2/models/narrow/infer"

    async def post(session: aiohttp.ClientSession) -> tuple[int, str]:
        async with session.post(url, json=body) as answer:
            return answer.status, answer.headers.get("Retry-After", "")

    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(post(session) for _ in range(20)))
    assert sorted(status for status, _ in answers) == [200] * 5 + [503] * 15
    assert all(bool(after) is (status == 503) for status, after in answers)
    await mesh.wait_idle()


async def test_a_full_queue_within_a_pipeline(mesh: Mesh, stub: Stub) -> None:
    flying = [asyncio.ensure_future(infer(stub, "narrow", x=ms(500))) for _ in range(5)]
    await asyncio.sleep(0.1)
    found = await failure(stub.ModelInfer(request("to_narrow", id="q99", x=ms(1))))
    assert found.code is StatusCode.UNAVAILABLE
    assert "in ensemble 'to_narrow', model 'narrow': " in found.text
    assert "Exceeds maximum queue size" in found.text
    assert "grpc-retry-pushback-ms" in found.trailers
    await asyncio.gather(*flying)
    await mesh.wait_idle()


async def test_the_gateway_takes_so_many_and_no_more(mesh: Mesh, stub: Stub) -> None:
    calls = [stub.ModelInfer(request("coop", x=ms(3000))) for _ in range(64)]
    await asyncio.sleep(0.3)
    found = await failure(stub.ModelInfer(request("ident", x=np.ones(1, np.float32))))
    assert (found.code, found.text) == (
        StatusCode.UNAVAILABLE,
        "64 requests are already in flight at this gateway",
    )
    assert found.took_s < 0.2
    assert "grpc-retry-pushback-ms" in found.trailers
    for call in calls:
        call.cancel()
    await mesh.wait_idle()
    assert await infer(stub, "ident", x=np.ones(1, np.float32))
    await mesh.wait_idle()


async def test_the_gateway_takes_so_many_bytes_and_no_more(mesh: Mesh, stub: Stub) -> None:
    """Four MiB are allowed when eight are the limit; the others are refused, or come when there is room again."""
    values = np.ones(4 * BIG // 4, np.float32)
    answers = await asyncio.gather(*(outcome(stub.ModelInfer(request("ident", x=values))) for _ in range(30)))
    assert answers.count(None) >= 2
    for each in answers:
        if each is not None:
            assert each.code is StatusCode.UNAVAILABLE
            assert "bytes of input are already in flight" in each.text
    await mesh.wait_idle()
    assert await infer(stub, "ident", x=np.ones(20 * BIG // 4, np.float32))  # alone, even what is over the limit
    await mesh.wait_idle()


async def test_a_service_that_is_absent(mesh: Mesh, stub: Stub) -> None:  # F09 c; last: it takes `post` away
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert await mesh.stop("post") == 0
    for name in ("away", "partly_away"):
        found = await failure(stub.ModelInfer(request(name, x=np.ones(1, np.float32))))
        assert found.code is StatusCode.UNAVAILABLE
        assert "'away'" in found.text
        assert found.took_s < 1.0
        assert not (await stub.ModelReady(pb.ModelReadyRequest(name=name))).ready
    assert (await stub.ModelReady(pb.ModelReadyRequest(name="ident"))).ready
    assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await mesh.get("/v2/health/ready"))[0] == 400
    assert (await mesh.get("/v2/health/live"))[0] == 200
    assert await infer(stub, "ident", x=np.ones(1, np.float32))
    rows = {row["name"]: row for row in (await mesh.get("/api/models"))[1]}
    assert rows["partly_away"]["state"] == "UNAVAILABLE"
    assert "'away'" in rows["partly_away"]["reason"]
    mesh.start("post")
    await mesh.wait_ready()
    assert await infer(stub, "partly_away", x=np.ones(1, np.float32))


# ---- With limits of their own.


async def test_messages_over_the_limit(tmp_path: Path) -> None:
    for place in ("pre", "mid", "post"):
        (tmp_path / place).mkdir()
    model(tmp_path / "pre", "ident", "identity")
    model(tmp_path / "pre", "make", "generate", parameters={"byte_size": str(2 * BIG)}, inputs=())
    services = {"pre": chain_services(tmp_path)["pre"]}
    limit = {"TENSORLINE_MAX_MESSAGE_BYTES": str(BIG)}
    async with (
        running_mesh(tmp_path / "pre", services=services, gateway_env=limit) as mesh,
        mesh.stub() as stub,
    ):
        fits = np.ones((BIG - 200) // 4, np.float32)
        assert np.array_equal((await infer(stub, "ident", x=fits))["y"], fits)
        sent = await failure(stub.ModelInfer(request("ident", x=np.ones(BIG // 4 + 1, np.float32))))
        assert sent.code is StatusCode.RESOURCE_EXHAUSTED
        assert str(BIG) in sent.text
        made = await failure(stub.ModelInfer(request("make")))
        assert made.code is StatusCode.RESOURCE_EXHAUSTED
        assert str(BIG) in made.text
        assert await infer(stub, "ident", x=fits)
        await mesh.wait_idle()
