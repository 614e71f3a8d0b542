"""The gRPC side of a stage: the one servicer that serves all stages, and the streams that are open on it."""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import cast

from google.protobuf.message import DecodeError
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tensorline import __version__
from tensorline.errors import ConfigError, UnavailableError, answering
from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.protocol.stubs.tensorline.v1.stage_pb2_grpc import StageServicer, add_StageServicer_to_server
from tensorline.rpc.channels import PROTOCOL, stage_server_options
from tensorline.rpc.connecting import HELLO_S
from tensorline.rpc.frames import LoadOrder
from tensorline.rpc.hosted import READY
from tensorline.rpc.lane import TOKEN_BYTES, Lane
from tensorline.shm import Arena, Leases
from tensorline.stage.execution import Executed
from tensorline.stage.host import ModelHost
from tensorline.stage.repository import StageRepository
from tensorline.stage.request import StageRequest
from tensorline.stage.session import Session

__all__ = ["StageEnd", "StageIdentity", "open_server", "set_health"]

REST_S = 1.0
"""How long a block rests beyond its request's deadline, for readers that are late."""

LEASE_S = 300.0
"""Of a request without a deadline; a gateway always sets one."""

MAX_STREAMS = 256


@dataclass(frozen=True, slots=True)
class StageIdentity:
    """What a stage says of itself in Hello."""

    instance_id: str
    service: str
    nonce: bytes
    max_in_flight: int
    inline_limit: int
    """Bytes of unfinished inline tensors that one gateway may have here."""
    lane: str = ""
    """Path of the lane socket, for gateways on this host; "" offers none."""


class StageEnd(StageServicer):
    """Serves Exchange: one session for each gateway."""

    def __init__(self, identity: StageIdentity, arena: Arena, leases: Leases) -> None:
        self._identity = identity
        self._arena = arena
        self._leases = leases
        self._host: ModelHost | None = None
        self._repository: StageRepository | None = None
        self._sessions: set[Session] = set()
        self._offers: dict[bytes, Session] = {}
        self._is_draining = False

    def serve_models(self, host: ModelHost) -> None:
        """From here on submissions go to `host`."""
        self._host = host

    def serve_loads(self, repository: StageRepository) -> None:
        """From here on gateways may load and unload."""
        self._repository = repository

    async def load_model(self, order: LoadOrder) -> bool:
        return await self._loading().load(order)

    async def unload_model(self, name: str) -> None:
        await self._loading().unload(name)

    def _loading(self) -> StageRepository:
        if self._is_draining or self._repository is None:
            raise UnavailableError("the stage is starting or shutting down: it loads and unloads nothing")
        return self._repository

    @property
    def streams(self) -> int:
        return len(self._sessions)

    @property
    def in_flight(self) -> int:
        return sum(session.in_flight for session in self._sessions)

    async def Exchange(  # type: ignore[override]  # noqa: N802 - the reader/writer form of a grpc.aio handler
        self, request_iterator: AsyncIterator[pb.Frames], context: "aio.ServicerContext[pb.Frames, pb.Frames]"
    ) -> None:
        async with answering(context):
            hello = await _read_hello(context)
            is_near = hello.nonce == self._identity.nonce and hello.protocol == PROTOCOL
            token = secrets.token_bytes(TOKEN_BYTES) if is_near and self._identity.lane else b""
            session = Session(self, hello.instance_id, self._identity.inline_limit)
            if token:
                self._offers[token] = session
            await context.write(self._hello(token))
            if hello.protocol != PROTOCOL:
                raise UnavailableError(f"this stage speaks protocol {PROTOCOL}, the gateway speaks {hello.protocol}")
            self._sessions.add(session)
            try:
                if self._host is not None and self._host.is_listed:
                    session.send_models(self._host.models)
                if self._is_draining:
                    session.send_drain("the stage is shutting down")
                await session.run(context)
            finally:
                self._sessions.discard(session)
                self._offers.pop(token, None)
                self._leases.release_all(session)

    def lane_end(self) -> Lane:
        """For a new connection on the lane socket."""
        return Lane(self._take_token)

    def _take_token(self, lane: Lane, token: bytes) -> bool:
        session = self._offers.pop(token, None)
        if session is None:
            return False
        session.attach(lane)
        return True

    def _hello(self, token: bytes) -> pb.Frames:
        message = pb.Frames()
        hello = message.frames.add().hello
        hello.protocol = PROTOCOL
        hello.release = __version__
        hello.instance_id = self._identity.instance_id
        hello.service = self._identity.service
        hello.nonce = self._identity.nonce
        hello.arena = self._arena.id
        hello.max_in_flight = self._identity.max_in_flight
        hello.monotonic_ns = time.monotonic_ns()
        hello.host = socket.gethostname()
        hello.pid = os.getpid()
        if self._host is not None:
            hello.backends.extend(sorted(self._host.backends))
        if token:
            hello.lane = self._identity.lane
            hello.lane_token = token
        return message

    def submit(self, session: Session, request: StageRequest) -> Callable[[StageRequest], None]:
        if self._is_draining or self._host is None:
            raise UnavailableError("the stage is shutting down: it takes no new requests")
        if session.in_flight > self._identity.max_in_flight:
            raise UnavailableError(
                f"{self._identity.max_in_flight} requests of this gateway are already in flight here"
            )
        return self._host.submit(request).cancel

    def release(self, session: Session, blocks: Iterable[tuple[int, int]]) -> None:
        for block, generation in blocks:
            self._leases.release(session, block, generation)

    def load(self) -> tuple[int, int]:
        return self._host.queued if self._host is not None else 0, self._arena.leased_bytes

    def queues(self) -> list[tuple[str, str, int]]:
        return self._host.queues if self._host is not None else []

    def lease(self, executed: Executed) -> None:
        """The references that an answer's blocks carry become leases of the gateway that asked."""
        session = executed.request.holder
        if not executed.blocks:
            return
        is_open = isinstance(session, Session) and session.is_open
        expires_at = min(executed.request.deadline, time.monotonic() + LEASE_S) + REST_S
        for block in executed.blocks:
            if is_open:
                self._leases.grant(session, block, expires_at)
            else:
                self._arena.release(block.handle.block, block.handle.generation)

    def announce_models(self) -> None:
        if self._host is not None and self._host.is_listed:
            models = self._host.models
            for session in self._sessions:
                session.send_models(models)

    def drain(self) -> None:
        """Refuse new work and tell every gateway; what is in flight goes on."""
        self._is_draining = True
        for session in self._sessions:
            session.send_drain("the stage is shutting down")

    def end_streams(self) -> None:
        for session in list(self._sessions):
            session.end()


async def _read_hello(context: "aio.ServicerContext[pb.Frames, pb.Frames]") -> pb.Hello:
    try:
        async with asyncio.timeout(HELLO_S):
            first: object = await context.read()
    except TimeoutError as error:
        raise UnavailableError("the gateway did not say hello in time") from error
    except DecodeError as error:
        raise UnavailableError("a stage stream begins with a message of hello alone") from error
    frames = [] if first is aio.EOF else list(cast(pb.Frames, first).frames)
    if len(frames) != 1 or frames[0].WhichOneof("kind") != "hello":
        raise UnavailableError("a stage stream begins with a message of hello alone")
    return frames[0].hello


@contextlib.asynccontextmanager
async def open_server(
    stage: StageEnd, socket_path: str, lane_path: str, listen: str
) -> AsyncIterator[tuple[health.aio.HealthServicer, int]]:
    """A server on the Unix socket, and on TCP where `listen` names an address; yields its health and its TCP port.

    Raises:
        ConfigError: `listen` is taken or no address.
    """
    server = aio.server(options=stage_server_options(MAX_STREAMS))
    add_StageServicer_to_server(stage, server)
    checks = health.aio.HealthServicer()
    await checks.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    names = [service.full_name for service in pb.DESCRIPTOR.services_by_name.values()]
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    port = 0
    if listen:
        try:
            port = server.add_insecure_port(listen)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on '{listen}': taken, or no address of this host") from error
    # The socket is made with the process's umask: 0600 in a 0700 directory.
    umask = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{socket_path}")
        lanes = await asyncio.get_running_loop().create_unix_server(stage.lane_end, lane_path)
        await server.start()
    finally:
        os.umask(umask)
    try:
        yield checks, port
    finally:
        lanes.close()
        stage.end_streams()
        await server.stop(grace=1.0)


async def set_health(checks: health.aio.HealthServicer, host: ModelHost) -> None:
    """The service is SERVING, and each model as it is: a model's name is its health service name."""
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    await checks.set("", serving)
    ready: dict[str, bool] = {}
    for model in host.models:
        ready[model.name] = ready.get(model.name, False) or model.state == READY
    for name, is_ready in ready.items():
        await checks.set(name, serving if is_ready else not_serving)
