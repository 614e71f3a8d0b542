"""A TCP proxy before the Consul agent: it counts what passes, and can be taken away while the agent lives on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Proxy", "proxied"]


class Proxy:
    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.is_silent = False
        """Bytes go nowhere, connections stay: an agent that is stuck."""
        self.requests: list[str] = []
        """The first line of every request."""

    def count(self, start: str) -> int:
        return sum(request.startswith(start) for request in self.requests)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """No one listens any more, and every connection breaks."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.reset()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Every connection breaks; new ones are taken."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        mine = {writer, upstream_writer}
        self._writers |= mine
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await asyncio.gather(
                self._pump(reader, upstream_writer, is_request=True),
                self._pump(upstream_reader, writer, is_request=False),
            )
        finally:
            self._writers -= mine
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_request: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if is_request:
                    lines = data.decode("latin-1").split("\r\n")
                    self.requests += [line.removesuffix(" HTTP/1.1") for line in lines if line.endswith(" HTTP/1.1")]
                if not self.is_silent:
                    writer.write(data)
                    await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def proxied(target_port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(target_port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.cut()
