"""A loaded version under many requests: who gets what, in which batch, on which thread, and how it ends."""

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from grpc import StatusCode

from tensorline.config.load import config_from_text
from tensorline.errors import BackendError, InvalidTensorError, OverloadedError, UnavailableError
from tensorline.rpc.frames import StageResult
from tensorline.stage.backend import Batch, Instance
from tensorline.stage.execution import Executed
from tensorline.stage.version import ModelVersion
from tensorline.tensor import Array, Tensor
from tests.tensorline.stage.inner import Asked, Place, inline, open_place
from tests.tensorline.stage.pair import config, until

BATCHING = "dynamic_batching { }"
SOON_S = 2.0
CANCELLED, EXPIRED, UNAVAILABLE, INTERNAL = (
    status.value[0]
    for status in (
        StatusCode.CANCELLED,
        StatusCode.DEADLINE_EXCEEDED,
        StatusCode.UNAVAILABLE,
        StatusCode.INTERNAL,
    )
)


@pytest.fixture
def place(path: Path) -> Iterator[Place]:
    with open_place(path) as place:
        yield place


class Recording:
    """Passes `x` on as `y`; keeps what it ran and on which thread. `gate` holds it up; `started` counts what began."""

    def __init__(self, instant_bytes: int = 0) -> None:
        self.instant_bytes = instant_bytes
        self.batches: list[list[int]] = []
        self.threads: set[int] = set()
        self.closed_on: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.on_run: Callable[[Batch], None] = lambda batch: None

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        self.threads.add(threading.get_ident())
        self.batches.append([int(value) for value in batch.inputs["x"].reshape(-1)])
        self.gate.wait(10)
        self.on_run(batch)
        return {"y": batch.inputs["x"].copy()}

    def close(self) -> None:
        self.closed_on.append(threading.get_ident())


@dataclass
class Serving:
    version: ModelVersion
    executed: list[Executed] = field(default_factory=list)

    def send(self, *values: int, deadline_in: float | None = None) -> Asked:
        array = np.array(values, np.int64).reshape(-1, 1)
        asked = (
            Asked.of(inline("x", array))
            if deadline_in is None
            else Asked.of(inline("x", array), deadline=time.monotonic() + deadline_in)
        )
        self.version.submit(asked.request)
        return asked


@asynccontextmanager
async def serving(
    place: Place, *instances: Instance, rows: int = 8, more: str = BATCHING, max_queue: int = 1000
) -> AsyncIterator[Serving]:
    model = config_from_text(config({"x": "INT64"}, {"y": "INT64"}, rows=rows, more=f'backend: "b"\n{more}'), "m")
    executed: list[Executed] = []
    version = ModelVersion(
        model, 3, [(f"m_{at}", each) for at, each in enumerate(instances)], place.plane, max_queue, executed.append
    )
    try:
        yield Serving(version, executed)
    finally:
        await version.aclose(2.0)


@contextmanager
def held(*instances: Recording) -> Iterator[None]:
    for each in instances:
        each.gate.clear()
    try:
        yield
    finally:
        for each in instances:
            each.gate.set()


def values(result: StageResult) -> list[int]:
    assert result.status == 0, result.error
    (output,) = result.outputs
    assert output.data is not None
    return [int(value) for value in np.frombuffer(output.data, np.int64)]


async def test_everybody_gets_exactly_his_rows(place: Place) -> None:
    """Case B01: 64 clients, 2000 requests of 1 to 3 rows, each row a number of its own."""
    instances = [Recording(), Recording()]
    dice = random.Random(1)
    requests = iter([[3 * at + row for row in range(dice.randint(1, 3))] for at in range(2000)])
    async with serving(place, *instances) as stage:

        async def client() -> None:
            for numbers in requests:
                assert values(await stage.send(*numbers).result()) == numbers

        async with asyncio.TaskGroup() as clients:
            for _ in range(64):
                clients.create_task(client())
        ran = [batch for instance in instances for batch in instance.batches]
        assert len(ran) < 1000
        assert max(map(len, ran)) <= 8
        assert len(stage.executed) == 2000
        assert (stage.version.queued, stage.version.running) == (0, 0)


async def test_one_bad_row_fails_its_own_request(place: Place) -> None:
    """Case B02."""

    def refuse(batch: Batch) -> None:
        if (batch.inputs["x"].astype(np.int64) < 0).any():
            raise BackendError("bad row")

    instance = Recording()
    instance.on_run = refuse
    dice = random.Random(2)
    async with serving(place, instance) as stage:
        for _ in range(100):
            guilty = dice.randrange(8)
            with held(instance):
                first = stage.send(1000)
                asked = [stage.send(-5 if at == guilty else at) for at in range(8)]
            for at, one in enumerate(asked):
                result = await one.result()
                if at == guilty:
                    assert (result.status, result.error) == (INTERNAL, "bad row")
                else:
                    assert values(result) == [at]
            assert values(await first.result()) == [1000]


async def test_the_limit_counts_rows(place: Place) -> None:
    """Case B04."""
    instance = Recording()
    async with serving(place, instance) as stage:
        asked = [stage.send(*range(5 * at, 5 * at + 5)) for at in range(20)] + [stage.send(*range(8))]
        with pytest.raises(InvalidTensorError, match=r"batch-size must be <= 8 for 'm'.*9"):
            stage.send(*range(9))
        for at, one in enumerate(asked[:-1]):
            assert values(await one.result()) == list(range(5 * at, 5 * at + 5))
        assert values(await asked[-1].result()) == list(range(8))
    assert max(map(len, instance.batches)) == 8


async def test_rows_that_do_not_match_are_refused(place: Place) -> None:
    async with serving(place, Recording()) as stage:
        two, three, none = (inline(name, np.zeros(shape)) for name, shape in (("a", (2, 1)), ("b", (3, 1)), ("c", ())))
        with pytest.raises(InvalidTensorError, match="input 'b' batch size does not match other inputs for 'm'"):
            stage.version.submit(Asked.of(two, three).request)
        with pytest.raises(InvalidTensorError, match="input 'c'"):
            stage.version.submit(Asked.of(two, none).request)


async def test_other_shapes_do_not_stack(place: Place) -> None:
    instance = Recording()
    async with serving(place, instance) as stage:
        with held(instance):
            first = stage.send(0)
            wide = [Asked.of(inline("x", np.full((1, width), width, np.int64))) for width in (1, 2, 2, 1)]
            for each in wide:
                stage.version.submit(each.request)
        await first.result()
        assert [values(await each.result()) for each in wide] == [[1], [2, 2], [2, 2], [1]]
    assert instance.batches == [[0], [1], [2, 2, 2, 2], [1]]


@pytest.mark.parametrize(("rows", "more"), [(0, ""), (8, ""), (1, BATCHING)])
async def test_without_batching_requests_run_alone(place: Place, rows: int, more: str) -> None:
    instance = Recording()
    async with serving(place, instance, rows=rows, more=more) as stage:
        with held(instance):
            asked = [stage.send(at) for at in range(5)]
        assert [values(await one.result()) for one in asked] == [[at] for at in range(5)]
    assert instance.batches == [[at] for at in range(5)]


async def test_the_first_waits_for_company(place: Place) -> None:
    instance = Recording()
    async with serving(
        place, instance, rows=3, more="dynamic_batching { max_queue_delay_microseconds: 1000000 }"
    ) as stage:
        began = time.monotonic()
        asked = [stage.send(1)]
        await asyncio.sleep(0.02)
        asked.append(stage.send(2))
        await asked[0].result()
        waited = time.monotonic() - began
        await asked[1].result()
        full = [stage.send(at) for at in range(3)]
        await full[0].result()
        assert time.monotonic() - began - waited < 0.9  # a full batch waits for nothing
    assert instance.batches == [[1, 2], [0, 1, 2]]
    assert 0.95 < waited < 5.0


async def test_the_last_to_leave_does_not_keep_the_version_open(place: Place) -> None:
    instance = Recording()
    async with serving(place, instance, more="dynamic_batching { max_queue_delay_microseconds: 5000000 }") as stage:
        asked = stage.send(1)
        stage.version.cancel(asked.request)
        assert (await asked.result()).status == CANCELLED
        began = time.monotonic()
        await stage.version.aclose(3.0)
        assert time.monotonic() - began < SOON_S
    assert instance.batches == []


async def test_closing_does_not_wait_for_company(place: Place) -> None:
    instance = Recording()
    async with serving(place, instance, more="dynamic_batching { max_queue_delay_microseconds: 60000000 }") as stage:
        asked = stage.send(1)
        began = time.monotonic()
        await stage.version.aclose(1.0)
        assert time.monotonic() - began < SOON_S
        assert values(await asked.result()) == [1]


async def test_instances_run_side_by_side(place: Place) -> None:
    instances = [Recording() for _ in range(3)]
    meeting = threading.Barrier(3, timeout=5)

    def meet(batch: Batch) -> None:
        meeting.wait()

    for each in instances:
        each.on_run = meet
    async with serving(place, *instances, rows=1) as stage:
        asked = [stage.send(at) for at in range(3)]
        assert stage.version.running == 3
        for at, one in enumerate(asked):
            assert values(await one.result()) == [at]
    names = {one.result.timing.instance for one in stage.executed if one.result.timing is not None}
    assert names == {"m_0", "m_1", "m_2"}


async def test_what_is_instant_is_answered_in_the_same_turn(place: Place) -> None:
    instance = Recording(instant_bytes=16)
    async with serving(place, instance) as stage:
        small = stage.send(1, 2)
        assert values(small.results[0]) == [1, 2]
        big = stage.send(1, 2, 3)
        assert not big.results
        await big.result()
        assert len(instance.threads) == 2


async def test_times_follow_each_other(place: Place) -> None:
    instance = Recording()
    async with serving(place, instance) as stage:
        with held(instance):
            asked = [stage.send(at) for at in range(4)]
            await asyncio.sleep(0.01)
        results = [await one.result() for one in asked]
    ids = []
    for one in results:
        timing = one.timing
        assert timing is not None
        steps = [timing.queued, timing.batched, timing.input_ready, timing.computed, timing.output_ready]
        assert steps == sorted(steps)
        assert one.version == "3"
        ids.append((timing.batch_id, timing.batch_size))
    assert [size for _, size in ids] == [1, 3, 3, 3]
    assert len({number for number, _ in ids}) == 2


async def test_who_cancels_in_the_queue_is_answered_at_once_and_never_run(place: Place) -> None:
    instance = Recording()
    async with serving(place, instance) as stage:
        with held(instance):
            first, second = stage.send(1), stage.send(2)
            stage.version.cancel(second.request)
            (result,) = second.results
            stage.version.cancel(second.request)
        assert (result.status, result.not_started) == (CANCELLED, True)
        await first.result()
    assert instance.batches == [[1]]


async def test_a_running_batch_hears_that_all_have_left(place: Place) -> None:
    said: list[bool] = []
    half, heard = threading.Event(), threading.Event()

    def listen(batch: Batch) -> None:
        if batch.rows == 2:
            half.wait(5)
            said.append(batch.is_cancelled())
            heard.set()
            ends = time.monotonic() + 5
            while not batch.is_cancelled() and time.monotonic() < ends:
                time.sleep(0.002)
            said.append(batch.is_cancelled())

    instance = Recording()
    instance.on_run = listen
    async with serving(place, instance) as stage:
        with held(instance):
            blocking = stage.send(0)
            asked = [stage.send(1), stage.send(2)]
        await blocking.result()
        await until(lambda: instance.batches == [[0], [1, 2]])
        stage.version.cancel(asked[0].request)
        half.set()
        await until(heard.is_set)
        stage.version.cancel(asked[1].request)
        assert [values(await one.result(1.0)) for one in asked] == [[1], [2]]
    assert said == [False, True]


async def test_an_idle_instance_keeps_nothing_of_its_last_batch(place: Place) -> None:
    async def call(version: ModelVersion) -> Callable[[], object]:
        array = np.zeros(8, np.uint8)
        asked = Asked.of(Tensor("x", "INT64", (1, 1), array.data))
        version.submit(asked.request)
        await asked.result()
        return weakref.ref(array)

    async with serving(place, Recording()) as stage:
        kept = await call(stage.version)
        stage.executed.clear()
        await until(lambda: gc.collect() < 0 or kept() is None)


async def test_what_has_expired_is_not_run(place: Place) -> None:
    instance = Recording()
    async with serving(place, instance) as stage:
        late = stage.send(7, deadline_in=-1.0)
        assert (await late.result()).status == EXPIRED
        with held(instance):
            first, second = stage.send(1), stage.send(2, deadline_in=0.01)
            await asyncio.sleep(0.02)
        result = await second.result()
        assert (result.status, result.not_started) == (EXPIRED, True)
        await first.result()
    assert instance.batches == [[1]]


async def test_a_full_queue_refuses_at_once(place: Place) -> None:
    instance = Recording()
    more = "dynamic_batching { default_queue_policy { max_queue_size: 4 } }"
    async with serving(place, instance, more=more) as stage:
        with held(instance):
            asked = [stage.send(at) for at in range(5)]
            for _ in range(15):
                with pytest.raises(OverloadedError, match=r"Exceeds maximum queue size \(4\) of model 'm'"):
                    stage.send(9)
            assert (stage.version.queued, stage.version.running) == (4, 1)
        assert [values(await one.result()) for one in asked] == [[at] for at in range(5)]


async def test_closing_lets_finish_what_is_here(place: Place) -> None:
    instances = [Recording(), Recording()]
    async with serving(place, *instances, rows=1) as stage:
        with held(*instances):
            asked = [stage.send(at) for at in range(6)]
            closing = asyncio.ensure_future(stage.version.aclose(5.0))
            await asyncio.sleep(0.01)
            with pytest.raises(UnavailableError, match="model 'm' version 3 is not at ready state"):
                stage.send(9)
            assert not closing.done()
        await closing
        assert [values(one.results[0]) for one in asked] == [[at] for at in range(6)]
    for each in instances:
        assert each.closed_on == list(each.threads)  # once, and where it ran


async def test_what_is_left_after_the_time_out_is_told_so(place: Place) -> None:
    instance = Recording()
    async with serving(place, instance, rows=1) as stage:
        with held(instance):
            running, waiting = stage.send(1), stage.send(2)
            closing = asyncio.ensure_future(stage.version.aclose(0.05))
            result = await waiting.result()
            assert (result.status, result.not_started) == (UNAVAILABLE, True)
            assert not running.results
        await closing
        assert values(await running.result()) == [1]
    assert instance.batches == [[1]]
    assert len(instance.closed_on) == 1


async def test_a_batch_that_outlasts_the_close_does_not_hold_it_up(place: Place) -> None:
    instances = [Recording(), Recording(), Recording()]
    async with serving(place, *instances, rows=1) as stage:
        with held(*instances):
            asked = [stage.send(at) for at in range(3)]
            began = time.monotonic()
            await stage.version.aclose(0.05)
            assert time.monotonic() - began < 12
            assert not any(each.closed_on for each in instances)
        for one in asked:
            await one.result()
        await until(lambda: all(len(each.closed_on) == 1 for each in instances))


async def test_an_instance_that_does_not_close_is_no_trouble(place: Place) -> None:
    class Stubborn(Recording):
        def close(self) -> None:
            super().close()
            raise SystemExit(3)

    instances = [Stubborn(), Recording()]
    async with serving(place, *instances, rows=1):
        pass
    assert [len(each.closed_on) for each in instances] == [1, 1]


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError(), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("instant_bytes", [0, 1 << 20])
async def test_nothing_that_a_model_raises_ends_its_thread(
    place: Place, error: BaseException, instant_bytes: int
) -> None:
    """Case C05."""

    def refuse(batch: Batch) -> None:
        if (batch.inputs["x"] == 13).any():
            raise error

    instance = Recording(instant_bytes)
    instance.on_run = refuse
    async with serving(place, instance) as stage:
        assert (await stage.send(13).result(1.0)).status != 0
        assert values(await stage.send(1).result(1.0)) == [1]
        assert len(instance.threads) == 1


async def test_one_answer_that_cannot_be_given_does_not_hold_up_the_others(place: Place) -> None:
    def broken(result: StageResult) -> None:
        raise RuntimeError("no way to the gateway")

    instance = Recording()
    async with serving(place, instance, rows=1) as stage:
        with held(instance):
            first, second = stage.send(1), stage.send(2)
            first.request.answer = broken
        assert values(await second.result()) == [2]
