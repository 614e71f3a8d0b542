"""Ports and sockets of the HTTP side."""

import asyncio
import socket
import stat
import time
import urllib.request
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gateway.web import bind_tcp, bind_unix, serve_http
from gateway.workers import _hold_port
from tensorline.errors import ConfigError


def app(delay_s: float = 0.0) -> Starlette:
    async def handle(request: Request) -> Response:
        await asyncio.sleep(delay_s)
        return PlainTextResponse("here")

    return Starlette(routes=[Route("/", handle)])


def get(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
        body: bytes = answer.read()
        return body


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"HTTP port {port} on 127.0.0.1 cannot be used: Address already in use"):
            bind_tcp("127.0.0.1", port, "HTTP")


def test_an_address_of_nobody_here() -> None:
    with pytest.raises(ConfigError, match=r"metrics port 0 on 192\.0\.2\.1 cannot be used"):
        bind_tcp("192.0.2.1", 0, "metrics")


@pytest.mark.parametrize("address", ["not an address", "host.invalid"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError, match="HTTP port 0"):
        bind_tcp(address, 0, "HTTP")


def test_sockets_are_private(tmp_path: Path) -> None:
    listener = bind_unix(tmp_path / "s.sock")
    assert stat.S_IMODE((tmp_path / "s.sock").stat().st_mode) == 0o600
    listener.close()


async def test_it_serves_while_the_block_lasts() -> None:
    listener = bind_tcp("127.0.0.1", 0, "HTTP")
    port = listener.getsockname()[1]
    async with serve_http(app(), listener):
        assert await asyncio.to_thread(get, port) == b"here"
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(get, port)


async def test_open_connections_and_slow_answers_do_not_hold_its_end() -> None:
    listener = bind_tcp("127.0.0.1", 0, "HTTP")
    port = listener.getsockname()[1]
    async with serve_http(app(30.0), listener):
        idle = socket.create_connection(("127.0.0.1", port))
        asking = socket.create_connection(("127.0.0.1", port))
        asking.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.sleep(0.1)
        began = time.monotonic()
    assert time.monotonic() - began < 12
    idle.close()
    asking.close()


def test_workers_hold_a_port_that_others_serve_only_with_them() -> None:
    guard = _hold_port("127.0.0.1", 0)
    port = guard.getsockname()[1]
    with pytest.raises(ConfigError, match=f"gRPC port {port} on 127.0.0.1 cannot be used"):
        _hold_port("127.0.0.1", port)
    with socket.socket() as worker:
        worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        worker.bind(("127.0.0.1", port))
    guard.close()
    _hold_port("127.0.0.1", port).close()
