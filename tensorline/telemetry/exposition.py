"""The lines of the Prometheus text format. `prometheus_client` writes counters as `..._total`, and Triton does not."""

import math
from collections.abc import Iterable, Mapping

__all__ = ["head_lines", "histogram_lines", "number", "series"]


def head_lines(name: str, kind: str, text: str) -> list[str]:
    """What comes before a family's samples."""
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def series(name: str, labels: Mapping[str, str], value: float) -> str:
    """One sample; its labels in alphabetical order, as Triton's stand and its users' tests match them."""
    if not labels:
        return f"{name} {number(value)}"
    pairs = ",".join(f'{key}="{_escape(labels[key])}"' for key in sorted(labels))
    return f"{name}{{{pairs}}} {number(value)}"


def number(value: float) -> str:
    """As Prometheus reads it; whole numbers exactly."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(value)


def histogram_lines(
    name: str, labels: Mapping[str, str], bounds: Iterable[str], cumulative: Iterable[int], total: float
) -> list[str]:
    """
    Args:
        bounds: Upper ones, without the last, +Inf.
        cumulative: Observations up to each bound, +Inf included.
        total: Sum of all observations.
    """
    lines, count = [], 0
    for bound, count in zip((*bounds, "+Inf"), cumulative, strict=True):
        lines.append(series(f"{name}_bucket", {**labels, "le": bound}, count))
    return [*lines, series(f"{name}_sum", labels, total), series(f"{name}_count", labels, count)]


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
