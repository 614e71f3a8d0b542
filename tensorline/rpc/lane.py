"""The local lane: a stage stream's messages over a plain Unix socket, for two peers on one host.

The frames are the same as on the gRPC stream, which stays open beside it as the contract and the sign of life. What the
lane leaves out is grpc.aio's cost of a message, in Python at both ends ten times that of the socket (bench/README.md).
"""

import asyncio
import struct
from collections.abc import Callable
from typing import cast

from google.protobuf.message import DecodeError

from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.rpc.channels import MESSAGE_BYTES

__all__ = ["TOKEN_BYTES", "Lane", "open_lane"]

TOKEN_BYTES = 16
_HEAD = struct.Struct("<I")
TOKEN_S = 2.0
"""In which a connection must have said its token."""
FULL_BYTES = 4 << 20
"""Unsent bytes from which the sender keeps its frames to itself."""


class Lane(asyncio.Protocol):
    """One end of a lane. `on_message` is called on the loop for each message, `on_lost` once.

    Args:
        on_token: At the stage's end: called with the first bytes of a connection; returns whether they are known. None
            at the gateway's end.
    """

    def __init__(self, on_token: "Callable[[Lane, bytes], bool] | None" = None) -> None:
        self.is_full = False
        self.on_message: Callable[[pb.Frames], None] = _nobody
        self.on_lost: Callable[[], None] = _nothing
        self.on_room: Callable[[], None] = _nothing
        self._on_token = on_token
        self._transport: asyncio.WriteTransport | None = None
        self._token_timer: asyncio.TimerHandle | None = None
        self._buffer = bytearray()

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are not instances of it
        self._transport.set_write_buffer_limits(high=FULL_BYTES)
        if self._on_token is not None:
            self._token_timer = asyncio.get_running_loop().call_later(TOKEN_S, self.close)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        if self._on_token is None and not buffer:
            # The usual case: whole messages, and nothing left over from before.
            at = self._take_messages(data)
            if at < len(data):
                buffer += data[at:]
            return
        buffer += data
        if self._on_token is not None:
            if len(buffer) < TOKEN_BYTES:
                return
            on_token, self._on_token = self._on_token, None
            if self._token_timer is not None:
                self._token_timer.cancel()
            if not on_token(self, bytes(buffer[:TOKEN_BYTES])):
                self.close()
                return
            del buffer[:TOKEN_BYTES]
        at = self._take_messages(buffer)
        del buffer[:at]

    def _take_messages(self, data: bytes | bytearray) -> int:
        at, end = 0, len(data)
        with memoryview(data) as view:
            while end - at >= 4:
                (length,) = _HEAD.unpack_from(view, at)
                if length > MESSAGE_BYTES:
                    self.close()
                    return end
                if end - at - 4 < length:
                    break
                try:
                    message = pb.Frames.FromString(bytes(view[at + 4 : at + 4 + length]))
                except DecodeError:
                    self.close()
                    return end
                at += 4 + length
                self.on_message(message)
        return at

    def write(self, message: pb.Frames) -> None:
        data = message.SerializeToString()
        if self._transport is not None:
            self._transport.write(_HEAD.pack(len(data)) + data)

    def write_token(self, token: bytes) -> None:
        if self._transport is not None:
            self._transport.write(token)

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self.on_room()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._token_timer is not None:
            self._token_timer.cancel()
        self.on_lost()

    def close(self) -> None:
        """What is written still goes out."""
        if self._transport is not None:
            self._transport.close()


async def open_lane(path: str, timeout_s: float) -> Lane:
    """Connect to a stage's lane socket. Nothing comes before `write_token`: set the callbacks first.

    Raises:
        OSError: nobody listens there; TimeoutError: nobody took the connection.
    """
    async with asyncio.timeout(timeout_s):
        _, lane = await asyncio.get_running_loop().create_unix_connection(Lane, path)
    return lane


def _nobody(message: pb.Frames) -> None:
    raise AssertionError("a lane carries messages before anybody listens")


def _nothing() -> None:
    pass
