"""An ASGI application on a port, in the loop that everything else runs in."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.applications import Starlette

from tensorline.errors import ConfigError

__all__ = ["serve_http"]

CLOSE_S = 1.0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # uvicorn would take SIGTERM from the process
        yield


@contextlib.asynccontextmanager
async def serve_http(app: Starlette, address: str, port: int, what: str) -> AsyncIterator[int]:
    """Serve `app` while the block lasts; yields the port.

    Raises:
        ConfigError: the port is taken, or the address is none of ours. `what` names the port in it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"{what} port {port} on {address} cannot be used: {error.strerror}") from error
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
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S + 1.0):
                await serving
        listener.close()
