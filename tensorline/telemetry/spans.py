"""The one encoder: finished requests to the bytes of an OTLP ExportTraceServiceRequest.

Written straight in protobuf's wire format: filling the generated messages was measured at six times the cost. What is
as usual goes through `usual.UsualSteps`, the rest (an error, a retry, another host's clock) through `tree.Span`.
Source: opentelemetry/proto/trace/v1/trace.proto; field numbers stand beside their tags.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from struct import Struct
from typing import Final, TypeVar

from tensorline.telemetry import names
from tensorline.telemetry.record import WALL_OFFSET_NS, Attributes, AttributeValue, Process, RequestRecord, TraceContext
from tensorline.telemetry.tree import (
    PHASES,
    Span,
    request_id_attributes,
    request_span,
    service_name,
    stage_spans,
    step_span,
)
from tensorline.telemetry.usual import UsualSteps, is_usual
from tensorline.telemetry.wire import ATTRIBUTE_LIMIT, AttributeEncoder, field, name_and_kind, varint

__all__ = ["SpanEncoder", "resource_attributes", "span_count"]

_CACHE_LIMIT: Final = 4096
_SAMPLED: Final = 0x01
_HAS_IS_REMOTE: Final = 0x100
_IS_REMOTE: Final = 0x200
_TIMES: Final = Struct("<BQBQ")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def span_count(record: RequestRecord) -> int:
    """At most so many spans are made of `record`: what a queue that is bounded in spans counts."""
    return 1 + (1 + len(PHASES)) * len(record.steps)


def resource_attributes(process: Process) -> Attributes:
    """The OpenTelemetry resource of `process`; what is not known is left out."""
    attributes: Attributes = (
        (names.SERVICE_NAME, service_name(process)),
        (names.SERVICE_INSTANCE_ID, process.instance_id),
        (names.SERVICE_VERSION, process.release),
        (names.HOST_NAME, process.host),
        (names.PROCESS_PID, process.pid),
        (names.TELEMETRY_SDK_LANGUAGE, "python"),
        (names.TELEMETRY_SDK_NAME, "tensorline"),
        (names.TELEMETRY_SDK_VERSION, process.release),
    )
    return tuple((key, value) for key, value in attributes if value)


class SpanEncoder:
    """Encodes requests as the gateway `gateway` saw them.

    Args:
        resource: More attributes for the gateway's own resource (OTEL_RESOURCE_ATTRIBUTES).
    """

    def __init__(self, gateway: Process, resource: Mapping[str, str] | None = None) -> None:
        self._gateway = gateway
        self._extra = dict(resource or {})
        self._scope = field(0x0A, field(0x0A, names.SCOPE_NAME.encode()))  # ScopeSpans: 1 scope { 1 name }
        self._schema = field(0x1A, names.SCHEMA_URL.encode())  # 3 schema_url: in ScopeSpans and in ResourceSpans
        self._attributes = AttributeEncoder(0x4A, uncached=frozenset({names.REQUEST_ID}))  # Span: 9 attributes
        self._resources: dict[Process, bytes] = {}
        self._usual_requests: dict[tuple[str, str, str], bytes] = {}
        self._usual_steps = UsualSteps(gateway, self._attributes)

    def encode(self, records: Iterable[RequestRecord]) -> bytes:
        """One request message, its spans grouped by the process they belong to."""
        gateway, pack_usual = self._gateway, self._usual_steps.pack
        own: list[bytes] = []
        groups = {id(gateway): (gateway, own)}  # by identity: hashing a Process takes a microsecond
        for record in records:
            context = record.context
            local, remote = _trace_fields(context)
            own.append(self._request(record, remote if context.is_from_caller else local))
            parent = b"\x22\x08" + record.span_id  # 4 parent_span_id
            for step in record.steps:
                timing, process = step.timing, step.process
                if timing is None or process is None:
                    own.append(self._span(step_span(step, record, gateway), local))
                    continue
                group = groups.get(id(process))
                if group is None:
                    group = groups[id(process)] = (process, [])
                stage = group[1]
                if is_usual(step, timing) and not context.state:
                    step_bytes, stage_bytes = pack_usual(step, timing, record, parent, local, remote)
                    own.append(step_bytes)
                    stage.append(stage_bytes)
                else:
                    own.append(self._span(step_span(step, record, gateway), local))
                    ended = step.ended or record.ended
                    stage += [self._span(span, remote) for span in stage_spans(step, timing, process, ended)]
        return b"".join([self._resource_spans(process, spans) for process, spans in groups.values() if spans])

    def _resource_spans(self, process: Process, spans: list[bytes]) -> bytes:
        resource = self._resources.get(process)
        if resource is None:
            attributes: dict[str, AttributeValue] = dict(resource_attributes(process))
            if process == self._gateway:
                attributes = {**self._extra, **attributes}
            encoded = AttributeEncoder(0x0A).encode(tuple(attributes.items()))  # Resource: 1 attributes
            resource = field(0x0A, encoded)  # ResourceSpans: 1 resource
            _remember(self._resources, process, resource)
        scope_spans = field(0x12, b"".join((self._scope, *spans, self._schema)))  # 2 scope_spans
        return field(0x0A, resource + scope_spans + self._schema)  # ExportTraceServiceRequest: 1 resource_spans

    def _span(self, span: Span, trace: bytes) -> bytes:
        """One span as a field of its ScopeSpans; `trace` is what every span of the trace holds."""
        return _span_field(
            trace,
            b"\x12\x08" + span.span_id,  # 2 span_id
            b"\x22\x08" + span.parent_id if span.parent_id else b"",  # 4 parent_span_id
            _times(span.start, span.end),
            name_and_kind(span.name, span.kind),
            self._attributes.encode(span.attributes),
            _error(span.message) if span.is_error else b"",
        )

    def _request(self, record: RequestRecord, trace: bytes) -> bytes:
        if record.status or record.attributes:
            return self._span(request_span(record, self._gateway), trace)
        key = (record.model, record.version, record.rpc)
        constant = self._usual_requests.get(key)
        if constant is None:
            span = request_span(replace(record, request_id=""), self._gateway)
            constant = name_and_kind(span.name, span.kind) + self._attributes.encode(span.attributes)
            _remember(self._usual_requests, key, constant)
        parent = record.context.span_id
        return _span_field(
            trace,
            b"\x12\x08" + record.span_id,
            b"\x22\x08" + parent if parent else b"",
            _times(record.started + WALL_OFFSET_NS, record.ended + WALL_OFFSET_NS),
            constant,
            self._attributes.encode(request_id_attributes(record)),
        )


def _trace_fields(context: TraceContext) -> tuple[bytes, bytes]:
    """What each span of a trace holds, for a parent in the same process and for one elsewhere."""
    trace = b"\x0a\x10" + context.trace_id  # Span: 1 trace_id
    if context.state:
        trace += field(0x1A, context.state.encode())  # 3 trace_state
    flags = context.flags & 0xFF | _SAMPLED | _HAS_IS_REMOTE
    return (
        b"%b\x85\x01%b" % (trace, flags.to_bytes(4, "little")),  # 16 flags: fixed32
        b"%b\x85\x01%b" % (trace, (flags | _IS_REMOTE).to_bytes(4, "little")),
    )


def _span_field(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return b"\x12%b%b" % (varint(len(body)), body)  # ScopeSpans: 2 spans


def _times(start: int, end: int) -> bytes:
    return _TIMES.pack(0x39, start, 0x41, end)  # 7 start_time_unix_nano, 8 end_time_unix_nano: fixed64


def _error(message: str) -> bytes:
    text = message[:ATTRIBUTE_LIMIT].encode(errors="replace")
    return field(0x7A, field(0x12, text) + b"\x18\x02")  # 15 status { 2 message, 3 code: STATUS_CODE_ERROR }


def _remember(cache: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    if len(cache) >= _CACHE_LIMIT:
        cache.clear()
    cache[key] = value
