"""Decoupled models in a stage: responses as they are made, no further ahead than they are read, one end for each."""

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode

from tensorline.errors import BackendError
from tensorline.stage.backend import Batch, Device, ModelDirectory
from tensorline.tensor import Array
from tests.gateway.streams import DECOUPLED, REPEAT, streamed
from tests.tensorline.stage.pair import Caller, Model, config, open_caller, open_stage, tensor, until
from tests.tensorline.stage.raw import inline, open_raw_gateway, submit

pytestmark = pytest.mark.usefixtures("one_loop")

X = np.array([1, 2], np.float32)
BIG = np.arange(4096, dtype=np.float32)
"""Travels by handle."""


def counting(batch: Batch) -> Iterator[Mapping[str, Array]]:
    for number in range(int(batch.inputs["x"][0])):
        yield {"y": np.array([number], np.float32)}


def counted(caller: Caller, results: list[Any]) -> list[float]:
    return [float(caller.read(result)["y"][0]) for result in results if result.outputs]


async def test_each_response_and_then_the_end_alone() -> None:
    async with open_stage({"m": streamed(counting)}) as stage, open_caller(stage) as caller:
        call = caller.start("m", tensor("x", np.array([3], np.float32)))
        last = await call.result()
        assert counted(caller, call.results) == [0, 1, 2]
        assert [result.final for result in call.results] == [False, False, False, True]
        assert not last.outputs
        assert (last.status, last.version) == (0, "1")
        times = [result.timing for result in call.results]
        assert all(timing is not None and 0 < timing.input_ready <= timing.computed for timing in times)
        assert stage.end.in_flight == 0


async def test_no_response_at_all() -> None:
    async with open_stage({"m": streamed(counting)}) as stage, open_caller(stage) as caller:
        call = caller.start("m", tensor("x", np.array([0], np.float32)))
        assert (await call.result()).status == 0
        assert len(call.results) == 1


async def test_what_a_generator_returns_is_its_last_response() -> None:
    def run(batch: Batch) -> Any:
        yield {"y": np.array([1], np.float32)}
        return {"y": np.array([2], np.float32)}

    async with open_stage({"m": streamed(run)}) as stage, open_caller(stage) as caller:
        call = caller.start("m", tensor("x", X))
        await call.result()
        assert counted(caller, call.results) == [1, 2]
        assert [result.final for result in call.results] == [False, True]


async def test_responses_in_the_arena_go_back_one_by_one() -> None:
    def run(batch: Batch) -> Iterator[Mapping[str, Array]]:
        for number in range(3):
            out = batch.empty("y", "FP32", BIG.shape)
            out.fill(number)
            yield {"y": out}
        yield {"y": batch.inputs["x"]}  # passed on
        yield {"y": BIG + 1}  # copied

    async with open_stage({"m": streamed(run)}) as stage, open_caller(stage) as caller:
        x = caller.place("x", BIG)
        call = caller.start("m", x)
        await call.result()
        assert stage.arena.leases == 4
        for number in range(3):
            caller.read(call.results[number])
            await until(lambda left=3 - number: stage.arena.leases == left)  # type: ignore[misc]
        passed = call.results[3].outputs[0].handle
        assert passed is not None
        assert x.handle is not None
        assert (passed.arena, passed.block) == (x.handle.arena, x.handle.block)
        assert caller.read(call.results[4])["y"][0] == 1
        await until(lambda: not stage.arena.leases)
        caller.arena.release(x.handle.block, x.handle.generation)


async def test_a_window_holds_the_model_up() -> None:
    made = 0

    def run(batch: Batch) -> Iterator[Mapping[str, Array]]:
        nonlocal made
        for _ in range(20):
            made += 1
            yield {"y": batch.inputs["x"]}

    async with open_stage({"m": streamed(run)}) as stage, open_caller(stage) as caller:
        call = caller.start("m", tensor("x", X), window=3)
        await until(lambda: len(call.results) == 3)
        caller.connection.take(call.number)
        await until(lambda: len(call.results) == 4)
        assert made == 4
        assert not call.is_over
        for count in range(4, 20):
            caller.connection.take(call.number)
            await until(lambda count=count: len(call.results) > count)  # type: ignore[misc]
        caller.connection.take(call.number)
        assert (await call.result()).status == 0
        assert made == 20


@pytest.mark.parametrize("how", ["cancelled", "left", "too late"])
async def test_who_waits_no_longer_ends_the_generator(how: str) -> None:
    ended = threading.Event()

    def run(batch: Batch) -> Iterator[Mapping[str, Array]]:
        try:
            while True:
                yield {"y": batch.inputs["x"]}
        finally:
            ended.set()

    async with open_stage({"m": streamed(run)}) as stage:
        async with open_caller(stage) as caller:
            call = caller.start("m", tensor("x", X), window=2, timeout_s=0.2 if how == "too late" else None)
            await until(lambda: len(call.results) == 2)
            if how == "cancelled":
                caller.connection.cancel(call.number)
            elif how == "too late":
                assert (await call.result()).status == StatusCode.DEADLINE_EXCEEDED.value[0]
            if how != "left":
                await until(ended.is_set)
        await until(ended.is_set)
        await until(lambda: stage.end.in_flight == 0)


async def test_a_long_response_hears_that_it_is_cancelled() -> None:
    heard = threading.Event()

    def run(batch: Batch) -> Iterator[Mapping[str, Array]]:
        yield {"y": batch.inputs["x"]}
        while not batch.is_cancelled():
            time.sleep(0.002)
        heard.set()

    async with open_stage({"m": streamed(run)}) as stage, open_caller(stage) as caller:
        call = caller.start("m", tensor("x", X))
        await until(lambda: call.results)
        caller.connection.cancel(call.number)
        await until(heard.is_set)
        await until(lambda: caller.connection.in_flight == 0)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (BackendError("no luck"), 13, "no luck"),
        (ZeroDivisionError("row 7"), 13, "[request id: <id_unknown>] model 'm' failed: ZeroDivisionError"),
        (SystemExit(3), 13, "[request id: <id_unknown>] model 'm' failed: SystemExit"),
        (MemoryError(), 8, "[request id: <id_unknown>] model 'm' failed: MemoryError"),
    ],
)
async def test_an_exception_ends_the_request_after_its_responses(error: BaseException, status: int, text: str) -> None:
    def run(batch: Batch) -> Iterator[Mapping[str, Array]]:
        yield {"y": batch.inputs["x"]}
        raise error

    async with open_stage({"m": streamed(run)}) as stage, open_caller(stage) as caller:
        for _ in range(2):  # the instance lives on
            call = caller.start("m", tensor("x", X))
            last = await call.result()
            assert (len(call.results), last.status, last.error) == (2, status, text)


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (7, "the model returned int, not arrays by output name"),
        ({"y": [1, 2]}, "output 'y' is list, not an array"),
        ({"y": np.array([1])}, "output 'y' is INT64, the configuration says FP32"),
    ],
)
async def test_a_response_that_is_none_is_the_models_mistake(outputs: Any, text: str) -> None:
    def run(batch: Batch) -> Iterator[Mapping[str, Array]]:
        yield outputs

    async with open_stage({"m": streamed(run)}) as stage, open_caller(stage) as caller:
        last = await caller.call("m", tensor("x", X))
        assert (last.status, last.error) == (13, text)


async def test_a_generator_that_does_not_close_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def run(batch: Batch) -> Iterator[Mapping[str, Array]]:
        try:
            yield {"y": batch.inputs["x"]}
            yield {"y": batch.inputs["x"]}
        finally:
            raise ValueError("and now?")

    async with open_stage({"m": streamed(run)}) as stage, open_caller(stage) as caller:
        call = caller.start("m", tensor("x", X), window=1)
        await until(lambda: call.results)
        caller.connection.cancel(call.number)
        await until(lambda: "a stream did not close" in caplog.text)
        assert (await caller.call("m", tensor("x", X))).status == 13


async def test_a_row_for_each_row_is_not_asked_of_a_batched_model() -> None:
    def run(batch: Batch) -> Iterator[Mapping[str, Array]]:
        yield {"y": np.zeros((batch.rows + 1, 1), np.float32)}

    async with open_stage({"m": streamed(run, rows=4)}) as stage, open_caller(stage) as caller:
        call = caller.start("m", tensor("x", np.ones((2, 1), np.float32)))
        await call.result()
        assert caller.read(call.results[0])["y"].shape == (3, 1)


async def test_streams_of_one_instance() -> None:
    """One at a time, unless the instance says otherwise; and it is closed once."""
    running = most = closed = 0
    lock = threading.Lock()

    class Many:
        def __init__(self, model: ModelDirectory, device: Device) -> None:
            if model.config.name == "many":
                self.max_streams = 3

        def stream(self, request: Batch) -> Iterator[Mapping[str, Array]]:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.03)
            yield {"y": request.inputs["x"]}
            with lock:
                running -= 1

        def close(self) -> None:
            nonlocal closed
            closed += 1

    for name, at_once in (("one", 1), ("many", 3)):
        most = closed = 0
        model = Model(config({"x": "FP32"}, {"y": "FP32"}, more=DECOUPLED), make=Many)
        async with open_stage({name: model}) as stage, open_caller(stage) as caller:
            calls = [caller.start(name, tensor("x", X)) for _ in range(6)]
            for call in calls:
                assert (await call.result()).status == 0
        assert (most, closed) == (at_once, 1)


async def test_a_stage_that_stops_ends_what_nobody_reads() -> None:
    async with open_stage({"m": streamed(counting)}, drain_s=0.1) as stage, open_caller(stage) as caller:
        call = caller.start("m", tensor("x", np.array([100], np.float32)), window=1)
        await until(lambda: call.results)
        await stage.host.aclose(0.1)
        assert (await call.result()).status == StatusCode.UNAVAILABLE.value[0]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Model(config({"x": "FP32"}, {"y": "FP32"}, more=DECOUPLED), lambda batch: {}), "gives one response"),
        (Model(REPEAT.config.replace(DECOUPLED, "")), "needs model_transaction_policy { decoupled: true }"),
    ],
)
async def test_configuration_and_backend_must_agree(model: Model, text: str) -> None:
    async with open_stage({"m": model}) as stage, open_caller(stage) as caller:
        (hosted,) = caller.models
        assert hosted.state == "UNAVAILABLE"
        assert text in hosted.reason


async def test_a_stream_that_nobody_reads_ends_with_an_error() -> None:
    """Inline, without a window of its own: the outbox is the last bound."""
    made: list[int] = []
    has_ended = threading.Event()

    def run(batch: Batch) -> Iterator[Mapping[str, Array]]:
        try:
            for number in range(200):
                made.append(number)
                yield {"y": np.zeros(250_000, np.float32)}
        finally:
            has_ended.set()

    async with (
        open_stage({"m": streamed(run)}, inline_limit=4 << 20) as stage,
        open_raw_gateway(stage, nonce=b"far") as raw,
    ):
        raw.reading.clear()
        await raw.say(submit(1, inline("x", X.tobytes(), "FP32", X.shape), model="m", inline_only=True))
        await until(has_ended.is_set)
        assert len(made) < 200
        raw.reading.set()
        await until(lambda: raw.received[-1].result.status)
        last = next(each.result for each in raw.received if each.result.status)
        assert (last.status, last.final) == (StatusCode.RESOURCE_EXHAUSTED.value[0], True)
        await until(lambda: stage.end.in_flight == 0)
