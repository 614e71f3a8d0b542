"""The traces that the gateway keeps in memory: the most recent, the failed, the slowest of each model and minute."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice

from tensorline.telemetry.record import Process, RequestRecord
from tensorline.telemetry.tree import is_failure
from tensorline.telemetry.view import SpanView, SummaryView, TraceView, summary_view, trace_view

__all__ = ["TraceStore"]

_MINUTE_NS = 60 * 10**9
_RECORD_BYTES = 600  # of a request without steps, measured with sys.getsizeof over its parts
_STEP_BYTES = 700
_SPAN_BYTES = 1200
_Slow = tuple[int, int, RequestRecord]  # duration, a number that decides between equals, the request


class TraceStore:
    """Bounded in number and in (estimated) bytes. What a caller did not want sampled is never kept.

    Not thread-safe: used on the event loop. A record belongs to the store once it is added.
    """

    def __init__(
        self,
        gateway: Process,
        *,
        recent: int = 1000,
        errors: int = 500,
        slow_per_minute: int = 3,
        slow_minutes: int = 30,
        slow_models: int = 100,
        byte_limit: int = 32 << 20,
    ) -> None:
        self._gateway = gateway
        self._recent_limit = recent
        self._errors_limit = errors
        self._slow_per_minute = slow_per_minute
        self._slow_limit = slow_minutes * slow_models
        self._slow_minutes = slow_minutes
        self._byte_limit = byte_limit
        self._recent: deque[RequestRecord] = deque()
        self._errors: deque[RequestRecord] = deque()
        self._slow: OrderedDict[tuple[str, int], list[_Slow]] = OrderedDict()
        self._elsewhere: OrderedDict[bytes, list[SpanView]] = OrderedDict()
        self._bytes = 0
        self._added = 0

    @property
    def byte_size(self) -> int:
        """An estimate; a record that is held for two reasons counts twice."""
        return self._bytes

    def __len__(self) -> int:
        return sum(1 for _ in self._held())

    def add(self, record: RequestRecord) -> None:
        """Keep a finished request, at the cost of an older one when a limit is reached."""
        context = record.context
        if context.is_from_caller and not context.is_sampled:
            return
        size = _size(record)
        self._added += 1
        self._bytes += size
        self._recent.append(record)
        if len(self._recent) > self._recent_limit:
            self._bytes -= _size(self._recent.popleft())
        if is_failure(record.status):
            self._bytes += size
            self._errors.append(record)
            if len(self._errors) > self._errors_limit:
                self._bytes -= _size(self._errors.popleft())
        elif record.status == 0:  # a failed request's model name may be the client's invention
            self._add_slow(record, size)
        while self._bytes > self._byte_limit:
            self._drop_one()

    def add_spans(self, trace_id: bytes, spans: Iterable[SpanView]) -> None:
        """Keep spans that another process sent (a client, a stage's own code); shown with the trace of that id."""
        held = self._elsewhere.setdefault(trace_id, [])
        self._elsewhere.move_to_end(trace_id)
        before = len(held)
        held.extend(spans)
        self._bytes += _SPAN_BYTES * (len(held) - before)
        while self._bytes > self._byte_limit or len(self._elsewhere) > self._recent_limit:
            self._drop_one()

    def get(self, trace_id: bytes) -> list[RequestRecord]:
        """The requests of one trace, the earliest first; empty when unknown."""
        found = [record for record in self._held() if record.context.trace_id == trace_id]
        return sorted(found, key=lambda record: record.started)

    def last(self) -> RequestRecord | None:
        return self._recent[-1] if self._recent else None

    def slowest(self, model: str | None = None) -> RequestRecord | None:
        """The slowest success that is still held, of `model` or of all."""
        slow = (entry for (name, _), heap in self._slow.items() if model in (None, name) for entry in heap)
        return max(slow, default=(0, 0, None))[2]

    def list(self, *, model: str | None = None, errors_only: bool = False, limit: int = 100) -> list[SummaryView]:
        """Summaries of what is held, the newest first."""
        found = (
            record
            for record in sorted(self._held(), key=lambda record: record.ended, reverse=True)
            if model in (None, record.model) and (not errors_only or is_failure(record.status))
        )
        return [summary_view(record) for record in islice(found, limit)]

    def to_json(self, record: RequestRecord) -> TraceView:
        """The whole trace as plain values, with the spans of the same trace that came from elsewhere."""
        return trace_view(record, self._gateway, self._elsewhere.get(record.context.trace_id, ()))

    def _held(self) -> Iterator[RequestRecord]:
        seen: set[int] = set()
        slow = (entry[2] for heap in self._slow.values() for entry in heap)
        for records in (self._recent, self._errors, slow):
            for record in records:
                if id(record) not in seen:
                    seen.add(id(record))
                    yield record

    def _add_slow(self, record: RequestRecord, size: int) -> None:
        key = (record.model, record.ended // _MINUTE_NS)
        heap = self._slow.get(key)
        if heap is None:
            heap = self._slow[key] = []
            self._drop_old_minutes(key[1])
        entry = (record.ended - record.started, self._added, record)
        if len(heap) < self._slow_per_minute:
            heapq.heappush(heap, entry)
            self._bytes += size
        elif heap and entry[0] > heap[0][0]:
            self._bytes += size - _size(heapq.heapreplace(heap, entry)[2])

    def _drop_old_minutes(self, minute: int) -> None:
        """Called once per model and minute. Minutes come in order, so the first entries are the oldest."""
        while self._slow:
            key = next(iter(self._slow))
            if key[1] > minute - self._slow_minutes and len(self._slow) <= self._slow_limit:
                return
            self._bytes -= sum(_size(entry[2]) for entry in self._slow.pop(key))

    def _drop_one(self) -> None:
        """Make room: spans from elsewhere first, then the oldest recent request, then the slow, then the failed."""
        if self._elsewhere:
            self._bytes -= _SPAN_BYTES * len(self._elsewhere.popitem(last=False)[1])
        elif self._recent:
            self._bytes -= _size(self._recent.popleft())
        elif self._slow:
            self._bytes -= sum(_size(entry[2]) for entry in self._slow.popitem(last=False)[1])
        else:
            self._bytes -= _size(self._errors.popleft())


def _size(record: RequestRecord) -> int:
    steps = record.steps
    size = _RECORD_BYTES + len(record.request_id) + len(record.error) + _STEP_BYTES * len(steps)
    return size + sum(len(step.error) for step in steps) if record.status else size
