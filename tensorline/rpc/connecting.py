"""Opening a stage stream from the gateway's side, and what lies behind it: channel, call, Hello, lane."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable

from grpc import aio

from tensorline import __version__
from tensorline.errors import UnavailableError
from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.protocol.stubs.tensorline.v1.stage_pb2_grpc import StageStub
from tensorline.rpc.channels import PROTOCOL, open_stage_channel
from tensorline.rpc.connection import LocalPeer, StageConnection
from tensorline.rpc.hosted import HostedModel
from tensorline.rpc.lane import Lane, open_lane

__all__ = ["HELLO_S", "connect_stage"]

log = logging.getLogger(__name__)

HELLO_S = 2.0


async def connect_stage(
    target: str,
    expected_id: str,
    local: LocalPeer,
    on_open: Callable[[StageConnection], None],
    on_models: Callable[[StageConnection, list[HostedModel]], None],
) -> None:
    """Open a stream, serve it until it ends, and close everything behind it.

    Args:
        expected_id: The instance that the registry says lives there; "" accepts any.
    Raises:
        UnavailableError: nobody there, somebody else there, or a release that cannot be talked to.
    """
    channel = open_stage_channel(target)
    call = StageStub(channel).Exchange()
    lane: Lane | None = None
    try:
        hello = await _exchange_hello(call, local)
        if hello.protocol != PROTOCOL:
            raise UnavailableError(f"the stage speaks protocol {hello.protocol}, this release speaks {PROTOCOL}")
        if expected_id and hello.instance_id != expected_id:
            raise UnavailableError("another instance answers at the registered address")
        lane = await _lane_of(hello)
        connection = StageConnection(hello, local, call, on_models)
        on_open(connection)
        await connection.run(lane)
    except aio.AioRpcError as error:
        raise UnavailableError(f"stage stream: {error.code().name}") from error
    except TimeoutError as error:
        raise UnavailableError("the stage did not say hello in time") from error
    except asyncio.InvalidStateError as error:
        raise UnavailableError("stage stream: it ended while it was opened") from error
    finally:
        if lane is not None:
            lane.close()
        # A dropped call stays open for ever, and other orders leak sockets in some releases.
        call.cancel()
        with contextlib.suppress(Exception):
            await channel.close()


async def _exchange_hello(call: "aio.StreamStreamCall[pb.Frames, pb.Frames]", local: LocalPeer) -> pb.Hello:
    first = pb.Frames()
    hello = first.frames.add().hello
    hello.protocol = PROTOCOL
    hello.release = __version__
    hello.service = "gateway"
    hello.instance_id = local.instance_id
    hello.nonce = local.nonce
    hello.arena = local.arena
    hello.monotonic_ns = time.monotonic_ns()
    hello.host = socket.gethostname()
    hello.pid = os.getpid()
    async with asyncio.timeout(HELLO_S):
        await call.write(first)
        answer = await call.read()
    frames = list(answer.frames) if isinstance(answer, pb.Frames) else []
    if len(frames) != 1 or frames[0].WhichOneof("kind") != "hello":
        raise UnavailableError("the stage did not begin with a message of hello alone")
    return frames[0].hello


async def _lane_of(hello: pb.Hello) -> Lane | None:
    """The lane that the stage offers, if it can be had; without one the stream carries the frames."""
    if not hello.lane:
        return None
    try:
        return await open_lane(hello.lane, HELLO_S)
    except (OSError, TimeoutError) as error:
        log.warning("no local lane to a stage", extra={"stage": hello.instance_id, "cause": str(error)})
        return None
