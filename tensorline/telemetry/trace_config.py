"""Triton's `--trace-config`: start values of the trace settings, and where its OpenTelemetry mode sends traces.

Source: observability.md §4. There is one mode here, opentelemetry: no file is written, and what belongs to Triton's own
files is named in a warning.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit

from tensorline.errors import ConfigError
from tensorline.telemetry.settings import TelemetrySettings
from tensorline.telemetry.trace_rules import OFF, TraceValue

__all__ = ["LEVELS", "TraceConfig", "trace_config"]

log = logging.getLogger(__name__)

LEVELS: Final = (OFF, "TIMESTAMPS", "TENSORS")

_TRITONS: Final[dict[str, TraceValue]] = {"trace_level": (OFF,), "trace_rate": 1000, "trace_count": -1}
_OTLP_HTTP_PORT: Final = 4318
_OTLP_GRPC_PORT: Final = 4317
_NUMBERS: Final = ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size")


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """What the lines say."""

    start: dict[str, TraceValue] = field(default_factory=dict)
    """Start values by setting, Triton's where the lines name none; empty: there were no lines."""
    url: str = ""
    resource: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    """Sentences about lines without a meaning here, for a warning."""

    def applied(self, settings: TelemetrySettings) -> TelemetrySettings:
        """`settings` from the environment, with what the lines say of the export in its place."""
        if self.url:
            target, is_insecure = _target(self.url)
            settings = replace(settings, target=target, is_insecure=is_insecure)
        resource = {**settings.resource, **self.resource}
        name = resource.pop("service.name", "")
        batch = self.numbers.get("bsp_max_export_batch_size", settings.batch_spans)
        return replace(
            settings,
            service_name=name or settings.service_name,
            resource=resource,
            batch_spans=batch,
            queue_spans=max(self.numbers.get("bsp_max_queue_size", settings.queue_spans), batch),
            delay_s=self.numbers.get("bsp_schedule_delay", settings.delay_s * 1000) / 1000,
        )


def trace_config(lines: Iterable[str]) -> TraceConfig:
    """Read lines `key=value` and `mode,key=value`; the last one of a key holds, but levels and resources add up.

    Raises:
        ConfigError: a key or a mode that Triton does not know either, or a value that cannot be.
    """
    start: dict[str, TraceValue] = {}
    levels: list[str] = []
    url, resource, numbers = "", {}, {}
    ignored: list[str] = []
    given = [line.strip() for line in lines if line.strip()]
    for line in given:
        name, equals, value = line.partition("=")
        mode, comma, key = name.partition(",")
        if not equals:
            raise ConfigError(f"trace_config '{line}' is no key=value")
        match (mode if comma else "", key if comma else name):
            case "", "mode":
                ignored += _check_mode(value)
            case "", "level":
                levels += _levels(value)
            case "", "rate":
                start["trace_rate"] = _number(line, value, 0)
            case "", "count":
                start["trace_count"] = _number(line, value, -1)
            case "triton", "file" | "log-frequency":
                ignored.append(f"trace_config {line} has no meaning here: traces are kept and exported, not written")
            case "opentelemetry", "url":
                url = value
            case "opentelemetry", "resource":
                label, _, text = value.partition("=")
                resource[label] = text
            case "opentelemetry", option if option in _NUMBERS:
                numbers[option] = _number(line, value, 1)
            case _:
                raise ConfigError(f"trace_config '{line}' is none that is known")
    if len(ignored) == len(given):  # Triton's defaults are for who sets something of it
        return TraceConfig(ignored=tuple(ignored))
    if levels:
        start["trace_level"] = _merged(levels)
    return TraceConfig({**_TRITONS, **start}, url, resource, numbers, tuple(ignored))


def _check_mode(value: str) -> list[str]:
    if value == "triton":
        return ["trace_config mode=triton is not there: no file is written, the mode is opentelemetry"]
    if value != "opentelemetry":
        raise ConfigError(f"trace_config mode is '{value}', triton or opentelemetry is wanted")
    return []


def _levels(value: str) -> list[str]:
    if value not in LEVELS:
        raise ConfigError(f"trace_config level is '{value}', one of {', '.join(LEVELS)} is wanted")
    return [value]


def _merged(levels: Iterable[str]) -> tuple[str, ...]:
    found = set(levels)
    if OFF in found and len(found) > 1:
        raise ConfigError("trace_config level is OFF and another one at once")
    return tuple(level for level in LEVELS if level in found)


def _number(line: str, value: str, least: int) -> int:
    try:
        number = int(value)
    except ValueError:
        number = least - 1
    if not least <= number < 1 << 31:
        raise ConfigError(f"trace_config '{line}': a number from {least} is wanted")
    return number


def _target(url: str) -> tuple[str, bool]:
    """The gRPC target for an OTLP address, and whether it is spoken to without TLS."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise ConfigError(f"trace_config opentelemetry,url is '{url}', http://host:port is wanted")
    if port in (None, _OTLP_HTTP_PORT):
        log.warning(
            "trace_config opentelemetry,url names OTLP over HTTP; gRPC is spoken here, to port %d", _OTLP_GRPC_PORT
        )
        port = _OTLP_GRPC_PORT
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{port}", parts.scheme != "https"
