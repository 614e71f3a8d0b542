"""Which counters a finished request moves: its model's, its steps' models', and those of the gateway as a whole."""

from collections.abc import Iterator
from typing import Final

from tensorline.telemetry.counters import ModelCounters, ModelTraits
from tensorline.telemetry.distributions import Histogram
from tensorline.telemetry.record import RequestRecord, StepRecord
from tensorline.telemetry.tree import status_name

__all__ = ["HOP_BUCKETS_US", "ModelTable"]

HOP_BUCKETS_US: Final = (50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 100_000, 1_000_000)

_MODELS_LIMIT: Final = 4096
_CANCELLED: Final = 1
_UNAVAILABLE: Final = 14
_REASON_OF: Final = {1: "CANCELED", 2: "BACKEND", 4: "REJECTED", 13: "BACKEND", 15: "BACKEND"}
_REFUSALS: Final = frozenset({3, 5, 6, 7, 8, 9, 11, 12, 16})


class ModelTable:
    """Counters by (model, version). Rows are made by `declare` and by successes alone: client text makes none.

    Args:
        has_windows: Rows keep what the summary families need, too.
    """

    def __init__(self, *, has_windows: bool = False) -> None:
        self._rows: dict[tuple[str, str], ModelCounters] = {}
        self._has_windows = has_windows
        self.hops: dict[str, Histogram] = {}
        """Seconds between gateway and stage, both ways together, by the stage's service."""
        self.requests: dict[tuple[str, str], int] = {}
        """Requests that have ended, by front end and status."""
        self.unknown = 0
        """Requests that failed before they had a model we know."""
        self.retries = 0

    def declare(self, model: str, version: str, traits: ModelTraits | None = None) -> ModelCounters:
        """The row of a model that was loaded (again: from 0)."""
        row = ModelCounters(traits, has_windows=self._has_windows)
        if len(self._rows) < _MODELS_LIMIT or (model, version) in self._rows:
            self._rows[model, version] = row
        return row  # above the limit, counted into the void: the exposition stays bounded whatever a registry says

    def restart(self, model: str, version: str, traits: ModelTraits | None = None) -> None:
        """The version was loaded again: it counts from 0, with its old traits if no others are given. Nothing happens
        to one without a row."""
        row = self._rows.get((model, version))
        if row is not None:
            self.declare(model, version, row.traits if traits is None else traits)

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
        key = (front_end_of(record.rpc), status_name(record.status))
        self.requests[key] = self.requests.get(key, 0) + 1
        is_pipeline = not steps or steps[0].model != record.model
        for step in steps:
            if step.attempt > 1:
                self.retries += 1
            self._add_hop(step)
            if step.status and _was_retried(step, steps):
                continue
            if not step.ended:  # still under way when the request ended
                self._count(step, record.status or _CANCELLED, step.started, record.ended)
            elif is_pipeline:
                self._count(step, step.status, step.started, step.ended)
            else:
                self._count(step, step.status, record.started, record.ended)
        if is_pipeline:
            self._count_pipeline(record)

    def _count(self, step: StepRecord, status: int, started: int, ended: int) -> None:
        row = self._rows.get((step.model, step.version))
        if row is None:
            if status:
                self.unknown += 1
                return
            row = self.declare(step.model, step.version)
        if status == 0:
            row.add_success(step, started, ended)
            return
        timing = step.timing
        if timing is not None and timing.input_ready:
            row.add_execution(step, timing)
            row.add_responses(step, timing, started)
        if _is_refusal(status, step):
            row.refused += 1
        else:
            row.add_failure(_reason(status, step), ended - started)

    def _count_pipeline(self, record: RequestRecord) -> None:
        row = self._rows.get((record.model, record.version))
        status = record.status
        if row is None:
            if status:
                self.unknown += 1
                return
            row = self.declare(record.model, record.version)
        if status == 0:
            row.add_pipeline(record)
        elif not record.steps or _is_refusal(status, record.steps[-1]):
            row.refused += 1
        else:
            row.add_failure("CANCELED" if status == _CANCELLED else "OTHER", record.ended - record.started)

    def _add_hop(self, step: StepRecord) -> None:
        timing, process = step.timing, step.process
        if timing is None or process is None or not timing.sent or not step.ended:
            return
        hop = self.hops.get(process.service)
        if hop is None:
            hop = self.hops[process.service] = Histogram(HOP_BUCKETS_US)
        # Without what lay between `received` and `sent`. Differences on each side's own clock: no offset enters.
        hop.observe(step.ended - step.started - timing.sent + timing.received)


def front_end_of(rpc: str) -> str:
    """ "grpc" or "http", by the name that a request's record has of its call; "other" for neither."""
    if rpc.startswith("inference."):
        return "grpc"
    return "http" if rpc.startswith(("HTTP", "GET ", "POST ", "/")) else "other"


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
