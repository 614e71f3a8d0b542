"""The REST routes of a house, asked without a network and with one."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.applications import Starlette

from gateway.admin import AdminRoutes
from gateway.operations import Operations
from gateway.operations.metadata import Metadata
from gateway.rest import RestRoutes, RestRules
from gateway.siblings import Siblings
from gateway.web import bind_tcp, serve_http
from tests.gateway.house import House

__all__ = ["Answer", "Connection", "Twin", "make_app", "serving", "tensor", "twin"]


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> tuple[int, str]:
        """Status and text of a failure in the form that every failure has."""
        assert list(self.json) == ["error"], self.body
        assert self.headers["content-type"] == "application/json"
        return self.status, self.json["error"]


class Twin:
    """Asks an application as its server would."""

    def __init__(self, app: Starlette) -> None:
        self.app = app

    async def ask(self, path: str, body: object = None, *, method: str = "", chunks: int = 1, **headers: str) -> Answer:
        """
        Args:
            body: Bytes, or what goes as JSON; None: none, by GET.
            chunks: In how many parts it comes.
            headers: Names with _ for -.
        """
        raw = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
        named = {"host": "localhost:8000", **{name.replace("_", "-"): value for name, value in headers.items()}}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method or ("GET" if body is None else "POST"),
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in named.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        step = max(1, -(-len(raw) // chunks))
        parts = [raw[at : at + step] for at in range(0, len(raw), step)] or [b""]
        answer = Answer()

        async def receive() -> dict[str, object]:
            if not parts:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                answer.parts.append(bytes(message.get("body", b"")))

        await self.app(scope, receive, send)
        return answer

    async def infer(self, model: str, *inputs: Mapping[str, Any], **more: Any) -> Answer:
        return await self.ask(f"/v2/models/{model}/infer", {"inputs": inputs, **more})


def make_app(
    house: House, rules: RestRules | None = None, *, address: str = "127.0.0.1", operations: Operations | None = None
) -> Starlette:
    operations = operations or Operations(Metadata(house.models, house.readiness, "server 1"))
    routes = RestRoutes(house.service, operations, rules or RestRules()).routes()
    return AdminRoutes(house.service, house.mesh, house.recorder.store, address, None, Siblings(()), routes).app()


def twin(house: House, rules: RestRules | None = None, **more: Any) -> Twin:
    return Twin(make_app(house, rules, **more))


def tensor(values: object, datatype: str = "FP32", shape: object = None, **more: Any) -> dict[str, Any]:
    """An input x with JSON data."""
    found = shape if shape is not None else [len(values)]  # type: ignore[arg-type]
    return {"name": "x", "datatype": datatype, "shape": found, "data": values, **more}


class Connection:
    """One TCP connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, body: bytes, *headers: str) -> None:
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers, "", ""]
        await self.send("\r\n".join(lines).encode() + body)

    async def head(self, within_s: float = 10.0) -> str:
        """Status line and headers of the next answer."""
        async with asyncio.timeout(within_s):
            return (await self.reader.readuntil(b"\r\n\r\n")).decode()

    async def answer(self) -> Answer:
        """The next answer, whose length is told."""
        status, *lines = (await self.head()).removesuffix("\r\n\r\n").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await self.reader.readexactly(int(headers["content-length"]))
        return Answer(int(status.split(" ")[1]), headers, [body])

    async def ended(self, within_s: float = 10.0) -> bool:
        """Whether the server closes it, with nothing more to say."""
        async with asyncio.timeout(within_s):
            return await self.reader.read(1) == b""

    def close(self) -> None:
        self.writer.close()


@asynccontextmanager
async def serving(house: House, rules: RestRules | None = None, **more: Any) -> AsyncIterator["Connect"]:
    """The routes on a free port."""
    listener = bind_tcp("127.0.0.1", 0, "HTTP")
    connect = Connect(listener.getsockname()[1])
    async with serve_http(make_app(house, rules, **more), listener):
        try:
            yield connect
        finally:
            for connection in connect.opened:
                connection.close()


class Connect:
    def __init__(self, port: int) -> None:
        self.port = port
        self.opened: list[Connection] = []

    async def __call__(self) -> Connection:
        self.opened.append(Connection(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.opened[-1]
