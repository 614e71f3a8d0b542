"""Our values on the stage stream: encoding into frames and back."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from google.protobuf.internal.containers import MessageMap

from tensorline.errors import InvalidTensorError, ResourceExhaustedError, TensorlineError
from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.rpc.channels import CHUNK_BYTES
from tensorline.telemetry.record import StageTiming
from tensorline.tensor import Handle, Tensor

__all__ = [
    "ChunkStore",
    "LoadOrder",
    "StageResult",
    "Submission",
    "decode_handle_tensor",
    "decode_order",
    "decode_parameters",
    "decode_result",
    "decode_tensor",
    "decode_tensors",
    "encode_parameters",
    "encode_tensor",
    "encode_timing",
    "text_bytes",
]

ParameterValue = bool | int | str | float
STAGE_TIMES = 7
INT64_MAX = (1 << 63) - 1

TEXT_BYTES = CHUNK_BYTES
"""Of one request's id, parameters and output names: a frame cannot be split, and one message has to hold it."""

UNCLAIMED_LIMIT = 4096
"""Tensors in chunks that no frame has referred to yet: those of one frame, which has at most a quarter of it."""


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
    window: int = 0
    """Of a decoupled model: responses that may be on their way at once."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load request as a gateway passes it on."""

    model: str
    config: str = ""
    """JSON of an inference.ModelConfig in place of config.pbtxt; "": the file."""
    files: Mapping[str, bytes | memoryview] = field(default_factory=dict)
    """In place of the model's directory, by path in it."""
    override: str = ""
    """Digest of both; "" where there is neither."""


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
        ResourceExhaustedError: chunks that there was no room for.
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
    if timing.executions:
        into.executions = timing.executions


def decode_timing(wire: pb.Timing) -> StageTiming | None:
    """None for a timing that is not ours: a neighbouring release may send more or fewer times."""
    if len(wire.ns) != STAGE_TIMES:
        return None
    received, queued, batched, ready, computed, written, sent = wire.ns
    return StageTiming(
        *(received, queued, batched, ready, computed, written, sent),
        wire.batch_id,
        wire.batch_size,
        wire.instance,
        wire.executions,
    )


def decode_tensors(wires: Iterable[pb.Tensor], chunks: "ChunkStore") -> list[Tensor]:
    """All tensors of a frame; when one of them is refused, the chunks of all leave the store.

    Raises:
        TensorlineError: as `decode_tensor`.
    """
    try:
        return [decode_tensor(wire, chunks) for wire in wires]
    except TensorlineError:
        chunks.drop(wire.chunked.id for wire in wires if wire.HasField("chunked"))
        raise


def decode_order(wire: pb.Load, chunks: "ChunkStore") -> LoadOrder:
    """
    Raises:
        TensorlineError: as `decode_tensor`.
    """
    files = {tensor.name: tensor.data or b"" for tensor in decode_tensors(wire.files, chunks)}
    return LoadOrder(wire.model, wire.config, files, wire.override)


def decode_result(wire: pb.Result, chunks: "ChunkStore") -> StageResult:
    return StageResult(
        status=wire.status,
        error=wire.error,
        outputs=decode_tensors(wire.outputs, chunks) if wire.outputs else [],
        version=wire.version,
        timing=decode_timing(wire.timing) if wire.HasField("timing") else None,
        final=wire.final,
        not_started=wire.not_started,
        parameters=decode_parameters(wire.parameters) if wire.parameters else {},
    )


class ChunkStore:
    """Inline tensors that arrive in pieces, until the frame that refers to them; one per stream and direction.

    Bounded, in bytes and in number, over all that is unfinished or unclaimed. What is refused is refused once more when
    a frame refers to it: that request fails, and no other on the stream.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self.held_bytes = 0
        """Of what is held, as announced."""
        self._parts: dict[int, tuple[int, bytearray | TensorlineError]] = {}
        """Bytes announced, and those that came; of a tensor that was refused, why: no later chunk of it counts."""

    def add(self, chunk: pb.Chunk) -> None:
        """
        Raises:
            InvalidTensorError: more bytes than announced.
            ResourceExhaustedError: over a limit.
        """
        number, data = chunk.id, chunk.data
        total, part = self._parts.get(number) or self._begin(number, chunk.total)
        if isinstance(part, TensorlineError):
            return
        if len(part) + len(data) > total:
            self.held_bytes -= total
            raise self._refused(number, InvalidTensorError(f"more chunk bytes than the announced {total}"))
        part += data

    def _begin(self, number: int, total: int) -> tuple[int, bytearray]:
        if len(self._parts) >= UNCLAIMED_LIMIT:
            raise ResourceExhaustedError(
                f"{UNCLAIMED_LIMIT + 1} tensors in chunks on one stream, at most {UNCLAIMED_LIMIT} are allowed"
            )
        if self.held_bytes + total > self._limit:
            text = f"inline tensors of {self.held_bytes + total} bytes on one stream, at most {self._limit} are allowed"
            raise self._refused(number, ResourceExhaustedError(text))
        self.held_bytes += total
        part = bytearray()
        self._parts[number] = total, part
        return total, part

    def _refused(self, number: int, error: TensorlineError) -> TensorlineError:
        self._parts[number] = 0, error
        return error

    def take(self, chunk_id: int, length: int) -> memoryview:
        """
        Raises:
            InvalidTensorError: they never came, are not all there, or were refused.
            ResourceExhaustedError: they were refused.
        """
        total, part = self._parts.pop(chunk_id, (0, InvalidTensorError("a tensor refers to chunks that never came")))
        self.held_bytes -= total
        if isinstance(part, TensorlineError):
            raise part
        if len(part) != length:
            raise InvalidTensorError(f"a tensor's chunks hold {len(part)} bytes of {length}")
        return memoryview(part).toreadonly()

    def drop(self, chunk_ids: Iterable[int]) -> None:
        """Nobody will take these, if they are here."""
        for chunk_id in chunk_ids:
            self.held_bytes -= self._parts.pop(chunk_id, (0, b""))[0]


def text_bytes(work: Submission) -> int:
    """
    Raises:
        InvalidTensorError: over the limit, or a number that no field holds.
    """
    size = len(work.request_id.encode()) + sum(len(name.encode()) for name in work.outputs)
    for key, value in work.parameters.items():
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise InvalidTensorError(f"parameter '{key[:64]}' is {value}, which 64 bits do not hold")
        size += len(key.encode()) + (len(value.encode()) if isinstance(value, str) else 8) + 16
    if size > TEXT_BYTES:
        raise InvalidTensorError(
            f"request id, parameters and output names have {size} bytes, at most {TEXT_BYTES} are passed on to a stage"
        )
    return size
