"""The failures that are expected, each with the gRPC status it is answered with."""

import contextlib
import logging
from typing import ClassVar, Protocol

from grpc import StatusCode

__all__ = [
    "AlreadyExistsError",
    "BackendError",
    "CancelledByPeerError",
    "ConfigError",
    "DeadlineError",
    "InternalError",
    "InvalidTensorError",
    "NotFoundError",
    "OverloadedError",
    "ResourceExhaustedError",
    "StaleHandleError",
    "TensorlineError",
    "UnavailableError",
    "UnloadableError",
    "UnsupportedError",
    "answering",
    "error_for_status",
]

MESSAGE_LIMIT = 1024
"""Bytes of an error text that reach a client: it travels in a header, at three times its size if it is not ASCII, and
above 8 KiB clients begin to refuse headers at random."""

log = logging.getLogger(__name__)


class TensorlineError(Exception):
    """Base of expected failures. The message is written for the client: no path, address, handle or process id."""

    status: ClassVar[StatusCode] = StatusCode.INTERNAL
    has_run: bool = False
    """A model had been given the request. Set by the gateway, for front ends that tell such errors otherwise."""


class InternalError(TensorlineError):
    """Ours to mend; the message says no more than that."""


class InvalidTensorError(TensorlineError):
    """A request that can never succeed: name, datatype, shape, size, parameter."""

    status = StatusCode.INVALID_ARGUMENT


class NotFoundError(TensorlineError):
    """No such model or version."""

    status = StatusCode.NOT_FOUND


class AlreadyExistsError(TensorlineError):
    status = StatusCode.ALREADY_EXISTS


class UnavailableError(TensorlineError):
    """Not now: no instance, not ready, shutting down."""

    status = StatusCode.UNAVAILABLE


class OverloadedError(UnavailableError):
    """A full queue. Not RESOURCE_EXHAUSTED: this is how Triton answers it, and its clients should see no difference."""


class ResourceExhaustedError(TensorlineError):
    """An arena or memory limit."""

    status = StatusCode.RESOURCE_EXHAUSTED


class UnsupportedError(TensorlineError):
    status = StatusCode.UNIMPLEMENTED


class DeadlineError(TensorlineError):
    status = StatusCode.DEADLINE_EXCEEDED


class CancelledByPeerError(TensorlineError):
    """The client or the gateway no longer wants the answer."""

    status = StatusCode.CANCELLED


class BackendError(TensorlineError):
    """A model or its framework failed. The message reaches the client, so it must be the model's own words to it."""


class StaleHandleError(UnavailableError):
    """A handle whose block is gone, was re-used, or never was."""


class ConfigError(TensorlineError):
    """A model or server configuration that cannot be used."""

    status = StatusCode.INVALID_ARGUMENT


class UnloadableError(ConfigError):
    """A configuration that can be read, of a model that cannot be loaded by it."""


_BY_STATUS: dict[StatusCode, type[TensorlineError]] = {
    kind.status: kind
    for kind in (
        InternalError,
        InvalidTensorError,
        NotFoundError,
        AlreadyExistsError,
        UnavailableError,
        ResourceExhaustedError,
        UnsupportedError,
        DeadlineError,
        CancelledByPeerError,
    )
}
_BY_NUMBER: dict[int, type[TensorlineError]] = {kind.status.value[0]: kind for kind in _BY_STATUS.values()}


def error_for_status(number: int, message: str) -> TensorlineError:
    """The error that a peer answered with, from its gRPC status number."""
    return _BY_NUMBER.get(number, InternalError)(message)


def _cut(text: str) -> str:
    return text.encode(errors="replace")[:MESSAGE_LIMIT].decode(errors="ignore")


class AbortContext(Protocol):
    """What `answering` needs of a gRPC servicer context."""

    async def abort(self, code: StatusCode, details: str = "") -> None: ...


class answering(contextlib.AbstractAsyncContextManager[None]):  # noqa: N801 - reads as a verb: async with answering(context)
    """Turn what leaves the block into a status; the only caller of `abort`."""

    def __init__(self, context: AbortContext) -> None:
        self._context = context

    async def __aexit__(self, kind: object, err: BaseException | None, tb: object) -> None:
        if isinstance(err, TensorlineError):
            await self._context.abort(err.status, _cut(str(err)))
        if isinstance(err, Exception):  # not CancelledError: cancellation passes through
            log.error("unexpected error", exc_info=err)
            await self._context.abort(StatusCode.INTERNAL, "internal error")
