"""`InferenceService.infer_stream`: one record, one end, blocks back as they are read, no retry after a response."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping

import numpy as np
import pytest

from gateway.service import InferenceService
from gateway.stream_step import WINDOW
from tensorline.errors import BackendError, DeadlineError, NotFoundError, TensorlineError, UnavailableError
from tensorline.protocol.infer import InferRequest, InferResponse
from tensorline.stage.backend import Batch
from tensorline.tensor import Array
from tests.gateway.house import NO_TRACE, House, add, array, infer_request, open_house
from tests.gateway.streams import REPEAT, streamed
from tests.gateway.test_runner import lose
from tests.tensorline.stage.pair import Model, until

pytestmark = pytest.mark.usefixtures("one_loop")

X = np.array([3, 2], np.float32)
BIG = np.arange(8192, dtype=np.float32)


def counting(batch: Batch) -> Iterator[Mapping[str, Array]]:
    """As many responses as x begins with, the size of x, each in the arena where x is big."""
    x = batch.inputs["x"]
    for number in range(int(x[0])):
        out = batch.empty("y", "FP32", x.shape)
        out.fill(number)
        yield {"y": out}


COUNTING = streamed(counting, max_streams=8)


@contextlib.asynccontextmanager
async def asking(
    house: House, model: str, x: Array, timeout_s: float | None = 5.0
) -> AsyncIterator[AsyncIterator[InferResponse]]:
    request: InferRequest = infer_request(model, x)
    responses = house.service.infer_stream(request, NO_TRACE, timeout_s, time.monotonic_ns(), "test/Stream")
    async with contextlib.aclosing(responses):
        yield responses


async def everything(house: House, model: str, x: Array, timeout_s: float | None = 5.0) -> list[InferResponse]:
    async with asking(house, model, x, timeout_s) as responses:
        return [response async for response in responses]


async def test_a_single_response_is_its_own_end() -> None:
    async with open_house({"one": add(1)}) as house:
        (response,) = await everything(house, "one", X)
        assert response.is_final
        np.testing.assert_array_equal(array(response), X + 1)
        assert (house.last.status, len(house.records)) == (0, 1)


async def test_responses_and_their_end() -> None:
    async with open_house({"m": COUNTING}) as house:
        *responses, end = await everything(house, "m", X, None)
        assert [float(array(response)[0]) for response in responses] == [0, 1, 2]
        assert [response.is_final for response in responses] == [False] * 3
        assert (end.outputs, end.is_final, end.version, end.id) == ((), True, "", "r1")
        (record,) = house.records
        (step,) = record.steps
        assert (record.status, record.version, step.status, step.version) == (0, "1", 0, "1")
        assert step.responses is not None
        assert [each.is_empty for each in step.responses] == [False] * 3 + [True]
        assert step.started < step.first_response <= step.ended <= record.ended


async def test_blocks_go_back_as_responses_are_read() -> None:
    async with open_house({"m": COUNTING}) as house:
        x = BIG.copy()
        x[0] = 40
        most = 0
        async with asking(house, "m", x) as responses:
            async for _ in responses:
                most = max(most, house.stages[0].arena.leases)
                await asyncio.sleep(0.001)
        assert 0 < most <= WINDOW
        await house.wait_nothing_held()


async def test_closing_cancels() -> None:
    closed = 0

    def endless(batch: Batch) -> Iterator[Mapping[str, Array]]:
        nonlocal closed
        try:
            while True:
                yield {"y": batch.inputs["x"]}
        finally:
            closed += 1

    async with open_house({"m": streamed(endless)}) as house:
        for x in (X, BIG):
            async with asking(house, "m", x) as responses:
                await anext(responses)
            assert (house.last.status, house.limits.in_flight) == (1, 0)
        await until(lambda: closed == 2)
        await house.wait_nothing_held()
        (connection,) = house.mesh.connections
        await until(lambda: not connection.in_flight)


async def test_the_deadline_passes_between_responses() -> None:
    def slow(batch: Batch) -> Iterator[Mapping[str, Array]]:
        yield {"y": batch.inputs["x"]}
        while not batch.is_cancelled():
            time.sleep(0.002)

    async with open_house({"m": streamed(slow)}) as house:
        async with asking(house, "m", BIG, 0.2) as responses:
            await anext(responses)
            with pytest.raises(DeadlineError, match="before the last response") as caught:
                await anext(responses)
            assert caught.value.has_run
        assert house.last.status == 4
        await house.wait_nothing_held()


async def test_without_a_deadline_a_stream_goes_on_as_long_as_it_moves() -> None:
    def slow(batch: Batch) -> Iterator[Mapping[str, Array]]:
        for _ in range(8):
            time.sleep(0.06)
            yield {"y": batch.inputs["x"]}
        while not batch.is_cancelled():
            time.sleep(0.002)

    async with open_house({"m": streamed(slow)}) as house:
        house.service._default_timeout_s = 0.3
        async with asking(house, "m", X, None) as responses:
            for _ in range(8):
                await anext(responses)
            with pytest.raises(DeadlineError, match=r"no response came or was read for 0\.3 s"):
                await anext(responses)
        await until(lambda: not house.stages[0].end.in_flight)


async def test_who_reads_nothing_does_not_keep_the_instance() -> None:
    async with open_house({"m": streamed(counting)}) as house:
        house.service._default_timeout_s = 0.2
        x = BIG.copy()
        x[0] = 100
        async with asking(house, "m", x, None) as responses:
            await anext(responses)
            await until(lambda: not house.stages[0].end.in_flight)
            await house.wait_nothing_held()
            with pytest.raises(DeadlineError):
                await anext(responses)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_another_instance_only_before_the_first_response(has_begun: bool) -> None:
    came = 0

    def run(batch: Batch) -> Iterator[Mapping[str, Array]]:
        nonlocal came
        came += 1
        if has_begun:
            yield {"y": batch.inputs["x"]}
        while came < 2 and not batch.is_cancelled():
            time.sleep(0.002)
        yield {"y": batch.inputs["x"]}

    models = {"m": streamed(run)}
    async with open_house(models, models) as house, asking(house, "m", BIG) as responses:
        first = asyncio.ensure_future(anext(responses))
        await until(lambda: came == 1)
        if has_begun:
            await first
        busy = next(at for at, stage in enumerate(house.stages) if stage.end.in_flight)
        house.registry.tell()
        await lose(house, busy)
        if has_begun:
            with pytest.raises(UnavailableError, match="the instance of model 'm' that ran the request is gone"):
                await anext(responses)
            assert [step.attempt for step in house.last.steps] == [1]
        else:
            np.testing.assert_array_equal(array(await first), BIG)
            assert (await anext(responses)).is_final
            assert [step.attempt for step in house.last.steps] == [1, 2]


async def test_errors_say_whether_a_model_had_run() -> None:
    def broken(batch: Batch) -> Iterator[Mapping[str, Array]]:
        yield {"y": batch.inputs["x"]}
        raise BackendError("no luck")

    async with open_house({"m": streamed(broken), "one": add(1)}) as house:
        for model, has_run in (("m", True), ("gone", False)):
            with pytest.raises(TensorlineError) as caught:
                await everything(house, model, X)
            assert caught.value.has_run is has_run
        assert [record.status for record in house.records] == [13, 5]
        house.service.is_stopping = True
        with pytest.raises(UnavailableError, match="shutting down"):
            await everything(house, "m", X)


async def test_limits_count_streams_too() -> None:
    async with open_house({"m": COUNTING}, max_in_flight=1) as house, asking(house, "m", X) as responses:
        await anext(responses)
        assert house.limits.in_flight == 1
        with pytest.raises(UnavailableError, match="already in flight"):
            await everything(house, "m", X)
        async for response in responses:
            assert house.limits.in_flight == (0 if response.is_final else 1)


def test_what_is_decoupled() -> None:
    """Told without a request; a name that nobody knows is no reason to fail."""

    class Missing:
        def find(self, model: str, version: str) -> object:
            raise NotFoundError(model)

    service = InferenceService.__new__(InferenceService)
    service.models = Missing()  # type: ignore[assignment]
    assert not service.is_decoupled("gone", "")


async def test_inputs_that_cannot_be() -> None:
    async with open_house({"repeat": REPEAT, "m": Model(COUNTING.config, make=COUNTING.make)}) as house:
        with pytest.raises(TensorlineError, match="unexpected inference input 'x' for model 'repeat'"):
            await everything(house, "repeat", X)
        assert house.limits.in_flight == 0
