"""An ASGI application on a port, in the loop that everything else runs in."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tensorline.errors import ConfigError

# Its lines of starting and stopping say nothing that ours do not.
logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

__all__ = ["HEADER_NAMES", "bind_tcp", "bind_unix", "serve_http"]

CLOSE_S = 1.0
CONNECTIONS = 1024
KEEP_OPEN_S = 75
"""Without a request. Clients keep connections for their next one, and few look whether it is still there."""
HEAD_BYTES = 16 << 10
"""Of a request's line and headers."""
HEADER_NAMES = "tensorline.header_names"
"""ASGI extension: the headers' names as they were sent, beside the scope's in lower case."""


class _Protocol(HttpToolsProtocol):
    """With a bound on a request's head, and the names of its headers as they came."""

    _head_bytes = 0
    _is_in_head = False

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's head has more than {HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._head_bytes = 0
        self._names: list[bytes] = []
        self.scope["extensions"] = {HEADER_NAMES: self._names}  # type: ignore[dict-item]  # of extensions uvicorn types its own alone

    def on_header(self, name: bytes, value: bytes) -> None:
        self._names.append(name)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES:
            raise httptools.HttpParserError(f"more than {HEAD_BYTES} bytes")  # answered as a request that is none
        super().on_headers_complete()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # uvicorn would take SIGTERM from the process
        yield


def bind_tcp(address: str, port: int, what: str) -> socket.socket:
    """
    Raises:
        ConfigError: the port is taken, or the address is none of ours. `what` names the port in it.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()  # two sockets may be bound to one port, as long as neither listens
    except OSError as error:
        listener.close()
        raise ConfigError(f"{what} port {port} on {address} cannot be used: {error.strerror}") from error
    return listener


def bind_unix(path: Path) -> socket.socket:
    """A socket with mode 0600 at a path that the caller has claimed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    return listener


@contextlib.asynccontextmanager
async def serve_http(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Serve `app` on a bound socket while the block lasts; closes it."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        access_log=False,
        log_config=None,
        http=_Protocol,
        ws="none",
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=KEEP_OPEN_S,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if serving.done():
            await serving  # says why
        yield
    finally:
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S + 1.0):
                await serving
        listener.close()
