"""What `nv_inference_*` metrics and `ModelStatistics` count, as plain integers updated from finished requests.

Rules: `reference/observability.md` §2. A full queue or a failed validation counts nothing there (ours are `refused` and
`unknown`); a failure is REJECTED (its time was up), CANCELED, BACKEND (the model) or OTHER.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from tensorline.telemetry.record import WALL_OFFSET_NS, RequestRecord, StageTiming, StepRecord

__all__ = ["HOP_BUCKETS_US", "REASONS", "BatchCounters", "Histogram", "ModelCounters", "ModelTable"]

REASONS: Final = ("BACKEND", "CANCELED", "OTHER", "REJECTED")
HOP_BUCKETS_US: Final = (50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 100_000, 1_000_000)

_MODELS_LIMIT: Final = 4096
_BATCHES_LIMIT: Final = 1024  # ids remembered twice over: far more than can be in flight
_CANCELLED: Final = 1
_REASON_OF: Final = {1: "CANCELED", 2: "BACKEND", 4: "REJECTED", 13: "BACKEND", 15: "BACKEND"}
_REFUSALS: Final = frozenset({3, 5, 6, 7, 8, 9, 11, 12, 16})
_UNAVAILABLE: Final = 14
_BatchKey = tuple[str, str, int]


class BatchCounters:
    """Executions of one batch size; nanoseconds."""

    __slots__ = ("compute_infer_ns", "compute_input_ns", "compute_output_ns", "count")

    def __init__(self) -> None:
        self.count = self.compute_input_ns = self.compute_infer_ns = self.compute_output_ns = 0


class ModelCounters:
    """One version of one model since it was loaded; durations in nanoseconds."""

    __slots__ = (
        "_seen",
        "_seen_before",
        "batches",
        "compute_count",
        "compute_infer_ns",
        "compute_input_ns",
        "compute_output_ns",
        "execution_count",
        "fail_ns",
        "failures",
        "inference_count",
        "last_inference_ns",
        "queue_ns",
        "refused",
        "success_count",
        "success_ns",
    )

    def __init__(self) -> None:
        self.success_count = self.success_ns = self.fail_ns = 0
        self.inference_count = self.execution_count = 0
        self.last_inference_ns = 0
        """Of this process's monotonic clock; 0: never."""
        self.queue_ns = 0
        self.compute_count = self.compute_input_ns = self.compute_infer_ns = self.compute_output_ns = 0
        self.failures = dict.fromkeys(REASONS, 0)
        self.refused = 0
        """Requests that Triton would not count: a full queue, a limit, an invalid tensor."""
        self.batches: dict[int, BatchCounters] = {}
        self._seen: set[_BatchKey] = set()
        self._seen_before: set[_BatchKey] = set()

    @property
    def fail_count(self) -> int:
        return sum(self.failures.values())

    @property
    def last_inference_ms(self) -> int:
        """Since the epoch; 0: never."""
        return (self.last_inference_ns + WALL_OFFSET_NS) // 1_000_000 if self.last_inference_ns else 0

    @property
    def queue_count(self) -> int:
        return self.compute_count

    def add_success(self, step: StepRecord, duration_ns: int) -> None:
        """One request that the model answered."""
        self.success_count += 1
        self.success_ns += duration_ns
        self.inference_count += step.rows
        timing = step.timing
        if timing is None:
            return
        _, queued, batched, input_ready, computed, output_ready, _, _, _, _ = timing
        self.compute_count += 1
        self.queue_ns += batched - queued
        self.compute_input_ns += input_ready - batched
        self.compute_infer_ns += computed - input_ready
        self.compute_output_ns += output_ready - computed
        self.add_execution(step, timing)

    def add_pipeline(self, record: RequestRecord, duration_ns: int) -> None:
        """One request that a pipeline answered: queue and compute are sums over its steps."""
        self.success_count += 1
        self.success_ns += duration_ns
        self.inference_count += record.rows
        self.execution_count += 1
        self.compute_count += 1
        self.last_inference_ns = record.started
        for step in record.steps:
            timing = step.timing
            if timing is not None and not step.status:
                _, queued, batched, input_ready, computed, output_ready, _, _, _, _ = timing
                self.queue_ns += batched - queued
                self.compute_input_ns += input_ready - batched
                self.compute_infer_ns += computed - input_ready
                self.compute_output_ns += output_ready - computed

    def add_failure(self, reason: str, duration_ns: int) -> None:
        self.failures[reason] += 1
        self.fail_ns += duration_ns

    def add_execution(self, step: StepRecord, timing: StageTiming) -> None:
        """Count the batch, unless another request of it was here before."""
        _, _, batched, input_ready, computed, output_ready, _, batch_id, batch_size, instance = timing
        process = step.process
        key = ("" if process is None else process.instance_id, instance, batch_id)
        if key in self._seen or key in self._seen_before:
            return
        self._seen.add(key)
        if len(self._seen) > _BATCHES_LIMIT:
            self._seen_before, self._seen = self._seen, set()
        self.execution_count += 1
        self.last_inference_ns = batched + step.clock_offset
        if not output_ready:  # it failed: counted, without durations
            return
        batch = self.batches.get(batch_size)
        if batch is None:
            batch = self.batches[batch_size] = BatchCounters()
        batch.count += 1
        batch.compute_input_ns += input_ready - batched
        batch.compute_infer_ns += computed - input_ready
        batch.compute_output_ns += output_ready - computed


class Histogram:
    """Counts by upper bound in microseconds (the last: above all of them), and the sum in nanoseconds."""

    __slots__ = ("_bounds_ns", "bounds_us", "counts", "sum_ns")

    def __init__(self, bounds_us: tuple[int, ...]) -> None:
        self.bounds_us = bounds_us
        self.counts = [0] * (len(bounds_us) + 1)
        self.sum_ns = 0
        self._bounds_ns = [bound * 1000 for bound in bounds_us]

    def observe(self, duration_ns: int) -> None:
        self.counts[bisect_left(self._bounds_ns, duration_ns)] += 1
        self.sum_ns += duration_ns


class ModelTable:
    """Counters by (model, version). Rows are made by `declare` and by successes alone: client text makes none."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], ModelCounters] = {}
        self.hops: dict[str, Histogram] = {}
        """Seconds between gateway and stage, both ways together, by the stage's service."""
        self.unknown = 0
        """Requests that failed before they had a model we know."""
        self.retries = 0

    def declare(self, model: str, version: str) -> ModelCounters:
        """The row of a model that was loaded (again: from 0)."""
        if len(self._rows) >= _MODELS_LIMIT and (model, version) not in self._rows:
            return ModelCounters()  # counted into the void: the exposition stays bounded whatever a registry says
        counters = self._rows[model, version] = ModelCounters()
        return counters

    def forget(self, model: str, version: str) -> None:
        """The model was unloaded: its rows go away."""
        self._rows.pop((model, version), None)

    def get(self, model: str, version: str) -> ModelCounters | None:
        return self._rows.get((model, version))

    def __iter__(self) -> Iterator[tuple[str, str, ModelCounters]]:
        return ((model, version, row) for (model, version), row in sorted(self._rows.items()))

    def record(self, record: RequestRecord) -> None:
        """Count a finished request: on its own model, and for a pipeline each step on the step's model."""
        steps = record.steps
        duration = record.ended - record.started
        is_pipeline = not steps or steps[0].model != record.model
        for step in steps:
            if step.attempt > 1:
                self.retries += 1
            self._add_hop(step)
            if step.status and _was_retried(step, steps):
                continue
            if not step.ended:  # still under way when the request ended
                self._count(step, record.status or _CANCELLED, record.ended - step.started)
            else:
                self._count(step, step.status, step.ended - step.started if is_pipeline else duration)
        if is_pipeline:
            self._count_pipeline(record, duration)

    def executed(self, model: str, version: str, timing: StageTiming, *, rows: int = 1, status: int = 0) -> None:
        """Count one request of a batch where it ran: the stage's own statistics."""
        received, sent = timing.received, timing.sent
        step = StepRecord(model, version, b"", received, sent, None, timing, rows=rows)
        self._count(step, status, sent - received)

    def _count(self, step: StepRecord, status: int, duration_ns: int) -> None:
        row = self._rows.get((step.model, step.version))
        if row is None:
            if status:
                self.unknown += 1
                return
            row = self.declare(step.model, step.version)
        if status == 0:
            row.add_success(step, duration_ns)
            return
        if step.timing is not None and step.timing.input_ready:
            row.add_execution(step, step.timing)
        if _is_refusal(status, step):
            row.refused += 1
        else:
            row.add_failure(_reason(status, step), duration_ns)

    def _count_pipeline(self, record: RequestRecord, duration_ns: int) -> None:
        row = self._rows.get((record.model, record.version))
        status = record.status
        if row is None:
            if status:
                self.unknown += 1
                return
            row = self.declare(record.model, record.version)
        if status == 0:
            row.add_pipeline(record, duration_ns)
        elif not record.steps or _is_refusal(status, record.steps[-1]):
            row.refused += 1
        else:
            row.add_failure("CANCELED" if status == _CANCELLED else "OTHER", duration_ns)

    def _add_hop(self, step: StepRecord) -> None:
        timing, process = step.timing, step.process
        if timing is None or process is None or not timing[6] or not step.ended:
            return
        hop = self.hops.get(process.service)
        if hop is None:
            hop = self.hops[process.service] = Histogram(HOP_BUCKETS_US)
        # Without what lay between `received` and `sent`. Differences on each side's own clock: no offset enters.
        hop.observe(step.ended - step.started - timing[6] + timing[0])


def _reason(status: int, step: StepRecord) -> str:
    if status in _REASON_OF:
        return _REASON_OF[status]
    return "BACKEND" if step.timing is not None and step.timing.input_ready else "OTHER"


def _was_retried(step: StepRecord, steps: list[StepRecord]) -> bool:
    return any(other.model == step.model and other.attempt > step.attempt for other in steps)


def _is_refusal(status: int, step: StepRecord) -> bool:
    """Not counted by Triton: what could never run, a full queue, or nobody there to ask."""
    if step.timing is not None and step.timing.input_ready:
        return False  # it ran
    return status in _REFUSALS or step.is_refused or (status == _UNAVAILABLE and step.process is None)
