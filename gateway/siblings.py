"""The other workers behind one port, as the first one sees them: their traces and metrics are part of the answer."""

import asyncio
import contextlib
import http.client
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

__all__ = ["Siblings", "merge_metrics", "worker_socket"]

log = logging.getLogger(__name__)

ASK_S = 2.0

NOT_SUMMED: Mapping[str, Callable[[float, float], float]] = {
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

    async def ask(self, target: str) -> list[bytes]:
        """The bodies of those that answer GET `target` with 200."""
        answers = await asyncio.gather(*(asyncio.to_thread(_get, path, target) for path in self._paths))
        return [answer for answer in answers if answer is not None]


def _get(path: Path, target: str) -> bytes | None:
    with contextlib.closing(_UnixConnection(path)) as connection:
        try:
            connection.request("GET", target)
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            log.warning("a worker did not answer", extra={"cause": str(error)})
            return None
        return body if response.status == 200 else None


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
                join = NOT_SUMMED.get(name, _sum)
                values[series] = join(values[series], float(value)) if series in values else float(value)
    lines: list[str] = []
    for comments, values in families.values():
        lines += comments
        lines += [f"{series} {int(value) if value.is_integer() else value}" for series, value in values.items()]
    return "\n".join(lines).encode() + b"\n"


def _sum(one: float, other: float) -> float:
    return one + other
