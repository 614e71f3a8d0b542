"""What the registries share: the set that was last seen, and the tasks that keep it so."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

from tensorline.discovery.registry import ServiceInstance

__all__ = ["Background", "Watched", "forever"]

BUG_PAUSE_S = 1.0

log = logging.getLogger(__name__)

Instances = frozenset[ServiceInstance]


class Watched:
    """The set last seen, for any number of watchers. A slow watcher skips to the newest set."""

    def __init__(self) -> None:
        self._seen: Instances | None = None
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def seen(self) -> Instances:
        """Empty while nothing was ever seen."""
        return self._seen or frozenset()

    def publish(self, seen: Instances) -> None:
        if seen != self._seen:
            self._seen = seen
            self._wake()

    def close(self) -> None:
        """End the watches."""
        self._is_closed = True
        self._wake()

    async def watch(self) -> AsyncIterator[Instances]:
        told: Instances | None = None
        while not self._is_closed:
            changed = self._changed
            if self._seen is not None and self._seen != told:
                told = self._seen
                yield told
            else:
                await changed.wait()

    def _wake(self) -> None:
        # A new event for each change: a watcher that is busy cannot miss one, and none has to be told of watchers.
        self._changed.set()
        self._changed = asyncio.Event()


class Background:
    """The tasks of one registry, each started once, owned by its `async with` block.

    Not a TaskGroup: that would wrap what the *body* of the block raises in an ExceptionGroup.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False

    def start(self, name: str, run: Callable[[], Coroutine[None, None, None]]) -> None:
        if name not in self._tasks and not self._is_closed:
            self._tasks[name] = asyncio.create_task(run(), name=f"discovery {name}")

    async def aclose(self) -> None:
        self._is_closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def forever(name: str, step: Callable[[], Awaitable[None]], *, pause_s: float = BUG_PAUSE_S) -> None:
    """Repeat `step`, which paces itself. A bug in it is logged whole and does not end discovery."""
    while True:
        try:
            await step()
        except Exception:
            log.exception("unexpected error in discovery (%s)", name)
            await asyncio.sleep(pause_s)
