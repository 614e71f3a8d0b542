import asyncio
import json
import logging
import time

import pytest

from tensorline.telemetry.lag import LoopLag, open_lag_monitor
from tensorline.telemetry.metrics import Metrics


def block(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_blocked_loop_is_measured_and_its_stack_logged(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(process_metrics=False)
    with caplog.at_level(logging.WARNING):
        async with open_lag_monitor(metrics) as lag:
            await asyncio.sleep(0.05)
            block(0.6)
            await asyncio.sleep(0.15)
            assert 0.4 < lag.max_s() < 1.0
            page = metrics.render().decode()
    assert f"tensorline_event_loop_lag_max_seconds {lag.max_s()}" in page
    assert "tensorline_event_loop_lag_p99_seconds" in page
    (record,) = caplog.records
    assert "blocked for" in record.getMessage()
    assert "in block" in vars(record)["stack"]


async def test_a_loop_that_runs_is_not_accused(caplog: pytest.LogCaptureFixture) -> None:
    async with open_lag_monitor():
        await asyncio.sleep(0.35)
    assert caplog.records == []


async def test_the_watchdog_can_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async with open_lag_monitor(has_watchdog=False):
        await asyncio.sleep(0)
        block(0.5)
    assert caplog.records == []


def test_without_samples_there_is_no_lag() -> None:
    assert (LoopLag().max_s(), LoopLag().p99_s()) == (0.0, 0.0)


def test_the_99th_percentile_is_not_the_worst_of_many() -> None:
    lag = LoopLag()
    lag._delays.extend([0.001] * 599 + [1.0])
    assert (lag.max_s(), lag.p99_s()) == (1.0, 0.001)
    assert json.dumps(lag.p99_s())
