"""The exporter against a real collector: what arrives, and what happens when nobody listens."""

import asyncio
import socket
import time
from dataclasses import replace

import grpc
import pytest

from tensorline.telemetry.export import SpanExporter, open_exporter
from tensorline.telemetry.settings import TelemetrySettings
from tensorline.telemetry.spans import SpanEncoder
from tests.tensorline.telemetry.collector import Collector
from tests.tensorline.telemetry.records import GATEWAY, pipeline, single


def settings(target: str, **changes: object) -> TelemetrySettings:
    return replace(TelemetrySettings(target=target, delay_s=0.02), **changes)  # type: ignore[arg-type]


def encoder() -> SpanEncoder:
    return SpanEncoder(GATEWAY)


async def wait_until(exporter: SpanExporter, exported: int) -> None:
    async with asyncio.timeout(5):
        while exporter.exported < exported:
            await asyncio.sleep(0.005)


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


async def test_a_collector_gets_the_spans(collector: Collector) -> None:
    async with open_exporter(settings(collector.target, headers=(("api-key", "s"),)), encoder()) as exporter:
        assert exporter.export_nowait(pipeline())
        spans = await collector.wait_spans(16)
        await wait_until(exporter, 16)
    assert {received.resource["service.name"] for received in spans} == {
        *("tensorline-gateway", "tensorline-preprocess", "tensorline-model", "tensorline-postprocess")
    }
    assert collector.metadata[0]["api-key"] == "s"
    assert not any(exporter.dropped.values())


async def test_spans_go_out_in_batches(collector: Collector) -> None:
    async with open_exporter(settings(collector.target, delay_s=0.5), encoder()) as exporter:
        for _ in range(100):
            exporter.export_nowait(pipeline())
        await collector.wait_spans(1600)
    sizes = [sum(len(s.spans) for r in request.resource_spans for s in r.scope_spans) for request in collector.requests]
    assert sizes[:3] == [512, 512, 512]
    assert sum(sizes) == 1600


async def test_what_is_left_is_sent_at_the_end(collector: Collector) -> None:
    async with open_exporter(settings(collector.target, delay_s=60.0), encoder()) as exporter:
        exporter.export_nowait(single())
    assert len(collector.spans()) == exporter.exported == 6


async def test_gzip_is_understood(collector: Collector) -> None:
    async with open_exporter(settings(collector.target, is_compressed=True), encoder()) as exporter:
        exporter.export_nowait(single())
    assert len(collector.spans()) == 6


async def test_a_full_queue_drops_and_counts() -> None:
    async with open_exporter(settings("127.0.0.1:1", queue_spans=100, delay_s=60.0), encoder()) as exporter:
        taken = [exporter.export_nowait(single()) for _ in range(100)]
        assert taken.count(True) == 16  # of 6 spans each
        assert exporter.dropped["queue_full"] == 84 * 6
    assert sum(exporter.dropped.values()) == 600


async def test_a_dead_collector_costs_nothing_and_delays_no_exit(caplog: pytest.LogCaptureFixture) -> None:
    async with open_exporter(settings(f"127.0.0.1:{closed_port()}"), encoder()) as exporter:
        record = single()
        before = time.thread_time()  # not wall-clock time: the machine may be busy
        for _ in range(2000):
            exporter.export_nowait(record)
        assert time.thread_time() - before < 2000 * 50e-6
        await asyncio.sleep(0.3)
        leaving = time.perf_counter()
    assert time.perf_counter() - leaving < 10
    assert exporter.exported == 0
    assert sum(exporter.dropped.values()) == 2000 * 6
    assert caplog.text.count("did not take spans") == 1


async def test_a_collector_that_hangs_delays_an_exit_by_two_seconds_at_most(collector: Collector) -> None:
    collector.delay_s = 30.0
    async with open_exporter(settings(collector.target), encoder()) as exporter:
        exporter.export_nowait(single())
        await asyncio.sleep(0.1)
        exporter.export_nowait(single())
        leaving = time.perf_counter()
    assert 1.0 < time.perf_counter() - leaving < 10
    assert exporter.dropped["failed"] == 12


async def test_a_host_that_does_not_answer_delays_no_exit_either() -> None:
    with socket.socket() as silent:  # accepts into its backlog and never speaks
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        async with open_exporter(settings(target), encoder()) as exporter:
            exporter.export_nowait(single())
            await asyncio.sleep(0.1)
            leaving = time.perf_counter()
        assert time.perf_counter() - leaving < 10


async def test_it_tries_again_what_may_succeed_later(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tensorline.telemetry.export._FIRST_BACKOFF_S", 0.05)
    collector.failures = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED]
    with caplog.at_level("INFO"):
        async with open_exporter(settings(collector.target), encoder()) as exporter:
            exporter.export_nowait(single())
            await collector.wait_spans(6)
            await wait_until(exporter, 6)
    assert not any(exporter.dropped.values())
    assert "takes spans again" in caplog.text


async def test_it_does_not_repeat_what_was_refused_for_good(collector: Collector) -> None:
    collector.failures = [grpc.StatusCode.UNAUTHENTICATED]
    async with open_exporter(settings(collector.target), encoder()) as exporter:
        exporter.export_nowait(single())
        await asyncio.sleep(0.2)
        assert exporter.dropped["failed"] == 6
        exporter.export_nowait(single())
    assert exporter.exported == 6


async def test_what_a_collector_rejects_is_counted(collector: Collector) -> None:
    collector.rejects = 2
    async with open_exporter(settings(collector.target), encoder()) as exporter:
        exporter.export_nowait(single())
        await collector.wait_spans(6)
    assert (exporter.exported, exporter.dropped["rejected"]) == (4, 2)


async def test_a_request_that_cannot_be_encoded_costs_its_batch_alone(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_exporter(settings(collector.target), encoder()) as exporter:
        broken = single()
        broken.span_id = None  # type: ignore[assignment]
        exporter.export_nowait(broken)
        await asyncio.sleep(0.1)
        exporter.export_nowait(single())
        await collector.wait_spans(6)
    assert exporter.dropped["failed"] == 6
    assert "could not be encoded" in caplog.text


async def test_a_collector_that_is_started_later_gets_what_still_fits(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorline.telemetry.export._FIRST_BACKOFF_S", 0.02)
    collector.failures = [grpc.StatusCode.UNAVAILABLE] * 5
    async with open_exporter(settings(collector.target, queue_spans=60), encoder()) as exporter:
        for _ in range(20):
            exporter.export_nowait(single())
        await wait_until(exporter, 60)
        assert exporter.dropped["queue_full"] + exporter.dropped["failed"] + exporter.exported == 120
