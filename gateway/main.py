"""A gateway's life."""

import asyncio
import logging
import os
import socket
import sys
import uuid
from contextlib import AsyncExitStack

from gateway.admin import AdminRoutes, is_loopback, metrics_app
from gateway.grpc_v2 import KServeFrontEnd, make_grpc_server
from gateway.mesh import Mesh
from gateway.models import Models
from gateway.observer import Observer
from gateway.plane import GatewayPlane
from gateway.readiness import Readiness
from gateway.service import GatewayLimits, InferenceService
from gateway.settings import GatewaySettings
from gateway.web import serve_http
from tensorline import __version__
from tensorline.config import scan
from tensorline.discovery import open_registry
from tensorline.errors import ConfigError, TensorlineError
from tensorline.rpc.connection import LocalPeer
from tensorline.settings import read_settings
from tensorline.shm import ArenaReader, open_arena, open_directory
from tensorline.stage.main import background, directory_sweeps, run_loop, stop_requested
from tensorline.telemetry.logs import configure_logging
from tensorline.telemetry.record import Process

__all__ = ["run_gateway", "serve_gateway"]

log = logging.getLogger(__name__)

INLINE_LIMIT = 1 << 30
MAX_STREAMS = 1024
PUBLISH_S = 0.5


def run_gateway() -> None:
    """Serve until SIGTERM or SIGINT, with settings from the environment. Ends the process with its status."""
    instance_id = f"gateway-{uuid.uuid4().hex[:12]}"
    try:
        settings = read_settings(GatewaySettings, os.environ)
        configure_logging("gateway", instance_id, level=settings.log_level, json=settings.log_json)
        if settings.workers > 1 and not settings.worker:
            from gateway.workers import run_workers

            sys.exit(run_workers(settings))
        run_loop(serve_gateway(instance_id, settings))
    except ConfigError as error:
        print(f"gateway: {error}", file=sys.stderr)
        sys.exit(2)
    except TensorlineError as error:
        print(f"gateway: {error}", file=sys.stderr)
        sys.exit(1)


async def serve_gateway(instance_id: str, settings: GatewaySettings) -> None:
    """Everything a gateway needs, opened in order; closing in reverse is the drain."""
    stop = stop_requested()
    process = Process("gateway", instance_id, socket.gethostname(), os.getpid(), __version__)
    entries = await asyncio.to_thread(scan, settings.model_repository)
    async with AsyncExitStack() as stack:
        directory = open_directory(settings.mesh_directory)
        arena = await stack.enter_async_context(open_arena(directory, settings.arena_bytes))
        reader = ArenaReader(directory)
        reader.attach(arena)
        observer = await stack.enter_async_context(Observer.open(process, settings, os.environ))
        registry = await stack.enter_async_context(open_registry(settings.discovery_url))
        local = LocalPeer(instance_id, directory.nonce, arena.id, INLINE_LIMIT)
        changed = asyncio.Event()
        mesh = Mesh(registry, local, reader, lambda: (models.changed(), changed.set()))
        models = Models(mesh, entries)
        readiness = Readiness(models, is_strict=settings.strict_readiness)
        limits = GatewayLimits(settings.max_in_flight, settings.max_bytes_in_flight)
        plane = GatewayPlane(arena, reader, mesh, settings.inline_bytes)
        service = InferenceService(mesh, models, plane, limits, settings.default_timeout_s, observer.finished)
        observer.watch(arena, limits, mesh, registry)

        server = make_grpc_server(
            KServeFrontEnd(service, readiness, settings.server_id),
            readiness,
            max_message_bytes=settings.max_message_bytes,
            max_streams=MAX_STREAMS,
            reuse_port=settings.workers > 1,
        )
        port = _bind(server, settings.grpc_address, settings.grpc_port)
        tasks = await stack.enter_async_context(
            background(
                mesh.run(),
                directory_sweeps(settings.mesh_directory, directory),
                _publish(readiness, changed),
            )
        )
        if settings.worker == 0:
            admin = AdminRoutes(
                service,
                readiness,
                mesh,
                observer.store,
                settings.server_id,
                settings.http_address,
                settings.admin_token_file,
            )
            await stack.enter_async_context(
                serve_http(admin.app(), settings.http_address, settings.http_port, "HTTP")
            )
            await stack.enter_async_context(
                serve_http(metrics_app(observer.metrics), settings.metrics_address, settings.metrics_port, "metrics")
            )
        await server.start()
        stack.push_async_callback(server.stop, 1.0)
        stack.push_async_callback(_drain, service, readiness, settings.drain_s)
        readiness.accepts = True
        changed.set()
        log.info("gateway serves", extra={"grpc": f"{settings.grpc_address}:{port}", "loopback": is_loopback(settings.grpc_address)})
        waiting = asyncio.create_task(stop.wait())
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


def _bind(server: "object", address: str, port: int) -> int:
    """
    Raises:
        ConfigError: the port is taken, or the address is none of ours.
    """
    from grpc import aio

    assert isinstance(server, aio.Server)
    host = f"[{address}]" if ":" in address else address
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(f"gRPC port {port} on {address} cannot be used: it is taken, or no address of this host") from error
    return bound


async def _publish(readiness: Readiness, changed: asyncio.Event) -> None:
    """Keep grpc.health in step with what changed, at most a few times a second."""
    while True:
        await changed.wait()
        changed.clear()
        await readiness.publish()
        await asyncio.sleep(PUBLISH_S / 10)


async def _drain(service: InferenceService, readiness: Readiness, timeout_s: float) -> None:
    """Not ready at once; requests in flight finish, bounded; new ones are refused."""
    readiness.accepts = False
    await readiness.publish()
    await readiness.checks.enter_graceful_shutdown()
    service.is_stopping = True
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    while service.limits.in_flight and loop.time() < until:
        await asyncio.sleep(0.01)
    if service.limits.in_flight:
        log.warning("stopping with requests in flight", extra={"in_flight": service.limits.in_flight})
