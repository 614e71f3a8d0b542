"""Finished requests as a gateway would tell them."""

import itertools

from tensorline.telemetry.context import new_span_id, new_trace_id
from tensorline.telemetry.record import Process, RequestRecord, StageTiming, StepRecord, TraceContext

GATEWAY = Process("gateway", "gateway-1", "host-a", 100, "0.1.0")
STAGES = (
    Process("preprocess", "preprocess-1", "host-a", 101, "0.1.0"),
    Process("model", "model-1", "host-a", 102, "0.1.0"),
    Process("postprocess", "postprocess-1", "host-a", 103, "0.1.0"),
)
MODELS = ("decode", "efficientnet_lite0", "classes")
US = 1_000
MS = 1_000_000
START = 10**12

CALLED = TraceContext(bytes(range(16)), bytes(range(8, 16)), 1, "", True)

_batches = itertools.count(1)


def root_context(flags: int = 0) -> TraceContext:
    return TraceContext(new_trace_id(), b"", flags)


def timing(
    started: int,
    *,
    compute_us: int = 1_000,
    batch_id: int | None = None,
    batch_size: int = 1,
    executions: int = 1,
) -> StageTiming:
    """100 us to it, 10 to the queue, 90 in it, 50 to gather, the computation, 40 to write, 10 until it is sent."""
    received = started + 100 * US
    queued = received + 10 * US
    batched = queued + 90 * US
    input_ready = batched + 50 * US
    computed = input_ready + compute_us * US
    output_ready = computed + 40 * US
    number = next(_batches) if batch_id is None else batch_id
    return StageTiming(
        *(received, queued, batched, input_ready, computed, output_ready, output_ready + 10 * US),
        batch_id=number,
        batch_size=batch_size,
        instance="m_0",
        executions=executions,
    )


def step(started: int, index: int = 0, *, compute_us: int = 1_000, batch_id: int | None = None) -> StepRecord:
    """Ends 60 us after the stage has sent its answer."""
    times = timing(started, compute_us=compute_us, batch_id=batch_id)
    return StepRecord(
        MODELS[index], "1", new_span_id(), started, times.sent + 60 * US, process=STAGES[index], timing=times
    )


def pipeline(
    context: TraceContext = CALLED, *, started: int = START, compute_us: int = 1_000, request_id: str = "r-1"
) -> RequestRecord:
    """Three steps one after the other, with 20 us of the gateway's before each and after the last."""
    record = RequestRecord(context, new_span_id(), "photo", "1", request_id, started)
    now = started
    for index in range(3):
        record.steps.append(step(now + 20 * US, index, compute_us=compute_us if index == 1 else 100))
        now = record.steps[-1].ended
    record.ended = now + 20 * US
    return record


def single(
    context: TraceContext = CALLED, *, started: int = START, compute_us: int = 1_000, batch_id: int | None = None
) -> RequestRecord:
    """One model, asked for by its name."""
    record = RequestRecord(context, new_span_id(), MODELS[1], "1", "", started)
    record.steps.append(step(started, 1, compute_us=compute_us, batch_id=batch_id))
    record.ended = record.steps[0].ended
    return record


def failed(status: int, message: str = "it broke", context: TraceContext = CALLED) -> RequestRecord:
    """A pipeline whose last step failed while it computed."""
    record = pipeline(context)
    last = record.steps[-1]
    assert last.timing is not None
    last.timing = last.timing._replace(computed=0, output_ready=0)
    last.status = record.status = status
    last.error = record.error = message
    return record


def refused(status: int, message: str = "no", context: TraceContext = CALLED) -> RequestRecord:
    """Answered by the gateway itself, without a step."""
    return RequestRecord(context, new_span_id(), "photo", "1", "r-1", START, START + MS, status, message)
