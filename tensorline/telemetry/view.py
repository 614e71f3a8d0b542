"""A trace as plain JSON values: what the command line draws and a user interface reads."""

from collections.abc import Iterable
from typing import TypedDict

from tensorline.telemetry.record import WALL_OFFSET_NS, AttributeValue, Process, RequestRecord
from tensorline.telemetry.tree import Span, service_name, spans_of, status_name

__all__ = ["SpanView", "SummaryView", "TraceView", "summary_view", "trace_view"]

_KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}


class SpanView(TypedDict):
    """Ids in hex, times in wall-clock nanoseconds; `parent_id` "" for a root."""

    name: str
    span_id: str
    parent_id: str
    kind: str
    service: str
    instance_id: str
    start_ns: int
    end_ns: int
    is_error: bool
    message: str
    attributes: dict[str, AttributeValue]


class SummaryView(TypedDict):
    """One line of a list of traces."""

    trace_id: str
    model: str
    version: str
    request_id: str
    status: str
    start_ns: int
    duration_ns: int
    steps: int


class TraceView(SummaryView):
    """A whole trace: parents stand before their children; spans that came from elsewhere stand at the end."""

    spans: list[SpanView]


def summary_view(record: RequestRecord) -> SummaryView:
    return {
        "trace_id": record.context.trace_id.hex(),
        "model": record.model,
        "version": record.version,
        "request_id": record.request_id[:256],
        "status": status_name(record.status),
        "start_ns": record.started + WALL_OFFSET_NS,
        "duration_ns": record.ended - record.started,
        "steps": len(record.steps),
    }


def trace_view(record: RequestRecord, gateway: Process, more: Iterable[SpanView] = ()) -> TraceView:
    return {**summary_view(record), "spans": [*map(_span_view, spans_of(record, gateway)), *more]}


def _span_view(span: Span) -> SpanView:
    return {
        "name": span.name,
        "span_id": span.span_id.hex(),
        "parent_id": span.parent_id.hex(),
        "kind": _KINDS[span.kind],
        "service": service_name(span.process),
        "instance_id": span.process.instance_id,
        "start_ns": span.start,
        "end_ns": span.end,
        "is_error": span.is_error,
        "message": span.message,
        "attributes": dict(span.attributes),
    }
