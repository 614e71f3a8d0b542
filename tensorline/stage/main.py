"""A stage service's life: `run_stage` is all that a service's `__main__` calls."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import uvloop
from grpc_health.v1 import health

from tensorline import __version__
from tensorline.discovery import Registry, ServiceInstance, open_registry
from tensorline.errors import ConfigError, TensorlineError
from tensorline.rpc.hosted import READY
from tensorline.rpc.sockets import claim_socket, sweep_sockets
from tensorline.settings import StageSettings, read_settings
from tensorline.shm import Arena, ArenaDirectory, ArenaReader, Leases, open_arena, open_directory, run_janitor
from tensorline.stage.backend import Backends
from tensorline.stage.batch import Plane
from tensorline.stage.builtin import BUILTIN
from tensorline.stage.host import ModelHost
from tensorline.stage.mappings import forget_gone_arenas
from tensorline.stage.repository import StageRepository
from tensorline.stage.server import StageEnd, StageIdentity, open_server, set_health
from tensorline.telemetry.lag import open_lag_monitor
from tensorline.telemetry.logs import configure_logging
from tensorline.telemetry.record import Process
from tensorline.telemetry.sdk import install_sdk
from tensorline.telemetry.settings import telemetry_settings

__all__ = [
    "background",
    "directory_sweeps",
    "run_loop",
    "run_stage",
    "serve_stage",
    "settle_memory",
    "stop_requested",
    "upkeep",
]

log = logging.getLogger(__name__)

UPKEEP_S = 0.25
SWEEP_S = 2.0
INLINE_LIMIT = 1 << 30


def run_stage(service: str, backends: Backends) -> None:
    """Serve `backends` until SIGTERM or SIGINT, with settings from the environment. Ends the process with its status.

    The built-in backends (identity, generate, repeat) are always there besides.
    """
    instance_id = f"{service}-{uuid.uuid4().hex[:12]}"
    try:
        settings = read_settings(StageSettings, os.environ)
        configure_logging(
            service,
            instance_id,
            level=settings.log_level,
            json=settings.is_logging_json,
            log_format=settings.log_format,
        )
        run_loop(serve_stage(service, instance_id, {**BUILTIN, **backends}, settings))
    except ConfigError as error:
        print(f"{service}: {error}", file=sys.stderr)
        sys.exit(2)
    except TensorlineError as error:
        print(f"{service}: {error}", file=sys.stderr)
        sys.exit(1)


def run_loop(main: Coroutine[object, object, None]) -> None:
    """Run a process's main on uvloop."""
    # An instance's thread that wakes up waits this long for the interpreter's lock while the loop is busy.
    sys.setswitchinterval(0.0005)
    # A request makes hundreds of objects and next to no cycles: at the default thresholds the collector was in a tenth
    # of the samples of a gateway's profile.
    gc.set_threshold(50_000, 20, 100)
    uvloop.run(main)


async def serve_stage(service: str, instance_id: str, backends: Backends, settings: StageSettings) -> None:
    """Everything a stage needs, opened in order; closing in reverse is the drain."""
    stop = stop_requested()
    async with AsyncExitStack() as stack:
        directory = open_directory(settings.mesh_directory)
        arena = await stack.enter_async_context(open_arena(directory, settings.arena_bytes))
        leases = Leases(arena)
        reader = ArenaReader(directory)
        reader.attach(arena)
        path = stack.enter_context(claim_socket(settings.mesh_directory / "sockets", instance_id))
        lane = stack.enter_context(claim_socket(settings.mesh_directory / "sockets", f"{instance_id}-lane"))
        identity = StageIdentity(instance_id, service, directory.nonce, settings.max_in_flight, INLINE_LIMIT, str(lane))
        end = StageEnd(identity, arena, leases)
        process = Process(service, instance_id, socket.gethostname(), os.getpid(), __version__)
        sdk = install_sdk(process, telemetry_settings(os.environ))
        stack.push_async_callback(asyncio.to_thread, sdk.shutdown)
        await stack.enter_async_context(open_lag_monitor())
        plane = Plane(
            arena,
            reader,
            settings.inline_bytes,
            settings.expose_model_errors,
            attaches_context=sdk.provider is not None,
        )
        changed = asyncio.Event()

        def models_changed() -> None:
            end.announce_models()
            changed.set()

        host = ModelHost(backends, plane, settings.max_queue, end.lease, models_changed, settings.load_threads)
        end.serve_models(host)
        repository = StageRepository(host, settings.model_repository, settings.model_control_mode, settings.load_model)
        end.serve_loads(repository)
        stack.push_async_callback(repository.aclose)
        registry = await stack.enter_async_context(open_registry(settings.discovery_url))
        checks, port = await stack.enter_async_context(open_server(end, str(path), str(lane), settings.listen))
        tasks = await stack.enter_async_context(
            background(
                directory_sweeps(settings.mesh_directory, directory),
                forget_gone_arenas(directory, reader),
                upkeep(leases),
            )
        )
        about = ServiceInstance(
            id=instance_id,
            service=service,
            address=_advertised(settings, port),
            local_address=f"unix:{path}",
            nonce=directory.nonce.hex(),
            host=socket.gethostname(),
            release=__version__,
        )
        stack.push_async_callback(_drain, end, host, arena, settings.drain_s)
        stack.push_async_callback(registry.deregister, instance_id)
        await registry.register(about)
        loading = asyncio.ensure_future(_load(host, repository, registry, about))
        waiting = asyncio.ensure_future(stop.wait())
        await asyncio.wait([loading, waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and not waiting.done():
            loading.result()
            await set_health(checks, host)
            settle_memory()
            log.info("stage is ready", extra={"models": [f"{m.name}/{m.version} {m.state}" for m in host.models]})
            tasks += await stack.enter_async_context(
                background(repository.watch(settings.repository_poll_secs), _follow_health(checks, host, changed))
            )
            await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in (loading, waiting):
            task.cancel()
        for task in tasks:
            if task.done():  # it runs until it is cancelled: this is a bug, and no reason to end as if all were well
                task.result()
        await checks.enter_graceful_shutdown()


async def _load(host: ModelHost, repository: StageRepository, registry: Registry, about: ServiceInstance) -> None:
    await repository.start()
    models = tuple(f"{model.name}/{model.version}" for model in host.models if model.state == READY)
    await registry.register(replace(about, models=models))


async def _follow_health(checks: health.aio.HealthServicer, host: ModelHost, changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
        await set_health(checks, host)


def _advertised(settings: StageSettings, port: int) -> str:
    if settings.advertise:
        return settings.advertise
    host = settings.listen.rpartition(":")[0]
    if host in ("0.0.0.0", "[::]"):  # noqa: S104 - compared, not bound
        host = socket.gethostname()  # every address of this host: peers need one
    return f"{host}:{port}" if settings.listen else ""


def stop_requested() -> asyncio.Event:
    """Set at the first SIGTERM or SIGINT; a second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
    return stop


async def _drain(end: StageEnd, host: ModelHost, arena: Arena, timeout_s: float) -> None:
    """Tell the gateways, finish what is in flight, let them read what they were given, end the streams."""
    end.drain()
    until = time.monotonic() + timeout_s
    while (end.in_flight or arena.leases) and time.monotonic() < until:
        await asyncio.sleep(0.01)
    if end.in_flight:
        log.warning("stopping with requests in flight", extra={"in_flight": end.in_flight})
    end.end_streams()
    await host.aclose(max(0.0, until - time.monotonic()))


def settle_memory() -> None:
    """What was loaded stays: a full collection over a framework's objects holds the loop for tenths of a second."""
    gc.collect()
    gc.freeze()


async def upkeep(leases: Leases) -> None:
    """End leases whose time is over."""
    while True:
        await asyncio.sleep(UPKEEP_S)
        expired = leases.expire(time.monotonic())
        if expired:
            log.warning("leases expired", extra={"count": expired})


async def directory_sweeps(mesh_directory: Path, directory: ArenaDirectory) -> None:
    """Clear away what dead processes of the mesh left."""

    async def sockets() -> None:
        while True:
            await asyncio.to_thread(sweep_sockets, mesh_directory / "sockets")
            await asyncio.sleep(SWEEP_S)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_janitor(directory, interval_s=SWEEP_S))
        tasks.create_task(sockets())


@asynccontextmanager
async def background(*work: Coroutine[object, object, None]) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
