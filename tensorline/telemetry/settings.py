"""The standard OpenTelemetry variables, read in one place from the mapping that `main` gives.

As the specification asks, a value that cannot be used is logged and its default taken: it never stops a start.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

__all__ = ["TelemetrySettings", "telemetry_settings"]

log = logging.getLogger(__name__)

_DEFAULT_PORT: Final = 4317
_MILLISECONDS_FROM: Final = 1000.0
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """Where traces go and which."""

    target: str = ""
    """gRPC target of the collector; "": nothing is exported."""
    is_insecure: bool = True
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 10.0
    is_compressed: bool = False
    certificate: str = ""
    """Path of the collector's CA, PEM; "": the system's."""
    client_key: str = ""
    client_certificate: str = ""
    ratio: float = 1.0
    rate_per_s: float | None = 100.0
    """Upper limit of the share that nobody asked for; None as soon as a sampler is named."""
    keeps_notable: bool = True
    """Errors and the slowest are kept beside the share; not when tracing is switched off by name."""
    queue_spans: int = 2048
    batch_spans: int = 512
    delay_s: float = 1.0
    service_name: str = ""
    """Overrides the process's own, "" does not."""
    resource: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_exporting(self) -> bool:
        return bool(self.target)


def telemetry_settings(environ: Mapping[str, str], *, rate_per_s: float = 100.0) -> TelemetrySettings:
    """Read OTEL_* from `environ`.

    Args:
        rate_per_s: Traces exported per second that neither a caller nor a named sampler asked for.
    """
    resource = _pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    service_name = environ.get("OTEL_SERVICE_NAME") or resource.pop("service.name", "")
    resource.pop("service.name", None)
    ratio, limit, keeps_notable = _sampler(environ, rate_per_s)
    target, is_insecure = _endpoint(environ)
    batch = _number(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", int, 512)
    return TelemetrySettings(
        target=target,
        is_insecure=is_insecure,
        headers=tuple((key.lower(), value) for key, value in _pairs(_otlp(environ, "HEADERS")).items()),
        timeout_s=_timeout_s(environ),
        is_compressed=_otlp(environ, "COMPRESSION").lower() == "gzip",
        certificate=_otlp(environ, "CERTIFICATE"),
        client_key=_otlp(environ, "CLIENT_KEY"),
        client_certificate=_otlp(environ, "CLIENT_CERTIFICATE"),
        ratio=ratio,
        rate_per_s=limit,
        keeps_notable=keeps_notable,
        queue_spans=max(_number(environ, "OTEL_BSP_MAX_QUEUE_SIZE", int, 2048), batch),
        batch_spans=batch,
        delay_s=_number(environ, "OTEL_BSP_SCHEDULE_DELAY", float, 1000.0) / 1000,
        service_name=service_name,
        resource=resource,
    )


def _otlp(environ: Mapping[str, str], name: str) -> str:
    """The variable for traces, or the one for all signals."""
    return (environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")).strip()


def _endpoint(environ: Mapping[str, str]) -> tuple[str, bool]:
    endpoint = _otlp(environ, "ENDPOINT")
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if not endpoint or is_off or environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
        return "", True
    protocol = _otlp(environ, "PROTOCOL") or "grpc"
    if protocol != "grpc":
        log.warning("OTEL_EXPORTER_OTLP_PROTOCOL %s is not spoken here, grpc is: no traces are exported", protocol)
        return "", True
    is_insecure = _otlp(environ, "INSECURE").lower() == "true"
    if "://" not in endpoint:
        return endpoint, is_insecure  # a gRPC target: host:port, unix:/path, dns:name
    parts = urlsplit(endpoint)
    if not parts.hostname:
        return endpoint, is_insecure  # unix:///path and the like
    try:
        has_port = parts.port is not None
    except ValueError:
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT has no valid port: no traces are exported")
        return "", True
    address = parts.netloc.rpartition("@")[2]
    return (address if has_port else f"{address}:{_DEFAULT_PORT}"), parts.scheme == "http"


def _timeout_s(environ: Mapping[str, str]) -> float:
    """The Python SDK reads seconds where the specification says milliseconds: from 1000 on it must be the latter."""
    name = "OTEL_EXPORTER_OTLP_TIMEOUT"
    if environ.get("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"):
        name = "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"
    value = _number(environ, name, float, 10.0)
    return value / 1000 if value >= _MILLISECONDS_FROM else value


def _sampler(environ: Mapping[str, str], rate_per_s: float) -> tuple[float, float | None, bool]:
    """Ratio, limit, and whether errors and slow requests are kept. A caller's flags are obeyed under every sampler."""
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    match name.removeprefix("parentbased_"):
        case "":
            return 1.0, rate_per_s, True
        case "always_on":
            return 1.0, None, True
        case "always_off":
            return 0.0, None, False
        case "traceidratio":
            ratio = _number(environ, "OTEL_TRACES_SAMPLER_ARG", float, 1.0)
            if 0.0 <= ratio <= 1.0:
                return ratio, None, True
            log.warning("OTEL_TRACES_SAMPLER_ARG %s is not in 0..1: 1 is used", ratio)
            return 1.0, None, True
    log.warning("OTEL_TRACES_SAMPLER %s is not known: the default is used", name[:64])
    return 1.0, rate_per_s, True


def _number(environ: Mapping[str, str], name: str, kind: Callable[[str], _Number], default: _Number) -> _Number:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = kind("-1")
    if 0 <= value < 1e12 and (value > 0 or name.endswith("_ARG")):
        return value
    log.warning("%s=%s cannot be used: %s is", name, text[:64], default)
    return default


def _pairs(text: str) -> dict[str, str]:
    """`key=value,key=value`, values percent-encoded. A malformed member is left out."""
    pairs: dict[str, str] = {}
    for member in text.split(","):
        key, equals, value = member.partition("=")
        if key.strip() and equals:
            pairs[unquote(key.strip())] = unquote(value.strip())
        elif member.strip():
            log.warning("a member without '=' in a list of OTEL_* pairs is ignored")
    return pairs
