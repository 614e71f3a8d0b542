"""Triton's --trace-config, and where it sends traces."""

import pytest

from tensorline.errors import ConfigError
from tensorline.telemetry.settings import TelemetrySettings
from tensorline.telemetry.trace_config import TraceConfig, trace_config


def test_without_lines_nothing_is_said() -> None:
    settings = TelemetrySettings(target="c:4317", service_name="s", resource={"a": "b"})
    assert trace_config([]) == TraceConfig()
    assert TraceConfig().applied(settings) == settings


def test_what_the_lines_leave_out_is_tritons_default() -> None:
    assert trace_config(["rate=1"]).start == {"trace_level": ("OFF",), "trace_rate": 1, "trace_count": -1}


def test_what_has_no_meaning_here_sets_nothing() -> None:
    found = trace_config(["triton,file=/tmp/t.json", "triton,log-frequency=10"])
    assert (found.start, len(found.ignored)) == ({}, 2)
    assert trace_config(["triton,file=/tmp/t.json", "rate=1"]).start["trace_level"] == ("OFF",)


def test_levels_add_up() -> None:
    start = trace_config(["level=TENSORS", "level=TIMESTAMPS", "count=7", "rate=0"]).start
    assert start == {"trace_level": ("TIMESTAMPS", "TENSORS"), "trace_rate": 0, "trace_count": 7}


def test_the_export_goes_where_they_say() -> None:
    lines = [
        "mode=opentelemetry",
        "opentelemetry,url=https://collector.example:9999/v1/traces",
        "opentelemetry,resource=service.name=photos",
        "opentelemetry,resource=team=a=b",
        "opentelemetry,bsp_max_queue_size=100",
        "opentelemetry,bsp_schedule_delay=250",
        "opentelemetry,bsp_max_export_batch_size=50",
    ]
    settings = trace_config(lines).applied(TelemetrySettings(target="elsewhere:1", resource={"kept": "yes"}))
    assert (settings.target, settings.is_insecure) == ("collector.example:9999", False)
    assert (settings.service_name, settings.resource) == ("photos", {"kept": "yes", "team": "a=b"})
    assert (settings.queue_spans, settings.delay_s, settings.batch_spans) == (100, 0.25, 50)


@pytest.mark.parametrize("url", ["http://localhost:4318/v1/traces", "localhost:4318", "http://localhost"])
def test_the_port_of_otlp_over_http_becomes_that_of_grpc(url: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = trace_config([f"opentelemetry,url={url}"]).applied(TelemetrySettings())
    assert (settings.target, settings.is_insecure) == ("localhost:4317", True)
    assert "gRPC is spoken here" in caplog.text


def test_what_belongs_to_tritons_files_is_told() -> None:
    found = trace_config(["triton,file=/tmp/t.json", "triton,log-frequency=10", "mode=triton"])
    assert [sentence.split()[1] for sentence in found.ignored] == [
        "triton,file=/tmp/t.json",
        "triton,log-frequency=10",
        "mode=triton",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "level=EVERYTHING",
        "rate=-1",
        "rate=often",
        "count=-2",
        "rate=99999999999",
        "mode=zipkin",
        "nonsense",
        "triton,url=http://a:1",
        "opentelemetry,file=x",
        "opentelemetry,bsp_schedule_delay=0",
        "colour=red",
    ],
)
def test_what_cannot_be_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="trace_config"):
        trace_config([line])


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://host:port"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://host:port is wanted"):
        trace_config([f"opentelemetry,url={url}"]).applied(TelemetrySettings())


def test_off_beside_another_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="OFF and another"):
        trace_config(["level=OFF", "level=TENSORS"])
