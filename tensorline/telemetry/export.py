"""Spans to any OpenTelemetry collector over OTLP/gRPC, batched, behind a bounded queue: a dead one costs spans only."""

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from tensorline.telemetry.record import RequestRecord
from tensorline.telemetry.settings import TelemetrySettings
from tensorline.telemetry.spans import SpanEncoder, span_count

__all__ = ["SpanExporter", "open_exporter"]

log = logging.getLogger(__name__)

_METHOD: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_ATTEMPTS: Final = 6  # half a minute with the pauses between them: a collector may restart
_FIRST_BACKOFF_S: Final = 1.0
_LAST_BACKOFF_S: Final = 30.0
_RETRYABLE: Final = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
_OPTIONS: Final = (
    ("grpc.enable_retries", 0),  # ours know about the queue and the end
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 10_000),
    ("grpc.primary_user_agent", "OTel-OTLP-Exporter-Tensorline"),
)


class SpanExporter:
    """Takes finished requests; encodes and sends them in its own task. Made by `open_exporter`."""

    def __init__(self, settings: TelemetrySettings, encoder: SpanEncoder, channel: grpc.aio.Channel) -> None:
        self._settings = settings
        self._encoder = encoder
        self._call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_METHOD)
        self._queue: deque[RequestRecord] = deque()
        self._queued_spans = 0
        self._is_full = asyncio.Event()
        self._is_closing = asyncio.Event()
        self._backoff_s = 0.0
        self.exported = 0
        """Spans that the collector took."""
        self.dropped: dict[str, int] = {"queue_full": 0, "failed": 0, "rejected": 0}
        """Spans that nobody took, by reason."""

    def export_nowait(self, record: RequestRecord) -> bool:
        """Queue a request; False when there is no room for its spans, which are then counted as dropped."""
        spans = span_count(record)
        if self._queued_spans + spans > self._settings.queue_spans:
            self.dropped["queue_full"] += spans
            return False
        self._queue.append(record)
        self._queued_spans += spans
        if self._queued_spans >= self._settings.batch_spans:
            self._is_full.set()
        return True

    async def run(self) -> None:
        """Send what is queued, a batch at a time or each `delay_s`, until closed and empty."""
        while not (self._is_closing.is_set() and not self._queue):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.delay_s):
                    await self._is_full.wait()
            while self._queue:
                records, spans = self._take()
                try:
                    await self._send(self._encoder.encode(records), spans)
                except Exception:  # spans must not end what they describe
                    log.exception("spans could not be encoded or sent")
                    self.dropped["failed"] += spans
            if not self._is_closing.is_set():
                self._is_full.clear()

    def close(self) -> None:
        """Send what is there, without waiting for more or trying twice; then `run` ends."""
        self._is_closing.set()
        self._is_full.set()

    def abandon(self) -> None:
        """Count what is still queued as dropped."""
        self.dropped["failed"] += self._queued_spans
        self._queue.clear()
        self._queued_spans = 0

    def _take(self) -> tuple[list[RequestRecord], int]:
        records: list[RequestRecord] = []
        spans = 0
        while self._queue and spans < self._settings.batch_spans:
            record = self._queue.popleft()
            records.append(record)
            spans += span_count(record)
        self._queued_spans -= spans
        return records, spans

    async def _send(self, request: bytes, spans: int) -> None:
        for attempt in range(_ATTEMPTS):
            if attempt or self._backoff_s:
                await self._back_off()
            try:
                response = await self._call(request, timeout=self._settings.timeout_s, metadata=self._settings.headers)
            except grpc.aio.AioRpcError as error:
                self._failed(error)
                if error.code() not in _RETRYABLE or self._is_closing.is_set():
                    break
            except asyncio.CancelledError:
                self.dropped["failed"] += spans
                raise
            else:
                self._succeeded(response, spans)
                return
        self.dropped["failed"] += spans

    async def _back_off(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._backoff_s * random.uniform(0.8, 1.2)):  # noqa: S311 - jitter
                await self._is_closing.wait()

    def _failed(self, error: grpc.aio.AioRpcError) -> None:
        if not self._backoff_s:  # once for each outage
            log.warning("the trace collector did not take spans (%s)", error.code().name)
        self._backoff_s = min(self._backoff_s * 2, _LAST_BACKOFF_S) or _FIRST_BACKOFF_S

    def _succeeded(self, response: bytes, spans: int) -> None:
        if self._backoff_s:
            self._backoff_s = 0.0
            log.info("the trace collector takes spans again; dropped so far: %s", self.dropped)
        rejected = _rejected_spans(response) if response else 0
        self.exported += spans - rejected
        self.dropped["rejected"] += rejected


@contextlib.asynccontextmanager
async def open_exporter(
    settings: TelemetrySettings, encoder: SpanEncoder, *, flush_s: float = 2.0
) -> AsyncIterator[SpanExporter]:
    """An exporter to `settings.target`, at work until the block ends; leaving takes at most `flush_s`."""
    channel = await _channel(settings)
    exporter = SpanExporter(settings, encoder, channel)
    task = asyncio.create_task(exporter.run(), name="span-exporter")
    try:
        yield exporter
    finally:
        exporter.close()
        _, late = await asyncio.wait([task], timeout=flush_s * 0.9)
        if late:
            task.cancel()
            await asyncio.wait([task])
        exporter.abandon()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(flush_s * 0.1):
                await channel.close()


async def _channel(settings: TelemetrySettings) -> grpc.aio.Channel:
    compression = grpc.Compression.Gzip if settings.is_compressed else grpc.Compression.NoCompression
    if settings.is_insecure:
        return grpc.aio.insecure_channel(settings.target, options=_OPTIONS, compression=compression)
    files = [settings.certificate, settings.client_key, settings.client_certificate]
    root, key, chain = await asyncio.to_thread(lambda: [Path(name).read_bytes() if name else None for name in files])
    credentials = grpc.ssl_channel_credentials(root, key, chain)
    return grpc.aio.secure_channel(settings.target, credentials, options=_OPTIONS, compression=compression)


def _rejected_spans(response: bytes) -> int:
    # Imported here: collectors answer with nothing, unless they refuse a part.
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    return int(ExportTraceServiceResponse.FromString(response).partial_success.rejected_spans)
