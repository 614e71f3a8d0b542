"""Workers of one gateway agree about what operators set."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette

from gateway.agreement import Agreement
from gateway.siblings import Siblings
from gateway.web import bind_unix, serve_http
from gateway.worker_api import settings_route
from tensorline.telemetry.logs import LogLines
from tensorline.telemetry.metrics import Metrics
from tensorline.telemetry.record import Process
from tensorline.telemetry.recorder import Recorder
from tensorline.telemetry.sampling import Sampler
from tensorline.telemetry.store import TraceStore
from tests.tensorline.stage.pair import until


@dataclass
class Worker:
    agreement: Agreement
    recorder: Recorder
    path: Path

    @property
    def rate(self) -> object:
        return self.agreement.rules.value("", "trace_rate")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = Starlette(routes=[settings_route(self.agreement)])
        async with serve_http(app, bind_unix(self.path)):
            yield
        self.path.unlink()


def worker(number: int, directory: Path, workers: int = 3) -> Worker:
    paths = {each: directory / f"{each}.sock" for each in range(1, workers + 1)}
    others = Siblings(path for each, path in paths.items() if each != number)
    recorder = Recorder(Metrics(process_metrics=False), TraceStore(Process("gateway", f"gateway-{number}")), Sampler())
    lines = LogLines(io.BytesIO(), "gateway", "g", json=True)
    return Worker(Agreement(recorder.rules, lines, others, number), recorder, paths[number])


async def test_what_one_sets_holds_in_all(tmp_path: Path) -> None:
    one, two, three = (worker(number, tmp_path) for number in (1, 2, 3))
    async with one.serving(), two.serving(), three.serving():
        await two.agreement.set_trace("m", {"trace_level": ("OFF",), "trace_rate": 5})
        await three.agreement.set_log(verbose=2, info=False)
        for each in (one, two, three):
            assert each.agreement.rules.is_off("m")
            assert each.agreement.rules.value("m", "trace_rate") == 5
            assert (each.agreement.switches.verbose, each.agreement.switches.info) == (2, False)
        await one.agreement.set_trace("m", {"trace_level": None, "trace_rate": None})
        assert not any(each.agreement.rules.is_active for each in (one, two, three))


async def test_one_that_starts_later_catches_up(tmp_path: Path) -> None:
    one, two = worker(1, tmp_path, 2), worker(2, tmp_path, 2)
    async with one.serving():
        await one.agreement.set_trace("", {"trace_rate": 7})
        await one.agreement.set_log(format="ISO8601")
        async with two.serving():
            await two.agreement.catch_up()
            assert two.rate == 7
            assert two.agreement.switches.format == "ISO8601"


async def test_two_that_set_one_thing_at_once_agree_in_the_end(tmp_path: Path) -> None:
    one, two = worker(1, tmp_path, 2), worker(2, tmp_path, 2)
    async with one.serving(), two.serving():
        for _ in range(5):
            await asyncio.gather(
                *(one.agreement.set_trace("", {"trace_rate": 1 + number}) for number in range(3)),
                *(two.agreement.set_trace("", {"trace_rate": 11 + number}) for number in range(3)),
            )
            assert one.rate == two.rate


async def test_a_limit_holds_for_all_together(tmp_path: Path) -> None:
    one, two = worker(1, tmp_path, 2), worker(2, tmp_path, 2)
    async with AsyncExitStack() as stack:
        for each in (one, two):
            await stack.enter_async_context(each.serving())
            task = asyncio.create_task(each.agreement.share_samples())
            stack.callback(task.cancel)
        await one.agreement.set_trace("m", {"trace_count": 3, "trace_rate": 1})
        assert [one.agreement.rules.sample("m") for _ in range(2)] == [True, True]
        await until(lambda: two.agreement.rules.shown_count("m") == 1)
        assert [two.agreement.rules.sample("m") for _ in range(2)] == [True, False]
        await until(lambda: one.agreement.rules.shown_count("m") == 0)
        assert not one.agreement.rules.sample("m")
        await two.agreement.set_trace("m", {"trace_count": 10})
        assert one.agreement.rules.shown_count("m") == two.agreement.rules.shown_count("m") == 10
