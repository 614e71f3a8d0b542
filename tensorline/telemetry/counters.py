"""What `nv_inference_*` metrics and `ModelStatistics` count of one model version, as plain integers.

Rules: `reference/observability.md` §2. A full queue or a failed validation counts nothing there (ours is `refused`); a
failure is REJECTED (its time was up), CANCELED, BACKEND (the model) or OTHER.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tensorline.telemetry.distributions import Histogram, Window
from tensorline.telemetry.record import WALL_OFFSET_NS, RequestRecord, ResponseTiming, StageTiming, StepRecord

__all__ = ["REASONS", "BatchCounters", "ModelCounters", "ModelTraits", "ResponseCounters", "Windows"]

REASONS: Final = ("BACKEND", "CANCELED", "OTHER", "REJECTED")

_RESPONSES_LIMIT: Final = 256
"""Responses of a request that have statistics of their own: `response_stats` has an entry for each number."""

_SIZES_LIMIT: Final = 4096
_CANCELLED: Final = 1


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What a model's configuration says about its metrics."""

    tags: Mapping[str, str] = field(default_factory=dict)
    """Further labels of its rows, from `metric_tags`."""
    is_decoupled: bool = False
    first_response_us: tuple[int, ...] = (100_000, 500_000, 2_000_000, 5_000_000)
    """Buckets of the time to the first response; `model_metrics` may say others."""


class BatchCounters:
    """Executions of one batch size; nanoseconds."""

    __slots__ = ("compute_infer_ns", "compute_input_ns", "compute_output_ns", "count")

    def __init__(self) -> None:
        self.count = self.compute_input_ns = self.compute_infer_ns = self.compute_output_ns = 0


class ResponseCounters:
    """The n-th responses of a decoupled model's requests; each value is count and nanoseconds."""

    __slots__ = ("cancel", "compute_infer", "compute_output", "empty_response", "fail", "success")

    def __init__(self) -> None:
        self.compute_infer = [0, 0]
        self.compute_output = [0, 0]
        self.success = [0, 0]
        self.fail = [0, 0]
        self.empty_response = [0, 0]
        self.cancel = [0, 0]

    def add(self, response: ResponseTiming, since: int) -> None:
        """
        Args:
            since: When its computation began: the end of the response before.
        """
        infer, output = max(0, response.computed - since), max(0, response.written - response.computed)
        _add(self.compute_infer, infer)
        if response.status == _CANCELLED:
            _add(self.cancel, infer + output)
        elif response.status:
            _add(self.fail, infer + output)
        elif response.is_empty:
            _add(self.empty_response, infer + output)
        else:
            _add(self.compute_output, output)
            _add(self.success, infer + output)


class Windows:
    """Of one model's requests, for the summary families."""

    __slots__ = ("compute_infer", "compute_input", "compute_output", "queue", "request")

    def __init__(self) -> None:
        self.request = Window()
        self.queue = Window()
        self.compute_input = Window()
        self.compute_infer = Window()
        self.compute_output = Window()


class ModelCounters:
    """One version of one model since it was loaded; durations in nanoseconds.

    Args:
        has_windows: Keep what the summary families need, too.
    """

    __slots__ = (
        "batches",
        "compute_count",
        "compute_infer_ns",
        "compute_input_ns",
        "compute_output_ns",
        "execution_count",
        "fail_ns",
        "failures",
        "first_response",
        "inference_count",
        "last_inference_ns",
        "queue_ns",
        "refused",
        "responses",
        "success_count",
        "success_ns",
        "traits",
        "windows",
    )

    def __init__(self, traits: ModelTraits | None = None, *, has_windows: bool = False) -> None:
        self.traits = ModelTraits() if traits is None else traits
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
        self.responses: list[ResponseCounters] = []
        """By the number of the response; of decoupled models."""
        self.first_response = Histogram(self.traits.first_response_us)
        self.windows = Windows() if has_windows else None

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

    def add_success(self, step: StepRecord, started: int, ended: int) -> None:
        """One request that the model answered."""
        self.success_count += 1
        self.success_ns += ended - started
        self.inference_count += step.rows
        timing = step.timing
        if timing is None:
            return
        self.compute_count += 1
        spent = _phases(timing)
        self._add_phases(spent)
        if self.windows is not None:
            self._observe(ended - started, spent, ended)
        self.add_execution(step, timing)
        self.add_responses(step, timing, started)

    def add_pipeline(self, record: RequestRecord) -> None:
        """One request that a pipeline answered: queue and compute are sums over its steps."""
        self.success_count += 1
        self.success_ns += record.ended - record.started
        self.inference_count += record.rows
        self.execution_count += 1
        self.compute_count += 1
        self.last_inference_ns = record.started
        spent = (0, 0, 0, 0)
        for step in record.steps:
            if step.timing is not None and not step.status:
                more = _phases(step.timing)
                spent = (spent[0] + more[0], spent[1] + more[1], spent[2] + more[2], spent[3] + more[3])
        self._add_phases(spent)
        if self.windows is not None:
            self._observe(record.ended - record.started, spent, record.ended)

    def add_failure(self, reason: str, duration_ns: int) -> None:
        self.failures[reason] += 1
        self.fail_ns += duration_ns

    def add_execution(self, step: StepRecord, timing: StageTiming) -> None:
        """Count what this answer is the one to count of its batch: the others of the batch may be anywhere."""
        self.last_inference_ns = max(self.last_inference_ns, timing.batched + step.clock_offset)
        if not timing.executions:
            return
        self.execution_count += timing.executions
        if not timing.output_ready:  # it failed: counted, without durations
            return
        batch = self.batches.get(timing.batch_size)
        if batch is None:
            if len(self.batches) >= _SIZES_LIMIT:
                return
            batch = self.batches[timing.batch_size] = BatchCounters()
        _, compute_input, compute_infer, compute_output = _phases(timing)
        batch.count += 1
        batch.compute_input_ns += compute_input
        batch.compute_infer_ns += compute_infer
        batch.compute_output_ns += compute_output

    def add_responses(self, step: StepRecord, timing: StageTiming, started: int) -> None:
        """What is told of each response of a decoupled request."""
        if step.first_response:
            self.first_response.observe(step.first_response - started)
        since = timing.input_ready
        for number, response in enumerate((step.responses or ())[:_RESPONSES_LIMIT]):
            if number == len(self.responses):
                self.responses.append(ResponseCounters())
            self.responses[number].add(response, since)
            since = response.written

    def _add_phases(self, spent: tuple[int, int, int, int]) -> None:
        self.queue_ns += spent[0]
        self.compute_input_ns += spent[1]
        self.compute_infer_ns += spent[2]
        self.compute_output_ns += spent[3]

    def _observe(self, duration_ns: int, spent: tuple[int, int, int, int], now_ns: int) -> None:
        windows = self.windows
        if windows is None:
            return
        windows.request.observe(duration_ns, now_ns)
        for window, phase_ns in zip(
            (windows.queue, windows.compute_input, windows.compute_infer, windows.compute_output), spent, strict=True
        ):
            window.observe(phase_ns, now_ns)


def _phases(timing: StageTiming) -> tuple[int, int, int, int]:
    """In the queue, and computing: input, the model, output; 0 for what it never came through."""
    _, queued, batched, input_ready, computed, output_ready, _, _, _, _, _ = timing
    return (
        batched - queued,
        input_ready - batched if input_ready else 0,
        computed - input_ready if computed else 0,
        output_ready - computed if output_ready and computed else 0,
    )


def _add(into: list[int], duration_ns: int) -> None:
    into[0] += 1
    into[1] += duration_ns
