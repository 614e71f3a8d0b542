"""Models that come, go and change while a mesh serves, as the published client drives it."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from tests.e2e.mesh import STAGES, Mesh, Service, running_mesh, until
from tests.e2e.models import ensemble, model

pytestmark = pytest.mark.usefixtures("one_loop")

EXPLICIT = {"TENSORLINE_MODEL_CONTROL_MODE": "explicit"}
POLL = {"TENSORLINE_MODEL_CONTROL_MODE": "poll", "TENSORLINE_REPOSITORY_POLL_SECS": "0.1"}
ONE = np.ones(1, np.float32)


def rewrite(folder: Path, name: str, by: float, versions: tuple[int, ...] = (1,)) -> None:
    """The model that adds `by`, as an editor would save it."""
    file = folder / name / "config.pbtxt"
    text = file.read_text()
    start = text.index('string_value: "') + len('string_value: "')
    new = file.with_suffix(".new")
    new.write_text(f"{text[:start]}{by}{text[text.index(chr(34), start) :]}")
    new.rename(file)
    for version in versions:
        (folder / name / str(version)).mkdir(exist_ok=True)


def adder(folder: Path, name: str, by: float = 1) -> None:
    model(folder, name, "add", parameters={"by": str(by)})


class Client:
    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.inner = triton.InferenceServerClient(mesh.target)

    async def value(self, name: str, version: str = "") -> float:
        tensor = triton.InferInput("x", [1], "FP32")
        tensor.set_data_from_numpy(ONE)
        result = await self.inner.infer(name, [tensor], model_version=version)
        return float(result.as_numpy("y")[0]) - 1

    async def states(self, name: str) -> dict[str, str]:
        index = await self.inner.get_model_repository_index(as_json=True)
        return {row.get("version", ""): row.get("state", "") for row in index.get("models", []) if row["name"] == name}


@asynccontextmanager
async def client_of(mesh: Mesh) -> AsyncIterator[Client]:
    client = Client(mesh)
    try:
        yield client
    finally:
        await client.inner.close()


@asynccontextmanager
async def mesh_of(
    folder: Path, environ: Mapping[str, str], *, stages: int = 1, workers: int = 1
) -> AsyncIterator[tuple[Mesh, Client]]:
    services = {f"stage{at}": Service(STAGES) for at in range(stages)}
    async with running_mesh(folder, services=services, workers=workers, extra_env=environ) as mesh:
        mesh.expected += ['"failed to load model"', "model configuration refused"]
        await mesh.wait_instances(stages)
        async with client_of(mesh) as client:
            yield mesh, client


async def test_reload_under_load(tmp_path: Path) -> None:
    """F01: not one failed request, and no answer of the old one to a request sent after the load returned."""
    adder(tmp_path, "m", 0)
    async with mesh_of(tmp_path, EXPLICIT, stages=2, workers=2) as (mesh, client):
        await client.inner.load_model("m")
        stop = asyncio.Event()
        counts: list[int] = []
        newest = 0.0

        async def ask() -> None:
            async with client_of(mesh) as own:  # a connection, and so a worker, of its own
                seen = 0
                while not stop.is_set():
                    floor = newest
                    value = await own.value("m")
                    assert floor <= value <= newest + 1
                    seen += 1
                counts.append(seen)

        async with asyncio.TaskGroup() as askers:
            for _ in range(4):
                askers.create_task(ask())
            for number in range(1, 11):
                rewrite(tmp_path, "m", number, versions=(number,))
                await client.inner.load_model("m")
                newest = float(number)
                assert await client.value("m") == number
            stop.set()
        assert min(counts) > 0
        # Requests that came by another stream than the load's may have been on their way to a version before.
        assert (await client.states("m"))["10"] == "READY"


async def test_polling(tmp_path: Path) -> None:
    adder(tmp_path, "m", 1)
    async with mesh_of(tmp_path, POLL) as (_, client):
        assert await client.value("m") == 1
        rewrite(tmp_path, "m", 2, versions=(2,))

        async def is_new() -> bool:
            return await client.value("m") == 2

        await until(is_new, 20)
        adder(tmp_path, "n", 5)
        ensemble(tmp_path, "chain", [("m", {"x": "x"}, {"y": "t"}), ("n", {"x": "t"}, {"y": "y"})])

        async def is_there() -> bool:
            return bool(await client.inner.is_model_ready("chain"))

        await until(is_there, 20)
        assert await client.value("chain") == 7
        (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: many")
        await asyncio.sleep(1.5)
        assert await client.value("m") == 2
        with pytest.raises(InferenceServerException, match="explicit model load / unload is not allowed"):
            await client.inner.load_model("m")


async def test_a_stage_that_comes_back_has_what_it_had(tmp_path: Path) -> None:
    """Also what a client gave in place of the repository; and not what was unloaded."""
    for name in ("m", "n"):
        adder(tmp_path, name)
    async with mesh_of(tmp_path, {**EXPLICIT, "TENSORLINE_LOAD_MODEL": "n"}) as (mesh, client):
        config = await client.inner.get_model_config("n", as_json=True)
        override = {**config["config"], "name": "m", "parameters": {"by": {"string_value": "7"}}}
        await client.inner.load_model("m", config=json.dumps(override))
        assert await client.value("m") == 7
        await client.inner.unload_model("n")
        await mesh.kill("stage0")
        mesh.start("stage0")

        async def is_back() -> bool:
            return bool(await client.inner.is_model_ready("m"))

        await until(is_back, 30)
        assert await client.value("m") == 7

        async def is_gone() -> bool:
            return not await client.inner.is_model_ready("n")

        await until(is_gone, 10)


async def test_every_worker_agrees(tmp_path: Path) -> None:
    adder(tmp_path, "m", 2)
    ensemble(tmp_path, "chain", [("m", {"x": "x"}, {"y": "t"}), ("m", {"x": "t"}, {"y": "y"})])
    async with mesh_of(tmp_path, EXPLICIT, workers=3) as (mesh, client):
        await client.inner.load_model("chain")
        for _ in range(12):
            async with client_of(mesh) as other:
                assert await other.value("chain") == 4
                assert await other.states("chain") == {"1": "READY"}
        async with client_of(mesh) as other:
            await other.inner.unload_model("chain", unload_dependents=True)
        for _ in range(12):
            async with client_of(mesh) as other:
                for name in ("chain", "m"):

                    async def is_gone(each: Client = other, model: str = name) -> bool:
                        return (await each.states(model)).get("1") == "UNAVAILABLE"

                    await until(is_gone, 5)
                    with pytest.raises(InferenceServerException, match="has no available versions"):
                        await other.value(name)
