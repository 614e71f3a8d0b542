"""The tree of spans that one finished request is told as: the only place that knows its shape.

`ModelInfer <model>` (gateway, server) -> `<model>` for each step and attempt (gateway, client) -> `queue`,
`compute_input`, `compute_infer`, `compute_output` (the stage's). A hop has no span: it is what the step's span has
over those four. Spans are values: the wire encoder, the trace store and the tests all start from here.
"""

from typing import Final, NamedTuple

from tensorline.telemetry import names
from tensorline.telemetry.record import (
    WALL_OFFSET_NS,
    Attributes,
    Process,
    RequestRecord,
    StageTiming,
    StepRecord,
)

__all__ = [
    "CLIENT",
    "INTERNAL",
    "PHASES",
    "SERVER",
    "SERVER_FAULTS",
    "Span",
    "is_failure",
    "request_id_attributes",
    "request_span",
    "service_name",
    "spans_of",
    "stage_attributes",
    "stage_marks",
    "stage_spans",
    "status_name",
    "step_span",
]

INTERNAL: Final = 1  # span kinds, as OTLP numbers them
SERVER: Final = 2
CLIENT: Final = 3

SERVER_FAULTS: Final = frozenset({2, 4, 12, 13, 14, 15})
"""Statuses that make a *server's* span an error: UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE,
DATA_LOSS. The rest, such as INVALID_ARGUMENT, is the caller's. Source: semantic conventions 1.44, gRPC server spans."""

_STATUS_NAMES: Final = (  # as gRPC numbers them; grpc itself is not imported, so that the command line need not
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
_OUR_SERVICES: Final = frozenset({"gateway", "preprocess", "model", "postprocess"})
_STEP_METHOD: Final = "tensorline.v1.Stage/Exchange"
_REQUEST_ID_LIMIT: Final = 256
_RPC_SYSTEM: Final = (names.RPC_SYSTEM_NAME, "grpc")
_STEP_RPC: Final[Attributes] = (_RPC_SYSTEM, (names.RPC_METHOD, _STEP_METHOD))

# A stage's span ids are its step's, XORed (little endian) with a constant: the same each time this trace is told.
PHASES: Final = (
    ("queue", 0x9E3779B97F4A7C15),
    ("compute_input", 0xC2B2AE3D27D4EB4F),
    ("compute_infer", 0x165667B19E3779F9),
    ("compute_output", 0xD6E8FEB86659FD93),
)


class Span(NamedTuple):
    """One span, times in wall-clock nanoseconds."""

    process: Process
    name: str
    kind: int
    span_id: bytes
    parent_id: bytes
    start: int
    end: int
    attributes: Attributes
    is_error: bool = False
    message: str = ""


def service_name(process: Process) -> str:
    """`service.name` of the process's resource: ours begin with "tensorline-", a team's own name stays as it is."""
    return f"tensorline-{process.service}" if process.service in _OUR_SERVICES else process.service


def status_name(status: int) -> str:
    """ "OK", "INVALID_ARGUMENT", ...: what `rpc.response.status_code` holds."""
    return _STATUS_NAMES[status] if 0 <= status < len(_STATUS_NAMES) else str(status)


def is_failure(status: int) -> bool:
    """Anything but OK and CANCELLED: a caller who left is no failure."""
    return status > 1


def spans_of(record: RequestRecord, gateway: Process) -> list[Span]:
    """The request's spans, each parent before its children."""
    spans = [request_span(record, gateway)]
    for step in record.steps:
        ended = step.ended or record.ended
        spans.append(step_span(step, record, gateway))
        if step.timing is not None and step.process is not None:
            spans += stage_spans(step, step.timing, step.process, ended)
    return spans


def request_span(record: RequestRecord, gateway: Process) -> Span:
    attributes: Attributes = (
        _RPC_SYSTEM,
        (names.RPC_METHOD, record.rpc),
        (names.RPC_RESPONSE_STATUS_CODE, status_name(record.status)),
        (names.MODEL_NAME, record.model),
        (names.MODEL_VERSION, record.version),
    )
    attributes += request_id_attributes(record)
    is_error = record.status in SERVER_FAULTS
    if is_error:
        attributes += ((names.ERROR_TYPE, status_name(record.status)),)
    return Span(
        gateway,
        f"{record.rpc.rpartition('/')[2]} {record.model}",
        SERVER,
        record.span_id,
        record.context.span_id,
        record.started + WALL_OFFSET_NS,
        record.ended + WALL_OFFSET_NS,
        attributes + record.attributes,
        is_error,
        record.error if is_error else "",
    )


def request_id_attributes(record: RequestRecord) -> Attributes:
    """The client's id, cut; empty when there is none."""
    return ((names.REQUEST_ID, record.request_id[:_REQUEST_ID_LIMIT]),) if record.request_id else ()


def step_span(step: StepRecord, record: RequestRecord, gateway: Process) -> Span:
    ended = step.ended or record.ended
    status, message = (step.status, step.error) if step.ended else (record.status, record.error)
    attributes: Attributes = (
        *_STEP_RPC,
        (names.RPC_RESPONSE_STATUS_CODE, status_name(status)),
        (names.MODEL_NAME, step.model),
        (names.MODEL_VERSION, step.version),
        (names.ATTEMPT, step.attempt),
    )
    if step.timing is not None:
        attributes += ((names.INSTANCE, step.timing.instance),)
    if step.clock_offset:
        attributes += _clock_attributes(step, ended)
    is_error = is_failure(status)
    if is_error:
        attributes += ((names.ERROR_TYPE, status_name(status)),)
    return Span(
        gateway,
        step.model,
        CLIENT,
        step.span_id,
        record.span_id,
        step.started + WALL_OFFSET_NS,
        ended + WALL_OFFSET_NS,
        attributes + step.attributes,
        is_error,
        message if is_error else "",
    )


def stage_attributes(step: StepRecord, timing: StageTiming) -> Attributes:
    """The same for each of a step's stage spans. A batch is named when others were in it too: it links their spans."""
    model: Attributes = ((names.MODEL_NAME, step.model),)
    if timing.batch_size <= step.rows:
        return model
    return ((names.BATCH_ID, timing.batch_id), (names.BATCH_SIZE, timing.batch_size), *model)


def stage_marks(step: StepRecord, timing: StageTiming, ended: int) -> list[int]:
    """Wall-clock bounds of the phases that the request went through: one more than there are phases.

    A request that failed on its way has zeros for what it never reached; its last phase ends when the answer left.
    """
    marks = [timing.queued, timing.batched, timing.input_ready, timing.computed, timing.output_ready]
    if 0 in marks:
        marks = marks[: marks.index(0)]
        if marks:
            marks.append(timing.sent or marks[-1])
    shift = step.clock_offset
    if (
        shift and step.clock_error
    ):  # what lies outside the call is the clocks' error; without one it is a bug and must be seen
        low, high = step.started, ended
        return [min(max(mark + shift, low), high) + WALL_OFFSET_NS for mark in marks]
    shift += WALL_OFFSET_NS
    return [mark + shift for mark in marks]


def stage_spans(step: StepRecord, timing: StageTiming, process: Process, ended: int) -> list[Span]:
    attributes = stage_attributes(step, timing)
    parent = step.span_id
    base = int.from_bytes(parent, "little")
    marks = stage_marks(step, timing, ended)
    spans = [
        Span(process, name, INTERNAL, (base ^ salt).to_bytes(8, "little"), parent, start, end, attributes)
        for (name, salt), start, end in zip(PHASES, marks, marks[1:], strict=False)
    ]
    if spans and is_failure(step.status):
        spans[-1] = spans[-1]._replace(is_error=True, message=step.error)
    return spans


def _clock_attributes(step: StepRecord, ended: int) -> Attributes:
    attributes: Attributes = ((names.CLOCK_OFFSET_NS, step.clock_offset),)
    if not step.clock_error:
        return attributes
    attributes += ((names.CLOCK_ERROR_NS, step.clock_error),)
    if step.timing is not None and step.timing.queued:
        first = step.timing.queued + step.clock_offset
        last = (step.timing.output_ready or step.timing.sent or step.timing.queued) + step.clock_offset
        clamped = max(step.started - first, last - ended)
        if clamped > 0:
            attributes += ((names.CLOCK_CLAMPED_NS, clamped),)
    return attributes
