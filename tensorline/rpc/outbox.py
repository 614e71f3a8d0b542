"""The sending side of a stage stream: frames gather here and leave in as few messages as the loop's turns allow."""

import asyncio
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.rpc.channels import CHUNK_BYTES
from tensorline.rpc.frames import encode_tensor
from tensorline.rpc.lane import Lane
from tensorline.tensor import Tensor

__all__ = ["Outbox", "TensorList"]

TensorList = RepeatedCompositeFieldContainer[pb.Tensor]

INLINE_BYTES = CHUNK_BYTES // 2
"""Of all tensors of one frame; what goes beyond it travels in chunks."""

CLOSE_AT_BYTES = CHUNK_BYTES
"""A message that holds this much is closed; the next frame opens another. So none has more than this and a frame."""

FRAME_BYTES = TENSOR_BYTES = 128
"""What a frame, and a tensor in it, are taken for besides their text and data: counted, not measured."""


class Outbox:
    """All frames added in one turn of the loop leave in one message; so do those added while a write is under way.

    A grpc.aio stream costs about 300 us a message in Python at both ends and hardly more for sixteen frames than for
    one, so that this is what makes the stream fast.
    """

    def __init__(self) -> None:
        self._open = pb.Frames()
        self._open_bytes = 0
        self._closed: deque[tuple[pb.Frames, int]] = deque()
        self._closed_bytes = 0
        self._wake: Callable[[], object] | None = None
        self._chunk_id = 0
        self._ended = False

    def frame(self, text_bytes: int = 0) -> pb.Frame:
        """A new frame to fill in before the caller next awaits.

        Args:
            text_bytes: Of what it will hold besides tensors, where that may be much.
        """
        if self._open_bytes >= CLOSE_AT_BYTES:
            self._closed.append((self._open, self._open_bytes))
            self._closed_bytes += self._open_bytes
            self._open = pb.Frames()
            self._open_bytes = 0
        self._open_bytes += FRAME_BYTES + text_bytes
        wake = self._wake
        if wake is not None:
            self._wake = None
            wake()
        return self._open.frames.add()

    def put_tensors(self, tensors: Sequence[Tensor], make_room: Callable[[], TensorList]) -> None:
        """Encode `tensors` into the list that `make_room` gives, its frame added only after the chunks of big ones."""
        chunked: dict[int, int] = {}
        inline = 0
        for index, tensor in enumerate(tensors):
            data = tensor.data
            if data is not None:
                inline += len(data)
                if inline > INLINE_BYTES:
                    inline -= len(data)
                    chunked[index] = self._put_chunks(memoryview(data))
        room = make_room()
        self._open_bytes += inline + TENSOR_BYTES * len(tensors)
        for index, tensor in enumerate(tensors):
            wire = room.add()
            if chunked and index in chunked:
                wire.name = tensor.name
                wire.datatype = tensor.datatype
                wire.shape.extend(tensor.shape)
                wire.chunked.id = chunked[index]
                wire.chunked.length = tensor.byte_size
            else:
                encode_tensor(wire, tensor)

    def _put_chunks(self, data: memoryview) -> int:
        self._chunk_id += 1
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = self.frame().chunk
            chunk.id = self._chunk_id
            chunk.total = len(data)
            chunk.data = bytes(data[start : start + CHUNK_BYTES])
            self._open_bytes += len(chunk.data)
        return self._chunk_id

    @property
    def is_empty(self) -> bool:
        return not self._closed and not self._open.frames

    @property
    def waiting_bytes(self) -> int:
        """About how much is here because the peer does not read it."""
        return self._closed_bytes + self._open_bytes

    def end(self) -> None:
        """Let `pump` return once everything is written."""
        self._ended = True
        if self._wake is not None:
            self._wake()

    async def pump(self, write: Callable[[pb.Frames], Awaitable[object]]) -> None:
        """Write messages as they fill until `end`; what `write` raises ends it."""
        loop = asyncio.get_running_loop()
        while True:
            message = self._next()
            if message is not None:
                await write(message)
            elif self._ended:
                return
            else:
                idle = loop.create_future()
                self._wake = functools.partial(_settle, idle)
                await idle

    def flush_to(self, lane: Lane) -> None:
        """Write what is there to `lane`, and from now on what each turn of the loop adds, at its end.

        While the lane is full everything stays here; `lane` calls this again when it has room.
        """
        while not lane.is_full:
            message = self._next()
            if message is None:
                if self._ended:
                    lane.close()
                else:
                    self._wake = functools.partial(asyncio.get_running_loop().call_soon, self.flush_to, lane)
                return
            lane.write(message)
        self._wake = None

    def _next(self) -> pb.Frames | None:
        if self._closed:
            message, size = self._closed.popleft()
            self._closed_bytes -= size
            return message
        if not self._open.frames:
            return None
        message, self._open, self._open_bytes = self._open, pb.Frames(), 0
        return message


def _settle(idle: asyncio.Future[None]) -> None:
    if not idle.done():
        idle.set_result(None)
