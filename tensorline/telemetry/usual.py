"""The five spans of a step that went as usual, packed from prepared parts: what most requests consist of.

As usual: it succeeded at the first attempt, on a shared clock, through all phases, with nothing more to tell. Only ids,
times and at most the batch differ from the step before, so all lengths are known, and a stage's four spans are written
by one `Struct.pack`. The bytes say what `tree.step_span` and `tree.stage_spans` say; a test compares them.
"""

from collections.abc import Callable
from struct import Struct
from typing import Final, NamedTuple

from tensorline.telemetry import names
from tensorline.telemetry.record import WALL_OFFSET_NS, Process, RequestRecord, StageTiming, StepRecord
from tensorline.telemetry.tree import INTERNAL, PHASES, step_span
from tensorline.telemetry.wire import AttributeEncoder, name_and_kind, varint

__all__ = ["TRACE_SIZE", "UsualSteps", "is_usual"]

TRACE_SIZE: Final = 18 + 6
"""Bytes of what each span holds of its trace: its id and its flags, and no state."""

_IDS_SIZE: Final = 10 + 10
_TIMES_SIZE: Final = 9 + 9
_FRONT_SIZE: Final = TRACE_SIZE + _IDS_SIZE - 8
_CACHE_LIMIT: Final = 4096
_BATCHES_LIMIT: Final = 256  # the requests of one batch end close together
_TIMES: Final = Struct("<BQBQ")
_S0, _S1, _S2, _S3 = (salt for _, salt in PHASES)

_Heads = tuple[bytes, bytes, bytes, bytes]
_Layout = tuple[Callable[..., bytes], _Heads]


class _Usual(NamedTuple):
    """What one model's steps have in common."""

    step_head: bytes
    """The step's span up to its trace: tag, length, name, kind, attributes."""
    model: bytes
    """The stage's attributes, and the tag of the start time; for a step that had its batch to itself."""
    layout: _Layout


def is_usual(step: StepRecord, timing: StageTiming) -> bool:
    if step.status or step.attempt > 1 or step.clock_offset or step.attributes or not step.ended:
        return False
    return 0 not in timing[1:6]


class UsualSteps:
    """Packs usual steps of traces without state."""

    def __init__(self, gateway: Process, attributes: AttributeEncoder) -> None:
        self._gateway = gateway
        self._attributes = attributes
        self._known: dict[tuple[str, str, str], _Usual] = {}
        self._layouts: dict[int, _Layout] = {}
        self._batches: dict[tuple[int, int], bytes] = {}

    def pack(
        self, step: StepRecord, timing: StageTiming, record: RequestRecord, parent: bytes, local: bytes, remote: bytes
    ) -> tuple[bytes, bytes]:
        """The gateway's span, and the stage's four.

        Args:
            parent: The field that names the request's span.
            local: What a span holds of its trace when its parent is of the same process.
            remote: The same when it is not.
        """
        _, queued, batched, input_ready, computed, output_ready, _, _, batch_size, instance, _ = timing
        usual = self._known.get((step.model, step.version, instance)) or self._learn(step, timing, record)
        span_id = step.span_id
        times = _TIMES.pack(0x39, step.started + WALL_OFFSET_NS, 0x41, step.ended + WALL_OFFSET_NS)
        own = b"".join((usual.step_head, local, b"\x12\x08", span_id, parent, times))
        if batch_size > step.rows:
            end = self._batch(timing) + usual.model
            pack, (h0, h1, h2, h3) = self._layout(len(end))
        else:
            end = usual.model
            pack, (h0, h1, h2, h3) = usual.layout
        front = b"%b\x22\x08%b\x12\x08" % (remote, span_id)  # 4 parent_span_id, 2 span_id
        base = int.from_bytes(span_id, "little")
        queued, batched, input_ready = queued + WALL_OFFSET_NS, batched + WALL_OFFSET_NS, input_ready + WALL_OFFSET_NS
        computed, output_ready = computed + WALL_OFFSET_NS, output_ready + WALL_OFFSET_NS
        stage = pack(
            *(h0, front, base ^ _S0, end, queued, 0x41, batched),
            *(h1, front, base ^ _S1, end, batched, 0x41, input_ready),
            *(h2, front, base ^ _S2, end, input_ready, 0x41, computed),
            *(h3, front, base ^ _S3, end, computed, 0x41, output_ready),
        )
        return own, stage

    def _learn(self, step: StepRecord, timing: StageTiming, record: RequestRecord) -> _Usual:
        if len(self._known) >= _CACHE_LIMIT:
            self._known.clear()
        span = step_span(step, record, self._gateway)
        constant = name_and_kind(span.name, span.kind) + self._attributes.encode(span.attributes)
        head = b"\x12%b%b" % (varint(len(constant) + TRACE_SIZE + _IDS_SIZE + _TIMES_SIZE), constant)
        model = self._attributes.encode(((names.MODEL_NAME, step.model),)) + b"\x39"
        usual = _Usual(head, model, self._layout(len(model)))
        self._known[step.model, step.version, timing.instance] = usual
        return usual

    def _batch(self, timing: StageTiming) -> bytes:
        key = (timing.batch_id, timing.batch_size)
        encoded = self._batches.get(key)
        if encoded is None:
            if len(self._batches) >= _BATCHES_LIMIT:
                self._batches.clear()
            encoded = self._attributes.encode(((names.BATCH_ID, key[0]), (names.BATCH_SIZE, key[1])))
            self._batches[key] = encoded
        return encoded

    def _layout(self, end_size: int) -> _Layout:
        """What packs four spans with attributes of this size, and the bytes that each begins with."""
        layout = self._layouts.get(end_size)
        if layout is None:
            if len(self._layouts) >= _CACHE_LIMIT:
                self._layouts.clear()
            layout = self._layouts[end_size] = _make_layout(end_size)
        return layout


def _make_layout(end_size: int) -> _Layout:
    heads, formats = [], []
    for name, _ in PHASES:
        constant = name_and_kind(name, INTERNAL)
        length = len(constant) + _FRONT_SIZE + 8 + end_size - 1 + _TIMES_SIZE
        heads.append(b"\x12%b%b" % (varint(length), constant))  # ScopeSpans: 2 spans
        formats.append(f"{len(heads[-1])}s{_FRONT_SIZE}sQ{end_size}sQBQ")
    h0, h1, h2, h3 = heads
    return Struct("<" + "".join(formats)).pack, (h0, h1, h2, h3)
