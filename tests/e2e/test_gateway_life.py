"""A gateway starts, drains, refuses to share its ports, and runs as several workers."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tests.e2e.client import Stub, infer, outcome, request
from tests.e2e.load import running_load
from tests.e2e.mesh import STAGES, Mesh, Service, running_mesh, until
from tests.e2e.models import chain_services, model

pytestmark = pytest.mark.slow

ONE = np.ones(1, np.float32)
MS = np.array([400], np.int32)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    model(root / "pre", "ident", "identity")
    model(root / "pre", "slow", "slow", datatype="INT32", dims="1", text="instance_group [ { count: 4 } ]")
    return root


def services(repository: Path) -> dict[str, Service]:
    return {"pre": chain_services(repository)["pre"]}


@pytest.fixture(scope="module")
async def mesh(repository: Path) -> AsyncIterator[Mesh]:
    async with running_mesh(repository / "pre", services=services(repository)) as mesh:
        yield mesh


async def test_sigterm_lets_work_in_flight_finish(mesh: Mesh) -> None:
    async with mesh.stub() as stub, mesh.stub() as other:
        await infer(other, "ident", x=ONE)
        flying = [asyncio.ensure_future(infer(stub, "slow", x=MS)) for _ in range(4)]
        await asyncio.sleep(0.15)
        mesh.signal("gateway", signal.SIGTERM)
        await asyncio.sleep(0.1)
        late = await outcome(other.ModelInfer(request("ident", x=ONE)))
        assert late is not None
        assert late.code is StatusCode.UNAVAILABLE
        assert [answer["y"].tolist() for answer in await asyncio.gather(*flying)] == [[400]] * 4
        assert await mesh.wait_exit("gateway") == 0
    mesh.start("gateway")
    await mesh.wait_ready()


async def test_sigterm_under_load(mesh: Mesh) -> None:
    """What was accepted is answered; what comes later is told UNAVAILABLE."""
    async with mesh.stub() as stub:

        async def ask(number: int) -> bool:
            return bool((await infer(stub, "ident", x=ONE * number))["y"][0] == number)

        async with running_load(ask, 200.0) as load:
            await asyncio.sleep(0.5)
            stopped = time.monotonic()
            assert await mesh.stop("gateway") == 0
        assert time.monotonic() - stopped < 3.0
        assert load.wrong == 0
        assert [sample for sample in load.failures if sample.began < stopped] == []
        # grpc.aio throws away what has arrived and no handler has seen when a server stops; the client reads CANCELLED.
        dropped = [sample for sample in load.failures if sample.code is StatusCode.CANCELLED]
        assert all(sample.began < stopped + 0.2 for sample in dropped)
        assert {sample.code for sample in load.failures} <= {StatusCode.UNAVAILABLE, StatusCode.CANCELLED}
    mesh.start("gateway")
    await mesh.wait_ready()


async def test_sigterm_when_idle_with_open_streams(mesh: Mesh) -> None:  # LC02
    with socket.create_connection(("127.0.0.1", mesh.http_port)) as open_connection:
        open_connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with mesh.channel() as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass  # it follows the other three within a tenth of a second
            asked = time.monotonic()
            mesh.signal("gateway", signal.SIGTERM)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert time.monotonic() - asked < 1.0
            assert await mesh.wait_exit("gateway") == 0
            assert time.monotonic() - asked < 3.0
    mesh.start("gateway")
    await mesh.wait_ready()


async def test_a_drain_has_an_end(mesh: Mesh) -> None:
    assert await mesh.stop("gateway") == 0
    mesh.start("gateway", TENSORLINE_DRAIN_S="0.5")
    await mesh.wait_ready()
    async with mesh.stub() as stub:
        flying = asyncio.ensure_future(outcome(stub.ModelInfer(request("slow", x=np.array([4000], np.int32)))))
        await asyncio.sleep(0.2)
        asked = time.monotonic()
        assert await mesh.stop("gateway") == 0
        assert time.monotonic() - asked < 3.5
        cut = await flying
        assert cut is not None
        assert cut.code is StatusCode.UNAVAILABLE
    mesh.start("gateway")
    await mesh.wait_ready()


@pytest.mark.parametrize("taken", ["GRPC", "HTTP", "METRICS"])
async def test_a_second_gateway_on_the_same_port(mesh: Mesh, tmp_path: Path, taken: str) -> None:  # LC05
    ports = {"GRPC": mesh.grpc_port, "HTTP": mesh.http_port, "METRICS": mesh.metrics_port}
    async with mesh.stub() as stub:

        async def ask(number: int) -> bool:
            return bool((await infer(stub, "ident", x=ONE * number))["y"][0] == number)

        async with running_load(ask, 50.0) as load:
            own = {f"TENSORLINE_{name}_PORT": "0" for name in ports}
            mesh.start_another("gateway", "second", **{**own, f"TENSORLINE_{taken}_PORT": str(ports[taken])})
            code = await mesh.wait_exit("second", 6.0)
        assert code == 2
        assert f"{ports[taken]}" in mesh.log("second")
        assert "cannot be used" in mesh.log("second").splitlines()[-1]
        assert (load.failures, load.wrong) == ([], 0)
    assert len(list(mesh.path.glob("*.arena"))) == 2
    (mesh.directory / "second.log").unlink()


async def test_ready_without_models_and_with_one_that_fails(tmp_path: Path) -> None:  # F09 a, b
    empty, failing = tmp_path / "empty", tmp_path / "failing"
    empty.mkdir()
    model(failing, "refused", "refusing")
    model(failing, "ident", "identity")
    for repository, is_ready in ((empty, True), (failing, False)):
        stage = Service(STAGES, ("pre",), [repository])
        async with (
            running_mesh(repository, services={"pre": stage}, is_awaited=False) as mesh,
            mesh.channel() as channel,
        ):
            mesh.expected.append('"failed to load model"')
            await until(lambda: is_live(mesh), 15.0)
            await mesh.wait_instances(1)
            stub, health = Stub(channel), health_pb2_grpc.HealthStub(channel)
            answers = {
                "ServerReady": (await stub.ServerReady(pb.ServerReadyRequest())).ready,
                "HTTP": (await mesh.get("/v2/health/ready"))[0] == 200,
                "health": (await checked(health)) == health_pb2.HealthCheckResponse.SERVING,
            }
            assert set(answers.values()) == {is_ready}, answers
            assert (await stub.ServerLive(pb.ServerLiveRequest())).live
            if repository is failing:
                rows = {row["name"]: row for row in (await mesh.get("/api/models"))[1]}
                assert "weights.bin" in rows["refused"]["reason"]
                assert "/" not in rows["refused"]["reason"]
                assert (await stub.ModelReady(pb.ModelReadyRequest(name="ident"))).ready


async def is_live(mesh: Mesh) -> bool:
    return (await mesh.get("/v2/health/live"))[0] == 200


async def checked(health: Any) -> int:
    return int((await health.Check(health_pb2.HealthCheckRequest())).status)


async def test_files_of_the_mesh_are_private(mesh: Mesh) -> None:  # I03, SH03
    """To this user; and to the gateway's clients there are no names of any of it."""
    for path in (mesh.path, *mesh.path.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))
    if os.geteuid() == 0:
        (arena, *_) = mesh.path.glob("*.arena")
        assert "Permission denied" in await asyncio.to_thread(read_as_nobody, arena)


def read_as_nobody(path: Path) -> str:
    return subprocess.run(["cat", path], user=65534, stderr=subprocess.PIPE, text=True, check=False).stderr


# ---- Several workers.


@pytest.fixture(scope="module")
async def workers(repository: Path) -> AsyncIterator[Mesh]:
    async with running_mesh(repository / "pre", services=services(repository), workers=2) as mesh:
        await until(lambda: len(worker_pids(mesh)) == 2)
        # Of the second one there is no readiness: it answers on its own socket.
        await until(lambda: len(list((mesh.path / "sockets").glob("gateway-*-worker-2.sock"))) == 1)
        yield mesh


def worker_pids(mesh: Mesh) -> list[int]:
    return [child.pid for child in psutil.Process(mesh.pid("gateway")).children()]


async def ask_each_worker(mesh: Mesh, count: int) -> list[str]:
    """Trace ids of `count` requests, each on a connection of its own: the kernel spreads connections."""
    ids = []
    for number in range(count):
        trace = f"{number + 1:08x}{'ab' * 12}"
        async with mesh.channel() as channel:
            stub = Stub(channel)
            metadata = (("traceparent", f"00-{trace}-{'cd' * 8}-01"),)
            await stub.ModelInfer(request("ident", x=ONE), metadata=metadata)
        ids.append(trace)
    return ids


async def test_workers_answer_as_one(workers: Mesh) -> None:
    series = 'nv_inference_request_success{model="ident",version="1"}'
    before = (await workers.metrics()).get(series, 0)
    ids = await ask_each_worker(workers, 40)
    assert (await workers.metrics())[series] - before == 40
    instances = set()
    for trace in ids:
        status, found = await workers.get(f"/api/traces?which={trace}")
        assert status == 200, trace
        assert [each["trace_id"] for each in found] == [trace]
        instances.add(found[0]["spans"][0]["instance_id"])
    assert len(instances) == 2
    _, listed = await workers.get("/api/traces?which=list&limit=1000")
    assert {row["trace_id"] for row in listed} >= set(ids)
    assert [row["start_ns"] for row in listed] == sorted((row["start_ns"] for row in listed), reverse=True)
    _, (last,) = await workers.get("/api/traces?which=last")
    assert last["trace_id"] == ids[-1]
    _, (slowest,) = await workers.get("/api/traces?which=slowest&model=ident")
    assert slowest["duration_ns"] == max(row["duration_ns"] for row in listed if row["model"] == "ident")


@pytest.mark.parametrize("number", [0, 1])
async def test_a_worker_that_dies_is_replaced(workers: Mesh, number: int) -> None:
    pids = worker_pids(workers)
    psutil.Process(pids[number]).kill()
    await until(lambda: len(set(worker_pids(workers)) - {pids[number]}) == 2, 10.0)
    await workers.wait_ready()
    await until(lambda: len(list((workers.path / "sockets").glob("gateway-*-worker-2.sock"))) == 1)
    workers.expected.append('"gateway worker ended"')

    async def all_answer() -> bool:
        async with workers.channel() as channel:
            stub = Stub(channel)
            try:
                await infer(stub, "ident", x=ONE)
            except AioRpcError:
                return False
        return True

    await until(all_answer)
    for _ in range(20):
        assert await all_answer()
    await until(lambda: len(list(workers.path.glob("*.arena"))) == 3)


async def test_a_second_set_of_workers_on_the_same_port(workers: Mesh) -> None:
    before = worker_pids(workers)
    workers.start_another("gateway", "second", TENSORLINE_HTTP_PORT="0", TENSORLINE_METRICS_PORT="0")
    assert await workers.wait_exit("second", 6.0) == 2
    assert "cannot be used" in workers.log("second").splitlines()[-1]
    assert worker_pids(workers) == before
    (workers.directory / "second.log").unlink()


async def test_a_worker_whose_port_is_taken_ends_all(workers: Mesh) -> None:
    """The parent holds the gRPC port, but not the HTTP port of the first worker."""
    workers.start_another("gateway", "second", TENSORLINE_GRPC_PORT="0", TENSORLINE_METRICS_PORT="0")
    assert await workers.wait_exit("second", 15.0) == 2
    assert "HTTP port" in workers.log("second")
    (workers.directory / "second.log").unlink()


async def test_workers_end_with_their_parent(workers: Mesh) -> None:  # last: stops it
    pids = worker_pids(workers)
    async with workers.stub() as stub:
        flying = [asyncio.ensure_future(infer(stub, "slow", x=MS)) for _ in range(4)]
        await asyncio.sleep(0.15)
        assert await workers.stop("gateway") == 0
        assert [answer["y"].tolist() for answer in await asyncio.gather(*flying)] == [[400]] * 4
    assert not any(psutil.pid_exists(pid) for pid in pids)
    workers.start("gateway")
    await workers.wait_ready()
    pids = worker_pids(workers)
    await workers.kill("gateway")
    await until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 5.0)
    workers.start("gateway")
    await workers.wait_ready()
