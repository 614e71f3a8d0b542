"""A mesh of real processes for the bench, and what can be read of them from outside."""

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

__all__ = ["BenchMesh", "running_mesh"]

READY_S = 60.0


@dataclass
class BenchMesh:
    grpc_port: int
    http_port: int
    ready_s: float = 0.0
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        return (json.loads(body) if body else {}) if response.status == 200 else None

    def rss_mb(self) -> dict[str, float]:
        """Resident memory of each process; the shared pages that it has mapped count in each."""
        return {name: psutil.Process(p.pid).memory_info().rss / 1e6 for name, p in self.processes.items()}

    def cpu_s(self) -> float:
        times = [psutil.Process(p.pid).cpu_times() for p in self.processes.values()]
        return sum(t.user + t.system for t in times)

    def socket_bytes(self) -> int:
        """Written by all processes so far: with tensors in shared memory everything they write goes to sockets."""
        return sum(psutil.Process(p.pid).io_counters().write_chars for p in self.processes.values())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_mesh(repositories: dict[str, list[Path]], *, settings: dict[str, str] | None = None) -> Iterator[BenchMesh]:
    """Gateway and services, each with its repositories (a service that is not named is not started)."""
    folder = Path(tempfile.mkdtemp(prefix="tensorline-bench-", dir="/dev/shm"))
    mesh = BenchMesh(free_port(), free_port())
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("TENSORLINE_", "OTEL_"))}
    environ |= {
        "TENSORLINE_MESH_DIRECTORY": str(folder / "mesh"),
        "TENSORLINE_LOG_LEVEL": "warning",
        **(settings or {}),
    }
    began = time.perf_counter()
    try:
        for name, paths in repositories.items():
            own = {"TENSORLINE_MODEL_REPOSITORY": ":".join(map(str, paths))}
            module = "gateway" if name == "gateway" else f"services.{name}"
            if name == "gateway":
                own |= {
                    "TENSORLINE_GRPC_PORT": str(mesh.grpc_port),
                    "TENSORLINE_HTTP_PORT": str(mesh.http_port),
                    "TENSORLINE_METRICS_PORT": str(free_port()),
                }
            mesh.processes[name] = subprocess.Popen([sys.executable, "-m", module], env={**environ, **own})
        while time.perf_counter() - began < READY_S:
            with contextlib.suppress(OSError):
                if mesh.get("/v2/health/ready") is not None:
                    break
            time.sleep(0.02)
        else:
            raise SystemExit("the bench's mesh was not ready in time; its log is above")
        mesh.ready_s = time.perf_counter() - began
        yield mesh
    finally:
        for process in mesh.processes.values():
            process.terminate()
        for process in mesh.processes.values():
            try:
                process.wait(25)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(folder, ignore_errors=True)
