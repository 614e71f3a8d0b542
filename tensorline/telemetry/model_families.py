"""The families of Triton's names that are read from a model's counters, row by row.

Source: observability.md §3.
"""

from collections.abc import Callable, Sequence
from typing import Final

from tensorline.telemetry.counters import REASONS, ModelCounters, Windows
from tensorline.telemetry.distributions import Window
from tensorline.telemetry.exposition import head_lines, histogram_lines, series
from tensorline.telemetry.metrics_options import MetricsOptions

__all__ = ["model_lines"]

Rows = Sequence[tuple[str, str, ModelCounters]]

_COUNTS: Final[tuple[tuple[str, str, Callable[[ModelCounters], int]], ...]] = (
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
)
_DURATIONS: Final[tuple[tuple[str, str, Callable[[ModelCounters], int]], ...]] = (
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
)
_OURS: Final[tuple[tuple[str, str, Callable[[ModelCounters], int]], ...]] = (
    (
        "tensorline_requests_refused_total",
        "Number of requests refused before they ran: a full queue, a limit, an invalid tensor",
        lambda row: row.refused,
    ),
)
_SUMMARIES: Final[tuple[tuple[str, str, Callable[[Windows], Window]], ...]] = (
    (
        "nv_inference_request_summary_us",
        "Summary of inference request duration in microseconds (includes cached requests)",
        lambda windows: windows.request,
    ),
    (
        "nv_inference_queue_summary_us",
        "Summary of inference queuing duration in microseconds (includes cached requests)",
        lambda windows: windows.queue,
    ),
    (
        "nv_inference_compute_input_summary_us",
        "Summary of compute input duration in microseconds (does not include cached requests)",
        lambda windows: windows.compute_input,
    ),
    (
        "nv_inference_compute_infer_summary_us",
        "Summary of compute inference duration in microseconds (does not include cached requests)",
        lambda windows: windows.compute_infer,
    ),
    (
        "nv_inference_compute_output_summary_us",
        "Summary of inference compute output duration in microseconds (does not include cached requests)",
        lambda windows: windows.compute_output,
    ),
)
_FAILURE: Final = "nv_inference_request_failure"
_FIRST_RESPONSE: Final = "nv_inference_first_response_histogram_ms"


def model_lines(rows: Rows, options: MetricsOptions, now_ns: int) -> list[str]:
    """
    Args:
        now_ns: Monotonic; the summaries' windows end there.
    """
    lines: list[str] = []
    for name, text, value in (*_COUNTS, *(_DURATIONS if options.counter_latencies else ()), *_OURS):
        lines += head_lines(name, "counter", text)
        lines += [series(name, _labels(*row), value(row[2])) for row in rows]
    lines += head_lines(_FAILURE, "counter", "Number of failed inference requests, all batch sizes")
    for row in rows:
        lines += [series(_FAILURE, {**_labels(*row), "reason": reason}, row[2].failures[reason]) for reason in REASONS]
    if options.histogram_latencies:
        lines += _first_response_lines(rows)
    if options.summary_latencies:
        lines += _summary_lines(rows, options.quantiles, now_ns)
    return lines


def _labels(model: str, version: str, row: ModelCounters) -> dict[str, str]:
    return {**row.traits.tags, "model": model, "version": version}


def _first_response_lines(rows: Rows) -> list[str]:
    text = "Duration from request to first response in milliseconds"
    lines = head_lines(_FIRST_RESPONSE, "histogram", text)
    for row in rows:
        counters = row[2]
        if counters.traits.is_decoupled:
            histogram = counters.first_response
            bounds = [f"{us / 1000:g}" for us in histogram.bounds_us]
            lines += histogram_lines(
                _FIRST_RESPONSE, _labels(*row), bounds, histogram.cumulative, histogram.sum_ns / 1e6
            )
    return lines


def _summary_lines(rows: Rows, quantiles: Sequence[float], now_ns: int) -> list[str]:
    lines: list[str] = []
    for name, text, window_of in _SUMMARIES:
        lines += head_lines(name, "summary", text)
        for row in rows:
            windows, labels = row[2].windows, _labels(*row)
            if windows is None:
                continue
            window = window_of(windows)
            for quantile, value_ns in zip(quantiles, window.quantiles_ns(quantiles, now_ns), strict=True):
                lines.append(series(name, {**labels, "quantile": f"{quantile:g}"}, value_ns / 1000))
            lines.append(series(f"{name}_sum", labels, window.sum_ns / 1000))
            lines.append(series(f"{name}_count", labels, window.count))
    return lines
