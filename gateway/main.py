"""A gateway's life."""

import asyncio
import logging
import os
import resource
import socket
import sys
import uuid
from contextlib import AsyncExitStack

from grpc import aio

from gateway.addresses import is_loopback
from gateway.admin import AdminRoutes, metrics_app
from gateway.agreement import Agreement
from gateway.forwarding import Forwarding
from gateway.gauges import watch_gauges, watch_process
from gateway.grpc_v2 import KServeFrontEnd, make_grpc_server
from gateway.mesh import Mesh
from gateway.models import Models
from gateway.operations import Operations
from gateway.operations.metadata import Metadata
from gateway.operations.regions import SharedMemory
from gateway.operations.repository import RepositoryControl
from gateway.operations.settings import Settings
from gateway.operations.statistics import Statistics
from gateway.plane import GatewayPlane
from gateway.readiness import Readiness
from gateway.repository import Repository
from gateway.rest import RestRoutes, RestRules
from gateway.restrictions import GRPC_PREFIX, Restrictions
from gateway.rows import CounterRows
from gateway.service import GatewayLimits, InferenceService
from gateway.settings import GatewaySettings
from gateway.siblings import Siblings, other_workers, worker_socket
from gateway.web import bind_tcp, bind_unix, serve_http
from gateway.worker_api import worker_routes
from tensorline import __version__
from tensorline.discovery import open_registry
from tensorline.errors import ConfigError, TensorlineError
from tensorline.rpc.connection import LocalPeer
from tensorline.rpc.sockets import claim_socket
from tensorline.settings import read_settings
from tensorline.shm import ArenaDirectory, ArenaReader, open_arena, open_directory
from tensorline.shm.region_table import RegionTable, region_directory
from tensorline.stage.main import background, directory_sweeps, run_loop, settle_memory, stop_requested
from tensorline.telemetry.lag import open_lag_monitor
from tensorline.telemetry.logs import LogLines, configure_logging
from tensorline.telemetry.metrics import Metrics
from tensorline.telemetry.metrics_options import metrics_options
from tensorline.telemetry.record import Process
from tensorline.telemetry.recorder import open_recorder
from tensorline.telemetry.settings import telemetry_settings
from tensorline.telemetry.store import TraceStore
from tensorline.telemetry.trace_config import trace_config
from tensorline.telemetry.trace_rules import TraceRules

__all__ = ["run_gateway", "serve_gateway"]

log = logging.getLogger(__name__)

INLINE_LIMIT = 1 << 30
MAX_STREAMS = 1024
PUBLISH_S = 0.5
SETTLE_S = 2.0
FORGET_S = 0.5
REGION_SHARE = 4
"""A region takes two descriptors: all of them together take half of those that a process may have."""


def run_gateway() -> None:
    """Serve until SIGTERM or SIGINT, with settings from the environment. Ends the process with its status."""
    instance_id = f"gateway-{uuid.uuid4().hex[:12]}"
    try:
        settings = read_settings(GatewaySettings, os.environ)
        lines = configure_logging(
            "gateway",
            instance_id,
            level=settings.log_level,
            json=settings.is_logging_json,
            log_format=settings.log_format,
        )
        if settings.workers > 1 and not settings.worker:
            from gateway.workers import run_workers

            sys.exit(run_workers(settings))
        run_loop(serve_gateway(instance_id, settings, lines))
    except ConfigError as error:
        print(f"gateway: {error}", file=sys.stderr)
        sys.exit(2)
    except TensorlineError as error:
        print(f"gateway: {error}", file=sys.stderr)
        sys.exit(1)


async def serve_gateway(instance_id: str, settings: GatewaySettings, lines: LogLines) -> None:
    """Everything a gateway needs, opened in order; closing in reverse is the drain."""
    stop = stop_requested()
    process = Process("gateway", instance_id, socket.gethostname(), os.getpid(), __version__)
    async with AsyncExitStack() as stack:
        directory = open_directory(settings.mesh_directory)
        arena = await stack.enter_async_context(open_arena(directory, settings.arena_bytes))
        reader = ArenaReader(directory)
        reader.attach(arena)
        metrics = Metrics(options=metrics_options(settings.metrics_config))
        traces = trace_config(settings.trace_config)
        for sentence in traces.ignored:
            log.warning(sentence)
        telemetry = traces.applied(telemetry_settings(os.environ, rate_per_s=settings.trace_rate))
        store = TraceStore(process, recent=settings.trace_store)
        recorder = await stack.enter_async_context(
            open_recorder(process, telemetry, metrics=metrics, store=store, rules=TraceRules(traces.start))
        )
        await stack.enter_async_context(open_lag_monitor(metrics))
        registry = await stack.enter_async_context(open_registry(settings.discovery_url))
        local = LocalPeer(instance_id, directory.nonce, arena.id, INLINE_LIMIT)
        changed = asyncio.Event()

        def table_changed() -> None:
            models.changed()
            repository.follow()
            changed.set()

        mesh = Mesh(registry, local, reader, table_changed)
        models = Models(mesh)
        readiness = Readiness(models, is_strict=settings.strict_readiness)
        limits = GatewayLimits(settings.max_in_flight, settings.max_bytes_in_flight)
        plane = GatewayPlane(arena, reader, mesh, settings.inline_bytes)
        regions = _open_regions(stack, settings, directory)
        service = InferenceService(mesh, models, plane, limits, settings.default_timeout_s, recorder, regions)
        watch_gauges(metrics, arena, limits, mesh, registry)
        watch_process(metrics, lines, has_cpu=settings.allow_cpu_metrics)
        sockets = settings.mesh_directory / "sockets"
        siblings = Siblings(other_workers(sockets, settings.grpc_port, settings.worker, settings.workers))
        agreement = Agreement(recorder.rules, lines, siblings, settings.worker)

        def pipeline_changed(name: str, version: int, is_there: bool) -> None:
            (recorder.restart if is_there else recorder.forget)(name, str(version))
            changed.set()

        repository = Repository(
            mesh,
            models,
            settings.model_repository,
            settings.model_control_mode,
            settings.load_model,
            siblings,
            settings.worker,
            pipeline_changed,
        )
        await repository.start()
        stack.push_async_callback(repository.aclose)

        operations = Operations(
            Metadata(models, readiness, settings.server_id),
            RepositoryControl(repository, models, mesh),
            SharedMemory(regions),
            Statistics(models, recorder, siblings),
            Settings(models, agreement, telemetry),
        )
        rest_rules = RestRules(
            Restrictions(settings.http_restricted_api),
            Forwarding(settings.http_header_forward_pattern),
            settings.http_max_input_size,
            settings.max_bytes_in_flight,
        )
        server = make_grpc_server(
            KServeFrontEnd(
                service, operations, settings.max_message_bytes, Forwarding(settings.grpc_header_forward_pattern)
            ),
            readiness,
            max_message_bytes=settings.max_message_bytes,
            max_streams=MAX_STREAMS,
            reuse_port=settings.workers > 1,
            restrictions=Restrictions(settings.grpc_restricted_protocol, prefix=GRPC_PREFIX, what="protocol"),
        )
        port = _bind(server, settings.grpc_address, settings.grpc_port)
        tasks = await stack.enter_async_context(
            background(
                mesh.run(),
                directory_sweeps(settings.mesh_directory, directory),
                _forget_regions(regions),
                _publish(readiness, CounterRows(recorder, models, mesh), changed),
                agreement.share_samples(),
                repository.watch(settings.repository_poll_secs),
            )
        )
        if settings.worker <= 1:
            rest = RestRoutes(service, operations, rest_rules)
            admin = AdminRoutes(
                service,
                mesh,
                recorder.store,
                settings.http_address,
                settings.admin_token_file,
                siblings,
                rest.routes(),
            )
            pages = metrics_app(recorder, siblings)
            for app, address, number, what in (
                (admin.app(), settings.http_address, settings.http_port, "HTTP"),
                (pages, settings.metrics_address, settings.metrics_port, "metrics"),
            ):
                await stack.enter_async_context(serve_http(app, bind_tcp(address, number, what)))
        if settings.workers > 1:  # what the others ask, each for itself
            alone = Siblings(())
            admin = AdminRoutes(service, mesh, recorder.store, "localhost", None, alone)
            app = admin.app()
            app.routes.extend([*metrics_app(recorder, alone).routes, *worker_routes(recorder, agreement, repository)])
            path = stack.enter_context(claim_socket(sockets, worker_socket(settings.grpc_port, settings.worker)))
            await stack.enter_async_context(serve_http(app, bind_unix(path)))
            await agreement.catch_up()
            await repository.catch_up()
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


def _open_regions(stack: AsyncExitStack, settings: GatewaySettings, directory: ArenaDirectory) -> RegionTable | None:
    """The table of clients' shared memory: the workers', or our own."""
    if not settings.allows_client_shm:
        return None
    path = settings.client_regions or stack.enter_context(region_directory(directory))
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(settings.max_client_regions, max(1, descriptors // REGION_SHARE))
    return stack.enter_context(RegionTable(path, directory.path, limit))


async def _forget_regions(regions: RegionTable | None) -> None:
    """What was unregistered through another worker, or by one that died in the middle of a use."""
    while True:
        await asyncio.sleep(FORGET_S)
        if regions is not None:
            await asyncio.to_thread(regions.forget_unregistered)


async def _publish(readiness: Readiness, rows: CounterRows, changed: asyncio.Event) -> None:
    """Keep grpc.health and the counters' rows in step with what changed, a few times a second at most."""
    while True:
        await changed.wait()
        changed.clear()
        rows.follow()
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
