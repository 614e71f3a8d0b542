"""gzip and deflate of request and response bodies, in threads where they are large.

Source: protocol.md §13.5.
"""

import asyncio
import zlib
from collections.abc import Iterable
from typing import Final

from gateway.rest.answers import Part, Reply
from tensorline.errors import InvalidTensorError, UnsupportedError
from tensorline.protocol.infer import shown

__all__ = ["accepted_encoding", "compress_reply", "decompress", "too_large"]

_WINDOWS: Final = {"gzip": 31, "deflate": 15}
"""zlib's number for each format; HTTP's deflate is zlib's own."""
EITHER: Final = 47
"""zlib's number for "look at the first bytes": Triton takes the one format under the other's name."""
LEVEL: Final = 1
"""Tensors compress badly, and a high level takes seconds where this one takes tenths."""
OFF_LOOP: Final = 4 << 10
"""Bytes; compressed, they may be a thousand times as many."""
MEMBERS: Final = 1024


def too_large(limit: int) -> InvalidTensorError:
    return InvalidTensorError(f"the request body exceeds the maximum allowed input size of {limit} bytes")


async def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """
    Args:
        encoding: Value of Content-Encoding.
        limit: Bytes of the result.
    Raises:
        UnsupportedError: another encoding than gzip or deflate.
        InvalidTensorError: `body` is not so encoded, or its result is larger than `limit`.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in _WINDOWS:
        raise UnsupportedError(f"Unsupported compression type '{shown(name)}', use gzip or deflate")
    if len(body) > OFF_LOOP:
        return await asyncio.to_thread(_decompress, body, name, limit)
    return _decompress(body, name, limit)


def _decompress(body: bytes, name: str, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    for _ in range(MEMBERS):  # a gzip body may be several, one behind the other
        inflater = zlib.decompressobj(EITHER)
        try:
            # One byte more than allowed is enough to know.
            parts.append(inflater.decompress(body, limit - size + 1))
        except zlib.error as error:
            raise InvalidTensorError(f"the request body is no {name}: {error}") from None
        size += len(parts[-1])
        if size > limit:
            raise too_large(limit)
        if not inflater.eof:
            raise InvalidTensorError(f"the request body is no {name}: it ends too early")
        body = inflater.unused_data
        if not body:
            return parts[0] if len(parts) == 1 else b"".join(parts)
    raise InvalidTensorError(f"the request body has more than {MEMBERS} {name} members")


def accepted_encoding(header: str) -> str:
    """ "gzip", "deflate" or "": what the client's Accept-Encoding likes best of what there is; gzip before deflate."""
    weights: dict[str, float] = {}
    for item in header.lower().split(","):
        name, _, parameter = item.partition(";")
        weights[name.strip()] = _weight(parameter)
    plain = weights.get("identity", 0.0)
    best = max(("gzip", "deflate"), key=lambda name: weights.get(name, weights.get("*", 0.0)))
    weight = weights.get(best, weights.get("*", 0.0))
    return best if weight > 0 and weight >= plain else ""


def _weight(parameter: str) -> float:
    key, _, value = parameter.partition("=")
    if key.strip() != "q":
        return 1.0
    try:
        return min(1.0, max(0.0, float(value)))
    except ValueError:
        return 0.0


async def compress_reply(reply: Reply, encoding: str) -> Reply:
    """The same answer with a compressed body; lengths in its headers are of what it was before."""
    if not reply.body:
        return reply
    if sum(map(len, reply.body)) > OFF_LOOP:
        body = await asyncio.to_thread(_compress, reply.body, encoding)
    else:
        body = _compress(reply.body, encoding)
    headers = (*reply.headers, (b"content-encoding", encoding.encode()), (b"vary", b"accept-encoding"))
    return Reply(reply.status, headers, (body,))


def _compress(parts: Iterable[Part], encoding: str) -> bytes:
    deflater = zlib.compressobj(LEVEL, zlib.DEFLATED, _WINDOWS[encoding])
    return b"".join([*[deflater.compress(part) for part in parts], deflater.flush()])
