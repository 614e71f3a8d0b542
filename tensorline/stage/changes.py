"""Loads and unloads that a gateway asks for by its stream, each answered by an Outcome when it is over."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Protocol

from tensorline.errors import InternalError, TensorlineError
from tensorline.rpc.frames import LoadOrder

__all__ = ["ModelChanger", "ModelChanges"]

log = logging.getLogger(__name__)


class ModelChanger(Protocol):
    """Who does it. Both raise a TensorlineError to refuse."""

    async def load_model(self, order: LoadOrder) -> bool:
        """Whether it is a model of this stage; returns when it is loaded."""

    async def unload_model(self, name: str) -> None:
        """Returns when it takes no more requests."""


class ModelChanges:
    """Of one stream.

    Args:
        tell: Called once for each, with its number: why it failed, if it did, and whether it is a model of this stage.
    """

    def __init__(
        self, changer: ModelChanger, tell: Callable[[int, TensorlineError | None, bool], None], gateway: str
    ) -> None:
        self._changer = changer
        self._tell = tell
        self._gateway = gateway
        self._running: set[asyncio.Task[None]] = set()

    def load(self, number: int, order: LoadOrder) -> None:
        self._start(number, self._changer.load_model(order))

    def unload(self, number: int, model: str) -> None:
        async def unload() -> bool:
            await self._changer.unload_model(model)
            return True

        self._start(number, unload())

    def end(self) -> None:
        """Nobody waits for the outcomes any more. What the stage has begun goes on, for whoever asks next."""
        for change in self._running:
            change.cancel()

    def _start(self, number: int, work: Coroutine[object, object, bool]) -> None:
        change = asyncio.create_task(self._change(number, work))
        self._running.add(change)
        change.add_done_callback(self._running.discard)

    async def _change(self, number: int, work: Coroutine[object, object, bool]) -> None:
        try:
            self._tell(number, None, await work)
        except Exception as error:
            if not isinstance(error, TensorlineError):
                log.exception("models not changed", extra={"gateway": self._gateway})
                error = InternalError("internal error")
            self._tell(number, error, True)
