"""The one call per finished request: it costs an append; counting, keeping and exporting follow in short slices."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from typing import Final

from tensorline.telemetry.context import extract
from tensorline.telemetry.counters import ModelTraits
from tensorline.telemetry.export import SpanExporter, open_exporter
from tensorline.telemetry.metrics import Metrics
from tensorline.telemetry.record import Process, RequestRecord, TraceContext
from tensorline.telemetry.sampling import Sampler
from tensorline.telemetry.settings import TelemetrySettings
from tensorline.telemetry.spans import SpanEncoder, span_count
from tensorline.telemetry.store import TraceStore
from tensorline.telemetry.trace_rules import TraceRules

__all__ = ["Recorder", "open_recorder"]

_DELAY_S: Final = 0.02
_SLICE_NS: Final = 1_000_000  # of the event loop's time before others get a turn
_PENDING_LIMIT: Final = 20_000


class Recorder:
    """What a gateway tells its requests to. Made by `open_recorder`; used on the event loop."""

    def __init__(
        self,
        metrics: Metrics,
        store: TraceStore,
        sampler: Sampler,
        exporter: SpanExporter | None = None,
        rules: TraceRules | None = None,
    ) -> None:
        self.rules = TraceRules() if rules is None else rules
        """What operators set at run time; where they did not, the sampler chooses."""
        self.metrics = metrics
        self.store = store
        self._sampler = sampler
        self._exporter = exporter
        self._pending: deque[RequestRecord] = deque()
        self._is_scheduled = False
        self._lost_spans = 0
        self._loop = asyncio.get_running_loop()
        metrics.watch("tensorline_traces_held", lambda: len(store))
        metrics.watch("tensorline_spans_dropped_total", self._dropped)
        metrics.watch("tensorline_spans_exported_total", lambda: exporter.exported if exporter is not None else 0)

    def begin(self, metadata: Iterable[tuple[str, str | bytes]], model: str = "") -> TraceContext:
        """The caller's trace context, or a new one that the head sampler decided about. Once for each request.

        Args:
            model: As the request names it: its trace settings count.
        """
        rules = self.rules
        if not rules.is_active:
            return extract(metadata, self._is_sampled)
        if rules.is_off(model):
            # As if the caller had said so: neither kept nor exported, here and in the stages.
            return replace(extract(metadata), flags=0, is_from_caller=True)
        if rules.decides(model):
            return extract(metadata, lambda _: self._exporter is not None and rules.sample(model))
        return extract(metadata, self._is_sampled)

    def record(self, record: RequestRecord) -> None:
        """Take a finished request; it is not to be changed afterwards."""
        if len(self._pending) >= _PENDING_LIMIT:
            self._lost_spans += span_count(record)
            return
        self._pending.append(record)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_later(_DELAY_S, self._work)

    def settle(self) -> None:
        """Work through everything now: before statistics are read or the process ends."""
        while self._pending:
            self._take_in(self._pending.popleft(), time.monotonic())

    def restart(self, model: str, version: str, traits: ModelTraits | None = None) -> None:
        """The version was loaded again: its counters begin anew. What has ended before counts before."""
        self.settle()
        self.metrics.models.restart(model, version, traits)

    def forget(self, model: str, version: str) -> None:
        """The version was unloaded: its counters go away."""
        self.settle()
        self.metrics.models.forget(model, version)

    def render_metrics(self) -> bytes:
        """The metrics page, with every request that has ended."""
        self.settle()
        return self.metrics.render()

    def _work(self) -> None:
        until = time.monotonic_ns() + _SLICE_NS
        while self._pending and (now := time.monotonic_ns()) < until:
            self._take_in(self._pending.popleft(), now * 1e-9)
        self._is_scheduled = bool(self._pending)
        if self._is_scheduled:
            self._loop.call_soon(self._work)

    def _take_in(self, record: RequestRecord, now_s: float) -> None:
        self.metrics.record(record)
        self.store.add(record)
        if self._exporter is not None and self._is_exported(record, now_s):
            self._exporter.export_nowait(record)

    def _is_exported(self, record: RequestRecord, now_s: float) -> bool:
        if self.rules.is_active and self.rules.decides(record.model):
            return record.context.is_sampled
        return self._sampler.decide(record, now_s) is not None

    def _is_sampled(self, trace_id: bytes) -> bool:
        return self._exporter is not None and self._sampler.head(trace_id, time.monotonic())

    def _dropped(self) -> Mapping[tuple[str, ...], float]:
        dropped = self._exporter.dropped if self._exporter is not None else {}
        return {**{(reason,): spans for reason, spans in dropped.items()}, ("busy",): self._lost_spans}


@contextlib.asynccontextmanager
async def open_recorder(
    gateway: Process,
    settings: TelemetrySettings,
    *,
    metrics: Metrics | None = None,
    store: TraceStore | None = None,
    rules: TraceRules | None = None,
) -> AsyncIterator[Recorder]:
    """A recorder that exports when `settings` say where to; leaving the block takes at most 2 s."""
    if settings.service_name:
        gateway = replace(gateway, service=settings.service_name)
    sampler = Sampler(settings.ratio, settings.rate_per_s, keeps_notable=settings.keeps_notable)
    metrics = Metrics() if metrics is None else metrics
    store = TraceStore(gateway) if store is None else store  # an empty store is false
    async with contextlib.AsyncExitStack() as stack:
        exporter = None
        if settings.is_exporting:
            encoder = SpanEncoder(gateway, settings.resource)
            exporter = await stack.enter_async_context(open_exporter(settings, encoder))
        recorder = Recorder(metrics, store, sampler, exporter, rules)
        try:
            yield recorder
        finally:
            recorder.settle()
