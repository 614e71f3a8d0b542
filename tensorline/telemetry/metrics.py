"""Prometheus metrics of one process: counters read from plain integers at the moment of the scrape.

The `nv_inference_*` families are written by us: `prometheus_client` would name them `..._total`, and Triton does not.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tensorline.telemetry.counters import REASONS, Histogram, ModelCounters, ModelTable
from tensorline.telemetry.record import RequestRecord

if TYPE_CHECKING:
    pass

__all__ = ["CONTENT_TYPE", "FAMILIES", "Family", "Metrics", "Reading"]

log = logging.getLogger(__name__)

CONTENT_TYPE: Final = "text/plain; charset=utf-8"

Reading = float | Mapping[tuple[str, ...], float]
"""A value, or values by the family's labels (in their order)."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric that its owner counts and we read."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()


FAMILIES: Final[Mapping[str, Family]] = {
    "nv_inference_pending_request_count": Family("gauge", "Number of requests that wait", ("model", "version")),
    "nv_model_load_duration_secs": Family("gauge", "Model load time in seconds", ("model", "version")),
    "tensorline_arena_bytes_capacity": Family("gauge", "Bytes that this process's arena may grow to"),
    "tensorline_arena_bytes_leased": Family("gauge", "Bytes of this process's arena that requests hold"),
    "tensorline_event_loop_lag_max_seconds": Family("gauge", "Longest event-loop delay of the last minute"),
    "tensorline_event_loop_lag_p99_seconds": Family("gauge", "99th percentile of event-loop delay, last minute"),
    "tensorline_in_flight": Family("gauge", "Requests that are being served"),
    "tensorline_instances": Family("gauge", "Stage instances known, by state", ("service", "state")),
    "tensorline_log_lines_dropped_total": Family("counter", "Log lines that could not be written"),
    "tensorline_queue_depth": Family("gauge", "Requests in a queue of this process", ("queue",)),
    "tensorline_registry_is_fresh": Family("gauge", "1 when the last look at the registry succeeded"),
    "tensorline_spans_dropped_total": Family("counter", "Spans that were not exported, by reason", ("reason",)),
    "tensorline_spans_exported_total": Family("counter", "Spans that a collector took"),
    "tensorline_stream_up": Family("gauge", "1 when the stage stream is open", ("service", "instance")),
    "tensorline_traces_held": Family("gauge", "Requests in the trace store"),
}

# Name, help and value of each counter of a model; times in microseconds.
_MODEL_FAMILIES: Final[tuple[tuple[str, str, Callable[[ModelCounters], int]], ...]] = (
    (
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda row: row.success_count,
    ),
    (
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda row: row.inference_count,
    ),
    (
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda row: row.execution_count,
    ),
    (
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda row: row.success_ns // 1000,
    ),
    (
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda row: row.queue_ns // 1000,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda row: row.compute_input_ns // 1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda row: row.compute_infer_ns // 1000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda row: row.compute_output_ns // 1000,
    ),
    (
        "tensorline_requests_refused_total",
        "Number of requests refused before they ran: a full queue, a limit, an invalid tensor",
        lambda row: row.refused,
    ),
)


class Metrics:
    """Everything that one process exposes. `models` also answers the statistics call.

    Args:
        process_metrics: Add memory, CPU, descriptors and garbage collection as `prometheus_client` names them.
    """

    def __init__(self, *, process_metrics: bool = True) -> None:
        # Imported here: 3 to 12 MB that a short command does without.
        from prometheus_client import CollectorRegistry

        self.models = ModelTable()
        self.registry: CollectorRegistry = CollectorRegistry(auto_describe=True)
        """For metrics that others define, such as those of Python models."""
        self._readers: dict[str, list[Callable[[], Reading]]] = {}
        if process_metrics:
            from prometheus_client import GCCollector, PlatformCollector, ProcessCollector

            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)
            GCCollector(registry=self.registry)

    def record(self, record: RequestRecord) -> None:
        """Count a finished request."""
        self.models.record(record)

    def watch(self, name: str, read: Callable[[], Reading]) -> None:
        """Let `read` answer for family `name` at each scrape. Several readers of one family are put together.

        Raises:
            KeyError: no such family: names are fixed in `FAMILIES`.
        """
        FAMILIES[name]
        self._readers.setdefault(name, []).append(read)

    def render(self) -> bytes:
        """The Prometheus text format, families of Triton's names first."""
        from prometheus_client import generate_latest

        lines: list[str] = []
        rows = list(self.models)
        for name, text, value in _MODEL_FAMILIES:
            _head(lines, name, "counter", text)
            lines += [f"{name}{_labels(model=model, version=version)} {value(row)}" for model, version, row in rows]
        _head(lines, "nv_inference_request_failure", "counter", "Number of failed inference requests, all batch sizes")
        for model, version, row in rows:
            for reason in REASONS:
                labels = _labels(model=model, reason=reason, version=version)
                lines.append(f"nv_inference_request_failure{labels} {row.failures[reason]}")
        _head(lines, "tensorline_requests_unknown_total", "counter", "Number of requests for no model that we know")
        lines.append(f"tensorline_requests_unknown_total {self.models.unknown}")
        _head(lines, "tensorline_retries_total", "counter", "Number of steps that were tried again elsewhere")
        lines.append(f"tensorline_retries_total {self.models.retries}")
        _head(lines, "tensorline_hop_seconds", "histogram", "Time between gateway and stage, both ways together")
        for service, hop in sorted(self.models.hops.items()):
            lines += _histogram_lines("tensorline_hop_seconds", service, hop)
        for name in sorted(self._readers):
            lines += self._family_lines(name)
        return "\n".join(lines).encode() + b"\n" + generate_latest(self.registry)

    def _family_lines(self, name: str) -> list[str]:
        family = FAMILIES[name]
        lines: list[str] = []
        _head(lines, name, family.kind, family.help)
        values: dict[tuple[str, ...], float] = {}
        for read in self._readers[name]:
            try:
                reading = read()
            except Exception:  # one broken reader must not take the page away
                log.exception("metric %s could not be read", name)
                continue
            values.update(reading if isinstance(reading, Mapping) else {(): reading})
        for key, value in sorted(values.items()):
            labels = _labels(**dict(zip(family.labels, key, strict=True))) if key else ""
            lines.append(f"{name}{labels} {value}")
        return lines


def _head(lines: list[str], name: str, kind: str, text: str) -> None:
    lines.append(f"# HELP {name} {text}")
    lines.append(f"# TYPE {name} {kind}")


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in sorted(labels.items())) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _histogram_lines(name: str, service: str, histogram: Histogram) -> Iterable[str]:
    total = 0
    for bound, count in zip((*(str(us / 1e6) for us in histogram.bounds_us), "+Inf"), histogram.counts, strict=True):
        total += count
        yield f"{name}_bucket{_labels(le=bound, service=service)} {total}"
    yield f"{name}_sum{_labels(service=service)} {histogram.sum_ns / 1e9}"
    yield f"{name}_count{_labels(service=service)} {total}"
