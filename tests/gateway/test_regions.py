"""Requests whose tensors are in their client's shared memory, through a gateway and a stage."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping

import numpy as np
import pytest

from gateway.operations.regions import SharedMemory
from gateway.plane import OFF_LOOP_BYTES
from gateway.settings import GatewaySettings
from tensorline.errors import (
    AlreadyExistsError,
    InternalError,
    InvalidTensorError,
    NotFoundError,
    TensorlineError,
    UnsupportedError,
)
from tensorline.protocol.infer import InferRequest, InferResponse, RegionUse, RequestedOutput
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.shm.regions import RegionSpec, Window
from tensorline.stage.backend import Batch
from tensorline.tensor import Array, Tensor, datatype_of, decode_bytes_tensor, encode_array
from tests.client_memory import SharedObject, shared_object
from tests.gateway.house import NO_TRACE, House, add, array, ensemble, open_house
from tests.gateway.streams import streamed
from tests.gateway.test_runner import Gate
from tests.tensorline.stage.pair import Model, config, until

pytestmark = pytest.mark.usefixtures("one_loop")

X = np.array([1, 2, 3], np.float32)
COUNTER = itertools.count()
CHAIN = ensemble("chain", ("one", {"x": "x"}, {"y": "y"}))
TEXTS = Model(config({"x": "BYTES"}, {"y": "BYTES"}) + '\nbackend: "identity"')
TWO = Model(
    config({"a": "FP32", "b": "FP32"}, {"y": "FP32"}),
    lambda batch: {"y": np.subtract(batch.inputs["a"], batch.inputs["b"])},
)


@contextlib.contextmanager
def client(house: House, content: bytes | int) -> Iterator[tuple[str, SharedObject]]:
    """A region of all of an object, by its name."""
    assert house.regions is not None
    name = f"region {next(COUNTER)}"
    with shared_object(content) as shared:
        house.regions.register(RegionSpec(name, shared.key, 0, shared.path.stat().st_size))
        yield name, shared
        house.regions.unregister(name)


async def ask(house: House, request: InferRequest, timeout_s: float = 5.0) -> InferResponse:
    return await house.service.infer(request, NO_TRACE, timeout_s, time.monotonic_ns(), "test/Infer")


def request(
    model: str,
    inputs: Mapping[str, RegionUse | Array],
    outputs: Mapping[str, RegionUse | None] | None = None,
    *,
    shape: tuple[int, ...] = (3,),
    datatype: str = "FP32",
) -> InferRequest:
    tensors = [
        Tensor(name, datatype, shape)
        if isinstance(given, RegionUse)
        else Tensor(name, datatype_of(given.dtype), given.shape, bytes(encode_array(given)))
        for name, given in inputs.items()
    ]
    uses = {name: given for name, given in inputs.items() if isinstance(given, RegionUse)}
    wanted = [RequestedOutput(name, region=region) for name, region in (outputs or {}).items()]
    return InferRequest(model, "", "7", tensors, wanted, regions=uses)


SIZES = [3, 1024, 1025, OFF_LOOP_BYTES // 4 - 1, OFF_LOOP_BYTES // 4, OFF_LOOP_BYTES + 3]


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("model", ["one", "chain"])
async def test_in_and_out_through_regions(model: str, count: int) -> None:
    x = np.random.default_rng(count).random(count, np.float32)
    async with open_house({"one": add(1)}, entries=[CHAIN]) as house:
        with client(house, b"pad" + x.tobytes()) as (source, _), client(house, x.nbytes + 8) as (target, shared):
            use, out = RegionUse(source, 3, x.nbytes), RegionUse(target, 4, x.nbytes + 4)
            answer = await ask(house, request(model, {"x": use}, {"y": out}, shape=(count,)))
            (y,) = answer.outputs
            assert (y.name, y.datatype, y.shape, y.data, y.handle) == ("y", "FP32", (count,), b"", None)
            assert answer.regions == {"y": out}
            assert shared.read(0, 4) == bytes(4)
            assert np.array_equal(np.frombuffer(shared.read(4, x.nbytes), np.float32), x + np.float32(1))
            assert shared.read(4 + x.nbytes) == bytes(4)
            in_band = await ask(house, request(model, {"x": use}, shape=(count,)))
            assert np.array_equal(array(in_band), x + np.float32(1))
            assert in_band.regions == {}
            out_only = await ask(house, request(model, {"x": x + 1}, {"y": out}))
            assert out_only.outputs[0].data == b""
            assert np.array_equal(np.frombuffer(shared.read(4, x.nbytes), np.float32), x + np.float32(2))
        await house.wait_nothing_held()


async def test_several_inputs_of_one_region_and_some_in_the_request() -> None:
    a, b = np.array([5, 6], np.float32), np.array([1, 2], np.float32)
    async with open_house({"two": TWO}) as house:
        with client(house, a.tobytes() + b.tobytes()) as (name, _):
            uses = {"a": RegionUse(name, 0, 8), "b": RegionUse(name, 8, 8)}
            assert array(await ask(house, request("two", uses, shape=(2,)))).tolist() == [4, 4]
            mixed: dict[str, RegionUse | Array] = {"a": a, "b": RegionUse(name, 0, 8)}
            assert array(await ask(house, request("two", mixed, shape=(2,)))).tolist() == [0, 0]
            into = {"y": RegionUse(name, 0, 16)}  # over its own inputs
            await ask(house, request("two", uses, into, shape=(2,)))
            assert array(await ask(house, request("two", uses, shape=(2,)))).tolist() == [3, 2]


@pytest.mark.parametrize("count", [1, 700, 30_000])
async def test_texts(count: int) -> None:
    raw = b"".join((at % 9).to_bytes(4, "little") + b"x" * (at % 9) for at in range(count))
    async with open_house({"texts": TEXTS}) as house:
        with client(house, raw) as (source, _), client(house, len(raw) + 1) as (target, shared):
            use, out = RegionUse(source, 0, len(raw)), RegionUse(target, 1, len(raw))
            await ask(house, request("texts", {"x": use}, {"y": out}, shape=(count,), datatype="BYTES"))
            assert shared.read(1) == raw
            assert len(decode_bytes_tensor(shared.read(1), (count,))) == count


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\1\0\0\0a", "expected 2 string elements for inference input 'x' for model 'texts', got 1"),
        (b"\1\0\0\0a" * 3, "unexpected number of string elements 3 .* expecting 2"),
        (b"\1\0\0\0a\1\0", "incomplete string length indicator .* expecting 4 bytes but only 2 bytes available"),
        (b"\1\0\0\0a\5\0\0\0a", "incomplete string data .* expecting string of length 5 but only 1 bytes available"),
    ],
)
async def test_texts_that_are_none(raw: bytes, text: str) -> None:
    async with open_house({"texts": TEXTS}) as house:
        with client(house, raw) as (name, _):
            wrong = request("texts", {"x": RegionUse(name, 0, len(raw))}, shape=(2,), datatype="BYTES")
            with pytest.raises(InvalidTensorError, match=text):
                await ask(house, wrong)
        await house.wait_nothing_held()


@pytest.mark.parametrize(
    ("use", "kind", "text"),
    [
        (RegionUse("nobody", 0, 12), NotFoundError, "Unable to find shared memory region: 'nobody'"),
        (RegionUse("", 12, 12), InvalidTensorError, "Invalid offset for shared memory region: '.*'"),
        (RegionUse("", -1, 12), InvalidTensorError, "Invalid offset for shared memory region: '.*'"),
        (RegionUse("", 2**63 - 1, 12), InvalidTensorError, "Invalid offset for shared memory region: '.*'"),
        (RegionUse("", 1, 12), InvalidTensorError, r"Invalid offset \+ byte size for shared memory region: '.*'"),
        (RegionUse("", 0, 0), InvalidTensorError, r"Invalid offset \+ byte size for shared memory region: '.*'"),
        (RegionUse("", 0, -12), InvalidTensorError, r"Invalid offset \+ byte size for shared memory region: '.*'"),
        (RegionUse("", 0, 2**63 - 1), InvalidTensorError, r"Invalid offset \+ byte size for shared memory region"),
        (RegionUse("", 0, 8), InvalidTensorError, "input byte size mismatch .* Expected 12, got 8"),
    ],
)
async def test_uses_that_are_refused(use: RegionUse, kind: type[TensorlineError], text: str) -> None:
    async with open_house({"one": add(1)}) as house:
        with client(house, 12) as (name, _):
            use = use._replace(region=use.region or name)
            with pytest.raises(kind, match=text):
                await ask(house, request("one", {"x": use}))
            if kind is NotFoundError or "Invalid offset" in text:
                with pytest.raises(kind, match=text):
                    await ask(house, request("one", {"x": X}, {"y": use}))
            assert house.regions is not None
            house.regions.unregister(name)
            assert house.regions.status("") == []  # nobody has it in use
        assert (house.limits.in_flight, house.limits.bytes_in_flight) == (0, 0)


async def test_an_output_without_room() -> None:
    async with open_house({"one": add(1)}) as house:
        with client(house, 64) as (name, shared):
            text = (
                r"shared memory size specified with the request for output 'y' \(11 bytes\) should be at least 12 bytes"
            )
            with pytest.raises(InternalError, match=text):
                await ask(house, request("one", {"x": X}, {"y": RegionUse(name, 0, 11)}))
            assert shared.read() == bytes(64)
            await ask(house, request("one", {"x": X}, {"y": RegionUse(name, 52, 12)}))
        await house.wait_nothing_held()


@pytest.mark.parametrize("count", [3, 5000, OFF_LOOP_BYTES])
async def test_an_object_that_shrinks_under_us(count: int) -> None:
    x = np.ones(count, np.float32)
    gate = Gate()
    async with open_house({"one": gate.model()}) as house:
        with client(house, x.tobytes()) as (source, shrinking), client(house, x.nbytes) as (target, other):
            use, out = RegionUse(source, 0, x.nbytes), RegionUse(target, 0, x.nbytes)
            shrinking.resize(x.nbytes - 1)
            with pytest.raises(InvalidTensorError, match="has been made shorter since"):
                await ask(house, request("one", {"x": use}, shape=(count,)))
            assert gate.came == 0
            flying = asyncio.create_task(ask(house, request("one", {"x": x}, {"y": out})))
            await until(lambda: gate.came == 1)
            other.resize(0)
            gate.open()
            with pytest.raises(InvalidTensorError, match="has been made shorter since"):
                await flying
            assert other.path.stat().st_size == 0
            assert array(await house.infer("one", X)).tolist() == [1, 2, 3]
        await house.wait_nothing_held()


async def test_unregistered_while_in_use() -> None:
    """E06."""
    gate = Gate()
    async with open_house({"one": gate.model()}) as house:
        table = house.regions
        assert table is not None
        with client(house, 12) as (name, shared):
            ask_again = request("one", {"x": X}, {"y": RegionUse(name, 0, 12)})
            flying = asyncio.create_task(ask(house, ask_again))
            await until(lambda: gate.came == 1)
            table.unregister(name)
            assert [spec.name for spec in table.status("")] == [name]
            with pytest.raises(NotFoundError):
                await ask(house, ask_again)
            gate.open()
            await flying
            assert shared.read() == X.tobytes()
            assert table.status("") == []


async def test_a_client_that_leaves_while_its_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread reads into is nobody else's until the thread is done, and its region stays open."""
    reading, go = threading.Event(), threading.Event()
    read_into = Window.read_into

    def slow(self: Window, target: memoryview) -> None:
        reading.set()
        go.wait(5)
        read_into(self, target)

    monkeypatch.setattr(Window, "read_into", slow)
    async with open_house({"one": add(1)}) as house:
        with client(house, OFF_LOOP_BYTES) as (name, _):
            shape = (OFF_LOOP_BYTES // 4,)
            flying = asyncio.create_task(
                ask(house, request("one", {"x": RegionUse(name, 0, OFF_LOOP_BYTES)}, shape=shape))
            )
            await until(reading.is_set)
            for _ in range(3):
                flying.cancel()
                await asyncio.sleep(0.01)
            assert not flying.done()
            assert house.arena.leases == 1
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await flying
            assert house.arena.leases == 0
        assert house.regions is not None
        assert house.regions.status("") == []


async def test_a_request_that_waits_for_room_holds_no_region_for_ever() -> None:
    async with open_house({"one": add(1)}, arena_bytes=1 << 20) as house:
        with client(house, 4 << 20) as (name, _):
            with pytest.raises(TensorlineError, match="no room for 4194304 bytes in shared memory"):
                await ask(house, request("one", {"x": RegionUse(name, 0, 4 << 20)}, shape=(1 << 20,)), timeout_s=0.2)
        assert house.regions is not None
        assert house.regions.status("") == []


async def test_what_is_read_counts_as_in_flight() -> None:
    async with open_house({"one": add(1)}, max_bytes=1000) as house:
        limits, seen = house.limits, []
        enter = limits.enter

        def note(byte_size: int) -> None:
            seen.append(byte_size)
            enter(byte_size)

        limits.enter = note  # type: ignore[method-assign]
        with client(house, 12) as (name, _):
            await ask(house, request("one", {"x": RegionUse(name, 0, 12)}))
        assert seen == [12]


def counting(batch: Batch) -> Iterator[Mapping[str, Array]]:
    """Three responses as large as x: x, x + 1, x + 2."""
    for number in range(3):
        yield {"y": np.add(batch.inputs["x"], np.float32(number))}


@pytest.mark.parametrize("count", [3, 5000])
async def test_streams_use_regions_too(count: int) -> None:
    """Each response takes the place of the one before, as the client that gave one place must know."""
    x = np.arange(count, dtype=np.float32)
    async with open_house({"one": add(1), "counting": streamed(counting)}, entries=[CHAIN]) as house:
        with client(house, x.tobytes()) as (source, _), client(house, x.nbytes) as (target, shared):
            use, out = RegionUse(source, 0, x.nbytes), RegionUse(target, 0, x.nbytes)
            for model, many in (("one", 1), ("chain", 1), ("counting", 3)):
                asked = request(model, {"x": use}, {"y": out}, shape=(count,))
                stream = house.service.infer_stream(asked, NO_TRACE, 5.0, time.monotonic_ns(), "test/Stream")
                seen = []
                async with contextlib.aclosing(stream) as responses:
                    async for response in responses:
                        if response.outputs:
                            assert (response.outputs[0].data, response.regions) == (b"", {"y": out})
                            seen.append(np.frombuffer(shared.read(), np.float32)[1])
                assert seen == ([1, 2, 3] if many == 3 else [2])
            assert house.regions is not None
            stream = house.service.infer_stream(
                request("counting", {"x": use}, {"y": out}, shape=(count,)),
                NO_TRACE,
                5.0,
                time.monotonic_ns(),
                "test/S",
            )
            async with contextlib.aclosing(stream) as responses:
                await anext(responses)
                house.regions.unregister(target)
                assert len(house.regions.status("")) == 2
            assert len(house.regions.status("")) == 1
        await house.wait_nothing_held()


def test_on_by_default_on_loopback_alone() -> None:
    assert GatewaySettings().allows_client_shm
    assert GatewaySettings(grpc_address="::1", http_address="localhost").allows_client_shm
    assert not GatewaySettings(grpc_address="0.0.0.0").allows_client_shm
    assert not GatewaySettings(http_address="::").allows_client_shm
    assert GatewaySettings(grpc_address="0.0.0.0", allow_client_shm=True).allows_client_shm
    assert not GatewaySettings(allow_client_shm=False).allows_client_shm


async def test_switched_off() -> None:
    async with open_house({"one": add(1)}, max_regions=0) as house:
        for asked in (
            request("one", {"x": RegionUse("r", 0, 12)}),
            request("one", {"x": X}, {"y": RegionUse("r", 0, 12)}),
        ):
            with pytest.raises(UnsupportedError, match=r"^Client shared memory is disabled$"):
                await ask(house, asked)


@pytest.fixture
async def operations() -> AsyncIterator[SharedMemory]:
    async with open_house() as house:
        yield SharedMemory(house.regions)


def registering(shared: SharedObject, name: str = "r", offset: int = 0) -> pb.SystemSharedMemoryRegisterRequest:
    return pb.SystemSharedMemoryRegisterRequest(name=name, key=shared.key, offset=offset, byte_size=8)


async def test_status_register_unregister(operations: SharedMemory) -> None:
    with shared_object(100) as shared:
        await operations.SystemSharedMemoryRegister(registering(shared, offset=5))
        await operations.SystemSharedMemoryRegister(registering(shared, ""))
        with pytest.raises(AlreadyExistsError, match="shared memory region 'r' already in manager"):
            await operations.SystemSharedMemoryRegister(registering(shared))
        answer = await operations.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())
        assert {*answer.regions} == {"r", ""}
        answer = await operations.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(name="r"))
        (region,) = answer.regions.values()
        assert (region.name, region.key, region.offset, region.byte_size) == ("r", shared.key, 5, 8)
        await operations.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name="r"))
        await operations.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name="r"))
        with pytest.raises(NotFoundError, match="Unable to find system shared memory region: 'r'"):
            await operations.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(name="r"))
        await operations.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
        assert not (await operations.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest())).regions
        assert shared.path.exists()


async def test_without_a_gpu(operations: SharedMemory) -> None:
    asked = pb.CudaSharedMemoryRegisterRequest(name="c", raw_handle=bytes(64), byte_size=8)
    with pytest.raises(UnsupportedError, match="failed to register shared memory region: invalid args"):
        await operations.CudaSharedMemoryRegister(asked)
    assert not (await operations.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest())).regions
    with pytest.raises(NotFoundError, match="Unable to find cuda shared memory region: 'c'"):
        await operations.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest(name="c"))
    await operations.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest(name="c"))
    await operations.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest())


async def test_operations_that_are_switched_off() -> None:
    off = SharedMemory(None)
    for call in (
        off.SystemSharedMemoryRegister(pb.SystemSharedMemoryRegisterRequest(name="r")),
        off.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest()),
        off.CudaSharedMemoryRegister(pb.CudaSharedMemoryRegisterRequest(name="r")),
        off.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest()),
    ):
        with pytest.raises(UnsupportedError, match=r"^Client shared memory is disabled$"):
            await call
    assert not (await off.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(name="r"))).regions
    assert not (await off.CudaSharedMemoryStatus(pb.CudaSharedMemoryStatusRequest(name="r"))).regions
