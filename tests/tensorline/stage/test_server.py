"""A stage behind a real server, and gateways that keep to the protocol."""

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack

import ml_dtypes
import numpy as np
import pytest
from grpc import StatusCode

from tensorline.errors import BackendError, InvalidTensorError, UnavailableError
from tensorline.rpc.frames import StageResult
from tensorline.stage.backend import Batch
from tensorline.tensor import Array, Handle, Tensor, datatype_of
from tests.leaks import no_leaks
from tests.tensorline.stage.pair import MIB, Caller, Model, Stage, config, open_caller, open_stage, tensor, until

pytestmark = pytest.mark.usefixtures("one_loop")

BIG = 50_000
"""Elements that do not travel inline."""
NEAR_AND_FAR = ["lane", "stream", "far"]


def status(code: StatusCode) -> int:
    number: int = code.value[0]
    return number


def floats(*shape: int) -> Array:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


class Gate:
    """A model that waits to be let through, and notes who ran and who was cancelled meanwhile."""

    def __init__(self) -> None:
        self.entered = 0
        self.cancelled = 0
        self.let = threading.Event()

    def __call__(self, batch: Batch) -> Mapping[str, Array]:
        self.entered += 1
        until_s = time.monotonic() + 5
        while not self.let.is_set() and time.monotonic() < until_s:
            if batch.is_cancelled():
                self.cancelled += 1
                break
            time.sleep(0.001)
        out = batch.empty("y", "FP32", (BIG,))
        out[:] = 1
        return {"y": out}


def double(batch: Batch) -> Mapping[str, Array]:
    x = batch.inputs["x"].astype(np.float32)
    if x.size and x.flat[0] < 0:
        raise InvalidTensorError("x is negative")
    out = batch.empty("y", "FP32", x.shape)
    np.multiply(x, 2, out=out)
    return {"y": out}


def sized(batch: Batch) -> Mapping[str, Array]:
    """As many bytes as asked for."""
    return {"y": np.full(int(batch.inputs["n"].astype(np.int64)[0]), 7, np.uint8)}


def raising(batch: Batch) -> Mapping[str, Array]:
    raise BackendError("\ud800\x1b" + "x" * 10_000_000)


ECHO = {
    datatype: Model(f'backend: "identity"\n{config({"x": datatype}, {"y": datatype})}')
    for datatype in ("FP32", "BYTES", "BF16", "INT64")
}


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def stage(gate: Gate, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    models = {
        **{f"echo_{datatype}": model for datatype, model in ECHO.items()},
        "double": Model(config({"x": "FP32"}, {"y": "FP32"}), run=double),
        "rows": Model(
            config(
                {"x": "FP32"}, {"y": "FP32"}, rows=8, more="dynamic_batching { max_queue_delay_microseconds: 5000 }"
            ),
            run=double,
        ),
        "gate": Model(config({"x": "FP32"}, {"y": "FP32"}), run=gate),
        "sized": Model(config({"n": "INT64"}, {"y": "UINT8"}), run=sized),
        "raising": Model(config({"x": "FP32"}, {"y": "FP32"}), run=raising),
    }
    async with open_stage(models, has_lane=getattr(request, "param", True)) as stage:
        yield stage
        gate.let.set()


@pytest.fixture(params=NEAR_AND_FAR)
async def caller(gate: Gate, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Stage, Caller]]:
    models = {f"echo_{datatype}": model for datatype, model in ECHO.items()} | {
        "double": Model(config({"x": "FP32"}, {"y": "FP32"}), run=double),
        "sized": Model(config({"n": "INT64"}, {"y": "UINT8"}), run=sized),
    }
    async with (
        open_stage(models, has_lane=request.param == "lane") as stage,
        open_caller(stage, is_near=request.param != "far") as caller,
    ):
        yield stage, caller


# ---- near and far


@pytest.mark.parametrize(
    "array",
    [
        np.array([b"a\0b", b"\0\0", b"", b"\xff\xfe\x00", "café".encode()], np.object_),
        np.array([b"x" * 3_000_000, b"y" * 100_000], np.object_),
        np.array([0x3F81], np.uint16).view(ml_dtypes.bfloat16),
        np.array([2**63 - 1, -(2**63), 2**53 + 1], np.int64),
        floats(0),
        floats(BIG),
        floats(2 * MIB),
    ],
    ids=["bytes", "big bytes", "BF16", "INT64", "empty", "big", "8 MiB"],
)
async def test_tensors_come_back_as_they_were(caller: tuple[Stage, Caller], array: Array) -> None:
    stage, gateway = caller
    sent = tensor("x", array)
    if gateway.connection.is_colocated and sent.byte_size > 4096:
        sent = gateway.place("x", array)
    result = await gateway.call(f"echo_{datatype_of(array.dtype)}", sent)
    back = gateway.read(result)["y"]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes() if array.dtype != np.object_ else back.tolist() == array.tolist()
    assert stage.arena.leases == 0


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, MIB - 1, MIB, MIB + 1, 5 * MIB + 3])
async def test_results_of_every_size_arrive(caller: tuple[Stage, Caller], size: int) -> None:
    stage, gateway = caller
    result = await gateway.call("sized", tensor("n", np.array([size], np.int64)))
    is_handle = result.outputs[0].handle is not None
    assert is_handle == (gateway.connection.is_colocated and size > 4096)
    assert stage.arena.leases == is_handle
    assert (gateway.read(result)["y"] == np.full(size, 7, np.uint8)).all()
    await until(lambda: stage.arena.leases == 0)


async def test_a_far_gateway_sees_no_handle_and_no_lane(stage: Stage) -> None:
    async with open_caller(stage, is_near=False) as far:
        assert not far.connection.is_colocated
        assert far.connection._lane_token == b""
        sent = [tensor("x", floats(MIB) + at) for at in range(3)]
        results = await asyncio.gather(*(far.call("double", each) for each in sent))
        for at, result in enumerate(results):
            assert result.outputs[0].handle is None
            assert (far.read(result)["y"] == (floats(MIB) + at) * 2).all()
        assert stage.arena.leases == 0


async def test_a_gateway_on_another_host_comes_by_tcp() -> None:
    models = {"double": Model(config({"x": "FP32"}, {"y": "FP32"}), run=double)}
    async with open_stage(models, listen="127.0.0.1:0") as stage:
        async with open_caller(stage, is_near=False, target=f"127.0.0.1:{stage.port}") as far:
            x = floats(MIB)
            assert (far.read(await far.call("double", tensor("x", x)))["y"] == x * 2).all()


async def test_a_near_gateway_gets_a_lane_once(stage: Stage) -> None:
    async with open_caller(stage) as near:
        assert len(near.connection._lane_token) == 16
        assert stage.end._offers == {}
        result = await near.call("double", near.place("x", floats(BIG)))
        assert result.outputs[0].handle is not None
        assert (near.read(result)["y"] == floats(BIG) * 2).all()


async def test_who_the_stage_is_and_what_it_serves(stage: Stage) -> None:
    async with open_caller(stage) as caller:
        assert caller.connection.instance_id == stage.identity.instance_id
        assert caller.connection.max_in_flight == 320
        assert [(m.name, m.version, m.state) for m in caller.models] == [
            (name, "1", "READY")
            for name in sorted([*(f"echo_{d}" for d in ECHO), "double", "gate", "raising", "rows", "sized"])
        ]
        stage.end.announce_models()
        await until(lambda: caller.told == 2)


@pytest.mark.parametrize(("expected_id", "reason"), [("model-x", "another instance answers at the registered address")])
async def test_a_gateway_that_looks_for_another_instance_leaves(stage: Stage, expected_id: str, reason: str) -> None:
    with pytest.raises(UnavailableError, match=reason):
        async with open_caller(stage, expected_id=expected_id):
            pass
    await until(lambda: stage.end.streams == 0)


# ---- every submission has one end


async def test_every_submission_ends_in_exactly_one_final_result(stage: Stage, gate: Gate) -> None:
    stale = Tensor("x", "FP32", (4,), None, Handle(b"?" * 16, 64, 128, 16, 1))
    async with open_caller(stage) as caller:
        calls = []
        for turn in range(60):
            calls += [
                caller.start("double", tensor("x", floats(3) + turn)),
                caller.start("double", tensor("x", floats(3) - 9)),
                caller.start("rows", tensor("x", floats(1, 3) + turn)),
                caller.start("none", tensor("x", floats(3))),
                caller.start("double", stale),
                caller.start("double", Tensor("x", "FP32", (4,), b"short")),
                caller.start("echo_FP32", tensor("x", floats(BIG))) if turn % 20 == 0 else caller.start("sized"),
            ]
            await asyncio.sleep(0)
        results = [await call.result() for call in calls]
        assert all(len(call.results) == 1 for call in calls)
        by_kind = [[result.status for result in results[at::7]] for at in range(6)]
        assert by_kind == [
            [0] * 60,
            [status(StatusCode.INVALID_ARGUMENT)] * 60,
            [0] * 60,
            [status(StatusCode.NOT_FOUND)] * 60,
            [status(StatusCode.UNAVAILABLE)] * 60,
            [status(StatusCode.INVALID_ARGUMENT)] * 60,
        ]
        assert caller.connection.in_flight == stage.end.in_flight == 0
        for result in results:
            if result.status == 0:
                caller.release(result)
        await until(lambda: stage.arena.leases == 0)


async def test_64_callers_each_get_their_own_rows(stage: Stage) -> None:
    async with AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(open_caller(stage, is_near=at < 2)) for at in range(3)]
        rng = np.random.default_rng(3)

        async def one(number: int) -> None:
            for turn in range(5):
                rows = int(rng.integers(1, 4))
                x = floats(rows, 2000) + number * 1_000 + turn
                caller = callers[number % 3]
                result = await caller.call("rows", tensor("x", x))
                assert (caller.read(result)["y"] == x * 2).all()

        async with asyncio.TaskGroup() as tasks:
            for number in range(64):
                tasks.create_task(one(number))
        assert len(stage.executed) == 320
        assert len(stage.executions) < 200
        assert max(stage.executions) <= 8
        await until(lambda: stage.arena.leases == 0)


async def test_what_a_result_says_of_itself(stage: Stage) -> None:
    async with open_caller(stage) as caller:
        before = time.monotonic_ns()
        result = await caller.call("double", tensor("x", floats(3)))
        timing = result.timing
        assert timing is not None
        phases = [timing.received, timing.queued, timing.batched, timing.input_ready, timing.computed]
        phases += [timing.output_ready, timing.sent]
        assert phases == sorted(phases)
        assert before < phases[0] < phases[-1] < time.monotonic_ns()
        assert (result.version, timing.instance, timing.batch_size) == ("1", "double_0", 1)


# ---- cancel and deadline


async def test_a_cancelled_request_that_waits_never_runs(stage: Stage, gate: Gate) -> None:
    async with open_caller(stage) as caller:
        first = caller.start("gate", tensor("x", floats(1)))
        await until(lambda: gate.entered)
        waiting = [caller.start("gate", tensor("x", floats(1))) for _ in range(5)]
        for call in waiting:
            caller.connection.cancel(call.number)
        await until(lambda: caller.connection.in_flight == 1)
        gate.let.set()
        caller.release(await first.result())
        assert gate.entered == 1
        assert [call.results for call in waiting] == [[]] * 5


async def test_a_cancelled_request_that_runs_hears_of_it_and_its_blocks_go_back(stage: Stage, gate: Gate) -> None:
    async with open_caller(stage) as caller:
        call = caller.start("gate", tensor("x", floats(1)))
        await until(lambda: gate.entered)
        asked = time.monotonic()
        caller.connection.cancel(call.number)
        await until(lambda: gate.cancelled == 1)
        assert time.monotonic() - asked < 2
        await until(lambda: caller.connection.in_flight == 0)
        await until(lambda: stage.arena.leases == 0)
        assert call.results == []


async def test_a_request_whose_deadline_has_passed_is_not_run(stage: Stage, gate: Gate) -> None:
    async with open_caller(stage) as caller:
        results = await asyncio.gather(
            *(caller.call("gate", tensor("x", floats(1)), timeout_s=left) for left in (1e-6, 0.0, -5.0) * 20)
        )
        assert {each.status for each in results} == {status(StatusCode.DEADLINE_EXCEEDED)}
        assert all(each.not_started for each in results)
        assert gate.entered == 0
        started = time.monotonic()
        assert (await caller.call("double", tensor("x", floats(1)), timeout_s=5)).status == 0
        assert time.monotonic() - started < 2


async def test_a_lease_ends_with_its_requests_deadline(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorline.stage.server.REST_S", 0.1)
    async with open_caller(stage) as caller:
        result = await caller.call("double", tensor("x", floats(BIG)), timeout_s=0.3)
        assert result.status == 0
        assert stage.arena.leases == 1
        await until(lambda: stage.arena.leases == 0, 3.0)


# ---- limits


async def test_a_gateway_beyond_its_share_is_refused_and_what_it_has_here_goes_on(gate: Gate) -> None:
    models = {"gate": Model(config({"x": "FP32"}, {"y": "FP32"}), run=gate)}
    async with open_stage(models, max_in_flight=4) as stage, open_caller(stage) as caller:
        assert caller.connection.max_in_flight == 4
        calls = [caller.start("gate", tensor("x", floats(1))) for _ in range(6)]
        assert not caller.connection.accepts
        refused = [await call.result() for call in calls[4:]]
        assert {each.error for each in refused} == {"4 requests of this gateway are already in flight here"}
        assert {(each.status, each.not_started) for each in refused} == {(status(StatusCode.UNAVAILABLE), True)}
        gate.let.set()
        for call in calls[:4]:
            caller.release(await call.result())
        assert caller.connection.accepts


async def test_a_full_queue_is_said(gate: Gate) -> None:
    models = {"gate": Model(config({"x": "FP32"}, {"y": "FP32"}), run=gate)}
    async with open_stage(models, max_queue=2) as stage, open_caller(stage) as caller:
        calls = [caller.start("gate", tensor("x", floats(1))) for _ in range(3)]
        refused = await caller.call("gate", tensor("x", floats(1)))
        assert (refused.status, refused.error) == (
            status(StatusCode.UNAVAILABLE),
            "Exceeds maximum queue size (2) of model 'gate'",
        )
        gate.let.set()
        for call in calls:
            caller.release(await call.result())


async def test_a_full_arena_is_said_and_over_when_there_is_room_again(gate: Gate) -> None:
    models = {"sized": Model(config({"n": "INT64"}, {"y": "UINT8"}), run=sized)}
    size = tensor("n", np.array([700_000], np.int64))
    async with open_stage(models, arena_bytes=MIB) as stage, open_caller(stage) as caller:
        held = await caller.call("sized", size)
        refused = await caller.call("sized", size)
        assert refused.status == status(StatusCode.RESOURCE_EXHAUSTED)
        assert refused.error.startswith("no room for 700000 bytes in shared memory: ")
        waiting = caller.start("sized", size)  # waits a while for what the gateway gives back
        await asyncio.sleep(0.05)
        caller.release(held)
        assert len(caller.read(await waiting.result())["y"]) == 700_000


@pytest.mark.parametrize("is_near", [True, False])
async def test_an_endless_error_text_fails_its_request_alone(stage: Stage, is_near: bool) -> None:
    async with open_caller(stage, is_near=is_near) as caller:
        bad = caller.start("raising", tensor("x", floats(1)))
        good = caller.start("double", tensor("x", floats(1)))
        result = await bad.result()
        assert result.status == status(StatusCode.INTERNAL)
        assert result.error.startswith("\\ud800\\u001bxxx")
        assert len(result.error) < 600
        assert (await good.result()).status == 0


async def test_a_result_over_the_gateways_inline_limit_fails_its_request_alone(stage: Stage) -> None:
    async with open_caller(stage, is_near=False, inline_limit=2 * MIB) as caller:
        big = caller.start("sized", tensor("n", np.array([3 * MIB], np.int64)))
        good = caller.start("sized", tensor("n", np.array([MIB], np.int64)))
        assert (await big.result()).status == status(StatusCode.RESOURCE_EXHAUSTED)
        assert len(caller.read(await good.result())["y"]) == MIB


async def test_inputs_over_the_stages_inline_limit_fail_their_request_alone(gate: Gate) -> None:
    models = {"double": Model(config({"x": "FP32"}, {"y": "FP32"}), run=double)}
    async with open_stage(models, inline_limit=2 * MIB) as stage, open_caller(stage, is_near=False) as caller:
        big = caller.start("double", tensor("x", floats(MIB)))
        good = caller.start("double", tensor("x", floats(MIB // 4)))
        result = await big.result()
        assert result.status == status(StatusCode.RESOURCE_EXHAUSTED)
        assert result.error == f"inline tensors of {4 * MIB} bytes on one stream, at most {2 * MIB} are allowed"
        assert (caller.read(await good.result())["y"] == floats(MIB // 4) * 2).all()


async def test_a_bad_handle_fails_its_request_alone(stage: Stage) -> None:
    async with open_caller(stage) as caller:
        good = caller.place("x", floats(BIG))
        assert good.handle is not None
        at = good.handle
        bad = [
            at._replace(arena=b""),
            at._replace(arena=b"/../../etc/passw"),
            at._replace(arena=b"x" * 40),
            at._replace(block=at.block + 64),
            at._replace(block=at.block + 1),
            at._replace(block=0),
            at._replace(block=(1 << 64) - 64, offset=(1 << 64) - 1),
            at._replace(offset=at.offset - 64),
            at._replace(offset=at.offset + 64),
            at._replace(offset=(1 << 64) - 1, length=1),
            at._replace(generation=at.generation + 1),
            at._replace(generation=0),
        ]
        for handle in bad:
            result = await caller.call("double", good._replace(handle=handle))
            assert result.status == status(StatusCode.UNAVAILABLE), handle
            assert result.error == "a tensor in shared memory is no longer there"
        longer = await caller.call("double", good._replace(handle=at._replace(length=at.length - 4)))
        assert longer.status == status(StatusCode.INVALID_ARGUMENT)
        caller.arena.release(at.block, at.generation)
        assert (await caller.call("double", good)).status == status(StatusCode.UNAVAILABLE)
        assert (await caller.call("double", caller.place("x", floats(BIG)))).status == 0


# ---- the end


async def test_a_draining_stage_finishes_what_it_has_takes_no_more_and_ends_the_stream(
    stage: Stage, gate: Gate
) -> None:
    async with open_caller(stage) as near, open_caller(stage, is_near=False) as far:
        calls = [(caller, caller.start("gate", tensor("x", floats(1)))) for caller in (near, far)]
        await until(lambda: stage.end.in_flight == 2)
        stage.end.drain()
        for caller in (near, far):
            await until(lambda caller=caller: caller.connection.is_draining)  # type: ignore[misc]
            assert not caller.connection.accepts
            refused = await caller.call("double", tensor("x", floats(1)))
            assert (refused.status, refused.not_started) == (status(StatusCode.UNAVAILABLE), True)
            assert refused.error == "the stage is shutting down: it takes no new requests"
        async with open_caller(stage) as late:
            assert late.connection.is_draining
        gate.let.set()
        for caller, call in calls:
            assert (caller.read(await call.result())["y"] == 1).all()
        await until(lambda: stage.arena.leases == 0)
        stage.end.end_streams()
        for caller in (near, far):
            assert caller.ended is not None
            await asyncio.wait_for(caller.ended, 1.0)
        assert stage.end.streams == 0


async def test_results_that_are_on_their_way_come_before_the_end(stage: Stage) -> None:
    for is_near in (True, False):
        async with open_caller(stage, is_near=is_near) as caller:
            calls = [caller.start("sized", tensor("n", np.array([4000], np.int64))) for _ in range(100)]
            await until(lambda: stage.end.in_flight)
            await until(lambda: stage.end.in_flight == 0)
            stage.end.end_streams()
            time.sleep(0.05)  # noqa: ASYNC251 - the gateway's loop stands still meanwhile: it is this one
            assert {(await call.result()).status for call in calls} == {0}


async def test_a_gateway_that_leaves_gives_back_all_it_held_and_harms_nobody(stage: Stage, gate: Gate) -> None:
    threads = {thread.ident for thread in threading.enumerate() if thread.name.startswith("instance-")}
    async with open_caller(stage) as stays:
        kept = await stays.call("double", tensor("x", floats(BIG)))
        async with open_caller(stage) as leaves:
            for _ in range(5):
                assert (await leaves.call("double", tensor("x", floats(BIG)))).status == 0
            running = leaves.start("gate", tensor("x", floats(1)))
            waiting = leaves.start("gate", tensor("x", floats(1)))
            await until(lambda: gate.entered)
            assert stage.arena.leases == 6
        results = [call.results[0] for call in (running, waiting)]
        assert [(each.status, each.final) for each in results] == [(status(StatusCode.UNAVAILABLE), True)] * 2
        await until(lambda: gate.cancelled == 1)
        await until(lambda: stage.arena.leases == 1)
        assert gate.entered == 1
        assert stage.end.streams == 1
        assert (stays.read(kept)["y"] == floats(BIG) * 2).all()
        gate.let.set()
        for model in ("gate", "double"):
            stays.release(await stays.call(model, tensor("x", floats(2))))
    alive = {thread.ident for thread in threading.enumerate() if thread.name.startswith("instance-")}
    assert alive == threads


async def test_a_stage_that_goes_fails_what_is_pending(gate: Gate) -> None:
    models = {"gate": Model(config({"x": "FP32"}, {"y": "FP32"}), run=gate)}
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(open_stage(models, drain_s=0.01))
        caller = await stack.enter_async_context(open_caller(stage))
        calls = [caller.start("gate", tensor("x", floats(1))) for _ in range(3)]
        await until(lambda: gate.entered)
        stage.end.end_streams()
        results: list[StageResult] = [await call.result() for call in calls]
        assert [each.status for each in results] == [status(StatusCode.UNAVAILABLE)] * 3
        assert {each.error for each in results} == {"the stage that ran it is gone"}
        gate.let.set()
        await until(lambda: stage.arena.leases == 0)


async def test_gateways_come_and_go_while_one_works(stage: Stage) -> None:
    async with open_caller(stage) as works:

        async def come_and_go() -> None:
            for turn in range(8):
                async with open_caller(stage, is_near=turn % 2 == 0) as other:
                    other.start("double", tensor("x", floats(BIG)))
                    other.start("rows", tensor("x", floats(1, 3000)))
                    await asyncio.sleep(0.005)

        going = asyncio.create_task(come_and_go())
        count = 0
        while not going.done():
            x = floats(1, 3000) + count
            result = await works.call("rows", tensor("x", x))
            assert (works.read(result)["y"] == x * 2).all()
            count += 1
        await going
        assert count > 5
        await until(lambda: stage.arena.leases == 0)


async def test_nothing_is_left_of_gateways_and_their_requests(stage: Stage, gate: Gate) -> None:
    async def once(is_near: bool) -> None:
        async with open_caller(stage, is_near=is_near) as caller:
            calls = [caller.start("double", tensor("x", floats(BIG) + at)) for at in range(10)]
            calls += [caller.start("rows", tensor("x", floats(1, 3000))) for _ in range(10)]
            calls += [caller.start("none"), caller.start("double", tensor("x", floats(2) - 5))]
            for call in calls[::3]:
                caller.connection.cancel(call.number)
            for at, call in enumerate(calls):
                if at % 3:
                    await call.result()

    await once(True)
    async with no_leaks(stage.directory.path, [stage.arena]):
        for turn in range(6):
            await once(turn % 2 == 0)
