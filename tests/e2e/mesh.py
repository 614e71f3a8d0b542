"""A whole mesh of real processes, and what can be seen and done from outside: ports, process ids, logs, signals."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from grpc import aio

from tests.consul import free_ports
from tests.e2e.client import Stub

__all__ = ["ROOT", "STAGES", "Footprint", "Mesh", "Service", "running_mesh", "until"]

ROOT = Path(__file__).resolve().parents[2]
STAGES = str(Path(__file__).with_name("stages.py"))
READY_S = 30.0
EXIT_S = 25.0
SETTLE_S = 5.0
"""In which everything must be at its baseline again (cases.md, S2)."""
ALARMS = re.compile(
    r"Traceback|\"exception\"|never retrieved|was never awaited|resource_tracker|Task was destroyed|answered twice"
    r"|unexpected error|leases expired|socket\.send\(\) raised"
)


@dataclass(frozen=True)
class Service:
    """What one process runs.

    Args:
        target: A module ("services.model") or a file with `run_stage` in it.
        arguments: Of the file.
        repositories: Its own; None: the mesh's.
        environ: More settings.
    """

    target: str
    arguments: Sequence[str] = ()
    repositories: Sequence[Path] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)


PHOTO_SERVICES = {name: Service(f"services.{name}") for name in ("preprocess", "model", "postprocess")}


@dataclass(frozen=True)
class Footprint:
    """What a process holds: equal within small bounds before and after (S2)."""

    descriptors: int
    threads: int


class Mesh:
    """Made by `running_mesh`. A service is called by its name in `services`; the gateway is "gateway"."""

    def __init__(self, directory: Path, services: Mapping[str, Service], environ: Mapping[str, str]) -> None:
        self.directory = directory
        self.path = directory / "mesh"
        self.grpc_port, self.http_port, self.metrics_port = free_ports(3)
        self._services = services
        self._environ = environ
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.expected: list[str] = []
        """Expressions for log lines that look alarming and are meant."""

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def names(self) -> list[str]:
        """Of what runs."""
        return [name for name, process in self._processes.items() if process.poll() is None]

    def channel(self, *options: tuple[str, int | str]) -> aio.Channel:
        sizes = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        # Channels of one process to one address would share a connection, and its back-off.
        return aio.insecure_channel(self.target, [*sizes, ("grpc.use_local_subchannel_pool", 1), *options])

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[Stub]:
        async with self.channel() as channel:
            yield Stub(channel)

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def logs(self) -> dict[str, str]:
        return {path.stem: path.read_text(errors="replace") for path in sorted(self.directory.glob("*.log"))}

    def start(self, name: str, **environ: str) -> None:
        """Start a process that does not run; `wait_ready` or `wait_joined` waits for it."""
        self.start_another(name, name, **environ)

    def start_another(self, like: str, name: str, **environ: str) -> None:
        """A second process of service `like` under its own name."""
        service = self._services[like]
        with open(self.directory / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                # Ends with us, however we end.
                [
                    *(sys.executable, "-m", "tensorline.cli.child", str(os.getpid())),
                    *(service.target, *service.arguments),
                ],
                cwd=ROOT,
                env={**self._environ, **self._own(like, service), **service.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _own(self, name: str, service: Service) -> dict[str, str]:
        own = {"TENSORLINE_MESH_DIRECTORY": str(self.path)}
        if service.repositories is not None:
            own["TENSORLINE_MODEL_REPOSITORY"] = ":".join(map(str, service.repositories))
        if name == "gateway":
            own |= {
                "TENSORLINE_GRPC_PORT": str(self.grpc_port),
                "TENSORLINE_HTTP_PORT": str(self.http_port),
                "TENSORLINE_METRICS_PORT": str(self.metrics_port),
            }
        return own

    def signal(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    async def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        process = self._processes.pop(name)
        process.kill()
        await asyncio.to_thread(process.wait)

    async def stop(self, name: str, timeout_s: float = EXIT_S) -> int:
        """SIGTERM; the exit status."""
        process = self._processes[name]
        process.terminate()
        return await self.wait_exit(name, timeout_s)

    async def wait_exit(self, name: str, timeout_s: float = EXIT_S) -> int:
        process = self._processes[name]
        try:
            return await asyncio.to_thread(process.wait, timeout_s)
        finally:
            if process.poll() is not None:
                del self._processes[name]

    async def get(self, path: str, port: int | None = None, **headers: str) -> tuple[int, Any]:
        """Status and body of a GET at the HTTP port; JSON decoded."""
        return await asyncio.to_thread(_get, f"http://127.0.0.1:{port or self.http_port}{path}", headers)

    async def metrics(self) -> dict[str, float]:
        """The metrics page by series."""
        _, page = await self.get("/metrics", self.metrics_port)
        rows = [line.rpartition(" ") for line in str(page).splitlines() if line and not line.startswith("#")]
        return {series: float(value) for series, _, value in rows}

    async def instances(self) -> list[dict[str, Any]]:
        _, rows = await self.get("/api/instances")
        return list(rows) if isinstance(rows, list) else []

    async def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Until /v2/health/ready says so, or a process has ended."""
        async with asyncio.timeout(timeout_s):
            while (await self.get("/v2/health/ready"))[0] != 200:
                for name, process in self._processes.items():
                    if process.poll() is not None:
                        raise ChildProcessError(f"{name} exited with {process.returncode}:\n{self.log(name)[-2000:]}")
                await asyncio.sleep(0.02)

    async def wait_instances(self, count: int, state: str = "READY", timeout_s: float = READY_S) -> None:
        """Until the gateway has streams to that many instances that serve."""

        async def enough() -> bool:
            return [row["state"] for row in await self.instances()].count(state) == count

        await until(enough, timeout_s)

    def footprint(self, name: str) -> Footprint:
        process = psutil.Process(self.pid(name))
        return Footprint(process.num_fds(), process.num_threads())

    def io_bytes(self, *names: str) -> int:
        """Read and written by these processes so far; with tensors in shared memory that is what goes by sockets."""
        counted = [psutil.Process(self.pid(name)).io_counters() for name in names]
        return sum(io.read_chars + io.write_chars for io in counted)

    def shared_files(self) -> dict[str, int]:
        """Bytes of each file of the mesh that is shared memory."""
        found = {}
        for path in self.path.rglob("*"):
            try:
                if path.is_file() and path.stat().st_size:
                    found[str(path.relative_to(self.path))] = path.stat().st_size
            except FileNotFoundError:
                continue
        return found

    async def held(self) -> dict[str, float]:
        """Bytes that requests hold in each arena, and requests in flight: all zero when nothing runs."""
        held = {row["id"]: float(row["arena_bytes"] + row["in_flight"]) for row in await self.instances()}
        metrics = await self.metrics()
        held["gateway"] = metrics["tensorline_arena_bytes_leased"]
        held["in flight"] = metrics["tensorline_in_flight"]
        return {name: value for name, value in held.items() if value}

    async def wait_idle(self, timeout_s: float = SETTLE_S) -> None:
        """Until no request is held anywhere: the stages say so with their beats, once a second."""

        async def idle() -> bool:
            return not await self.held()

        try:
            await until(idle, timeout_s)
        except TimeoutError:
            raise AssertionError(f"still held: {await self.held()}") from None

    def alarms(self) -> list[str]:
        """Log lines that no healthy process writes."""
        lines = [f"{name}: {line}" for name, text in self.logs().items() for line in text.splitlines()]
        return [
            line[:2000]
            for line in lines
            if ALARMS.search(line) and not any(re.search(meant, line) for meant in self.expected)
        ]

    async def aclose(self, *, is_checked: bool) -> None:
        """End every process, last the gateway; with `is_checked`, each must end well and leave nothing behind."""
        codes: dict[str, int | None] = {}
        family = [psutil.Process(process.pid) for process in self._processes.values() if process.poll() is None]
        family += [child for process in family for child in process.children(recursive=True)]
        try:
            for name in sorted(self.names, key=lambda name: name != "gateway"):
                self._processes[name].send_signal(signal.SIGCONT)
                self._processes[name].terminate()
            for name, process in self._processes.items():
                codes[name] = await asyncio.to_thread(process.wait, EXIT_S)
        finally:
            for process in self._processes.values():
                if process.poll() is None:
                    process.kill()
                    process.wait()
            # A worker that outlives its parent would make the directory again, with its registry in it.
            _, alive = await asyncio.to_thread(psutil.wait_procs, family, EXIT_S)
            for each in alive:
                each.kill()
        if is_checked:
            assert self.alarms() == []
            assert {name: code for name, code in codes.items() if code} == {}
            left = {str(path.relative_to(self.path)) for path in self.path.rglob("*") if not path.is_dir()}
            assert left - {"nonce"} == set()


@asynccontextmanager
async def running_mesh(
    repository: Path | Sequence[Path],
    *,
    services: Mapping[str, Service] | None = None,
    workers: int = 1,
    extra_env: Mapping[str, str] | None = None,
    gateway_env: Mapping[str, str] | None = None,
    gateway_repositories: Sequence[Path] | None = None,
    is_awaited: bool = True,
) -> AsyncIterator[Mesh]:
    """Run a gateway and `services`; at the end everything is stopped, and S2 and S3 are checked.

    Args:
        services: The three of the photo pipeline, unless others are given.
        extra_env: Settings of every process.
        gateway_repositories: Where the gateway's are others than `repository`.
        is_awaited: Enter the block when the mesh is ready.
    """
    repositories = [repository] if isinstance(repository, Path) else list(repository)
    # Socket paths are limited to 107 bytes, so that pytest's own folder would be too deep.
    directory = Path(tempfile.mkdtemp(prefix="tl", dir="/dev/shm"))
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TENSORLINE_", "OTEL_"))},
        "TENSORLINE_MODEL_REPOSITORY": ":".join(map(str, repositories)),
        "TENSORLINE_LOG_JSON": "true",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "default",
        **(extra_env or {}),
    }
    chosen = dict(PHOTO_SERVICES if services is None else services)
    gateway = Service("gateway", (), gateway_repositories, {"TENSORLINE_WORKERS": str(workers), **(gateway_env or {})})
    mesh = Mesh(directory, {**chosen, "gateway": gateway}, environ)
    is_checked = False
    try:
        for name in [*chosen, "gateway"]:
            mesh.start(name)
        if is_awaited:
            await mesh.wait_ready()
        yield mesh
        is_checked = True
    except BaseException:
        print(*(f"--- {name}\n{text[-3000:]}" for name, text in mesh.logs().items()), sep="\n", file=sys.stderr)
        raise
    finally:
        try:
            await mesh.aclose(is_checked=is_checked)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


async def until(is_so: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """For what tells nobody when it changes; `is_so` may be asynchronous."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = is_so()
        if await answer if asyncio.iscoroutine(answer) else answer:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s")
        await asyncio.sleep(0.02)


def _get(url: str, headers: Mapping[str, str]) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=5) as answer:
            status, body = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, body = error.code, error.read()
    except OSError:
        return 0, None
    try:
        return status, json.loads(body)
    except ValueError:
        return status, body.decode(errors="replace")
