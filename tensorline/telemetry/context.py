"""W3C trace context: read from a client's metadata, begun where there is none, written for the next service."""

import functools
import os
import random
import re
from collections.abc import Callable, Iterable
from typing import Final

from tensorline.telemetry.record import TraceContext

__all__ = ["TRACESTATE_LIMIT", "extract", "new_span_id", "new_trace_id", "traceparent"]

TRACESTATE_LIMIT: Final = 512
"""Bytes; a longer tracestate is dropped, the trace itself is kept."""

# The SDK's own expression, so that both accept the same headers; the propagator around it costs ten times as much.
_TRACEPARENT: Final = re.compile(r"[ \t]*([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:(-.*)|[ \t]*)")
_TRACEPARENT_LIMIT: Final = 512
_MEMBER: Final = re.compile(
    r"([a-z][_0-9a-z\-*/]{0,255}|[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13})"
    r"=([\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])"
)
_MEMBERS_LIMIT: Final = 32
_NO_TRACE: Final = bytes(16)
_NO_SPAN: Final = bytes(8)

# Ids need to be unique, not unguessable. A generator of our own: tests and models seed the module's global one.
_ids = random.Random()  # noqa: S311
os.register_at_fork(after_in_child=_ids.seed)


def new_trace_id() -> bytes:
    """16 random bytes, never all zero; all of them are random, as a sampler by ratio needs."""
    while not (value := _ids.getrandbits(128)):
        pass
    return value.to_bytes(16, "big")


def new_span_id() -> bytes:
    """8 random bytes, never all zero."""
    while not (value := _ids.getrandbits(64)):
        pass
    return value.to_bytes(8, "big")


def extract(
    metadata: Iterable[tuple[str, str | bytes]], is_sampled: Callable[[bytes], bool] | None = None
) -> TraceContext:
    """The caller's trace context, or a new root when there is none or it is not valid.

    Args:
        metadata: gRPC invocation metadata or HTTP headers, keys in lower case.
        is_sampled: The head sampler, asked for new roots alone, with the trace id: a caller's flags are obeyed.
    """
    header: str | bytes | None = None
    states: list[str | bytes] = []
    for key, value in metadata:
        if key == "traceparent":
            header = value if header is None else header  # of several the first counts, as in the SDK
        elif key == "tracestate":
            states.append(value)
    if header is not None:
        context = _parse(_text(header), states)
        if context is not None:
            return context
    trace_id = new_trace_id()
    return TraceContext(trace_id, b"", 1 if is_sampled is not None and is_sampled(trace_id) else 0)


def traceparent(context: TraceContext, span_id: bytes) -> str:
    """The header that makes the receiver's spans children of `span_id`."""
    return f"00-{context.trace_id.hex()}-{span_id.hex()}-{context.flags & 0xFF:02x}"


def _parse(header: str, states: list[str | bytes]) -> TraceContext | None:
    match = _TRACEPARENT.fullmatch(header) if len(header) <= _TRACEPARENT_LIMIT else None
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    if version == "ff" or (version == "00" and more):
        return None
    trace_id, span_id = bytes.fromhex(trace), bytes.fromhex(span)
    if trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    state = _state(",".join(map(_text, states))) if states else ""
    return TraceContext(trace_id, span_id, int(flags, 16), state, is_from_caller=True)


@functools.lru_cache(maxsize=256)
def _state(header: str) -> str:
    """`header` as the SDK would pass it on: "" when a member is malformed or comes twice, or there are too many."""
    if len(header) > TRACESTATE_LIMIT:
        return ""
    members: dict[str, str] = {}
    for member in header.split(","):
        text = member.strip(" \t")
        if not text:
            continue
        match = _MEMBER.fullmatch(text)
        if match is None or match[1] in members:
            return ""
        members[match[1]] = match[2]
    return ",".join(f"{key}={value}" for key, value in members.items()) if len(members) <= _MEMBERS_LIMIT else ""


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
