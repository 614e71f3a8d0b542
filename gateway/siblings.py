"""The other workers behind one port, as each of them sees them: what they know is part of the answer."""

import asyncio
import contextlib
import http.client
import logging
import math
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tensorline.telemetry.exposition import number

__all__ = ["Siblings", "merge_metrics", "other_workers", "worker_socket"]

log = logging.getLogger(__name__)

ASK_S = 2.0

NOT_SUMMED: Mapping[str, Callable[[float, float], float]] = {
    "nv_cpu_memory_total_bytes": max,
    "nv_cpu_memory_used_bytes": max,
    "nv_cpu_utilization": max,
    # Of the stages, which every worker sees whole.
    "nv_inference_pending_request_count": max,
    "nv_model_load_duration_secs": max,
    "tensorline_queue_depth": max,
    "tensorline_stage_arena_bytes_leased": max,
    "process_start_time_seconds": max,
    "python_info": max,
    "tensorline_event_loop_lag_max_seconds": max,
    "tensorline_event_loop_lag_p99_seconds": max,
    "tensorline_instances": max,  # every worker has a stream to each
    "tensorline_registry_is_fresh": min,
}
"""How the workers' values of these families become one."""


def worker_socket(port: int, worker: int) -> str:
    """Name of a worker's HTTP socket in the mesh's socket directory."""
    return f"gateway-{port}-worker-{worker}"


def other_workers(sockets: Path, port: int, worker: int, workers: int) -> list[Path]:
    """The HTTP sockets of all workers but this one; none for a gateway that is alone."""
    if workers <= 1:
        return []
    return [sockets / f"{worker_socket(port, other)}.sock" for other in range(1, workers + 1) if other != worker]


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=ASK_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ASK_S)
        self.sock.connect(str(self._path))


class Siblings:
    """Args:
    paths: HTTP sockets of the other workers; none of a gateway that is alone.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)

    @property
    def are_none(self) -> bool:
        return not self._paths

    async def ask(self, target: str) -> list[bytes]:
        """The bodies of those that answer GET `target` with 200."""
        return await self._call("GET", target, None)

    async def tell(self, target: str, body: bytes) -> list[bytes]:
        """The same for POST `target` with `body`."""
        return await self._call("POST", target, body)

    async def _call(self, method: str, target: str, body: bytes | None) -> list[bytes]:
        calls = (asyncio.to_thread(_call_one, path, method, target, body) for path in self._paths)
        return [answer for answer in await asyncio.gather(*calls) if answer is not None]


def _call_one(path: Path, method: str, target: str, body: bytes | None) -> bytes | None:
    with contextlib.closing(_UnixConnection(path)) as connection:
        try:
            connection.request(method, target, body)
            response = connection.getresponse()
            answer = response.read()
        except FileNotFoundError:  # it is not up yet, or it stops
            return None
        except (OSError, http.client.HTTPException) as error:
            log.warning("a worker did not answer", extra={"cause": str(error)})
            return None
        return answer if response.status == 200 else None


def merge_metrics(pages: Iterable[bytes]) -> bytes:
    """One metrics page of several: each series summed, or as `NOT_SUMMED` says, below its family's comments."""
    families: dict[str, tuple[dict[str, None], dict[str, float]]] = {}
    for page in pages:
        name = ""
        for line in page.decode().split("\n"):
            if line.startswith("#"):
                name = line.split(" ", 3)[2]
                comments, _ = families.setdefault(name, ({}, {}))
                comments[line] = None
            elif line:
                series, _, value = line.rpartition(" ")
                _, values = families.setdefault(name, ({}, {}))
                # A quantile of all cannot be had from those of each: the slowest worker's is told.
                join = _larger if "quantile=" in series else NOT_SUMMED.get(name, _sum)
                values[series] = join(values[series], float(value)) if series in values else float(value)
    lines: list[str] = []
    for comments, values in families.values():
        lines += comments
        lines += [f"{series} {int(value) if value.is_integer() else number(value)}" for series, value in values.items()]
    return "\n".join(lines).encode() + b"\n"


def _sum(one: float, other: float) -> float:
    return one + other


def _larger(one: float, other: float) -> float:
    return other if math.isnan(one) else one if math.isnan(other) else max(one, other)
