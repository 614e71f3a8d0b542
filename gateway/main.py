"""A gateway's life."""

import asyncio
import logging
import os
import socket
import sys
import uuid
from contextlib import AsyncExitStack

from grpc import aio

from gateway.admin import AdminRoutes, is_loopback, metrics_app
from gateway.gauges import declare_rows, watch_gauges
from gateway.grpc_v2 import KServeFrontEnd, make_grpc_server
from gateway.mesh import Mesh
from gateway.models import Models
from gateway.operations import Operations
from gateway.operations.metadata import Metadata
from gateway.plane import GatewayPlane
from gateway.readiness import Readiness
from gateway.service import GatewayLimits, InferenceService
from gateway.settings import GatewaySettings
from gateway.siblings import Siblings, worker_socket
from gateway.web import bind_tcp, bind_unix, serve_http
from tensorline import __version__
from tensorline.config import scan
from tensorline.discovery import open_registry
from tensorline.errors import ConfigError, TensorlineError
from tensorline.rpc.connection import LocalPeer
from tensorline.rpc.sockets import claim_socket
from tensorline.settings import read_settings
from tensorline.shm import ArenaReader, open_arena, open_directory
from tensorline.stage.main import background, directory_sweeps, run_loop, settle_memory, stop_requested
from tensorline.telemetry.lag import open_lag_monitor
from tensorline.telemetry.logs import configure_logging
from tensorline.telemetry.metrics import Metrics
from tensorline.telemetry.record import Process
from tensorline.telemetry.recorder import open_recorder
from tensorline.telemetry.settings import telemetry_settings
from tensorline.telemetry.store import TraceStore

__all__ = ["run_gateway", "serve_gateway"]

log = logging.getLogger(__name__)

INLINE_LIMIT = 1 << 30
MAX_STREAMS = 1024
PUBLISH_S = 0.5
SETTLE_S = 2.0


def run_gateway() -> None:
    """Serve until SIGTERM or SIGINT, with settings from the environment. Ends the process with its status."""
    instance_id = f"gateway-{uuid.uuid4().hex[:12]}"
    try:
        settings = read_settings(GatewaySettings, os.environ)
        configure_logging("gateway", instance_id, level=settings.log_level, json=settings.is_logging_json)
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
        metrics = Metrics()
        recorder = await stack.enter_async_context(
            open_recorder(
                process,
                telemetry_settings(os.environ, rate_per_s=settings.trace_rate),
                metrics=metrics,
                store=TraceStore(process, recent=settings.trace_store),
            )
        )
        await stack.enter_async_context(open_lag_monitor(metrics))
        registry = await stack.enter_async_context(open_registry(settings.discovery_url))
        local = LocalPeer(instance_id, directory.nonce, arena.id, INLINE_LIMIT)
        changed = asyncio.Event()

        def table_changed() -> None:
            models.changed()
            changed.set()

        mesh = Mesh(registry, local, reader, table_changed)
        models = Models(mesh, entries)
        readiness = Readiness(models, is_strict=settings.strict_readiness)
        limits = GatewayLimits(settings.max_in_flight, settings.max_bytes_in_flight)
        plane = GatewayPlane(arena, reader, mesh, settings.inline_bytes)
        service = InferenceService(mesh, models, plane, limits, settings.default_timeout_s, recorder)
        watch_gauges(metrics, arena, limits, mesh, registry)

        operations = Operations(Metadata(models, readiness, settings.server_id))
        server = make_grpc_server(
            KServeFrontEnd(service, operations, settings.max_message_bytes),
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
                _publish(readiness, metrics, models, changed),
            )
        )
        sockets = settings.mesh_directory / "sockets"
        if settings.worker <= 1:
            others = range(2, settings.workers + 1)
            siblings = Siblings(sockets / f"{worker_socket(settings.grpc_port, other)}.sock" for other in others)
            admin = AdminRoutes(
                service,
                readiness,
                mesh,
                recorder.store,
                settings.server_id,
                settings.http_address,
                settings.admin_token_file,
                siblings,
            )
            pages = metrics_app(recorder, siblings)
            for app, address, number, what in (
                (admin.app(), settings.http_address, settings.http_port, "HTTP"),
                (pages, settings.metrics_address, settings.metrics_port, "metrics"),
            ):
                await stack.enter_async_context(serve_http(app, bind_tcp(address, number, what)))
        else:
            alone = Siblings(())
            admin = AdminRoutes(service, readiness, mesh, recorder.store, settings.server_id, "localhost", None, alone)
            app = admin.app()
            app.routes.extend(metrics_app(recorder, alone).routes)
            path = stack.enter_context(claim_socket(sockets, worker_socket(settings.grpc_port, settings.worker)))
            await stack.enter_async_context(serve_http(app, bind_unix(path)))
        await mesh.wait_settled(SETTLE_S)
        await server.start()
        stack.push_async_callback(server.stop, 1.0)
        stack.push_async_callback(_drain, service, readiness, settings.drain_s)
        settle_memory()
        readiness.accepts = True
        changed.set()
        log.info(
            "gateway serves",
            extra={"grpc": f"{settings.grpc_address}:{port}", "loopback": is_loopback(settings.grpc_address)},
        )
        waiting = asyncio.create_task(stop.wait())
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


def _bind(server: aio.Server, address: str, port: int) -> int:
    """
    Raises:
        ConfigError: the port is taken, or the address is none of ours.
    """
    host = f"[{address}]" if ":" in address else address
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(
            f"gRPC port {port} on {address} cannot be used: it is taken, or no address of this host"
        ) from error
    return bound


async def _publish(readiness: Readiness, metrics: Metrics, models: Models, changed: asyncio.Event) -> None:
    """Keep grpc.health and the counters' rows in step with what changed, a few times a second at most."""
    while True:
        await changed.wait()
        changed.clear()
        declare_rows(metrics, models)
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
