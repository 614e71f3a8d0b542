"""A stage service as a process: how it starts, says that it is ready, stops, and what it leaves behind."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.tensorline.stage.pair import config, until

ROOT = Path(__file__).resolve().parents[3]
START_S = 20.0
"""Of a process on a busy machine; what is promised is measured from when it serves."""

STOP_S = 3.0
"""Promised are 2 s, on a machine that is not busy with other tests."""

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

SLOW = """
import threading
from tensorline.stage.main import run_stage

def slow(model, device):
    print("loading", flush=True)
    threading.Event().wait(60)

run_stage("slow", {"slow": slow})
"""


@dataclass
class Started:
    process: asyncio.subprocess.Process
    mesh: Path

    @property
    def sockets(self) -> list[Path]:
        return [path for path in (self.mesh / "sockets").glob("*.sock") if not path.stem.endswith("-lane")]

    async def check(self, service: str = "") -> int | StatusCode | None:
        """Its health by its only socket; None while there is none."""
        found = self.sockets
        if not found:
            return None
        async with aio.insecure_channel(f"unix:{found[0]}") as channel:
            try:
                request = health_pb2.HealthCheckRequest(service=service)
                stub: Any = health_pb2_grpc.HealthStub(channel)
                return int((await stub.Check(request, timeout=2)).status)
            except aio.AioRpcError as error:
                return error.code()

    async def serving(self) -> None:
        async with asyncio.timeout(START_S):
            while await self.check() != SERVING:
                assert self.process.returncode is None, await self.words()
                await asyncio.sleep(0.05)

    async def words(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def ended(self, within_s: float) -> int:
        async with asyncio.timeout(within_s):
            return await self.process.wait()

    async def stopped(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await self.ended(STOP_S)


@asynccontextmanager
async def started(mesh: Path, repository: Path | None = None, program: str = "", **more: str) -> AsyncIterator[Started]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TENSORLINE_", "OTEL_"))}
    given = {"TENSORLINE_MESH_DIRECTORY": str(mesh), "TENSORLINE_ARENA_BYTES": "16MiB", **more}
    if repository is not None:
        given["TENSORLINE_MODEL_REPOSITORY"] = str(repository)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(("-c", program) if program else ("-m", "services.model")),
        cwd=ROOT,
        env={**kept, **given},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Started(process, mesh)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def left_in(mesh: Path) -> list[str]:
    """Files in the mesh directory."""
    return sorted(str(path.relative_to(mesh)) for path in mesh.rglob("*") if not path.is_dir())


def write(repository: Path, name: str, text: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(text)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    write(path, "same", config({"x": "FP32"}, {"y": "FP32"}, more='backend: "identity"'))
    return path


async def test_it_serves_and_leaves_nothing(path: Path, repository: Path) -> None:
    async with started(path, repository) as stage:
        await stage.serving()
        assert await stage.check("same") == SERVING
        assert await stage.check("other") == StatusCode.NOT_FOUND
        assert await stage.stopped() == 0
        assert "Traceback" not in await stage.words()
    assert left_in(path) == ["nonce"]


async def test_a_good_model_serves_beside_broken_ones(path: Path, repository: Path) -> None:
    write(repository, "broken", "max_batch_size: many")
    write(repository, "refused", config({"x": "FP32"}, {"y": "INT8"}, more='backend: "identity"'))
    async with started(path, repository) as stage:
        await stage.serving()
        checks = {name: await stage.check(name) for name in ("same", "broken", "refused")}
        assert checks == {"same": SERVING, "broken": NOT_SERVING, "refused": NOT_SERVING}
        assert await stage.stopped() == 0
        words = await stage.words()
        assert "broken/config.pbtxt" in words
        assert "output 'y' is INT8, its input 'x' is FP32" in words


async def test_a_misspelt_setting_stops_the_start(path: Path) -> None:
    async with started(path, TENSORLINE_ARENA_BYTE="1MiB") as stage:
        assert await stage.ended(START_S) == 2
        said = "TENSORLINE_ARENA_BYTE is no setting of this process; did you mean TENSORLINE_ARENA_BYTES?"
        assert await stage.words() == f"model: {said}\n"
    assert left_in(path) == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TENSORLINE_MAX_QUEUE", "0", "TENSORLINE_MAX_QUEUE='0'"),
        ("TENSORLINE_ARENA_BYTES", "1PiB", "does not fit"),
        ("TENSORLINE_MODEL_REPOSITORY", "/nowhere/at/all", "model repository '/nowhere/at/all' cannot be read"),
    ],
)
async def test_what_cannot_be_is_told_in_a_line(path: Path, name: str, value: str, said: str) -> None:
    async with started(path, None, "", **{name: value}) as stage:
        assert await stage.ended(START_S) == 2
        words = await stage.words()
        assert "Traceback" not in words
        assert said in words.splitlines()[-1]
    assert left_in(path) in ([], ["nonce"])


async def test_a_second_one_on_a_taken_port_ends_and_disturbs_nothing(path: Path, repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        async with started(path, repository) as first:
            await first.serving()
            before = left_in(path)
            async with started(path, repository, TENSORLINE_LISTEN=listen) as second:
                assert await second.ended(START_S) == 2
                words = await second.words()
                assert words.splitlines()[-1] == (
                    f"model: cannot listen on '{listen}': taken, or no address of this host"
                )
                assert "Traceback" not in words
            assert left_in(path) == before
            assert await first.check() == SERVING


async def test_two_stages_do_not_share_a_port(path: Path, repository: Path) -> None:
    async with started(path, repository, TENSORLINE_LISTEN="127.0.0.1:0") as first:
        await first.serving()
        (entry,) = [name for name in left_in(path) if name.startswith("registry/")]
        address = next(
            word.strip('",') for word in (path / entry).read_text().split('"') if word.startswith("127.0.0.1:")
        )
        async with started(path, repository, TENSORLINE_LISTEN=address) as second:
            assert await second.ended(START_S) == 2
        assert await first.stopped() == 0
    assert left_in(path) == ["nonce"]


async def test_what_a_killed_one_leaves_is_swept_by_another(path: Path, repository: Path) -> None:
    async with AsyncExitStack() as stack:
        killed = await stack.enter_async_context(started(path, repository))
        await killed.serving()
        left = set(left_in(path)) - {"nonce"}
        assert {Path(name).suffix for name in left} >= {".arena", ".sock"}
        killed.process.kill()
        await killed.process.wait()
        other = await stack.enter_async_context(started(path, repository))
        async with asyncio.timeout(START_S):
            while not any(each.name not in {Path(name).name for name in left} for each in other.sockets):
                await asyncio.sleep(0.05)

        def gone() -> bool:
            return not [name for name in left & set(left_in(path)) if not name.startswith("registry/")]

        await until(gone, within_s=5.0)
        assert await other.check() == SERVING
        assert await other.stopped() == 0
    # Its entry stays until a gateway reads the registry and finds nobody behind it.
    assert [name for name in left_in(path) if not name.startswith("registry/")] == ["nonce"]


async def test_it_can_be_stopped_while_it_loads(path: Path, tmp_path: Path) -> None:
    repository = tmp_path / "slow"
    write(repository, "m", config({"x": "FP32"}, {"y": "FP32"}, more='backend: "slow"'))
    async with started(path, repository, SLOW) as stage:
        assert stage.process.stdout is not None
        async with asyncio.timeout(START_S):
            assert await stage.process.stdout.readline() == b"loading\n"
        assert await stage.check() == NOT_SERVING
        assert await stage.stopped() == 0
        assert "Traceback" not in await stage.words()
    assert left_in(path) == ["nonce"]
