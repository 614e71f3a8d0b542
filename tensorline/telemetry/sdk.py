"""The OpenTelemetry SDK in a stage process: for the spans that a stage's own code opens, children of the gateway's.

Nothing is installed unless an endpoint is set: without one, such spans are the API's no-ops.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from tensorline.telemetry.logs import logged_request
from tensorline.telemetry.record import Process
from tensorline.telemetry.settings import TelemetrySettings
from tensorline.telemetry.spans import resource_attributes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Sdk", "install_sdk", "stage_context", "stage_span_scope"]

log = logging.getLogger(__name__)

_SHUTDOWN_S: Final = 2.0


def stage_context(trace_id: bytes, span_id: bytes, flags: int, state: str = "") -> Context:
    """The context of a `Submit`: attached while its batch runs, it makes what is opened a child of the step's span."""
    parent = SpanContext(
        int.from_bytes(trace_id, "big"),
        int.from_bytes(span_id, "big"),
        is_remote=True,
        trace_flags=TraceFlags(flags & 0xFF),
        trace_state=TraceState.from_header([state]) if state else None,
    )
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())


@contextlib.contextmanager
def stage_span_scope(trace_id: bytes, span_id: bytes, flags: int, request_id: str, state: str = "") -> Iterator[None]:
    """While the block runs, spans and log lines of this thread belong to that request."""
    token = context.attach(stage_context(trace_id, span_id, flags, state))
    try:
        with logged_request(trace_id, span_id, request_id):
            yield
    finally:
        context.detach(token)


class Sdk:
    """What was installed; `shutdown` blocks, so it is called in a thread or when the loop has ended."""

    def __init__(self, provider: "TracerProvider | None" = None, exporter: "SpanExporter | None" = None) -> None:
        self.provider = provider
        self._exporter = exporter

    def shutdown(self, timeout_s: float = _SHUTDOWN_S) -> None:
        """Send what is left, for at most `timeout_s`: a dead collector would hold the SDK for its whole time-out."""
        if self.provider is None or self._exporter is None:
            return
        thread = threading.Thread(target=self.provider.shutdown, name="otel-shutdown", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            self._exporter.shutdown()  # returns at once, and ends what the thread waits for
            log.warning("the trace collector did not take the last spans in %.1f s", timeout_s)


def install_sdk(process: Process, settings: TelemetrySettings, *, is_global: bool = True) -> Sdk:
    """Export the spans that this process's own code opens, if `settings` say where to.

    Args:
        is_global: Make it the process's tracer provider, which is possible once.
    """
    if not settings.is_exporting:
        return Sdk()
    try:
        # Imported here, as the SDK below: the optional extra `otlp`, 6 MB that only an exporting process pays.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError:
        log.warning("spans of this stage's own code are not exported: install tensorline[otlp]")
        return Sdk()
    import grpc
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased

    attributes = {**settings.resource, **dict(resource_attributes(process)), "telemetry.sdk.name": "opentelemetry"}
    if settings.service_name:
        attributes["service.name"] = settings.service_name
    # What no request asked for (loading a model) follows the ratio; without one it is not traced.
    root = TraceIdRatioBased(settings.ratio) if settings.rate_per_s is None else ALWAYS_OFF
    provider = TracerProvider(sampler=ParentBased(root), resource=Resource(attributes), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(
        endpoint=settings.target,
        insecure=settings.is_insecure,
        headers=settings.headers,
        timeout=settings.timeout_s,
        compression=grpc.Compression.Gzip if settings.is_compressed else None,
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=settings.queue_spans,
            max_export_batch_size=settings.batch_spans,
            schedule_delay_millis=settings.delay_s * 1000,
        )
    )
    if is_global:
        trace.set_tracer_provider(provider)
    return Sdk(provider, exporter)
