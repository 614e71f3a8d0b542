"""Where the time of a trace went: its own sum, without a clock or a screen. Input is the `TraceView` of the store."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tensorline.telemetry.view import SpanView, TraceView

__all__ = ["Interval", "Part", "children_of", "dominant", "parts_of", "uncovered"]

Interval = tuple[int, int]

COMPUTE: Final = ("compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True, slots=True)
class Part:
    """Kind "gateway", "hop", "silence", "queue" or "compute"; `model` "" for the gateway's own work."""

    kind: str
    model: str
    duration_ns: int

    def __str__(self) -> str:
        match self.kind:
            case "gateway":
                return "the gateway's own work"
            case "hop":
                return f"the hop to {self.model}"
            case "silence":
                return f"the wait for {self.model}, which did not answer,"
            case "queue":
                return f"the queue of {self.model}"
        return f"compute of {self.model}"


def children_of(spans: Iterable[SpanView]) -> dict[str, list[SpanView]]:
    """Spans by the id of their parent, each list in the order of their starts."""
    children: dict[str, list[SpanView]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span["start_ns"], span["end_ns"])):
        children[span["parent_id"]].append(span)
    return children


def uncovered(start: int, end: int, others: Iterable[Interval]) -> list[Interval]:
    """What of [start, end) none of `others` covers."""
    gaps: list[Interval] = []
    for other_start, other_end in sorted(others):
        if other_start > start:
            gaps.append((start, min(other_start, end)))
        start = max(start, other_end)
        if start >= end:
            return gaps
    return [*gaps, (start, end)]


def parts_of(trace: TraceView) -> list[Part]:
    """Each part of the request's time, the longest first. They add up to the whole where steps follow one another."""
    root, children = trace["spans"][0], children_of(trace["spans"])
    steps = [span for span in children[root["span_id"]] if span["kind"] == "client"]
    sums: dict[tuple[str, str], int] = defaultdict(int)
    sums["gateway", ""] += _total(uncovered(root["start_ns"], root["end_ns"], map(_interval, steps)))
    for step in steps:
        phases = [span for span in children[step["span_id"]] if span["name"] in ("queue", *COMPUTE)]
        model = step["name"]
        # A stage that answers sends its times along: without any, all that is known is that nothing came.
        kind = "hop" if phases else "silence"
        sums[kind, model] += _total(uncovered(step["start_ns"], step["end_ns"], map(_interval, phases)))
        for span in phases:
            sums["queue" if span["name"] == "queue" else "compute", model] += span["end_ns"] - span["start_ns"]
    parts = [Part(kind, model, duration) for (kind, model), duration in sums.items()]
    return sorted(parts, key=lambda part: -part.duration_ns)


def dominant(trace: TraceView) -> Part:
    """The longest part."""
    return parts_of(trace)[0]


def _interval(span: SpanView) -> Interval:
    return span["start_ns"], span["end_ns"]


def _total(intervals: Sequence[Interval]) -> int:
    return sum(end - start for start, end in intervals)
