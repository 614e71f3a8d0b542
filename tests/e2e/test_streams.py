"""Decoupled models and streams in a real mesh, through the published clients."""

import asyncio
import queue
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as sync_client
import tritonclient.grpc.aio as aio_client

from tests.e2e.client import infer
from tests.e2e.mesh import STAGES, Mesh, Service, running_mesh, until
from tests.e2e.models import model, tensor, write

WAIT_S = 20.0
DECOUPLED = "model_transaction_policy { decoupled: true }"
OPTIONAL = "optional: true"


def write_models(root: Path) -> None:
    inputs = ", ".join([tensor("IN", "INT32"), tensor("DELAY", "UINT32", extra=OPTIONAL)])
    outputs = ", ".join([tensor("OUT", "INT32"), tensor("IDX", "UINT32", "1")])
    for name, more in (("repeat", ""), ("wide", 'parameters { key: "elements" value { string_value: "65536" } }')):
        write(
            root / "talk" / name, f'backend: "repeat" {DECOUPLED} input [ {inputs} ] output [ {outputs} ] {more}', [1]
        )
    model(root / "line", "line", "identity", datatype="INT32", inputs=("IN",), outputs=("OUT",))
    steps = [("wide", {"IN": "IN"}, {"OUT": "wide"}), ("line", {"IN": "wide"}, {"OUT": "OUT"})]
    lines = ['platform: "ensemble"', f"input [ {tensor('IN', 'INT32')} ] output [ {tensor('OUT', 'INT32')} ]"]
    lines.append("ensemble_scheduling {")
    for target, taken, given in steps:
        maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in taken.items()]
        maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in given.items()]
        lines.append(f'step [ {{ model_name: "{target}" model_version: -1 {" ".join(maps)} }} ]')
    write(root / "pipelines" / "both", "\n".join([*lines, "}"]), [1])


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    write_models(tmp_path)
    async with running_mesh(
        tmp_path,
        services={name: Service(STAGES, (name,), [tmp_path / name]) for name in ("talk", "line")},
        gateway_repositories=[tmp_path / name for name in ("talk", "line", "pipelines")],
    ) as mesh:
        await mesh.wait_instances(2)
        yield mesh


def series(count: int, delay_ms: int = 0) -> list[Any]:
    tensors = [sync_client.InferInput("IN", [count], "INT32")]
    tensors[0].set_data_from_numpy(np.arange(count, dtype=np.int32))
    if delay_ms:
        tensors.append(sync_client.InferInput("DELAY", [1], "UINT32"))
        tensors[1].set_data_from_numpy(np.array([delay_ms], np.uint32))
    return tensors


async def in_flight(mesh: Mesh) -> float:
    return (await mesh.metrics())["tensorline_in_flight"]


def talk(target: str) -> list[int]:
    """What the synchronous client hears: a narrow stream, a wide one and a pipeline's, and one request between them."""
    came: queue.Queue[Any] = queue.Queue()
    with sync_client.InferenceServerClient(target) as client:
        client.start_stream(lambda result, error: came.put(error or result))
        heard = []
        for name, count in (("repeat", 10), ("wide", 20), ("both", 20), ("line", 1)):
            client.async_stream_infer(name, series(count), request_id=name)
            for _ in range(count):
                result = came.get(timeout=WAIT_S)
                assert not isinstance(result, Exception), result
                out = result.as_numpy("OUT")
                assert (out == out[0]).all()
                heard.append(int(out[0]))
        client.stop_stream()
    assert came.empty()
    return heard


async def test_the_synchronous_client(mesh: Mesh) -> None:
    heard = await asyncio.to_thread(talk, mesh.target)
    assert heard == [*range(10), *range(20), *range(20), 0]
    metrics = await mesh.metrics()
    assert metrics['nv_inference_request_success{model="wide",version="1"}'] == 2
    assert metrics['nv_inference_request_success{model="both",version="1"}'] == 1
    assert metrics['nv_inference_request_success{model="line",version="1"}'] == 21


async def test_the_asyncio_client(mesh: Mesh) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for id in "ab":
            yield {"model_name": "repeat", "inputs": series(30, 1), "request_id": id}

    came: dict[str, list[int]] = {"a": [], "b": []}
    async with aio_client.InferenceServerClient(mesh.target) as client, asyncio.timeout(WAIT_S):
        async for result, error in client.stream_infer(requests()):
            assert error is None
            came[result.get_response().id].append(int(result.as_numpy("OUT")[0]))
    assert came == {"a": [*range(30)], "b": [*range(30)]}


CLIENT = """
import sys, numpy as np, tritonclient.grpc as client
tensors = [client.InferInput("IN", [1000], "INT32"), client.InferInput("DELAY", [1], "UINT32")]
tensors[0].set_data_from_numpy(np.arange(1000, dtype=np.int32))
tensors[1].set_data_from_numpy(np.array([20], np.uint32))
triton = client.InferenceServerClient(sys.argv[1])
triton.start_stream(lambda result, error: print(result.as_numpy("OUT")[0], flush=True))
triton.async_stream_infer("repeat", tensors)
import time; time.sleep(60)
"""


async def test_a_client_that_dies(mesh: Mesh) -> None:
    """cases.md C02."""
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, mesh.target, stdout=subprocess.PIPE)
    assert client.stdout is not None
    async with asyncio.timeout(WAIT_S):
        for _ in range(10):
            await client.stdout.readline()
    assert await in_flight(mesh) == 1
    client.kill()
    await client.wait()

    async def is_quiet() -> bool:
        return await in_flight(mesh) == 0

    await until(is_quiet, 5.0)


async def test_a_stage_that_dies_ends_its_streams_alone(mesh: Mesh) -> None:
    mesh.expected += ["stage stream ended"]
    came: asyncio.Queue[Any] = asyncio.Queue()

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "repeat", "inputs": series(1000, 20), "request_id": "lost"}
        await killed.wait()
        yield {"model_name": "line", "inputs": series(3), "request_id": "lives"}

    killed = asyncio.Event()
    async with aio_client.InferenceServerClient(mesh.target) as client, asyncio.timeout(WAIT_S):
        responses = 0
        async for result, error in client.stream_infer(requests()):
            if error is not None:
                assert "the instance of model 'repeat' that ran the request is gone" in error.message()
                killed.set()
            elif result.get_response().id == "lives":
                came.put_nowait(result.as_numpy("OUT").tolist())
            else:
                responses += 1
                if responses == 5:
                    await mesh.kill("talk")
    assert came.get_nowait() == [0, 1, 2]
    mesh.start("talk")
    await mesh.wait_instances(2)
    assert (await asyncio.to_thread(talk, mesh.target))[:10] == [*range(10)]


async def test_a_gateway_that_stops_closes_idle_streams(mesh: Mesh) -> None:
    """cases.md LC02: open streams do not hold it up; a request that runs is finished."""
    finished: list[int] = []

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "repeat", "inputs": series(30, 20), "request_id": "r"}
        await asyncio.sleep(60)

    async def read() -> None:
        async with aio_client.InferenceServerClient(mesh.target) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None
                finished.append(int(result.as_numpy("OUT")[0]))

    reading = asyncio.create_task(read())
    async with asyncio.timeout(WAIT_S):
        while not finished:
            await asyncio.sleep(0.01)
    began = time.monotonic()
    assert await mesh.stop("gateway") == 0
    assert time.monotonic() - began < 8
    with pytest.raises(Exception, match=re.compile("cancel|unavailable|closed", re.IGNORECASE)):
        await reading
    assert finished == list(range(30))
    mesh.start("gateway")
    await mesh.wait_ready()
    async with mesh.stub() as stub:
        assert (await infer(stub, "line", IN=np.array([5], np.int32)))["OUT"].tolist() == [5]
