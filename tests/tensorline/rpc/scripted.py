"""A stage that says what a test tells it to: right, wrong, or nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from grpc import aio

from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.rpc.channels import PROTOCOL
from tensorline.rpc.connecting import connect_stage
from tensorline.rpc.connection import LocalPeer, StageConnection
from tensorline.rpc.frames import StageResult, Submission
from tensorline.rpc.hosted import HostedModel
from tensorline.rpc.lane import TOKEN_BYTES, Lane
from tensorline.tensor import Tensor
from tests.tensorline.rpc.carriers import open_raw_server
from tests.tensorline.stage.pair import until

__all__ = ["ARENA", "NONCE", "Gateway", "ScriptedStage", "frames", "open_gateway", "open_scripted"]

ARENA, NONCE = b"stage arena, 16b", b"nonce of 16 byte"


def frames(*each: pb.Frame) -> pb.Frames:
    return pb.Frames(frames=each)


def hello(**fields: object) -> pb.Hello:
    usual: dict[str, object] = {
        "protocol": PROTOCOL,
        "instance_id": "model-1",
        "service": "model",
        "arena": ARENA,
        "nonce": NONCE,
        "max_in_flight": 8,
    }
    return pb.Hello(**{**usual, **fields})  # type: ignore[arg-type]


class ScriptedStage:
    """Says `first` after the gateway's first message, then what `say` is given, by the stream or by its lane."""

    def __init__(self, first: pb.Frames | None, *, lane_path: str = "") -> None:
        self.first = first
        self.target = ""
        self.hello: pb.Hello | None = None
        """The gateway's."""
        self.received: list[pb.Frame] = []
        self.streams = 0
        self.lanes: list[Lane] = []
        self.tokens: list[bytes] = []
        self.is_lane_refused = False
        self._lane_path = lane_path
        self._end = asyncio.Event()
        self._context: aio.ServicerContext[pb.Frames, pb.Frames] | None = None

    async def exchange(
        self, requests: AsyncIterator[pb.Frames], context: "aio.ServicerContext[pb.Frames, pb.Frames]"
    ) -> None:
        self.streams += 1
        begin = await context.read()
        self.hello = begin.frames[0].hello
        if self.first is None:
            await self._end.wait()
            return
        await context.write(self.first)
        self._context = context
        reading = asyncio.create_task(self._collect(context))
        await self._end.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async def _collect(self, context: "aio.ServicerContext[pb.Frames, pb.Frames]") -> None:
        while True:
            message: object = await context.read()
            if message is aio.EOF:
                return
            self.take(cast(pb.Frames, message))

    def take(self, message: pb.Frames) -> None:
        self.received.extend(message.frames)

    def accept(self) -> Lane:
        def on_token(lane: Lane, token: bytes) -> bool:
            self.tokens.append(token)
            lane.on_message = self.take
            return not self.is_lane_refused

        self.lanes.append(Lane(on_token))
        return self.lanes[-1]

    async def say(self, *each: pb.Frame) -> None:
        if self.lanes:
            self.lanes[-1].write(frames(*each))
            return
        assert self._context is not None
        await self._context.write(frames(*each))

    def end(self) -> None:
        """Of the stream, and with it of the lane, from the stage's side."""
        for lane in self.lanes:
            lane.close()
        self._end.set()

    def of_kind(self, kind: str) -> list[pb.Frame]:
        return [frame for frame in self.received if frame.WhichOneof("kind") == kind]


@asynccontextmanager
async def open_scripted(
    path: Path, first: pb.Frames | str | None = "hello", *, has_lane: bool = False, **fields: object
) -> AsyncIterator[ScriptedStage]:
    """
    Args:
        first: Its first message; "hello": the usual one, with `fields`; None: it never comes.
    """
    lane_path = str(path / "lane.sock") if has_lane else ""
    if has_lane:
        fields = {"lane": lane_path, "lane_token": b"t" * TOKEN_BYTES, **fields}
    said = frames(pb.Frame(hello=hello(**fields))) if isinstance(first, str) else first
    stage = ScriptedStage(said, lane_path=lane_path)
    server = await asyncio.get_running_loop().create_unix_server(stage.accept, lane_path) if has_lane else None
    try:
        async with open_raw_server(path / "stage.sock", stage.exchange) as target:
            stage.target = target
            yield stage
            stage.end()
    finally:
        for lane in stage.lanes:
            lane.close()
        if server is not None:
            server.close()


class Gateway:
    """One stream to a scripted stage, and what it told us."""

    def __init__(self) -> None:
        self.connections: list[StageConnection] = []
        self.models: list[list[HostedModel]] = []
        self.running: asyncio.Task[None] | None = None

    @property
    def connection(self) -> StageConnection:
        return self.connections[-1]

    def submit(self, *inputs: Tensor) -> tuple[int, list[StageResult]]:
        """Number, and where the answers go."""
        return self.submit_to("m", *inputs)

    def submit_to(self, model: str, *inputs: Tensor) -> tuple[int, list[StageResult]]:
        results: list[StageResult] = []
        return self.connection.submit(Submission(model, "", list(inputs)), results.append), results

    async def wait_ended(self, within_s: float = 5.0) -> None:
        assert self.running is not None
        async with asyncio.timeout(within_s):
            await asyncio.wait([self.running])


@asynccontextmanager
async def open_gateway(
    target: str,
    *,
    expected_id: str = "model-1",
    nonce: bytes = NONCE,
    inline_limit: int = 1 << 26,
    on_open: Callable[[StageConnection], None] | None = None,
) -> AsyncIterator[Gateway]:
    gateway = Gateway()
    local = LocalPeer("gateway-1", nonce, b"g" * 16, inline_limit)
    gateway.running = asyncio.create_task(
        connect_stage(
            target,
            expected_id,
            local,
            on_open or gateway.connections.append,
            lambda _, models: gateway.models.append(models),
        )
    )
    try:
        await until(lambda: gateway.connections or (gateway.running is not None and gateway.running.done()))
        if gateway.running.done():
            await gateway.running
        yield gateway
    finally:
        gateway.running.cancel()
        await asyncio.gather(gateway.running, return_exceptions=True)
