"""Our values on the stage stream: encoding into frames and back."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from google.protobuf.internal.containers import MessageMap

from tensorline.errors import InvalidTensorError
from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.telemetry.record import StageTiming
from tensorline.tensor import Handle, Tensor

__all__ = [
    "ChunkStore",
    "StageResult",
    "Submission",
    "decode_handle_tensor",
    "decode_parameters",
    "decode_result",
    "decode_tensor",
    "encode_parameters",
    "encode_tensor",
    "encode_timing",
]

ParameterValue = bool | int | str | float
STAGE_TIMES = 7
INT64_MAX = (1 << 63) - 1


@dataclass(slots=True)
class Submission:
    """What a gateway asks of a stage: one run of one model."""

    model: str
    version: str
    inputs: list[Tensor]
    outputs: tuple[str, ...] = ()
    """Names wanted; empty: all."""
    request_id: str = ""
    timeout_s: float | None = None
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    priority: int = 0
    trace_id: bytes = b""
    span_id: bytes = b""
    trace_flags: int = 0
    tracestate: str = ""


@dataclass(slots=True)
class StageResult:
    """A stage's answer: outputs, or a status other than 0 with its text."""

    status: int
    error: str = ""
    outputs: list[Tensor] = field(default_factory=list)
    version: str = ""
    timing: StageTiming | None = None
    final: bool = True
    not_started: bool = False
    """The model has not run: trying elsewhere is safe whatever it does."""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)


def encode_parameters(into: MessageMap[str, pb.Parameter], values: Mapping[str, ParameterValue]) -> None:
    for key, value in values.items():
        if isinstance(value, bool):
            into[key].bool_value = value
        elif isinstance(value, int):
            if value > INT64_MAX:
                into[key].uint64_value = value
            else:
                into[key].int64_value = value
        elif isinstance(value, str):
            into[key].string_value = value
        else:
            into[key].double_value = value


def decode_parameters(source: Mapping[str, pb.Parameter]) -> dict[str, ParameterValue]:
    values: dict[str, ParameterValue] = {}
    for key, parameter in source.items():
        kind = parameter.WhichOneof("value")
        if kind is not None:
            values[key] = getattr(parameter, kind)
    return values


def encode_tensor(into: pb.Tensor, tensor: Tensor) -> None:
    """Fill `into`; a tensor with bytes in hand goes inline (the outbox has chunked what is too big)."""
    into.name = tensor.name
    into.datatype = tensor.datatype
    into.shape.extend(tensor.shape)
    handle = tensor.handle
    if handle is None:
        data = tensor.data
        into.inline = data if isinstance(data, bytes) else b"" if data is None else bytes(data)
    else:
        wire = into.handle
        wire.arena = handle.arena
        wire.block = handle.block
        wire.offset = handle.offset
        wire.length = handle.length
        wire.generation = handle.generation


def decode_tensor(wire: pb.Tensor, chunks: "ChunkStore") -> Tensor:
    """The tensor of a frame; its chunks, if it came in some, are taken out of the store.

    Raises:
        InvalidTensorError: no data, or chunks that are missing or incomplete.
    """
    kind = wire.WhichOneof("data")
    if kind == "handle":
        return decode_handle_tensor(wire)
    if kind == "inline":
        return Tensor(wire.name, wire.datatype, tuple(wire.shape), wire.inline)
    if kind == "chunked":
        data = chunks.take(wire.chunked.id, wire.chunked.length)
        return Tensor(wire.name, wire.datatype, tuple(wire.shape), data)
    raise InvalidTensorError(f"tensor '{wire.name}' came without data")


def decode_handle_tensor(wire: pb.Tensor) -> Tensor:
    at = wire.handle
    handle = Handle(at.arena, at.block, at.offset, at.length, at.generation)
    return Tensor(wire.name, wire.datatype, tuple(wire.shape), None, handle)


def encode_timing(into: pb.Timing, timing: StageTiming, sent: int) -> None:
    into.ns.extend(
        (
            timing.received,
            timing.queued,
            timing.batched,
            timing.input_ready,
            timing.computed,
            timing.output_ready,
            sent,
        )
    )
    into.batch_id = timing.batch_id
    into.batch_size = timing.batch_size
    into.instance = timing.instance


def decode_timing(wire: pb.Timing) -> StageTiming | None:
    """None for a timing that is not ours: a neighbouring release may send more or fewer times."""
    if len(wire.ns) != STAGE_TIMES:
        return None
    received, queued, batched, ready, computed, written, sent = wire.ns
    return StageTiming(
        received, queued, batched, ready, computed, written, sent, wire.batch_id, wire.batch_size, wire.instance
    )


def decode_result(wire: pb.Result, chunks: "ChunkStore") -> StageResult:
    return StageResult(
        status=wire.status,
        error=wire.error,
        outputs=[decode_tensor(tensor, chunks) for tensor in wire.outputs],
        version=wire.version,
        timing=decode_timing(wire.timing) if wire.HasField("timing") else None,
        final=wire.final,
        not_started=wire.not_started,
        parameters=decode_parameters(wire.parameters) if wire.parameters else {},
    )


class ChunkStore:
    """Inline tensors that arrive in pieces, until the frame that refers to them; one per stream and direction.

    Bounded in bytes over all that is unfinished or unclaimed; a peer beyond it broke the protocol.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._parts: dict[int, bytearray] = {}
        self._totals: dict[int, int] = {}

    def add(self, chunk: pb.Chunk) -> None:
        """
        Raises:
            InvalidTensorError: over the limit, or more bytes than announced.
        """
        part = self._parts.get(chunk.id)
        if part is None:
            if self._held + chunk.total > self._limit:
                raise InvalidTensorError(
                    f"inline tensors of {self._held + chunk.total} bytes on one stream, "
                    f"at most {self._limit} are allowed"
                )
            part = self._parts[chunk.id] = bytearray()
            self._totals[chunk.id] = chunk.total
            self._held += chunk.total
        if len(part) + len(chunk.data) > self._totals[chunk.id]:
            raise InvalidTensorError(f"more chunk bytes than the announced {self._totals[chunk.id]}")
        part += chunk.data

    def take(self, chunk_id: int, length: int) -> memoryview:
        part = self._parts.pop(chunk_id, None)
        if part is None:
            raise InvalidTensorError("a tensor refers to chunks that never came")
        self._held -= self._totals.pop(chunk_id)
        if len(part) != length:
            raise InvalidTensorError(f"a tensor's chunks hold {len(part)} bytes of {length}")
        return memoryview(part)


def tensors_byte_size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.byte_size for tensor in tensors)
