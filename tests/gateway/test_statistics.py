"""ModelStatistics: what was asked for, counted as Triton counts, over all workers together."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from starlette.applications import Starlette

from gateway.operations.statistics import Statistics, merge_statistics, own_statistics
from gateway.siblings import Siblings
from gateway.web import bind_unix, serve_http
from gateway.worker_api import statistics_route
from tensorline.errors import BackendError, InvalidTensorError, TensorlineError
from tensorline.protocol.infer import InferRequest
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.stage.backend import Batch
from tensorline.telemetry.counters import ModelTraits
from tensorline.telemetry.record import ResponseTiming
from tensorline.tensor import Array, Tensor
from tests.gateway.house import FP32, NO_TRACE, House, add, ensemble, open_house
from tests.gateway.streams import REPEAT
from tests.tensorline.stage.pair import Model, config
from tests.tensorline.telemetry.records import MODELS, single

X = np.array([1, 2], np.float32)


async def statistics(house: House, name: str = "", version: str = "") -> list[pb.ModelStatistics]:
    operation = Statistics(house.models, house.recorder, Siblings(()))
    answer = await operation.ModelStatistics(pb.ModelStatisticsRequest(name=name, version=version))
    return list(answer.model_stats)


async def one(house: House, name: str) -> pb.ModelStatistics:
    (found,) = await statistics(house, name)
    return found


def batching(rows: int = 8) -> Model:
    """Waits for company up to a second."""
    text = f"dynamic_batching {{ max_queue_delay_microseconds: 1000000 preferred_batch_size: {rows} }}"

    def run(batch: Batch) -> Mapping[str, Array]:
        if np.any(np.less(batch.inputs["x"], 0)):
            raise BackendError("a negative row")
        return {"y": batch.inputs["x"]}

    return Model(config(FP32, {"y": "FP32"}, rows=rows, more=text), run)


async def test_one_request_of_one_model() -> None:
    async with open_house({"one": add(1)}) as house:
        before = await one(house, "one")
        assert (before.version, before.last_inference, before.inference_count) == ("1", 0, 0)
        assert before.inference_stats.success.count == 0
        await house.infer("one", X)
        row = await one(house, "one")
        assert (row.inference_count, row.execution_count) == (1, 1)
        stats = row.inference_stats
        for duration in (stats.success, stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output):
            assert duration.count == 1
        assert stats.success.ns >= stats.queue.ns + stats.compute_infer.ns
        assert stats.compute_infer.ns > 0
        assert (stats.fail.count, stats.cache_hit.count, stats.cache_miss.count) == (0, 0, 0)
        assert 0 <= time.time() * 1e3 - row.last_inference < 60_000
        (batch,) = row.batch_stats
        assert (batch.batch_size, batch.compute_infer.count) == (1, 1)
        assert batch.compute_infer.ns == stats.compute_infer.ns


async def test_a_batch_is_one_execution_however_many_requests_share_it() -> None:
    async with open_house({"eight": batching()}) as house:
        rows = np.arange(8, dtype=np.float32).reshape(8, 1)
        await asyncio.gather(*(house.infer("eight", rows[at : at + 2]) for at in range(0, 8, 2)))
        row = await one(house, "eight")
        assert (row.inference_count, row.execution_count, row.inference_stats.success.count) == (8, 1, 4)
        assert [(batch.batch_size, batch.compute_infer.count) for batch in row.batch_stats] == [(8, 1)]
        assert row.inference_stats.compute_infer.ns == 4 * row.batch_stats[0].compute_infer.ns


async def test_a_failure_counts_as_one_and_its_execution_too() -> None:
    async with open_house({"eight": batching(1)}) as house:
        with pytest.raises(TensorlineError, match="a negative row"):
            await house.infer("eight", np.array([[-1]], np.float32))
        row = await one(house, "eight")
        assert (row.inference_count, row.execution_count) == (0, 1)
        assert (row.inference_stats.fail.count, row.inference_stats.success.count) == (1, 0)
        assert row.inference_stats.compute_infer.count == 0
        assert list(row.batch_stats) == []


async def test_a_batch_that_failed_together_is_an_execution_and_each_run_after_it_another() -> None:
    async with open_house({"eight": batching(4)}) as house:
        rows = [np.array([[value]], np.float32) for value in (1, -1, 2, 3)]
        done = await asyncio.gather(*(house.infer("eight", row) for row in rows), return_exceptions=True)
        assert [isinstance(each, TensorlineError) for each in done] == [False, True, False, False]
        row = await one(house, "eight")
        assert (row.inference_count, row.execution_count) == (3, 1 + 4)
        assert (row.inference_stats.success.count, row.inference_stats.fail.count) == (3, 1)
        assert [(batch.batch_size, batch.compute_infer.count) for batch in row.batch_stats] == [(1, 3)]


async def test_what_validation_refuses_counts_nothing() -> None:
    async with open_house({"one": add(1)}) as house:
        with pytest.raises(InvalidTensorError):
            await house.infer("one", X.astype(np.int64))
        row = await one(house, "one")
        assert (row.execution_count, row.inference_stats.fail.count, row.inference_stats.success.count) == (0, 0, 0)


async def test_a_pipeline_counts_itself_and_each_step_its_model() -> None:
    pipeline = ensemble("both", ("one", {"x": "x"}, {"y": "a"}), ("two", {"x": "a"}, {"y": "y"}))
    async with open_house({"one": add(1), "two": add(2)}, entries=[pipeline]) as house:
        for _ in range(3):
            await house.infer("both", X)
        rows = {row.name: row for row in await statistics(house)}
        assert sorted(rows) == ["both", "one", "two"]
        for row in rows.values():
            assert (row.inference_count, row.execution_count, row.inference_stats.success.count) == (3, 3, 3)
        for phase in ("queue", "compute_input", "compute_infer", "compute_output"):
            parts = [getattr(rows[name].inference_stats, phase).ns for name in ("one", "two")]
            assert getattr(rows["both"].inference_stats, phase).ns == sum(parts)
        assert list(rows["both"].batch_stats) == []


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        ("nobody", "", "requested model 'nobody' is not available"),
        ("one", "7", "requested model version is not available for model 'one'"),
        ("one", "x", "must be integer > 0"),
        ("one", "-1", "must be integer > 0"),
    ],
)
async def test_what_is_not_there_is_named(name: str, version: str, text: str) -> None:
    async with open_house({"one": add(1)}) as house:
        with pytest.raises(InvalidTensorError, match=text):
            await statistics(house, name, version)


async def test_versions_and_names() -> None:
    async with open_house({"one": add(1), "two": add(2)}) as house:
        assert [(row.name, row.version) for row in await statistics(house)] == [("one", "1"), ("two", "1")]
        # Without a name the version says nothing.
        assert len(await statistics(house, "", "9")) == 2
        assert [row.name for row in await statistics(house, "two", "1")] == ["two"]
        assert [row.name for row in await statistics(house, "two", "01")] == ["two"]


async def test_a_version_loaded_again_counts_from_zero() -> None:
    async with open_house({"one": add(1)}) as house:
        await house.infer("one", X)
        house.recorder.restart("one", "1")
        row = await one(house, "one")
        assert (row.inference_count, row.last_inference) == (0, 0)


def test_rows_of_workers_are_summed() -> None:
    def row(count: int, **sizes: int) -> pb.ModelStatistics:
        row = pb.ModelStatistics(name="m", version="1", last_inference=count, inference_count=count)
        row.inference_stats.success.count, row.inference_stats.success.ns = count, 10 * count
        for size, number in sizes.items():
            batch = row.batch_stats.add(batch_size=int(size[1:]))
            batch.compute_infer.count, batch.compute_infer.ns = number, 100
        row.response_stats["0"].success.count = count
        return row

    pages = [
        pb.ModelStatisticsResponse(model_stats=[row(3, b4=1)]),
        pb.ModelStatisticsResponse(model_stats=[row(5, b4=2, b1=7), pb.ModelStatistics(name="other", version="1")]),
        pb.ModelStatisticsResponse(),
    ]
    answer = merge_statistics(pages, [("m", "1"), ("m", "2")])
    merged, idle = answer.model_stats
    assert (merged.last_inference, merged.inference_count) == (5, 8)
    assert (merged.inference_stats.success.count, merged.inference_stats.success.ns) == (8, 80)
    assert [(batch.batch_size, batch.compute_infer.count, batch.compute_infer.ns) for batch in merged.batch_stats] == [
        (1, 7, 100),
        (4, 3, 200),
    ]
    assert merged.response_stats["0"].success.count == 8
    assert (idle.version, idle.inference_count, idle.HasField("inference_stats")) == ("2", 0, True)


@asynccontextmanager
async def workers(tmp_path: Path, *houses: House) -> AsyncIterator[list[Statistics]]:
    """Each house as one worker: its statistics and its socket."""
    paths = [tmp_path / f"{number}.sock" for number in range(len(houses))]
    async with AsyncExitStack() as stack:
        found = []
        for house, path in zip(houses, paths, strict=True):
            siblings = Siblings(other for other in paths if other != path)
            app = Starlette(routes=[statistics_route(house.recorder)])
            await stack.enter_async_context(serve_http(app, bind_unix(path)))
            found.append(Statistics(house.models, house.recorder, siblings))
        yield found


async def test_any_worker_tells_the_sum_of_all(tmp_path: Path) -> None:
    """Each of the two also answers when the other is gone."""
    async with open_house({"one": add(1)}) as first, open_house({"one": add(1)}) as second:
        async with workers(tmp_path, first, second) as both:
            for house, requests in ((first, 3), (second, 4)):
                for _ in range(requests):
                    await house.infer("one", X)
            for worker in both:
                answer = await worker.ModelStatistics(pb.ModelStatisticsRequest(name="one"))
                assert [(row.inference_count, row.execution_count) for row in answer.model_stats] == [(7, 7)]
        answer = await both[0].ModelStatistics(pb.ModelStatisticsRequest(name="one"))
        assert answer.model_stats[0].inference_count == 3


async def test_a_decoupled_request_counts_once_and_its_responses_by_their_number() -> None:
    async with open_house({"repeat": REPEAT}) as house:
        given = Tensor("IN", "INT32", (3,), np.arange(3, dtype=np.int32).tobytes())
        request = InferRequest("repeat", "", "r1", [given])
        for _ in range(2):
            responses = house.service.infer_stream(request, NO_TRACE, 5.0, time.monotonic_ns(), "test/Stream")
            assert len([response async for response in responses if response.outputs]) == 3
        row = await one(house, "repeat")
        assert (row.inference_count, row.execution_count, row.inference_stats.success.count) == (2, 2, 2)
        assert [(batch.batch_size, batch.compute_infer.count) for batch in row.batch_stats] == [(1, 2)]
        assert sorted(row.response_stats) == ["0", "1", "2", "3"]
        for number in "012":
            assert row.response_stats[number].success.count == 2
            assert row.response_stats[number].success.ns > 0
        assert row.response_stats["3"].empty_response.count == 2
        assert row.response_stats["3"].success.count == 0


async def test_responses_of_a_decoupled_model_have_statistics_by_their_number() -> None:
    async with open_house({"one": add(1)}) as house:
        table = house.metrics.models
        table.declare(MODELS[1], "1", ModelTraits(is_decoupled=True))
        record = single()
        assert record.steps[0].timing is not None
        ready = record.steps[0].timing.input_ready
        record.steps[0].responses = [
            ResponseTiming(ready + 10, ready + 15),
            ResponseTiming(ready + 40, ready + 40, is_empty=True),
        ]
        table.record(record)
        (row,) = own_statistics(house.recorder, MODELS[1]).model_stats
        first, last = row.response_stats["0"], row.response_stats["1"]
        assert (first.success.count, first.success.ns, first.compute_infer.ns, first.compute_output.ns) == (
            1,
            15,
            10,
            5,
        )
        assert (last.empty_response.count, last.empty_response.ns, last.success.count) == (1, 25, 0)
