"""What befalls a mesh beside its processes dying: no memory, a frozen gateway, a registry that is torn away."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from grpc import StatusCode

from tests.e2e.client import Stub, failure, infer, outcome, request
from tests.e2e.load import running_load
from tests.e2e.mesh import ROOT, Mesh, running_mesh, until
from tests.e2e.models import chain_repositories, chain_services, model, write_chain

pytestmark = pytest.mark.slow

ONE = np.ones(1, np.float32)
MOUNT = 'mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm && echo mounted && exec "$@"'


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    root = tmp_path_factory.mktemp("repository")
    write_chain(root, "chain", "add")
    write_chain(root, "copying", parameters={"mode": "copy"})
    model(root / "mid", "die", "die")
    async with running_mesh(
        root,
        services=chain_services(root),
        gateway_repositories=chain_repositories(root),
        extra_env={"TENSORLINE_ARENA_BYTES": str(48 << 20)},
    ) as mesh:
        yield mesh


async def ask(stub: Stub, number: int) -> bool:
    x = np.arange(16 << 10, dtype=np.float32) + number
    return np.array_equal((await infer(stub, "chain", x=x))["y"], x + 3)


async def test_full_arenas(mesh: Mesh) -> None:
    """Ten requests of 10 MiB through copying steps, in arenas of 48 MiB: each waits its turn, or is refused in time."""
    async with mesh.stub() as stub:
        x = np.ones(10 << 18, np.float32)
        answers = await asyncio.gather(*(outcome(stub.ModelInfer(request("copying", x=x))) for _ in range(10)))
        refused = [answer for answer in answers if answer is not None]
        assert len(refused) < 10
        for each in refused:
            assert each.code is StatusCode.RESOURCE_EXHAUSTED
            assert each.took_s < 4.0
        assert await ask(stub, 1)
        await mesh.wait_idle()
        deadline = await asyncio.gather(
            *(outcome(stub.ModelInfer(request("copying", x=x), timeout=0.3)) for _ in range(10))
        )
        late = [each for each in deadline if each is not None]
        assert {each.code for each in late} <= {StatusCode.DEADLINE_EXCEEDED, StatusCode.RESOURCE_EXHAUSTED}
        assert all(each.took_s < 0.8 for each in late)
        assert await ask(stub, 2)
        await mesh.wait_idle()


async def test_a_request_that_kills_its_stage(mesh: Mesh) -> None:
    async with mesh.stub() as stub:
        found = await failure(stub.ModelInfer(request("die", x=np.full(1, 9, np.float32))))
        assert found.code is StatusCode.UNAVAILABLE
        assert found.text == "the instance of model 'die' that ran the request is gone"
        assert found.took_s < 1.0
        assert await mesh.wait_exit("mid") == -signal.SIGKILL
        mesh.start("mid")
        await mesh.wait_ready()
        assert (await infer(stub, "die", x=ONE))["y"] == 1


async def test_a_frozen_stage_without_a_twin(mesh: Mesh) -> None:
    """Nobody else can do its work: within five seconds that is said, and then at once."""
    async with mesh.stub() as stub:
        assert await ask(stub, 1)
        mesh.signal("mid", signal.SIGSTOP)
        waiting = await failure(stub.ModelInfer(request("die", x=ONE)))
        assert (waiting.code, waiting.text) == (
            StatusCode.UNAVAILABLE,
            "the instance of model 'die' that ran the request is gone",
        )
        assert waiting.took_s < 5.0
        found = await failure(stub.ModelInfer(request("chain", x=ONE)))
        assert (found.code, found.took_s < 0.2) == (StatusCode.UNAVAILABLE, True)
        assert "'chain_mid'" in found.text
        mesh.signal("mid", signal.SIGCONT)
        await mesh.wait_ready()
        assert await ask(stub, 2)
        await mesh.wait_idle()


async def test_a_frozen_gateway(mesh: Mesh) -> None:
    """The stages give back what it held; when it runs again, so does everything."""
    async with mesh.stub() as stub:
        assert await ask(stub, 1)
        flying = [asyncio.ensure_future(outcome(ask(stub, number))) for number in range(20)]
        await asyncio.sleep(0.005)
        mesh.signal("gateway", signal.SIGSTOP)
        await asyncio.sleep(6.5)
        mesh.signal("gateway", signal.SIGCONT)
        await mesh.wait_ready()
        await asyncio.gather(*flying)
        await until(lambda: answers(stub), 5.0)
        for number in range(20):
            assert await ask(stub, number)
        await mesh.wait_idle()


async def answers(stub: Stub) -> bool:
    return await outcome(ask(stub, 0)) is None


async def test_the_registry_is_torn_away(mesh: Mesh) -> None:
    async with mesh.stub() as stub:
        async with running_load(lambda number: ask(stub, number), 50.0) as load:
            await asyncio.sleep(0.5)
            shutil.rmtree(mesh.path / "registry")
            await asyncio.sleep(3.0)
        assert (load.failures, load.wrong) == ([], 0)
        assert len(list((mesh.path / "registry").glob("*.json"))) == 3  # each has put its own entry back
        await mesh.wait_instances(3)
        await mesh.wait_idle()


async def test_a_full_dev_shm(tmp_path: Path) -> None:  # E13
    command = ["unshare", "-m", "sh", "-c", MOUNT, "sh", sys.executable, "-m", "tests.e2e.full_tmpfs"]
    try:
        run = await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        mounted = run.stdout.startswith("mounted")
    except FileNotFoundError:
        mounted = False
    if not mounted and os.environ.get("CI") != "true":
        pytest.skip("needs unshare -m and the right to mount")
    assert mounted, "CI must be able to mount a tmpfs of its own"
    assert (run.stdout, run.returncode) == ("mounted\nalive\n", 0), run.stderr[-5000:]
