"""From an ASGI call to an answer: who may ask, the body, a client that leaves, failures.

A handler gets an `Exchange` and returns the answer, or None when it has sent it itself.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from gateway.forwarding import NO_FORWARDING, Forwarding
from gateway.rest.answers import Reply, Send, error_reply, json_reply
from gateway.rest.bodies import Bodies, ClientGoneError, Receive
from gateway.rest.compression import accepted_encoding, compress_reply, decompress, too_large
from gateway.restrictions import NO_RESTRICTIONS, Restrictions, category_of
from gateway.web import HEADER_NAMES
from tensorline.errors import InternalError, TensorlineError, UnavailableError

__all__ = ["Endpoint", "Exchange", "Handler", "RestRules"]

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]

CLOSE: Final = (b"connection", b"close")


@dataclass(frozen=True, slots=True)
class RestRules:
    """What holds for every route."""

    restrictions: Restrictions = NO_RESTRICTIONS
    forwarding: Forwarding = NO_FORWARDING
    max_input_bytes: int = 64 << 20
    max_held_bytes: int = 2 << 30


@dataclass(slots=True)
class Exchange:
    """One request that may be answered."""

    scope: Scope
    receive: Receive
    send: Send
    headers: Mapping[bytes, bytes]
    started_ns: int
    body: bytes = b""
    held: int = 0
    """Bytes that it holds of those that all bodies may have together."""
    is_read: bool = False
    """Its body is."""
    has_started: bool = False
    """Its answer is on its way."""

    @property
    def path(self) -> Mapping[str, str]:
        """The variable parts of the path."""
        found: Mapping[str, str] = self.scope["path_params"]
        return found

    @property
    def is_post(self) -> bool:
        return bool(self.scope["method"] == "POST")

    def metadata(self) -> list[tuple[str, str]]:
        """Headers as gRPC would have them, names in lower case."""
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self.scope["headers"]]

    def sent_headers(self) -> list[tuple[str, str]]:
        """Headers with their names as the client wrote them."""
        names = self.scope.get("extensions", {}).get(HEADER_NAMES)
        if names is None:
            return self.metadata()
        values = (value for _, value in self.scope["headers"])
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in zip(names, values, strict=True)]

    async def begin(self, message: MutableMapping[str, Any]) -> None:
        """Send, and remember that something was."""
        self.has_started = True
        await self.send(message)


Handler = Callable[[Exchange], Awaitable[Reply | None]]


@dataclass(slots=True)
class Endpoint:
    """An ASGI application for one path.

    Args:
        rpc: Its twin in the gRPC service; decides who may call it.
        is_change: A POST changes the server, so that no page of another origin may send it.
        is_compressed: The answer is compressed when the client likes that.
    """

    handler: Handler
    rpc: str
    rules: RestRules
    bodies: Bodies
    is_change: bool = False
    is_compressed: bool = False
    _category: str = field(init=False)

    def __post_init__(self) -> None:
        self._category = category_of(self.rpc)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, dict(scope["headers"]), time.monotonic_ns())
        try:
            await self._answer(exchange)
        except ClientGoneError:
            return
        except asyncio.CancelledError:  # the server ends, with less patience than the request took
            if not exchange.has_started:
                await error_reply(UnavailableError("the gateway is shutting down")).send(send)

    async def _answer(self, exchange: Exchange) -> None:
        reply = self._refusal(exchange)
        if reply is None:
            reply = await self._reply(exchange)
        if reply is not None:
            exchange.has_started = True
            await reply.send(exchange.send)

    def _refusal(self, exchange: Exchange) -> Reply | None:
        if self.rules.restrictions.is_active:
            try:
                self.rules.restrictions.check(self._category, lambda name: exchange.headers.get(name.encode()))
            except TensorlineError as error:
                return error_reply(error)
        if self.is_change and exchange.is_post and not _is_own(exchange.headers):
            return json_reply({"error": "a page of another origin may not change this server"}, 403)
        return None

    async def _reply(self, exchange: Exchange) -> Reply | None:
        try:
            if exchange.is_post:
                await self._read(exchange)
            reply = await _while_there(exchange, self.handler)
        except TensorlineError as error:
            reply = error_reply(error)
            if exchange.is_post and not exchange.is_read:  # what may still come must not be taken for a request
                reply = reply._replace(headers=(*reply.headers, CLOSE))
        except ClientGoneError:
            raise
        except Exception as error:
            log.error("unexpected error", exc_info=error)
            reply = error_reply(InternalError("internal error"))
        finally:
            self.bodies.drop(exchange.held)
            exchange.body = b""
        if exchange.has_started:
            return None
        if reply is not None and self.is_compressed and reply.status == 200:
            wanted = exchange.headers.get(b"accept-encoding")
            encoding = accepted_encoding(wanted.decode("latin-1")) if wanted else ""
            if encoding:
                reply = await compress_reply(reply, encoding)
        return reply

    async def _read(self, exchange: Exchange) -> None:
        headers, bodies = exchange.headers, self.bodies
        declared = _declared(headers)
        if declared is not None and declared > bodies.limit and b"expect" in headers:
            raise too_large(bodies.limit)  # it waits to hear whether to send it
        exchange.body = await bodies.read(exchange.receive, declared)
        exchange.held = len(exchange.body)
        exchange.is_read = True
        encoding = headers.get(b"content-encoding")
        if encoding is not None:
            exchange.body = await decompress(exchange.body, encoding.decode("latin-1"), bodies.limit)
            more = len(exchange.body) - exchange.held
            bodies.hold(more)
            exchange.held += more


async def _while_there(exchange: Exchange, handler: Handler) -> Reply | None:
    """The handler's answer; it is cancelled when the client leaves.

    Raises:
        ClientGoneError: it left.
    """
    task = asyncio.current_task()
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await exchange.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        if task is not None:
            task.cancel()

    watching = asyncio.create_task(watch()) if exchange.is_post else None
    try:
        return await handler(exchange)
    except asyncio.CancelledError:
        if not is_gone:
            raise
        if task is not None:
            task.uncancel()
        raise ClientGoneError from None
    finally:
        if watching is not None:
            watching.cancel()


def _declared(headers: Mapping[bytes, bytes]) -> int | None:
    """The length of the body; the server has checked that it is a number."""
    value = headers.get(b"content-length")
    return int(value) if value is not None and value.isdigit() else None


def _is_own(headers: Mapping[bytes, bytes]) -> bool:
    """Whether no browser, or a page of this very server, sends this: others have their own in `Origin`."""
    origin = headers.get(b"origin")
    if origin is None:
        return True
    try:
        place = urlsplit(origin.decode("latin-1")).netloc
    except ValueError:
        return False
    return place != "" and place.lower() == headers.get(b"host", b"").decode("latin-1").lower()
