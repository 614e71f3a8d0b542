import asyncio
import io
import json
import subprocess
import sys
import threading
import time
from dataclasses import replace

import anyio.to_thread
import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace

from tensorline.telemetry.logs import LogLines
from tensorline.telemetry.sdk import install_sdk, stage_context, stage_span_scope
from tensorline.telemetry.settings import TelemetrySettings
from tests.tensorline.telemetry.collector import Collector
from tests.tensorline.telemetry.records import STAGES

TRACE, SPAN = bytes(range(16)), bytes(range(8, 16))


def test_a_stages_context_is_the_gateways_span() -> None:
    span = trace.get_current_span(stage_context(TRACE, SPAN, 1, "a=b")).get_span_context()
    assert (span.trace_id.to_bytes(16, "big"), span.span_id.to_bytes(8, "big")) == (TRACE, SPAN)
    assert span.is_remote
    assert span.trace_flags.sampled
    assert span.trace_state.to_header() == "a=b"


def test_while_a_batch_runs_spans_and_lines_are_its_requests() -> None:
    lines = LogLines(io.BytesIO(), "s", "i", json=True)
    with stage_span_scope(TRACE, SPAN, 1, "r-1", "vendor=1"):
        assert trace.get_current_span().get_span_context().span_id.to_bytes(8, "big") == SPAN
        assert trace.get_current_span().get_span_context().trace_state.to_header() == "vendor=1"
        inside = json.loads(lines.line("info", "x", {}))
    assert (inside["trace_id"], inside["request_id"]) == (TRACE.hex(), "r-1")
    assert not trace.get_current_span().get_span_context().is_valid
    assert "trace_id" not in json.loads(lines.line("info", "x", {}))


def test_without_an_endpoint_nothing_is_installed() -> None:
    sdk = install_sdk(STAGES[1], TelemetrySettings())
    assert sdk.provider is None
    sdk.shutdown()


@pytest.mark.parametrize(("flags", "names"), [(1, ["tokenize"]), (0, [])])
async def test_a_stages_own_span_is_a_child_of_the_step(collector: Collector, flags: int, names: list[str]) -> None:
    sdk = install_sdk(STAGES[1], TelemetrySettings(target=collector.target), is_global=False)
    assert sdk.provider is not None
    token = otel_context.attach(stage_context(TRACE, SPAN, flags))
    with sdk.provider.get_tracer("mine").start_as_current_span("tokenize"):
        pass
    otel_context.detach(token)
    with sdk.provider.get_tracer("mine").start_as_current_span("no request asked for this"):
        pass
    await anyio.to_thread.run_sync(sdk.shutdown)
    received = collector.spans()
    assert [one.span.name for one in received] == names
    for one in received:
        assert (one.span.trace_id, one.span.parent_span_id) == (TRACE, SPAN)
        assert one.resource["service.name"] == "tensorline-model"
        assert one.resource["service.instance.id"] == "model-1"


async def test_a_dead_collector_delays_no_exit(caplog: pytest.LogCaptureFixture) -> None:
    settings = replace(TelemetrySettings(target="127.0.0.1:1"), delay_s=0.01)
    sdk = install_sdk(STAGES[1], settings, is_global=False)
    assert sdk.provider is not None
    token = otel_context.attach(stage_context(TRACE, SPAN, 1))
    sdk.provider.get_tracer("mine").start_span("lost").end()
    otel_context.detach(token)
    before = time.perf_counter()
    await anyio.to_thread.run_sync(sdk.shutdown, 1.0)
    assert time.perf_counter() - before < 6
    assert "did not take the last spans" in caplog.text
    async with asyncio.timeout(5):
        while any(thread.name == "otel-shutdown" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)


def test_without_the_extra_it_says_what_to_install() -> None:
    program = """
import logging, sys
sys.modules["opentelemetry.exporter.otlp.proto.grpc.trace_exporter"] = None
logging.basicConfig()
from tensorline.telemetry.record import Process
from tensorline.telemetry.sdk import install_sdk
from tensorline.telemetry.settings import TelemetrySettings
assert install_sdk(Process("model", "m"), TelemetrySettings(target="127.0.0.1:1")).provider is None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "install tensorline[otlp]" in done.stderr


def test_a_stage_that_exports_nothing_does_not_load_the_sdk() -> None:
    program = """
import sys
import tensorline.telemetry.context, tensorline.telemetry.logs, tensorline.telemetry.record
import tensorline.telemetry.sdk, tensorline.telemetry.counters
heavy = {"opentelemetry.sdk.trace", "opentelemetry.exporter", "prometheus_client", "rich", "structlog", "grpc"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
