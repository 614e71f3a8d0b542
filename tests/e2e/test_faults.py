"""Each process killed once under load: short failures that name what is gone, no wrong value, nothing left behind."""

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from grpc import StatusCode, aio

from examples.prepare import EXAMPLES
from examples.reference import top_five
from tests.e2e.client import Stub, infer
from tests.e2e.load import Load, running_load
from tests.e2e.mesh import Footprint, Mesh, Service, running_mesh, until
from tests.e2e.models import ensemble, model

pytestmark = pytest.mark.slow

SERVICES = ("preprocess", "model", "postprocess")
CHAIN_RATE, PHOTO_RATE = 42.0, 8.0
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""`asyncio.to_thread` starts a thread of its pool only when the others are busy: the pool may be full later alone."""
BIG = np.arange(1 << 18, dtype=np.float32)
"""1 MiB."""


@pytest.fixture(scope="module")
async def mesh(photos: list[Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """The four processes of the photo pipeline, which run a chain of three copying steps besides."""
    root, example = tmp_path_factory.mktemp("repository"), EXAMPLES / "models"
    for place in SERVICES:
        model(root / place, f"copy_{place}", "identity", parameters={"mode": "copy"})
    names = ["x", "a", "b", "y"]
    steps = [(f"copy_{place}", {"x": names[at]}, {"y": names[at + 1]}) for at, place in enumerate(SERVICES)]
    ensemble(root / "pipelines", "chain", steps)
    async with running_mesh(
        root,
        services={name: Service(f"services.{name}", (), [example, root / name]) for name in SERVICES},
        gateway_repositories=[example, *(root / name for name in (*SERVICES, "pipelines"))],
    ) as mesh:
        yield mesh


class Traffic:
    """50 requests a second: chains over 1 MiB, and photos."""

    def __init__(self, stub: Stub, photo: Path) -> None:
        self._stub = stub
        self._photo = np.array([[photo.read_bytes()]], dtype=object)
        self._classes = [index for index, _, _ in top_five(photo)]

    async def chain(self, number: int) -> bool:
        sent = BIG + number
        return np.array_equal((await infer(self._stub, "chain", x=sent))["y"], sent)

    async def photo(self, number: int) -> bool:
        answer = await infer(self._stub, "classify", image=self._photo)
        return bool(answer["class"][0].tolist() == self._classes)


def loads(*running: Load) -> tuple[list[str], int]:
    return [f"{each.code.name} {each.text}" for load in running for each in load.failures], sum(
        load.wrong for load in running
    )


async def test_each_process_is_killed_once(mesh: Mesh, photos: list[Path]) -> None:  # E10, F07
    options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)]
    sizes = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with aio.insecure_channel(mesh.target, [*options, *sizes]) as channel:
        traffic = Traffic(Stub(channel), photos[0])
        async with running_load(traffic.chain, CHAIN_RATE) as chain, running_load(traffic.photo, PHOTO_RATE) as photo:
            await asyncio.sleep(3.0)
        assert loads(chain, photo) == ([], 0)
        await mesh.wait_idle()
        before = {name: mesh.footprint(name) for name in mesh.names}
        files = mesh.shared_files()
        for victim in (*SERVICES, "gateway"):
            async with (
                running_load(traffic.chain, CHAIN_RATE) as chain,
                running_load(traffic.photo, PHOTO_RATE) as photo,
            ):
                await asyncio.sleep(1.0)
                known = {row["id"] for row in await mesh.instances()}
                killed = time.monotonic()
                await mesh.kill(victim)
                mesh.start(victim)
                if victim != "gateway":  # which may not have missed the old one yet when it is asked
                    await until(functools.partial(has_new, mesh, victim, known), 30.0)
                await mesh.wait_ready()
                await asyncio.sleep(0.5)
                healed = time.monotonic()
                await asyncio.sleep(2.0)
            for load in (chain, photo):
                assert load.wrong == 0
                assert {sample.code for sample in load.failures} <= {StatusCode.UNAVAILABLE}
                assert load.failures_since(healed) == []
                assert [sample for sample in load.failures if sample.began < killed - 1.0] == []
                assert max((sample.took_s for sample in load.failures), default=0) < 1.0
                if victim != "gateway":
                    assert all("instance" in sample.text or "model" in sample.text for sample in load.failures)
            await mesh.wait_idle()
            survivors = [name for name in before if name != victim]
            await until(functools.partial(all_near, mesh, {name: before[name] for name in survivors}), 5.0)
            before[victim] = mesh.footprint(victim)
            await until(lambda: kinds(mesh.shared_files()) == kinds(files), 5.0)
            assert sum(mesh.shared_files().values()) < 2 * sum(files.values())


async def has_new(mesh: Mesh, service: str, known: set[str]) -> bool:
    return any(row["service"] == service and row["id"] not in known for row in await mesh.instances())


def all_near(mesh: Mesh, then: Mapping[str, Footprint]) -> bool:
    return all(near(mesh.footprint(name), footprint) for name, footprint in then.items())


def near(now: Footprint, then: Footprint) -> bool:
    """A stage keeps what it has mapped of a dead peer's arena for a minute: two descriptors."""
    return abs(now.descriptors - then.descriptors) <= 3 and now.threads <= then.threads + POOL_THREADS


def kinds(files: dict[str, int]) -> dict[str, int]:
    """How many files there are of each kind: a dead process's arena and entry are gone, the new one's are there."""
    count: dict[str, int] = {}
    for name in files:
        kind = Path(name).suffix or name
        count[kind] = count.get(kind, 0) + 1
    return count
