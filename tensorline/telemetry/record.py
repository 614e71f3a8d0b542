"""What is known of a request once it is answered: plain values from which spans, metrics and statistics are made later.

All times are nanoseconds of this process's monotonic clock (`time.monotonic_ns`); those of a stage carry the estimated
offset of its clock. `WALL_OFFSET_NS` turns them into wall-clock time.
"""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "WALL_OFFSET_NS",
    "AttributeValue",
    "Attributes",
    "Process",
    "RequestRecord",
    "ResponseTiming",
    "StageTiming",
    "StepRecord",
    "TraceContext",
]

AttributeValue = str | bool | int | float
Attributes = tuple[tuple[str, AttributeValue], ...]

WALL_OFFSET_NS = time.time_ns() - time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class Process:
    """Whom a span belongs to: its OpenTelemetry resource."""

    service: str
    instance_id: str
    host: str = ""
    pid: int = 0
    release: str = ""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A W3C trace context: ids of 16 and 8 bytes, flags, and whether the caller decided about sampling."""

    trace_id: bytes
    span_id: bytes
    """Of the parent: the caller's span; b"" when this process began the trace."""
    flags: int = 0
    state: str = ""
    is_from_caller: bool = False

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & 1)


class StageTiming(NamedTuple):
    """When a stage did what, on the stage's monotonic clock (ns)."""

    received: int
    queued: int
    batched: int
    input_ready: int
    computed: int
    output_ready: int
    sent: int
    batch_id: int
    batch_size: int
    instance: str
    executions: int = 0
    """Of the model, that this answer is the one to count: not 0 for one request of each batch."""


class ResponseTiming(NamedTuple):
    """One response of a decoupled request, on its stage's clock (ns); for `ModelStatistics.response_stats`."""

    computed: int
    written: int
    """When its outputs were ready to be sent; as `computed` for a response without outputs."""
    status: int = 0
    is_empty: bool = False
    """It said only that it was the last."""


@dataclass(slots=True)
class StepRecord:
    """One call of one model by the gateway: the client side of a hop, and the stage's story of it."""

    model: str
    version: str
    span_id: bytes
    started: int
    ended: int = 0
    """0: the step was still under way when the request ended, and shares its end and its status."""
    process: Process | None = None
    timing: StageTiming | None = None
    clock_offset: int = 0
    """Add to a time of the stage's clock to get this process's."""
    status: int = 0
    error: str = ""
    attempt: int = 1
    clock_error: int = 0
    """By how much a `clock_offset` other than 0 may be wrong: half the best round trip."""
    is_refused: bool = False
    """The stage refused it before the model ran (`Result.not_started`): a full queue is no failure of the model."""
    rows: int = 1
    """The request's batch size, for `nv_inference_count`."""
    responses: list[ResponseTiming] | None = None
    """Of a decoupled model, in their order; as many as are worth statistics."""
    first_response: int = 0
    """When the first of several responses came here; 0: not decoupled, or none."""
    attributes: Attributes = ()
    """More for the step's span, such as `gen_ai.*`: never prompts, tokens or tensor data."""


@dataclass(slots=True)
class RequestRecord:
    """One request as the gateway saw it."""

    context: TraceContext
    span_id: bytes
    """Of the gateway's own span."""
    model: str
    version: str
    request_id: str
    started: int
    ended: int = 0
    status: int = 0
    error: str = ""
    rpc: str = "inference.GRPCInferenceService/ModelInfer"
    steps: list[StepRecord] = field(default_factory=list)
    """In the order they were started; a retried step stands there once for each attempt."""
    rows: int = 1
    attributes: Attributes = ()
    """More for the gateway's span."""
