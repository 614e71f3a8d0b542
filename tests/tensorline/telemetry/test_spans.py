"""Our wire format, read by the generated classes of opentelemetry-proto."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tensorline.telemetry.record import Process, RequestRecord, StageTiming, StepRecord, TraceContext
from tensorline.telemetry.spans import SpanEncoder, span_count
from tensorline.telemetry.tree import Span, spans_of
from tensorline.telemetry.wire import varint
from tests.tensorline.telemetry.collector import Received, received_spans
from tests.tensorline.telemetry.records import (
    CALLED,
    GATEWAY,
    STAGES,
    START,
    failed,
    pipeline,
    root_context,
    single,
    timing,
)

times = st.integers(-1, 2**40).map(lambda time: max(time, 0))
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ids = st.binary(min_size=8, max_size=8)
values = st.one_of(words, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
attributes = st.lists(st.tuples(st.text("abc._", min_size=1, max_size=30), values), max_size=3).map(tuple)
timings = st.builds(
    StageTiming, *[times] * 7, batch_id=st.integers(0, 2**63 - 1), batch_size=st.integers(0, 2**31), instance=words
)
steps = st.builds(
    StepRecord,
    model=words,
    version=words,
    span_id=ids,
    started=times,
    ended=times,
    process=st.one_of(st.none(), st.sampled_from(STAGES)),
    timing=st.one_of(st.none(), timings),
    clock_offset=st.one_of(st.just(0), st.integers(-(2**40), 2**40)),
    status=st.one_of(st.just(0), st.integers(0, 17)),
    error=words,
    attempt=st.integers(1, 2),
    clock_error=st.integers(0, 10**9),
    attributes=attributes,
)
near_usual_steps = st.builds(
    StepRecord,
    model=words,
    version=words,
    span_id=ids,
    started=times,
    ended=st.integers(0, 2**40),
    process=st.sampled_from(STAGES),
    timing=timings,
)
contexts = st.builds(
    TraceContext,
    trace_id=st.binary(min_size=16, max_size=16),
    span_id=st.one_of(st.just(b""), ids),
    flags=st.integers(0, 255),
    state=st.sampled_from(["", "a=b"]),
    is_from_caller=st.booleans(),
)
records = st.builds(
    RequestRecord,
    context=contexts,
    span_id=ids,
    model=words,
    version=words,
    request_id=words,
    started=times,
    ended=times,
    status=st.one_of(st.just(0), st.integers(0, 17)),
    error=words,
    steps=st.lists(st.one_of(steps, near_usual_steps), max_size=4),
    attributes=attributes,
)


def decoded(encoded: bytes) -> list[Received]:
    request = ExportTraceServiceRequest.FromString(encoded)
    size = request.ByteSize()
    request.DiscardUnknownFields()
    assert request.ByteSize() == size
    return received_spans(request)


def as_values(received: Received) -> tuple[object, ...]:
    span = received.span
    return (
        received.resource["service.name"],
        span.name,
        span.kind,
        span.span_id,
        span.parent_span_id,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        received.attributes,
        span.status.code == Status.STATUS_CODE_ERROR,
        span.status.message,
    )


def as_told(span: Span) -> tuple[object, ...]:
    service = f"tensorline-{span.process.service}"
    return (service, *span[1:7], dict(span.attributes), span.is_error, span.message if span.is_error else "")


@settings(deadline=None)  # the machine may be busy
@given(st.lists(records, max_size=4))
def test_what_is_encoded_is_what_the_tree_says(batch: Sequence[RequestRecord]) -> None:
    encoder = SpanEncoder(GATEWAY)
    expected = [as_told(span) for record in batch for span in spans_of(record, GATEWAY)]
    for _ in range(2):  # the second time from what the encoder remembers
        got = [as_values(received) for received in decoded(encoder.encode(batch))]
        assert sorted(got, key=repr) == sorted(expected, key=repr)


def test_spans_stand_under_the_process_they_belong_to() -> None:
    encoded = SpanEncoder(GATEWAY, {"deployment.environment.name": "test"}).encode([pipeline(), pipeline()])
    request = ExportTraceServiceRequest.FromString(encoded)
    resources = [received.resource for received in received_spans(request)]
    assert [group.schema_url for group in request.resource_spans] == ["https://opentelemetry.io/schemas/1.44.0"] * 4
    assert [resource["service.name"] for resource in resources] == [
        *["tensorline-gateway"] * 8,
        *["tensorline-preprocess"] * 8,
        *["tensorline-model"] * 8,
        *["tensorline-postprocess"] * 8,
    ]
    assert resources[0] == {
        "deployment.environment.name": "test",
        "service.name": "tensorline-gateway",
        "service.instance.id": "gateway-1",
        "service.version": "0.1.0",
        "host.name": "host-a",
        "process.pid": 100,
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "tensorline",
        "telemetry.sdk.version": "0.1.0",
    }
    assert "deployment.environment.name" not in resources[-1]


def test_flags_say_sampled_and_whether_the_parent_is_elsewhere() -> None:
    flags = {received.span.name: received.span.flags for received in decoded(SpanEncoder(GATEWAY).encode([single()]))}
    assert flags["ModelInfer efficientnet_lite0"] == 0x301
    assert flags["efficientnet_lite0"] == 0x101
    assert flags["queue"] == flags["compute_output"] == 0x301
    root = decoded(SpanEncoder(GATEWAY).encode([single(root_context())]))[0]
    assert root.span.flags == 0x101


def test_the_callers_state_goes_along() -> None:
    record = single(replace(CALLED, state="vendor=1"))
    assert {received.span.trace_state for received in decoded(SpanEncoder(GATEWAY).encode([record]))} == {"vendor=1"}


def test_text_from_outside_is_cut_and_made_encodable() -> None:
    record = failed(13, "x" * 5000)
    record.model = "\ud800" + "m" * 5000
    spans = decoded(SpanEncoder(GATEWAY).encode([record]))
    root = spans[0]
    assert len(root.span.name) <= 1024
    assert len(str(root.attributes["tensorline.model.name"])) <= 1024
    assert len(root.span.status.message) == 1024


def test_memory_is_bounded_when_names_never_repeat() -> None:
    encoder = SpanEncoder(GATEWAY)
    for number in range(10_000):
        record = single()
        record.model = record.steps[0].model = f"model-{number}"
        record.steps[0].process = Process("model", f"m-{number}")
        record.steps[0].timing = timing(START, batch_id=number, batch_size=2)
        encoder.encode([record])
    rooms = (encoder, encoder._attributes, encoder._usual_steps)
    sizes = [len(cache) for room in rooms for cache in vars(room).values() if isinstance(cache, dict)]
    assert len(sizes) >= 7
    assert max(sizes) <= 4096


def test_the_number_of_spans_is_known_beforehand() -> None:
    record = pipeline()
    assert span_count(record) == len(spans_of(record, GATEWAY)) == 16


@settings(deadline=None)  # the machine may be busy
@given(st.integers(-(2**63), 2**63 - 1))
def test_varints_are_protobufs(number: int) -> None:
    from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]

    assert varint(number) == _VarintBytes(number & 0xFFFF_FFFF_FFFF_FFFF)
