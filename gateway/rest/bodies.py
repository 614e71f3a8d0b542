"""Request bodies: read whole, in time, and never more of them than the gateway may hold."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from gateway.rest.compression import too_large
from tensorline.errors import DeadlineError, InvalidTensorError, OverloadedError

__all__ = ["Bodies", "ClientGoneError", "Receive"]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

SILENT_S: Final = 60.0
"""How long a client may send nothing in the middle of a body."""
SPARE: Final = 4
"""A body that is too large is read to its end, so that its client hears why; up to so many times the limit."""
OFF_LOOP: Final = 1 << 20


class ClientGoneError(Exception):
    """Nobody is left to be answered."""


class Bodies:
    """Args:
    limit: Bytes of one body, also unpacked.
    held_limit: Of all bodies that are being read or worked on.
    """

    def __init__(self, limit: int, held_limit: int) -> None:
        self.limit = limit
        self._held_limit = held_limit
        self.held = 0

    async def read(self, receive: Receive, declared: int | None) -> bytes:
        """One body; the caller gives its length to `drop` when it is done with it.

        Args:
            declared: The Content-Length.
        Raises:
            InvalidTensorError: it is larger than the limit.
            OverloadedError: the others' are too large to read this one too.
            DeadlineError: the client went silent.
            ClientGoneError: it left.
        """
        if declared is not None and declared > self.limit * SPARE:
            raise too_large(self.limit)
        message = await _next(receive)
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            if len(body) > self.limit:
                raise too_large(self.limit)
            self.hold(len(body))
            return body
        return await self._read_on(receive, body)

    async def _read_on(self, receive: Receive, first: bytes) -> bytes:
        chunks, size = [first], len(first)
        held = 0
        refusal: InvalidTensorError | OverloadedError | None = None
        try:
            more = True
            while more:
                if refusal is None:
                    try:
                        self.hold(size - held)
                        held = size
                    except OverloadedError as error:
                        refusal = error
                if size > self.limit:
                    refusal = refusal or too_large(self.limit)
                if refusal is not None:
                    chunks.clear()
                    if size > self.limit * SPARE:
                        break
                message = await _next(receive)
                chunk = message.get("body", b"")
                chunks.append(chunk)
                size += len(chunk)
                more = message.get("more_body", False)
            if refusal is None and size > self.limit:
                refusal = too_large(self.limit)
            if refusal is not None:
                raise refusal
            self.hold(size - held)
            held = size
            return await asyncio.to_thread(b"".join, chunks) if size >= OFF_LOOP else b"".join(chunks)
        except BaseException:
            self.drop(held)
            raise

    def hold(self, size: int) -> None:
        """
        Raises:
            OverloadedError: so much more is too much.
        """
        if self.held + size > self._held_limit and self.held:
            raise OverloadedError(
                f"{self.held} bytes of request bodies are already held at this gateway, at most {self._held_limit} are "
                "allowed"
            )
        self.held += size

    def drop(self, size: int) -> None:
        self.held -= size


async def _next(receive: Receive) -> MutableMapping[str, Any]:
    try:
        async with asyncio.timeout(SILENT_S):
            message = await receive()
    except TimeoutError:
        raise DeadlineError(f"nothing of the request body came for {SILENT_S:g} s") from None
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message
