from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tensorline.telemetry.context import TRACESTATE_LIMIT, extract, new_span_id, new_trace_id, traceparent
from tensorline.telemetry.record import TraceContext

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{SPAN}-01"


def hexes(length: int) -> st.SearchStrategy[str]:
    return st.one_of(
        st.text("0123456789abcdef", min_size=length, max_size=length),
        st.text("0123456789abcdefABCDEFg_ ", min_size=length - 1, max_size=length + 1),
        st.just("0" * length),
    )


near_headers = st.tuples(
    st.sampled_from(["", " ", "\t", "\n"]),
    st.one_of(hexes(2), st.sampled_from(["00", "00", "01", "ff"])),
    hexes(32),
    hexes(16),
    hexes(2),
    st.sampled_from(["", "", "-", "-more", " ", "\n", "x", "-" * 600]),
).map(lambda parts: f"{parts[0]}{parts[1]}-{parts[2]}-{parts[3]}-{parts[4]}{parts[5]}")
headers = st.one_of(st.text(max_size=80), near_headers, near_headers, st.just(HEADER))
members = st.one_of(
    st.text(max_size=30),
    st.tuples(
        st.text("abz019_-*/@A ", max_size=20),
        st.text(st.characters(min_codepoint=0x1F, max_codepoint=0x80), max_size=20),
    ).map("=".join),
    st.just(""),
)
states = st.lists(members, max_size=40).map(",".join)


def sdk_extract(carrier: Mapping[str, list[str]]) -> trace.SpanContext:
    context = TraceContextTextMapPropagator().extract(dict(carrier), trace.set_span_in_context(trace.INVALID_SPAN))
    return trace.get_current_span(context).get_span_context()


@settings(deadline=None)  # the machine may be busy
@given(header=headers, state=st.one_of(st.none(), states))
def test_it_reads_what_the_sdk_reads(header: str, state: str | None) -> None:
    carrier = {"traceparent": [header]} | ({} if state is None else {"tracestate": [state]})
    theirs = sdk_extract(carrier)
    ours = extract([(key, value) for key, values in carrier.items() for value in values])
    assert ours.is_from_caller == theirs.is_valid
    if theirs.is_valid:
        assert ours.trace_id == theirs.trace_id.to_bytes(16, "big")
        assert ours.span_id == theirs.span_id.to_bytes(8, "big")
        assert ours.flags == theirs.trace_flags
        if state is None or len(state) <= TRACESTATE_LIMIT:
            assert ours.state == theirs.trace_state.to_header()


@settings(deadline=None)  # the machine may be busy
@given(states=st.lists(states, max_size=3))
def test_several_tracestates_are_joined_as_the_sdk_joins_them(states: list[str]) -> None:
    theirs = sdk_extract({"traceparent": [HEADER], "tracestate": states} if states else {"traceparent": [HEADER]})
    ours = extract([("traceparent", HEADER), *(("tracestate", state) for state in states)])
    if len(",".join(states)) <= TRACESTATE_LIMIT:
        assert ours.state == theirs.trace_state.to_header()


def test_without_a_header_a_trace_begins_here() -> None:
    context = extract([("user-agent", "x")])
    assert (len(context.trace_id), context.span_id, context.is_from_caller) == (16, b"", False)
    assert not context.is_sampled
    assert context.trace_id != extract([]).trace_id


def test_the_head_sampler_is_asked_for_new_traces_alone() -> None:
    asked: list[bytes] = []

    def is_sampled(trace_id: bytes) -> bool:
        asked.append(trace_id)
        return True

    root = extract([], is_sampled)
    assert root.is_sampled
    assert asked == [root.trace_id]
    assert not extract([("traceparent", HEADER[:-1] + "0")], is_sampled).is_sampled
    assert len(asked) == 1


@pytest.mark.parametrize("flags", ["00", "01", "02", "03", "ff"])
def test_the_callers_flags_go_on_unchanged(flags: str) -> None:
    context = extract([("traceparent", f"00-{TRACE}-{SPAN}-{flags}")])
    assert context.is_sampled == bool(int(flags, 16) & 1)
    assert traceparent(context, bytes.fromhex(SPAN)) == f"00-{TRACE}-{SPAN}-{flags}"


@settings(deadline=None)  # the machine may be busy
@given(st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8), st.integers(0, 255))
def test_what_is_written_is_read_back(trace_id: bytes, span_id: bytes, flags: int) -> None:
    if any(trace_id) and any(span_id):
        header = traceparent(TraceContext(trace_id, b"", flags), span_id)
        assert extract([("traceparent", header)]) == TraceContext(trace_id, span_id, flags, "", True)


def test_a_long_tracestate_is_dropped_and_the_trace_kept() -> None:
    fits = "k=" + "v" * 250 + ",l=" + "v" * 256
    assert len(fits) == 511
    assert extract([("traceparent", HEADER), ("tracestate", fits)]).state == fits
    dropped = extract([("traceparent", HEADER), ("tracestate", fits + ",m=v")])
    assert (dropped.trace_id.hex(), dropped.state) == (TRACE, "")


def test_bytes_are_read_like_text() -> None:
    assert extract([("traceparent", HEADER.encode())]).trace_id.hex() == TRACE
    assert not extract([("traceparent", b"\xff\x00")]).is_from_caller


def test_ids_are_unique_and_of_full_length() -> None:
    assert len({new_trace_id() for _ in range(10_000)}) == 10_000
    assert len({new_span_id() for _ in range(10_000)}) == 10_000
    assert all(len(new_span_id()) == 8 and any(new_span_id()) for _ in range(1000))
