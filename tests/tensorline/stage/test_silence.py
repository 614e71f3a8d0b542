"""Peers that freeze or die, each of them a real process: noticed in time, with nothing of theirs left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tensorline.stage.backend import Batch
from tensorline.tensor import Array
from tests.tensorline.rpc.scripted import Gateway, open_gateway
from tests.tensorline.stage.pair import Model, Stage, config, open_caller, open_stage, tensor, until

pytestmark = pytest.mark.usefixtures("one_loop")

ROOT = Path(__file__).resolve().parents[3]
GATEWAY = Path(__file__).with_name("gateway_process.py")
SILENCE_S = 4.0, 6.5
"""Four missed beats, and what a busy machine adds."""

BIG = """
backend: "generate"
output [ { name: "y" data_type: TYPE_UINT8 dims: [ -1 ] } ]
parameters { key: "byte_size" value { string_value: "10000" } }
"""
SLOW = (
    'backend: "identity"\n'
    + config({"x": "UINT8"}, {"y": "UINT8"})
    + ('parameters { key: "execute_delay_ms" value { string_value: "60000" } }')
)


def big(batch: Batch) -> Mapping[str, Array]:
    return {"y": np.zeros(10_000, np.uint8)}


def slow(batch: Batch) -> Mapping[str, Array]:
    until_s = time.monotonic() + 20
    while not batch.is_cancelled() and time.monotonic() < until_s:
        time.sleep(0.01)
    return {"y": batch.inputs["x"]}


IN_PROCESS = {
    "big": Model(config({"x": "UINT8"}, {"y": "UINT8"}), run=big),
    "slow": Model(config({"x": "UINT8"}, {"y": "UINT8"}), run=slow),
}


@asynccontextmanager
async def gateway_process(stage: Stage) -> AsyncIterator["subprocess.Popen[bytes]"]:
    """One that holds an answer and has a request in flight."""
    command = [sys.executable, str(GATEWAY), stage.target, str(stage.directory.path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as process:  # noqa: ASYNC220 - a millisecond
        try:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == b"held\n"
            await until(lambda: stage.end.in_flight == 1)
            assert stage.arena.leases == 1
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def stage_process(path: Path, repository: Path) -> AsyncIterator[tuple["subprocess.Popen[bytes]", str]]:
    """`python -m services.model` with the models `big` and `slow`, and the target of its socket."""
    for name, text in (("big", BIG), ("slow", SLOW)):
        (repository / name).mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(text)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TENSORLINE_")}
    environ |= {"TENSORLINE_MESH_DIRECTORY": str(path), "TENSORLINE_MODEL_REPOSITORY": str(repository)}
    environ |= {"TENSORLINE_LOG_LEVEL": "error", "TENSORLINE_ARENA_BYTES": "8MiB"}
    command = [sys.executable, "-m", "services.model"]
    with subprocess.Popen(command, env=environ, cwd=ROOT) as process:  # noqa: ASYNC220 - a millisecond
        try:
            await until(lambda: sockets(path), 20.0)
            yield process, f"unix:{sockets(path)[0]}"
        finally:
            process.kill()


def left_in(path: Path) -> list[str]:
    return [each.name for each in path.rglob("*") if not each.is_dir()]


def sockets(path: Path) -> list[Path]:
    return [each for each in (path / "sockets").glob("*.sock") if not each.stem.endswith("-lane")]


@asynccontextmanager
async def pending(path: Path, target: str) -> AsyncIterator[Gateway]:
    """A gateway with one request in flight at a stage process."""
    nonce = (path / "nonce").read_bytes()
    async with open_gateway(target, expected_id="", nonce=nonce) as gateway:
        states = ["LOADING"]

        def is_ready() -> bool:
            states[:] = [model.state for models in gateway.models[-1:] for model in models]
            return states == ["READY", "READY"]

        await until(is_ready, 20.0)
        yield gateway


async def frozen_stage(path: Path, repository: Path) -> tuple[float, list[int]]:
    """Seconds until the gateway has given up on it, and what became of its request."""
    async with stage_process(path, repository) as (process, target), pending(path, target) as gateway:
        _, results = gateway.submit_to("slow", tensor("x", np.zeros(1, np.uint8)))
        await asyncio.sleep(0.05)
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        await gateway.wait_ended(10.0)
        return time.monotonic() - started, [each.status for each in results]


async def frozen_gateway() -> float:
    """Seconds until the stage has taken back all that it held."""
    async with open_stage(IN_PROCESS) as stage, gateway_process(stage) as process, open_caller(stage) as other:
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        await until(lambda: stage.end.streams == 1, 10.0)
        taken_s = time.monotonic() - started
        await until(lambda: stage.arena.leases == 0, 1.0)
        assert stage.end.in_flight == 0
        assert len(other.read(await other.call("big", tensor("x", np.zeros(1, np.uint8))))["y"]) == 10_000
        assert {"instance-big_0", "instance-slow_0"} <= {thread.name for thread in threading.enumerate()}
        return taken_s


async def test_a_frozen_peer_is_taken_out_in_five_seconds(path: Path, tmp_path: Path) -> None:
    (stage_s, results), gateway_s = await asyncio.gather(frozen_stage(path, tmp_path), frozen_gateway())
    assert SILENCE_S[0] - 1.0 < stage_s < SILENCE_S[1]
    assert results == [14]
    assert SILENCE_S[0] - 1.0 < gateway_s < SILENCE_S[1]


async def test_a_killed_stage_is_noticed_in_a_second(path: Path, tmp_path: Path) -> None:
    async with stage_process(path, tmp_path) as (process, target), pending(path, target) as gateway:
        _, results = gateway.submit_to("slow", tensor("x", np.zeros(1, np.uint8)))
        _, held = gateway.submit_to("big")
        await until(lambda: held)
        assert held[0].outputs[0].handle is not None
        process.kill()
        started = time.monotonic()
        await gateway.wait_ended()
        assert time.monotonic() - started < 4
        assert [each.status for each in results] == [14]


async def test_a_killed_gateways_leases_end_in_a_second() -> None:
    async with open_stage(IN_PROCESS) as stage, gateway_process(stage) as process:
        process.kill()
        started = time.monotonic()
        await until(lambda: stage.end.streams == 0)
        await until(lambda: stage.arena.leases == 0)
        assert time.monotonic() - started < 4
        assert stage.end.in_flight == 0


async def test_an_idle_stage_with_an_open_stream_stops_in_two_seconds_and_leaves_nothing(
    path: Path, tmp_path: Path
) -> None:
    async with stage_process(path, tmp_path) as (process, target), pending(path, target) as gateway:
        _, held = gateway.submit_to("big")
        await until(lambda: held)
        assert held[0].outputs[0].handle is not None
        gateway.connection.release([held[0].outputs[0].handle])
        process.terminate()
        started = time.monotonic()
        await gateway.wait_ended()
        assert gateway.connection.is_draining
        assert await asyncio.to_thread(process.wait, 5.0) == 0
        assert time.monotonic() - started < 8
    assert left_in(path) == ["nonce"]
