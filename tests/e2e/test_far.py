"""A stage that shares no memory with the gateway: the bytes travel by TCP, alone and among stages that do share."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from grpc import StatusCode

from tests.consul import free_ports
from tests.e2e.client import Stub, failure, infer, request
from tests.e2e.load import running_load
from tests.e2e.mesh import Mesh, Service, running_mesh
from tests.e2e.models import CHAIN, chain_repositories, chain_services, model, write_chain

SIZES = [12, 4 << 10, (4 << 10) + 4, 600 << 10, 1 << 20, (1 << 20) + 4, 7 << 20]
"""Around the sizes where the form of transport changes: inline, one message, chunks."""


def far_services(root: Path, registry: Path, *far: str) -> dict[str, Service]:
    """Stages of a chain, some of which stand in a mesh directory of their own and listen on TCP."""
    services = {}
    for name, service in chain_services(root).items():
        environ = {"TENSORLINE_DISCOVERY": f"file://{registry}"}
        if name in far:
            environ |= {"TENSORLINE_MESH_DIRECTORY": str(registry / name), "TENSORLINE_LISTEN": "127.0.0.1:0"}
        services[name] = Service(service.target, service.arguments, service.repositories, environ)
    return services


def write_models(root: Path) -> None:
    write_chain(root, "adding", "add")
    write_chain(root, "passing")
    write_chain(root, "texts", datatype="BYTES")
    for place in CHAIN:
        model(root / place, f"boom_{place}", "boom")


@pytest.fixture(scope="module", params=[("mid",), CHAIN], ids="-".join)
async def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    root = tmp_path_factory.mktemp("repository")
    write_models(root)
    # Beside the mesh's own directory, so that it goes with it.
    shared = tmp_path_factory.mktemp("r")
    async with running_mesh(
        root,
        services=far_services(root, shared, *request.param),
        gateway_repositories=chain_repositories(root),
        gateway_env={"TENSORLINE_DISCOVERY": f"file://{shared}"},
    ) as mesh:
        near = {row["service"] for row in await mesh.instances() if row["is_colocated"]}
        assert near == set(CHAIN) - set(request.param)
        yield mesh


@pytest.fixture(scope="module")
async def stub(mesh: Mesh) -> AsyncIterator[Stub]:
    async with mesh.stub() as stub:
        yield stub


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "by"), [("adding", 3), ("passing", 0)])
async def test_tensors_of_every_size(mesh: Mesh, stub: Stub, name: str, by: int, size: int) -> None:
    x = np.arange(size // 4, dtype=np.float32) % 1000
    np.testing.assert_array_equal((await infer(stub, name, x=x))["y"], x + by)


async def test_texts_and_nothing(stub: Stub) -> None:
    for elements in ([], [b"", b"\0"], [b"x" * (3 << 20), b"end"]):
        array = np.empty(len(elements), object)
        array[:] = elements
        assert (await infer(stub, "texts", x=array))["y"].tolist() == elements
    assert (await infer(stub, "adding", x=np.empty(0, np.float32)))["y"].shape == (0,)


async def test_many_at_once(mesh: Mesh, stub: Stub) -> None:
    """Chunks of several requests on one stream, each back to its own."""

    async def one(number: int) -> bool:
        x = np.full((300 + 40 * number) << 10 >> 2, number, np.float32)
        return bool(((await infer(stub, "adding", x=x))["y"] == number + 3).all())

    assert all(await asyncio.gather(*map(one, range(30))))
    await mesh.wait_idle()


async def test_errors_come_back(mesh: Mesh, stub: Stub) -> None:
    for place in CHAIN:
        found = await failure(stub.ModelInfer(request(f"boom_{place}", x=np.full(1 << 19, -1, np.float32))))
        assert (found.code, found.text) == (StatusCode.INTERNAL, "bad row")
    await mesh.wait_idle()


async def test_killing_a_far_stage(mesh: Mesh, stub: Stub) -> None:
    async def ask(number: int) -> bool:
        x = np.full(1 << 16, number % 1000, np.float32)
        return bool(((await infer(stub, "adding", x=x))["y"] == number % 1000 + 3).all())

    async with running_load(ask, 30.0) as load:
        await asyncio.sleep(0.5)
        await mesh.kill("mid")
        mesh.start("mid")
        await mesh.wait_ready()
        await asyncio.sleep(0.5)
    assert load.wrong == 0
    assert {sample.code for sample in load.failures} <= {StatusCode.UNAVAILABLE}
    assert max((sample.took_s for sample in load.failures), default=0) < 1.0
    assert await ask(1)
    await mesh.wait_idle()


async def test_instances_named_one_by_one(tmp_path: Path) -> None:
    """static:// knows addresses alone: who is there, and whether memory is shared, comes out at hello."""
    write_chain(tmp_path, "adding", "add")
    ports = dict(zip(CHAIN, free_ports(3), strict=True))
    services = {}
    for name, service in chain_services(tmp_path).items():
        environ = {"TENSORLINE_LISTEN": f"127.0.0.1:{ports[name]}"}
        services[name] = Service(service.target, service.arguments, service.repositories, environ)
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports.values())
    async with (
        running_mesh(
            tmp_path,
            services=services,
            gateway_repositories=chain_repositories(tmp_path),
            extra_env={"TENSORLINE_DISCOVERY": f"static://{addresses}"},
        ) as mesh,
        mesh.stub() as stub,
    ):
        for size in SIZES:
            x = np.arange(size // 4, dtype=np.float32) % 1000
            np.testing.assert_array_equal((await infer(stub, "adding", x=x))["y"], x + 3)
        await mesh.kill("mid")
        found = await failure(stub.ModelInfer(request("adding", x=np.ones(1, np.float32))))
        assert found.code is StatusCode.UNAVAILABLE
        mesh.start("mid")
        await mesh.wait_ready()
        assert (await infer(stub, "adding", x=np.ones(1, np.float32)))["y"].tolist() == [4]
        await mesh.wait_idle()
