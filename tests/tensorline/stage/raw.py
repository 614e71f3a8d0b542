"""A gateway that says to a stage what a test tells it to: right, wrong, or nothing."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from grpc import StatusCode, aio

from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.protocol.stubs.tensorline.v1.stage_pb2_grpc import StageStub
from tensorline.rpc.channels import PROTOCOL, open_stage_channel
from tests.tensorline.stage.pair import Stage, until

__all__ = ["RawGateway", "frame", "inline", "open_raw_gateway", "submit"]


def frame(**kind: object) -> pb.Frame:
    return pb.Frame(**kind)  # type: ignore[arg-type]


def inline(name: str, data: bytes, datatype: str = "UINT8", shape: Sequence[int] | None = None) -> pb.Tensor:
    return pb.Tensor(name=name, datatype=datatype, shape=[len(data)] if shape is None else shape, inline=data)


def submit(number: int, *inputs: pb.Tensor, model: str = "echo", **more: object) -> pb.Frame:
    return pb.Frame(submit=pb.Submit(id=number, model=model, inputs=inputs, **more))  # type: ignore[arg-type]


class RawGateway:
    def __init__(self, call: "aio.StreamStreamCall[pb.Frames, pb.Frames]") -> None:
        self.call = call
        self.reading = asyncio.Event()
        """Cleared: it stops to read."""
        self.reading.set()
        self.received: list[pb.Frame] = []
        self.sizes: list[int] = []
        """Bytes of each message that came."""

    @property
    def hello(self) -> pb.Hello:
        return self.received[0].hello

    async def say(self, *frames: pb.Frame) -> None:
        await self.call.write(pb.Frames(frames=frames))

    async def listen(self) -> None:
        while True:
            await self.reading.wait()
            message: object = await self.call.read()
            if message is aio.EOF:
                return
            frames = cast(pb.Frames, message)
            self.sizes.append(frames.ByteSize())
            self.received.extend(frames.frames)

    def results(self) -> dict[int, pb.Result]:
        found: dict[int, pb.Result] = {}
        for each in self.received:
            if each.WhichOneof("kind") == "result":
                assert each.result.id not in found, "answered twice"
                found[each.result.id] = each.result
        return found

    async def result(self, number: int) -> pb.Result:
        await until(lambda: number in self.results())
        return self.results()[number]

    async def ended(self, within_s: float = 5.0) -> tuple[StatusCode, str]:
        """How the stage ended the stream."""
        async with asyncio.timeout(within_s):
            return await self.call.code(), await self.call.details() or ""


@asynccontextmanager
async def open_raw_gateway(
    stage: Stage, first: Sequence[pb.Frame] | None = None, *, nonce: bytes | None = None, protocol: int = PROTOCOL
) -> AsyncIterator[RawGateway]:
    """
    Args:
        first: Frames of its first message; None: a right hello.
        nonce: None: the stage's own.
    """
    channel = open_stage_channel(stage.target)
    call = StageStub(channel).Exchange()
    gateway = RawGateway(call)
    hello = pb.Hello(
        protocol=protocol, instance_id="raw", nonce=stage.identity.nonce if nonce is None else nonce, arena=b"r" * 16
    )
    listening = asyncio.create_task(gateway.listen())
    try:
        if first is None or first:
            await gateway.say(*([frame(hello=hello)] if first is None else first))
        if first is None and protocol == PROTOCOL:
            await until(lambda: gateway.received)
        yield gateway
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        call.cancel()
        await channel.close()
