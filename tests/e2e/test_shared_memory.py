"""Clients' shared memory with the published client and perf_analyzer, against a gateway of two workers."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
import tritonclient.utils as triton_utils
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from tensorline.tensor import Array
from tests.e2e.mesh import STAGES, Mesh, Service, running_mesh, until
from tests.e2e.models import ensemble, model
from tests.perf_analyzer import run_perf_analyzer

WORKERS = 2
CONNECTIONS = 64
"""At most, until each worker has had one."""
BIG = 1 << 19


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    root = tmp_path_factory.mktemp("repository")
    model(root, "ident", "identity")
    model(root, "texts", "identity", datatype="BYTES")
    model(root, "sum", "add", inputs=("a", "b"), parameters={"by": "0"})
    model(root, "slow", "slow", datatype="INT32", dims="1")
    model(root, "fixed", "identity", dims="16", batch=8)
    ensemble(root, "chain", [("ident", {"x": "x"}, {"y": "a"}), ("ident", {"x": "a"}, {"y": "y"})])
    async with running_mesh(root, services={"one": Service(STAGES, ("one",))}, workers=WORKERS) as mesh:
        yield mesh


@asynccontextmanager
async def open_client(mesh: Mesh) -> AsyncIterator[Any]:
    """On a connection of its own: the kernel gives it to one of the workers."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    client = triton_aio.InferenceServerClient(mesh.target, channel_args=options)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[Any]:
    async with open_client(mesh) as client:
        yield client
        await client.unregister_system_shared_memory()


@contextmanager
def made(byte_size: int) -> Iterator[tuple[Any, str]]:
    """An object of the published client's making, and its key."""
    key = f"/tl-e2e-{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region("region", key, byte_size, create_only=True)
    try:
        yield handle, key
    finally:
        shm.destroy_shared_memory_region(handle)


@contextmanager
def made_again(path: str) -> Iterator[None]:
    """Another object under a name that has become free."""
    Path(path).write_bytes(bytes(8))
    yield
    Path(path).unlink()


def placed(name: str, shape: tuple[int, ...], datatype: str, region: str, byte_size: int, offset: int = 0) -> Any:
    tensor = triton.InferInput(name, list(shape), datatype)
    tensor.set_shared_memory(region, byte_size, offset)
    return tensor


def wanted(name: str, region: str, byte_size: int, offset: int = 0) -> Any:
    output = triton.InferRequestedOutput(name)
    output.set_shared_memory(region, byte_size, offset)
    return output


def in_band(name: str, array: Array, datatype: str = "FP32") -> Any:
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def workers(mesh: Mesh) -> list[psutil.Process]:
    return psutil.Process(mesh.pid("gateway")).children()


def having_open(mesh: Mesh, key: str) -> int:
    """In how many workers."""
    found = 0
    for process in workers(mesh):
        folder = Path(f"/proc/{process.pid}/fd")
        targets = []
        for descriptor in folder.iterdir():
            try:
                targets.append(os.readlink(descriptor))
            except FileNotFoundError:
                continue
        found += any(target.split(" ")[0] == f"/dev/shm{key}" for target in targets)
    return found


async def refusal(call: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        await call
    return str(caught.value.status()), str(caught.value.message())


@pytest.mark.parametrize("name", ["ident", "chain"])
@pytest.mark.parametrize("count", [4, BIG])
async def test_in_and_out(client: Any, name: str, count: int) -> None:
    x = np.random.default_rng(1).random(count, np.float32)
    with made(x.nbytes) as (source, source_key), made(x.nbytes) as (target, target_key):
        shm.set_shared_memory_region(source, [x])
        await client.register_system_shared_memory("in", source_key, x.nbytes)
        await client.register_system_shared_memory("out", target_key, x.nbytes)
        inputs = [placed("x", x.shape, "FP32", "in", x.nbytes)]
        answer = await client.infer(name, inputs, outputs=[wanted("y", "out", x.nbytes)])
        y = answer.get_output("y")
        assert (y.datatype, list(y.shape)) == ("FP32", [count])
        assert np.array_equal(shm.get_contents_as_numpy(target, np.float32, [count]), x)
        assert np.array_equal((await client.infer(name, inputs)).as_numpy("y"), x)


async def test_a_region_is_every_workers(mesh: Mesh, client: Any) -> None:
    x = np.arange(4, dtype=np.float32)
    assert len(workers(mesh)) == WORKERS
    with made(2 * x.nbytes) as (handle, key):
        shm.set_shared_memory_region(handle, [x])
        await client.register_system_shared_memory("shared", key, 2 * x.nbytes)
        for _ in range(CONNECTIONS):
            async with open_client(mesh) as other:
                inputs = [placed("x", x.shape, "FP32", "shared", x.nbytes)]
                await other.infer("ident", inputs, outputs=[wanted("y", "shared", x.nbytes, x.nbytes)])
                assert len((await other.get_system_shared_memory_status()).regions) == 1
            if having_open(mesh, key) == WORKERS:
                break
        else:
            raise AssertionError("one worker got no connection")
        assert shm.get_contents_as_numpy(handle, np.float32, [8]).tolist() == [0, 1, 2, 3] * 2
        async with open_client(mesh) as other:
            await other.unregister_system_shared_memory("shared")
        await until(lambda: having_open(mesh, key) == 0)


async def test_texts(client: Any) -> None:
    texts = np.array([b"", b"a", "ö".encode(), bytes(range(256))], dtype=object)
    raw = triton_utils.serialize_byte_tensor(texts)
    size = triton_utils.serialized_byte_size(raw)
    with made(2 * size) as (handle, key):
        shm.set_shared_memory_region(handle, [raw])
        await client.register_system_shared_memory("texts", key, 2 * size)
        inputs = [placed("x", texts.shape, "BYTES", "texts", size)]
        await client.infer("texts", inputs, outputs=[wanted("y", "texts", size, size)])
        assert shm.get_contents_as_numpy(handle, np.object_, [4], size).tolist() == texts.tolist()
        assert (await client.infer("texts", inputs)).as_numpy("y").tolist() == texts.tolist()


async def test_several_regions_and_some_in_band(client: Any) -> None:
    a, b = np.array([1, 2], np.float32), np.array([10, 20], np.float32)
    with made(8) as (one, one_key), made(72) as (two, two_key):
        shm.set_shared_memory_region(one, [a])
        shm.set_shared_memory_region(two, [b], offset=64)
        await client.register_system_shared_memory("one", one_key, 8)
        await client.register_system_shared_memory("two", two_key, 8, offset=64)  # no whole pages: Triton refuses it
        both = [placed("a", (2,), "FP32", "one", 8), placed("b", (2,), "FP32", "two", 8)]
        assert (await client.infer("sum", both)).as_numpy("y").tolist() == [11, 22]
        mixed = [placed("a", (2,), "FP32", "one", 8), in_band("b", b * 2)]
        assert (await client.infer("sum", mixed)).as_numpy("y").tolist() == [21, 42]
        mixed = [in_band("a", a * 2), placed("b", (2,), "FP32", "two", 8)]
        assert (await client.infer("sum", mixed)).as_numpy("y").tolist() == [12, 24]


async def test_registration_and_its_bounds(mesh: Mesh, client: Any) -> None:
    """E08, I03."""
    before = [process.pid for process in workers(mesh)]
    register = client.register_system_shared_memory
    with made(4096) as (_, key):
        for bad in (f"/../dev/shm{key}", f"{mesh.directory.name}", f"/{mesh.directory.name}/mesh", "/", ".."):
            status, _ = await refusal(register("bad", bad, 1))
            assert status == "StatusCode.INVALID_ARGUMENT", bad
        for file in (mesh.path.relative_to("/dev/shm") / name for name in mesh.shared_files()):
            assert (await refusal(register("bad", f"/{file}", 1)))[0] == "StatusCode.INVALID_ARGUMENT"
        status, text = await refusal(register("bad", "/tl-nobody", 1))
        assert (status, text) == ("StatusCode.INTERNAL", "Unable to open shared memory region: '/tl-nobody'")
        for size, offset in ((4097, 0), (4096, 1), (2**64 - 1, 2), (2, 2**64 - 1), (2**63, 2**63)):
            status, text = await refusal(register("bad", key, size, offset))
            assert status == "StatusCode.INVALID_ARGUMENT"
            assert text.startswith("failed to register shared memory region 'bad': invalid args")
        assert (await refusal(register("bad", key, 0)))[0] == "StatusCode.INVALID_ARGUMENT"
        await register("with", key, 4096)
        await register("without", key.lstrip("/"), 4000, 64)
        status, text = await refusal(register("with", key, 1))
        assert (status, text) == (
            "StatusCode.ALREADY_EXISTS",
            "shared memory region 'with' already in manager",
        )
        answer = await client.get_system_shared_memory_status(as_json=True)
        assert answer["regions"]["with"] == {"name": "with", "key": key, "byte_size": "4096"}
        assert answer["regions"]["without"]["offset"] == "64"
        for offset in (4096, 2**63 - 1, -1):
            status, text = await refusal(client.infer("ident", [placed("x", (1,), "FP32", "with", 4, offset)]))
            assert status == "StatusCode.INVALID_ARGUMENT"
            assert text.startswith("Invalid offset for shared memory region: 'with'")
    assert [process.pid for process in workers(mesh)] == before


async def test_an_object_that_shrinks_or_is_another(client: Any) -> None:
    x = np.ones(BIG, np.float32)
    with made(x.nbytes) as (handle, key):
        path, away = f"/dev/shm{key}", f"/dev/shm{key}-away"
        shm.set_shared_memory_region(handle, [x])
        await client.register_system_shared_memory("r", key, x.nbytes)
        ask = [placed("x", x.shape, "FP32", "r", x.nbytes)]
        os.truncate(path, 100)
        status, text = await refusal(client.infer("ident", ask))
        assert (status, "has been made shorter since" in text) == ("StatusCode.INVALID_ARGUMENT", True)
        outputs = [wanted("y", "r", x.nbytes)]
        assert (await refusal(client.infer("ident", [in_band("x", x)], outputs=outputs)))[0] == status
        assert os.stat(path).st_size == 100
        os.truncate(path, x.nbytes)
        os.rename(path, away)
        try:
            with made_again(path):  # the region stays the object that was registered
                assert (await client.infer("ident", ask)).as_numpy("y")[25:].tolist() == [0] * (BIG - 25)
        finally:
            os.rename(away, path)


async def test_unregistered_while_in_use(mesh: Mesh, client: Any) -> None:
    """E06."""
    ms = np.array([1000], np.int32)
    with made(4) as (handle, key):
        await client.register_system_shared_memory("r", key, 4)
        outputs = [wanted("y", "r", 4)]
        flying = asyncio.create_task(client.infer("slow", [in_band("x", ms, "INT32")], outputs=outputs))

        async def is_in_use() -> bool:
            return bool((await mesh.metrics())["tensorline_in_flight"])

        await until(is_in_use)
        async with open_client(mesh) as other:
            await other.unregister_system_shared_memory("r")
            assert list((await other.get_system_shared_memory_status()).regions) == ["r"]
            refused = other.infer("slow", [in_band("x", ms, "INT32")], outputs=outputs)
            assert (await refusal(refused))[0] == "StatusCode.NOT_FOUND"
            await flying
            assert shm.get_contents_as_numpy(handle, np.int32, [1]).tolist() == [1000]

            async def is_gone() -> bool:
                return not (await other.get_system_shared_memory_status()).regions

            await until(is_gone, 1.0)
        await until(lambda: having_open(mesh, key) == 0)


async def test_a_worker_that_is_killed_loses_no_region(mesh: Mesh, client: Any) -> None:
    x = np.arange(4, dtype=np.float32)
    with made(x.nbytes) as (handle, key):
        shm.set_shared_memory_region(handle, [x])
        await client.register_system_shared_memory("r", key, x.nbytes)
        mesh.expected.append('"gateway worker ended"')
        before = {process.pid for process in workers(mesh)}
        for pid in before:
            os.kill(pid, 9)
        await until(lambda: len({process.pid for process in workers(mesh)} - before) == WORKERS, 20.0)
        await mesh.wait_ready()
        async with open_client(mesh) as other:
            ask = [placed("x", x.shape, "FP32", "r", x.nbytes)]
            assert (await other.infer("ident", ask)).as_numpy("y").tolist() == x.tolist()
            await other.unregister_system_shared_memory("r")


def over_http(mesh: Mesh, count: int) -> None:
    x = np.random.default_rng(2).random(count, np.float32)
    with (
        triton_http.InferenceServerClient(f"127.0.0.1:{mesh.http_port}") as client,
        made(2 * x.nbytes) as (handle, key),
    ):
        shm.set_shared_memory_region(handle, [x])
        client.register_system_shared_memory("http", key, 2 * x.nbytes)
        status = {"name": "http", "key": key, "offset": 0, "byte_size": 2 * x.nbytes}
        assert client.get_system_shared_memory_status() == [status]
        tensor = triton_http.InferInput("x", [count], "FP32")
        tensor.set_shared_memory("http", x.nbytes)
        output = triton_http.InferRequestedOutput("y")
        output.set_shared_memory("http", x.nbytes, x.nbytes)
        said = client.infer("ident", [tensor], outputs=[output]).get_output("y")
        assert (said["shape"], "data" in said) == ([count], False)
        assert np.array_equal(shm.get_contents_as_numpy(handle, np.float32, [count], x.nbytes), x)
        assert np.array_equal(client.infer("ident", [tensor]).as_numpy("y"), x)
        output.set_shared_memory("http", x.nbytes, x.nbytes + 1)
        with pytest.raises(InferenceServerException, match=r"Invalid offset [+] byte size for shared memory region"):
            client.infer("ident", [tensor], outputs=[output])
        client.unregister_system_shared_memory("http")
        assert client.get_system_shared_memory_status() == []


@pytest.mark.parametrize("count", [4, BIG])
async def test_over_http(mesh: Mesh, count: int) -> None:
    await asyncio.to_thread(over_http, mesh, count)


async def test_nothing_is_left(mesh: Mesh, client: Any) -> None:
    await mesh.wait_idle()
    assert not (await client.get_system_shared_memory_status()).regions


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("kind", ["none", "system"])
async def test_perf_analyzer(mesh: Mesh, tmp_path: Path, kind: str, protocol: str) -> None:
    # So many requests, and not until the latency is stable: on a busy machine it never is.
    options = ("--shared-memory", kind, "--concurrency-range", "4", "--request-count", "400")
    target = mesh.target if protocol == "grpc" else f"127.0.0.1:{mesh.http_port}"
    measured = await asyncio.to_thread(
        run_perf_analyzer, target, "fixed", tmp_path / "table.csv", *options, protocol=protocol
    )
    assert measured.requests_per_s > 0
    assert "Failed" not in measured.output
    await mesh.wait_idle()
