"""The mesh found through a real Consul agent, which is killed, forgets everything, and comes back."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

from tests.consul import ConsulAgent, consul_agent
from tests.e2e.client import infer
from tests.e2e.load import running_load
from tests.e2e.mesh import Mesh, running_mesh, until
from tests.e2e.models import chain_repositories, chain_services, write_chain

pytestmark = [pytest.mark.slow, pytest.mark.consul]

Ask = Callable[[int], Awaitable[bool]]
NAMES = ("pre", "mid", "mid2", "post")


@pytest.fixture(scope="module")
async def agent() -> AsyncIterator[ConsulAgent]:
    async with consul_agent() as agent:
        yield agent


@pytest.fixture(scope="module")
async def mesh(agent: ConsulAgent, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    root = tmp_path_factory.mktemp("repository")
    write_chain(root, "chain", "add")
    services = chain_services(root)
    services["mid2"] = services["mid"]
    async with running_mesh(
        root,
        services=services,
        gateway_repositories=chain_repositories(root),
        extra_env={"TENSORLINE_DISCOVERY": agent.url},
    ) as mesh:
        await mesh.wait_instances(4)
        yield mesh


@pytest.fixture
async def ask(mesh: Mesh) -> AsyncIterator[Ask]:
    ramp = np.arange(16 << 10 >> 2, dtype=np.float32)
    async with mesh.stub() as stub:

        async def one(number: int) -> bool:
            sent = ramp + number % 4096
            return np.array_equal((await infer(stub, "chain", x=sent))["y"], sent + 3)

        yield one


def registered(agent: ConsulAgent) -> list[str]:
    """Services of the agent by their ids; empty while it is away."""
    try:
        found = json.loads(agent.get("/v1/agent/services"))
    except OSError:
        return []
    return sorted(found)


def of(ids: list[str], service: str) -> list[str]:
    return [id for id in ids if id.startswith(f"{service}-")]


async def test_the_agent_comes_back_empty(mesh: Mesh, agent: ConsulAgent, ask: Ask) -> None:  # F13
    before = registered(agent)
    assert [len(of(before, name)) for name in ("pre", "mid", "post")] == [1, 2, 1]
    async with running_load(ask, 60.0) as load:
        await asyncio.sleep(0.5)
        await agent.kill()
        await asyncio.sleep(2.0)
        await until(lambda: fresh(mesh, 0.0), 10.0)
        assert (await mesh.get("/v2/health/ready"))[0] == 200  # on what was last known, and on the streams
        await agent.start()
        began = time.monotonic()
        await until(lambda: registered(agent) == before, 15.0)
        assert time.monotonic() - began < 15.0
        await until(lambda: fresh(mesh, 1.0), 15.0)
        await asyncio.sleep(1.0)
    assert (load.failures, load.wrong) == ([], 0)
    assert registered(agent) == before
    await mesh.wait_instances(4)
    await mesh.wait_idle()


async def fresh(mesh: Mesh, value: float) -> bool:
    return bool((await mesh.metrics())["tensorline_registry_is_fresh"] == value)


async def test_one_of_two_is_killed_while_consul_still_lists_it(
    mesh: Mesh, agent: ConsulAgent, ask: Ask
) -> None:  # F15
    series = 'nv_inference_request_success{model="chain_mid",version="1"}'
    async with running_load(ask, 100.0) as load:
        await asyncio.sleep(0.5)
        await mesh.kill("mid2")
        killed = time.monotonic()
        assert len(of(registered(agent), "mid")) == 2
        await asyncio.sleep(2.0)
        assert load.failures_since(killed + 1.0) == []
        mesh.start("mid2")
        await mesh.wait_instances(4)
        before = mesh.io_bytes("mid2")
        await asyncio.sleep(1.0)
        assert mesh.io_bytes("mid2") - before > 10_000  # it is given work again
    assert (load.failures, load.wrong) == ([], 0)
    assert (await mesh.metrics())[series] >= len(load.samples)
    await mesh.wait_idle()


async def test_a_stage_that_stops_is_gone_from_consul_first(mesh: Mesh, agent: ConsulAgent, ask: Ask) -> None:
    (id,) = [row["id"] for row in await mesh.instances() if row["service"] == "mid"][:1]
    async with running_load(ask, 60.0) as load:
        await asyncio.sleep(0.3)
        for name in ("mid", "mid2"):
            assert await mesh.stop(name) == 0
            mesh.start(name)
            await mesh.wait_instances(4)
    assert (load.failures, load.wrong) == ([], 0)
    assert id not in registered(agent)
