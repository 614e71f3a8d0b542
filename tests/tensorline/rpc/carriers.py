"""What carries an outbox's messages, real at both ends: a gRPC stream, and a lane. Both keep the same promises."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from grpc import aio

from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.protocol.stubs.tensorline.v1.stage_pb2_grpc import (
    StageServicer,
    StageStub,
    add_StageServicer_to_server,
)
from tensorline.rpc.channels import open_stage_channel, stage_server_options
from tensorline.rpc.lane import TOKEN_BYTES, Lane, open_lane
from tensorline.rpc.outbox import Outbox

__all__ = ["CARRIERS", "Carrier", "Exchange", "open_raw_server"]

Exchange = Callable[[AsyncIterator[pb.Frames], "aio.ServicerContext[pb.Frames, pb.Frames]"], Awaitable[None]]


class Carrier(Protocol):
    """One way, from an outbox to a peer that keeps what it gets."""

    received: list[pb.Frames]

    def start(self, outbox: Outbox) -> None:
        """From here on what the outbox has leaves."""

    def hold(self) -> None:
        """The peer stops reading."""

    def resume(self) -> None: ...

    async def wait_ended(self) -> None:
        """Until the outbox has ended and the peer has all of it."""


class _Servicer(StageServicer):
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def Exchange(  # type: ignore[override]  # noqa: N802 - as in tensorline/stage/server.py
        self, request_iterator: AsyncIterator[pb.Frames], context: "aio.ServicerContext[pb.Frames, pb.Frames]"
    ) -> None:
        await self._exchange(request_iterator, context)


@asynccontextmanager
async def open_raw_server(path: Path, exchange: Exchange) -> AsyncIterator[str]:
    """A gRPC server whose Stage/Exchange is `exchange`; its target."""
    server = aio.server(options=stage_server_options(16))
    add_StageServicer_to_server(_Servicer(exchange), server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        yield f"unix:{path}"
    finally:
        await server.stop(0)


class StreamCarrier:
    def __init__(self, call: "aio.StreamStreamCall[pb.Frames, pb.Frames]") -> None:
        self.received: list[pb.Frames] = []
        self.call = call
        self.is_reading = asyncio.Event()
        self.is_reading.set()
        self._ended = asyncio.Event()
        self._moving: asyncio.Task[None] | None = None

    async def collect(
        self, requests: AsyncIterator[pb.Frames], context: "aio.ServicerContext[pb.Frames, pb.Frames]"
    ) -> None:
        async for message in requests:
            self.received.append(message)
            await self.is_reading.wait()
        self._ended.set()

    def start(self, outbox: Outbox) -> None:
        self._moving = asyncio.create_task(outbox.pump(self.call.write))

    def hold(self) -> None:
        self.is_reading.clear()

    def resume(self) -> None:
        self.is_reading.set()

    async def wait_ended(self) -> None:
        assert self._moving is not None
        async with asyncio.timeout(10):
            await self._moving
            await self.call.done_writing()
            await self._ended.wait()


@asynccontextmanager
async def stream(path: Path) -> AsyncIterator[Carrier]:
    carriers: list[StreamCarrier] = []

    async def exchange(
        requests: AsyncIterator[pb.Frames], context: "aio.ServicerContext[pb.Frames, pb.Frames]"
    ) -> None:
        await carriers[0].collect(requests, context)

    async with open_raw_server(path / "stream.sock", exchange) as target:
        channel = open_stage_channel(target)
        call = StageStub(channel).Exchange()
        carriers.append(StreamCarrier(call))
        try:
            yield carriers[0]
        finally:
            call.cancel()
            await channel.close()


class LaneCarrier:
    def __init__(self, near: Lane, far: Lane) -> None:
        self.received: list[pb.Frames] = []
        self._near = near
        self._far = far
        self._lost = asyncio.Event()
        far.on_message = self.received.append
        far.on_lost = self._lost.set

    def start(self, outbox: Outbox) -> None:
        self._near.on_room = lambda: outbox.flush_to(self._near)
        outbox.flush_to(self._near)

    def hold(self) -> None:
        self._far._transport.pause_reading()  # type: ignore[union-attr]

    def resume(self) -> None:
        self._far._transport.resume_reading()  # type: ignore[union-attr]

    async def wait_ended(self) -> None:
        async with asyncio.timeout(10):
            await self._lost.wait()


@asynccontextmanager
async def lane(path: Path) -> AsyncIterator[Carrier]:
    ends: list[Lane] = []
    token = b"t" * TOKEN_BYTES
    known = asyncio.Event()

    def on_token(end: Lane, given: bytes) -> bool:
        known.set()
        return given == token

    def accept() -> Lane:
        ends.append(Lane(on_token))
        return ends[-1]

    server = await asyncio.get_running_loop().create_unix_server(accept, str(path / "lane.sock"))
    near = await open_lane(str(path / "lane.sock"), 1.0)
    near.write_token(token)
    await known.wait()
    try:
        yield LaneCarrier(near, ends[0])
    finally:
        near.close()
        ends[0].close()
        server.close()


CARRIERS = {"stream": stream, "lane": lane}
