"""Several gateway processes on one gRPC port: the kernel spreads connections, the parent keeps them running."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from gateway.settings import GatewaySettings
from tensorline.cli.backoff import Backoff
from tensorline.errors import ConfigError
from tensorline.settings import PREFIX
from tensorline.shm import open_directory
from tensorline.shm.region_table import region_directory

__all__ = ["run_workers"]

log = logging.getLogger(__name__)

LOOK_S = 0.2
KILL_S = 3.0
"""Beyond the drain. Less than the supervisor above us allows: a stuck worker must not outlive its parent."""


def run_workers(settings: GatewaySettings) -> int:
    """Start `settings.workers` processes and restart those that die, until SIGTERM or SIGINT; the exit status.

    Worker 1 of them also has the HTTP and metrics ports. A worker that ends with a configuration error ends all.
    """
    with contextlib.ExitStack() as stack:
        guard = stack.enter_context(_hold_port(settings.grpc_address, settings.grpc_port))
        regions = None
        if settings.allows_client_shm:
            regions = stack.enter_context(region_directory(open_directory(settings.mesh_directory)))
        return _run(settings, guard.getsockname()[1], regions)


def _run(settings: GatewaySettings, port: int, regions: Path | None) -> int:
    stopping = False

    def ask(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    workers = [_Worker(index, port, regions) for index in range(1, settings.workers + 1)]
    while not stopping and not any(worker.status == 2 for worker in workers):
        time.sleep(LOOK_S)
        for worker in workers:
            worker.look(time.monotonic())
    _stop([worker.process for worker in workers], settings.drain_s + KILL_S)
    return 2 if any(worker.status == 2 for worker in workers) else 0


class _Worker:
    """One of the processes, and when it is started again once it has ended."""

    def __init__(self, index: int, port: int, regions: Path | None) -> None:
        self.status: int | None = None
        """Of the last end, until it is started again."""
        self._index = index
        self._port = port
        self._regions = regions
        self._backoff = Backoff()
        self._restart_at = 0.0
        self._started = time.monotonic()
        self.process = _start(index, port, regions)

    def look(self, now: float) -> None:
        if self.status is not None:
            if self.status != 2 and now >= self._restart_at:
                self.status, self._started = None, now
                self.process = _start(self._index, self._port, self._regions)
            return
        self.status = self.process.poll()
        if self.status is not None:
            self._restart_at = now + self._backoff.ended(now - self._started)
            log.error("gateway worker ended", extra={"worker": self._index, "status": self.status})


def _hold_port(address: str, port: int) -> socket.socket:
    """Bound, never listening: it shows that nobody else serves there, and keeps it so.

    Raises:
        ConfigError: somebody does.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # Without SO_REUSEPORT first: with it, two gateways on one port would both start and share its connections.
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
        guard = socket.socket(family, socket.SOCK_STREAM)
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        guard.bind((address, port))
    except OSError as error:
        raise ConfigError(f"gRPC port {port} on {address} cannot be used: {error.strerror}") from error
    return guard


def _start(index: int, port: int, regions: Path | None) -> "subprocess.Popen[bytes]":
    environ = {**os.environ, f"{PREFIX}WORKER": str(index), f"{PREFIX}GRPC_PORT": str(port)}
    if regions is not None:
        environ[f"{PREFIX}CLIENT_REGIONS"] = str(regions)
    # A new session: the terminal's signals are for the parent, which orders the stop.
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "tensorline.cli.child", str(os.getpid()), "gateway"], env=environ, start_new_session=True
    )


def _stop(workers: "list[subprocess.Popen[bytes]]", patience_s: float) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    until = time.monotonic() + patience_s
    for worker in workers:
        try:
            worker.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
