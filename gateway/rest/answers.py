"""What is sent back: a status, headers, and the parts of a body; and every failure as one of these.

Source: protocol.md §13.2, errors.md §1, §10.
"""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final, NamedTuple

import orjson
from grpc import StatusCode

from gateway.restrictions import RestrictedError
from tensorline.errors import MESSAGE_LIMIT, TensorlineError

__all__ = ["JSON", "STREAM", "Part", "Reply", "Send", "empty_reply", "error_body", "error_reply", "json_reply"]

Part = bytes | memoryview
Header = tuple[bytes, bytes]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON: Final[Header] = (b"content-type", b"application/json")
STREAM: Final[Header] = (b"content-type", b"text/event-stream; charset=utf-8")
RETRY_AFTER: Final[Header] = (b"retry-after", b"1")
"""Seconds. The least that HTTP can say, and ten times what gRPC clients are told."""

STATUSES: Final[Mapping[StatusCode, int]] = {
    StatusCode.NOT_FOUND: 404,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.INTERNAL: 500,
    # Triton has none of these two.
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.DEADLINE_EXCEEDED: 504,
}
LATER: Final = (429, 503)
"""The same request may succeed later."""
BAD_REQUEST: Final = 400
FORBIDDEN: Final = 403


class Reply(NamedTuple):
    """A whole answer. `headers` without the content's length."""

    status: int
    headers: Sequence[Header]
    body: Sequence[Part] = ()

    async def send(self, send: Send) -> None:
        length = sum(map(len, self.body))
        headers = [*self.headers, (b"content-length", b"%d" % length)]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        parts = self.body
        if length and len(parts) > 1 and length <= ONE_WRITE:
            parts = (b"".join(parts),)
        for index, part in enumerate(parts):
            more = index + 1 < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})
        if not parts:
            await send({"type": "http.response.body", "body": b""})


ONE_WRITE: Final = 64 << 10
"""Bytes of a body up to which its parts are copied together: a system call costs more."""


def json_reply(value: object, status: int = 200) -> Reply:
    return Reply(status, (JSON,), (orjson.dumps(value),))


def empty_reply(status: int = 200) -> Reply:
    return Reply(status, (JSON,))


def error_body(text: str) -> bytes:
    """The text cut as gRPC's is, so that both say the same."""
    cut = text.encode(errors="replace")[:MESSAGE_LIMIT].decode(errors="ignore")
    return orjson.dumps({"error": cut})


def error_reply(error: TensorlineError) -> Reply:
    status = FORBIDDEN if isinstance(error, RestrictedError) else STATUSES.get(error.status, BAD_REQUEST)
    headers = (JSON, RETRY_AFTER) if status in LATER else (JSON,)
    return Reply(status, headers, (error_body(str(error)),))
