"""The collector's configuration against what we know of it: no packaged collector exists to ask."""

import re
from collections.abc import Mapping
from typing import Any, Final

import pytest
import yaml

from tests.deploy.images import ROOT

CONFIG = ROOT / "deploy" / "otel" / "collector.yaml"

TEXT: Final = str
NUMBER: Final = int
DURATION: Final = re.compile(r"\d+(ms|s|m)")
ENDPOINT: Final = re.compile(r"[\w.-]+:\d+")
# Keys of each part that we use, and what their values are; a component stands before the "/" of its name.
SCHEMA: Final[dict[str, Any]] = {
    "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": ENDPOINT}, "http": {"endpoint": ENDPOINT}}}},
    "processors": {
        "memory_limiter": {"check_interval": DURATION, "limit_mib": NUMBER, "spike_limit_mib": NUMBER},
        "batch": {"timeout": DURATION, "send_batch_size": NUMBER, "send_batch_max_size": NUMBER},
    },
    "exporters": {
        "otlp": {
            "endpoint": ENDPOINT,
            "tls": {"insecure": bool},
            "sending_queue": {"queue_size": NUMBER, "num_consumers": NUMBER},
            "retry_on_failure": {"max_elapsed_time": DURATION},
        }
    },
    "service": {
        "telemetry": {"logs": {"level": TEXT, "encoding": TEXT}},
        "pipelines": {"traces": {"receivers": list, "processors": list, "exporters": list}},
    },
}


def problems_of(config: object, schema: object, where: str = "") -> list[str]:
    if isinstance(schema, dict):
        if not isinstance(config, Mapping):
            return [f"{where}: a mapping is wanted"]
        found = []
        for name, value in config.items():
            known = schema.get(str(name).partition("/")[0])
            found += [f"{where}/{name}: unknown"] if known is None else problems_of(value, known, f"{where}/{name}")
        return found
    if isinstance(schema, re.Pattern):
        return [] if isinstance(config, str) and schema.fullmatch(config) else [f"{where}: {config!r}"]
    return [] if isinstance(schema, type) and type(config) is schema else [f"{where}: {config!r}"]


@pytest.fixture
def config() -> dict[str, Any]:
    return dict(yaml.safe_load(CONFIG.read_text()))


def test_it_is_made_of_what_a_collector_knows(config: dict[str, Any]) -> None:
    assert problems_of(config, SCHEMA) == []


def test_the_schema_finds_faults(config: dict[str, Any]) -> None:
    config["processors"]["batch"]["timout"] = "1s"
    config["exporters"]["otlp/jaeger"]["tls"]["insecure"] = "true"
    config["receivers"]["zipkin"] = None
    assert problems_of(config, SCHEMA) == [
        "/receivers/zipkin: unknown",
        "/processors/batch/timout: unknown",
        "/exporters/otlp/jaeger/tls/insecure: 'true'",
    ]


def test_what_is_defined_is_used_and_the_other_way_round(config: dict[str, Any]) -> None:
    for part in ("receivers", "processors", "exporters"):
        used = {name for pipeline in config["service"]["pipelines"].values() for name in pipeline[part]}
        assert used == set(config[part])


def test_memory_is_limited_first_and_batches_are_made_last(config: dict[str, Any]) -> None:
    for pipeline in config["service"]["pipelines"].values():
        assert pipeline["processors"][0] == "memory_limiter"
        assert pipeline["processors"][-1] == "batch"


def test_it_listens_where_the_mesh_sends_and_sends_where_jaeger_listens(config: dict[str, Any]) -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())
    sends_to = compose["services"]["gateway"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert (
        sends_to.rpartition(":")[2] == config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    )
    assert config["exporters"]["otlp/jaeger"]["endpoint"] == "jaeger:4317"
    assert "0.0.0.0:4317" in compose["services"]["jaeger"]["command"][0]
    limit = config["processors"]["memory_limiter"]["limit_mib"]
    assert limit < int(compose["services"]["collector"]["mem_limit"].removesuffix("m"))
