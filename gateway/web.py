"""An ASGI application on a port, in the loop that everything else runs in."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from tensorline.errors import ConfigError

# Its lines of starting and stopping say nothing that ours do not.
logging.getLogger("uvicorn.error").setLevel(logging.WARNING)

__all__ = ["bind_tcp", "bind_unix", "serve_http"]

CLOSE_S = 1.0


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
async def serve_http(app: Starlette, listener: socket.socket) -> AsyncIterator[None]:
    """Serve `app` on a bound socket while the block lasts; closes it."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        access_log=False,
        log_config=None,
        http="httptools",
        ws="none",
        server_header=False,
        limit_concurrency=256,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=16 << 10,
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
