"""Two instances of one stage: one of them dies, is restarted, or freezes, and no request is lost."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

from tests.e2e.client import infer
from tests.e2e.load import running_load
from tests.e2e.mesh import Mesh, Service, running_mesh
from tests.e2e.models import chain_repositories, chain_services, model, write_chain

pytestmark = pytest.mark.slow

RATE = 60.0
VALUES = 64 << 10 >> 2


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    root = tmp_path_factory.mktemp("repository")
    write_chain(root, "chain", "add")
    model(root / "mid", "slow", "slow", datatype="INT32", dims="1")
    services: dict[str, Service] = chain_services(root)
    services["mid2"] = services["mid"]
    async with running_mesh(root, services=services, gateway_repositories=chain_repositories(root)) as mesh:
        await mesh.wait_instances(4)
        yield mesh


@pytest.fixture
async def ask(mesh: Mesh) -> AsyncIterator[Callable[[int], Awaitable[bool]]]:
    """Each request has numbers of its own, so that another's answer, or a stage left out, shows."""
    ramp = np.arange(VALUES, dtype=np.float32)

    async with mesh.stub() as stub:

        async def one(number: int) -> bool:
            sent = ramp + number % 4096
            return np.array_equal((await infer(stub, "chain", x=sent))["y"], sent + 3)

        yield one


Ask = Callable[[int], Awaitable[bool]]


async def test_one_of_two_is_killed(mesh: Mesh, ask: Ask) -> None:
    async with running_load(ask, RATE) as load:
        for victim in ("mid", "mid2"):
            await asyncio.sleep(1.0)
            await mesh.kill(victim)
            await asyncio.sleep(1.0)
            mesh.start(victim)
            await mesh.wait_instances(4)
    assert (load.failures, load.wrong) == ([], 0)
    assert len(load.samples) > RATE * 3
    await mesh.wait_idle()


async def test_a_rolling_restart_loses_nothing(mesh: Mesh, ask: Ask) -> None:  # LC01
    async with running_load(ask, RATE) as load:
        for victim in ("mid", "mid2"):
            await asyncio.sleep(0.5)
            assert await mesh.stop(victim) == 0
            await asyncio.sleep(0.5)
            mesh.start(victim)
            await mesh.wait_instances(4)
    assert (load.failures, load.wrong) == ([], 0)
    await mesh.wait_idle()


async def test_one_of_two_freezes(mesh: Mesh, ask: Ask) -> None:  # FT02
    async with running_load(ask, RATE) as load:
        await asyncio.sleep(1.0)
        frozen = time.monotonic()
        mesh.signal("mid", signal.SIGSTOP)
        await asyncio.sleep(8.0)
        mesh.signal("mid", signal.SIGCONT)
        thawed = time.monotonic()
        await mesh.wait_instances(4)
        await asyncio.sleep(1.5)
    assert (load.failures, load.wrong) == ([], 0)
    assert max(sample.took_s for sample in load.since(frozen + 5.0) if sample.began < thawed) < 1.0
    assert max(sample.took_s for sample in load.samples) < 6.5
    await mesh.wait_idle()


async def test_work_in_flight_survives_the_stop_of_its_instance(mesh: Mesh) -> None:
    """Twice over: the registry's news and the drain come in either order."""
    async with mesh.stub() as stub:
        for _ in range(2):
            flying = [
                asyncio.ensure_future(infer(stub, "slow", x=np.array([900], np.int32), id=f"s{at}")) for at in range(2)
            ]
            await asyncio.sleep(0.2)
            retries = (await mesh.metrics())["tensorline_retries_total"]
            assert set(await asyncio.gather(mesh.stop("mid"), mesh.stop("mid2"))) == {0}
            assert all(answer["y"] == np.array([900]) for answer in await asyncio.gather(*flying))
            assert (await mesh.metrics())["tensorline_retries_total"] == retries
            mesh.start("mid")
            mesh.start("mid2")
            await mesh.wait_instances(4)
