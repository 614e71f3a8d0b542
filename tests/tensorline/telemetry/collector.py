"""A real OTLP receiver: a gRPC server with the service's own generated code, that remembers what it was sent."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import grpc.aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Received(NamedTuple):
    """A span, with the resource it came under."""

    resource: dict[str, object]
    span: Span

    @property
    def attributes(self) -> dict[str, object]:
        return values(self.span.attributes)


if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[ExportTraceServiceRequest, ExportTraceServiceResponse]


class Collector(TraceServiceServicer):
    def __init__(self) -> None:
        self.port = 0
        self.requests: list[ExportTraceServiceRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.delay_s = 0.0
        self.failures: list[grpc.StatusCode] = []
        """Answered, in turn, before a request is taken."""
        self.rejects = 0

    async def Export(self, request: ExportTraceServiceRequest, context: "Context") -> ExportTraceServiceResponse:  # noqa: N802
        await asyncio.sleep(self.delay_s)
        if self.failures:
            await context.abort(self.failures.pop(0), "no")
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.requests.append(request)
        response = ExportTraceServiceResponse()
        if self.rejects:
            response.partial_success.rejected_spans = self.rejects
        return response

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def spans(self) -> list[Received]:
        return [received for request in self.requests for received in received_spans(request)]

    async def wait_spans(self, number: int, timeout_s: float = 5.0) -> list[Received]:
        async with asyncio.timeout(timeout_s):
            while len(self.spans()) < number:
                await asyncio.sleep(0.01)
        return self.spans()


def received_spans(request: ExportTraceServiceRequest) -> list[Received]:
    return [
        Received(values(resource_spans.resource.attributes), span)
        for resource_spans in request.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def values(attributes: Iterable[KeyValue]) -> dict[str, object]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "") for pair in attributes}


@asynccontextmanager
async def open_collector() -> AsyncIterator[Collector]:
    collector = Collector()
    server = grpc.aio.server()
    add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0.1)
