"""Prometheus metrics of one process: counters read from plain integers at the moment of the scrape."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tensorline.telemetry.exposition import head_lines, histogram_lines, series
from tensorline.telemetry.metrics_options import MetricsOptions
from tensorline.telemetry.model_families import model_lines
from tensorline.telemetry.model_table import ModelTable
from tensorline.telemetry.record import RequestRecord

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


_MODEL: Final = ("model", "version")

FAMILIES: Final[Mapping[str, Family]] = {
    "nv_cpu_memory_total_bytes": Family("gauge", "CPU total memory (RAM), in bytes"),
    "nv_cpu_memory_used_bytes": Family("gauge", "CPU used memory (RAM), in bytes"),
    "nv_cpu_utilization": Family("gauge", "CPU utilization rate [0.0 - 1.0]"),
    "nv_inference_pending_request_count": Family(
        "gauge", "Instantaneous number of pending requests awaiting execution per-model.", _MODEL
    ),
    "nv_model_load_duration_secs": Family("gauge", "Model load time in seconds", _MODEL),
    "tensorline_arena_bytes_capacity": Family("gauge", "Bytes that this process's arena may grow to"),
    "tensorline_arena_bytes_leased": Family("gauge", "Bytes of this process's arena that requests hold"),
    "tensorline_event_loop_lag_max_seconds": Family("gauge", "Longest event-loop delay of the last minute"),
    "tensorline_event_loop_lag_p99_seconds": Family("gauge", "99th percentile of event-loop delay, last minute"),
    "tensorline_in_flight": Family("gauge", "Requests that are being served"),
    "tensorline_instances": Family("gauge", "Stage instances known, by state", ("service", "state")),
    "tensorline_log_lines_dropped_total": Family("counter", "Log lines that could not be written"),
    "tensorline_queue_depth": Family("gauge", "Requests that wait at a stage instance", (*_MODEL, "instance")),
    "tensorline_registry_is_fresh": Family("gauge", "1 when the last look at the registry succeeded"),
    "tensorline_spans_dropped_total": Family("counter", "Spans that were not exported, by reason", ("reason",)),
    "tensorline_spans_exported_total": Family("counter", "Spans that a collector took"),
    "tensorline_stage_arena_bytes_leased": Family(
        "gauge", "Bytes of a stage instance's arena that requests hold", ("service", "instance")
    ),
    "tensorline_stage_in_flight": Family(
        "gauge", "Requests of this gateway that a stage instance has", ("service", "instance")
    ),
    "tensorline_traces_held": Family("gauge", "Requests in the trace store"),
}


class Metrics:
    """Everything that one process exposes. `models` also answers the statistics call.

    Args:
        process_metrics: Add memory, CPU, descriptors and garbage collection as `prometheus_client` names them.
        options: Which of the models' families are there.
    """

    def __init__(self, *, process_metrics: bool = True, options: MetricsOptions | None = None) -> None:
        # Imported here: 3 to 12 MB that a short command does without.
        from prometheus_client import CollectorRegistry

        self._options = MetricsOptions() if options is None else options
        self.models = ModelTable(has_windows=self._options.summary_latencies)
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

        lines = model_lines(list(self.models), self._options, time.monotonic_ns())
        lines += self._gateway_lines()
        for name in sorted(self._readers):
            lines += self._family_lines(name)
        return "\n".join(lines).encode() + b"\n" + generate_latest(self.registry)

    def _gateway_lines(self) -> list[str]:
        models = self.models
        lines = head_lines("tensorline_requests_total", "counter", "Number of requests that ended, by front end")
        for (front_end, status), count in sorted(models.requests.items()):
            lines.append(series("tensorline_requests_total", {"front_end": front_end, "status": status}, count))
        lines += head_lines(
            "tensorline_requests_unknown_total", "counter", "Number of requests for no model that we know"
        )
        lines.append(series("tensorline_requests_unknown_total", {}, models.unknown))
        lines += head_lines("tensorline_retries_total", "counter", "Number of steps that were tried again elsewhere")
        lines.append(series("tensorline_retries_total", {}, models.retries))
        lines += head_lines("tensorline_hop_seconds", "histogram", "Time between gateway and stage, both ways together")
        for service, hop in sorted(models.hops.items()):
            bounds = [str(us / 1e6) for us in hop.bounds_us]
            lines += histogram_lines(
                "tensorline_hop_seconds", {"service": service}, bounds, hop.cumulative, hop.sum_ns / 1e9
            )
        return lines

    def _family_lines(self, name: str) -> list[str]:
        family = FAMILIES[name]
        lines = head_lines(name, family.kind, family.help)
        values: dict[tuple[str, ...], float] = {}
        for read in self._readers[name]:
            try:
                reading = read()
            except Exception:  # one broken reader must not take the page away
                log.exception("metric %s could not be read", name)
                continue
            values.update(reading if isinstance(reading, Mapping) else {(): reading})
        for key, value in sorted(values.items()):
            labels = dict(zip(family.labels, key, strict=True)) if key else {}
            if family.labels == _MODEL:
                row = self.models.get(*key)
                labels |= row.traits.tags if row is not None else {}
            lines.append(series(name, labels, value))
        return lines
