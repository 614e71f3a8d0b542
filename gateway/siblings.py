"""The other workers behind one port, as the first one sees them: their traces and metrics are part of the answer."""

import asyncio
import contextlib
import http.client
import logging
import socket
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Siblings", "merge_metrics", "worker_socket"]

log = logging.getLogger(__name__)

ASK_S = 2.0


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
    """One metrics page of several: the sum of each series, the comments of the first page that has it."""
    lines: dict[str, float | None] = {}
    for page in pages:
        for line in page.decode().splitlines():
            if not line or line.startswith("#"):
                lines.setdefault(line, None)
            else:
                series, _, value = line.rpartition(" ")
                lines[series] = (lines.get(series) or 0.0) + float(value)
    return "".join(f"{key}\n" if value is None else f"{key} {value:g}\n" for key, value in lines.items()).encode()
