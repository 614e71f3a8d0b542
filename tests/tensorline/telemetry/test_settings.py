import logging

import pytest

from tensorline.telemetry.settings import TelemetrySettings, telemetry_settings

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def test_without_variables_nothing_is_exported() -> None:
    assert telemetry_settings({}) == TelemetrySettings()
    assert not TelemetrySettings().is_exporting


@pytest.mark.parametrize(
    ("endpoint", "target", "is_insecure"),
    [
        ("http://collector:4317", "collector:4317", True),
        ("http://collector", "collector:4317", True),
        ("https://collector:443/", "collector:443", False),
        ("HTTP://[::1]:4317", "[::1]:4317", True),
        ("http://user:secret@collector:4317", "collector:4317", True),
        ("collector:4317", "collector:4317", False),
        ("unix:/run/otel.sock", "unix:/run/otel.sock", False),
        ("unix:///run/otel.sock", "unix:///run/otel.sock", False),
    ],
)
def test_an_endpoint_names_target_and_security(endpoint: str, target: str, is_insecure: bool) -> None:
    settings = telemetry_settings({ENDPOINT: endpoint})
    assert (settings.target, settings.is_insecure) == (target, is_insecure)


def test_insecure_counts_where_the_endpoint_does_not_say() -> None:
    assert telemetry_settings({ENDPOINT: "c:1", "OTEL_EXPORTER_OTLP_INSECURE": "true"}).is_insecure
    assert telemetry_settings({ENDPOINT: "c:1", "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "TRUE"}).is_insecure
    assert not telemetry_settings({ENDPOINT: "https://c:1", "OTEL_EXPORTER_OTLP_INSECURE": "true"}).is_insecure


def test_the_variable_for_traces_goes_before_the_general_one() -> None:
    environ = {
        ENDPOINT: "http://all:4317",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces:4317",
        "OTEL_EXPORTER_OTLP_HEADERS": "a=1",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "Api-Key=s%20e,x = y",
        "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip",
    }
    settings = telemetry_settings(environ)
    assert settings.target == "traces:4317"
    assert settings.headers == (("api-key", "s e"), ("x", "y"))
    assert settings.is_compressed


@pytest.mark.parametrize(("text", "seconds"), [("5", 5.0), ("0.5", 0.5), ("10000", 10.0), ("999", 999.0)])
def test_a_time_out_is_read_as_python_does_and_as_the_specification_says(text: str, seconds: float) -> None:
    assert telemetry_settings({"OTEL_EXPORTER_OTLP_TIMEOUT": text}).timeout_s == seconds


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
        {ENDPOINT: "http://collector:x"},
    ],
)
def test_exporting_can_be_off(environ: dict[str, str]) -> None:
    assert not telemetry_settings({ENDPOINT: "http://collector:4317", **environ}).is_exporting


@pytest.mark.parametrize(
    ("name", "argument", "ratio", "rate", "keeps_notable"),
    [
        ("", "", 1.0, 100.0, True),
        ("always_on", "", 1.0, None, True),
        ("parentbased_always_on", "", 1.0, None, True),
        ("always_off", "", 0.0, None, False),
        ("parentbased_always_off", "", 0.0, None, False),
        ("traceidratio", "0.25", 0.25, None, True),
        ("parentbased_traceidratio", "0", 0.0, None, True),
        ("ParentBased_TraceIdRatio", "", 1.0, None, True),
        ("traceidratio", "2", 1.0, None, True),
        ("traceidratio", "half", 1.0, None, True),
        ("jaeger_remote", "", 1.0, 100.0, True),
    ],
)
def test_samplers_by_their_standard_names(
    name: str, argument: str, ratio: float, rate: float | None, keeps_notable: bool
) -> None:
    settings = telemetry_settings({"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument})
    assert (settings.ratio, settings.rate_per_s, settings.keeps_notable) == (ratio, rate, keeps_notable)


def test_the_batch_is_the_bsps() -> None:
    settings = telemetry_settings(
        {"OTEL_BSP_MAX_QUEUE_SIZE": "100", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "300", "OTEL_BSP_SCHEDULE_DELAY": "250"}
    )
    assert (settings.queue_spans, settings.batch_spans, settings.delay_s) == (300, 300, 0.25)


def test_the_resource_is_read_and_the_name_has_its_own_variable() -> None:
    environ = {"OTEL_RESOURCE_ATTRIBUTES": "service.name=a,deployment.environment.name=pre%20prod,broken"}
    settings = telemetry_settings(environ)
    assert (settings.service_name, settings.resource) == ("a", {"deployment.environment.name": "pre prod"})
    assert telemetry_settings({**environ, "OTEL_SERVICE_NAME": "b"}).service_name == "b"


@pytest.mark.parametrize("name", ["OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_SCHEDULE_DELAY", "OTEL_EXPORTER_OTLP_TIMEOUT"])
@pytest.mark.parametrize("value", ["many", "-5", "0", "nan", "1e99"])
def test_a_useless_value_is_said_and_its_default_taken(name: str, value: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert telemetry_settings({name: value}) == TelemetrySettings()
    assert name in caplog.text
