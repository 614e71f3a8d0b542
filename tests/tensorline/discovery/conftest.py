"""Registries of every kind, and what the tests do with them."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tensorline.discovery import Registry, ServiceInstance, open_registry

SEEN_S = 0.5
"""In which a change is seen."""
PATIENCE = 8
"""Times as long as promised before a test calls it lost: its machine does other things besides."""


async def until(is_so: Callable[[], bool], within_s: float = 5.0) -> None:
    """For what tells nobody when it changes."""
    async with asyncio.timeout(within_s):
        while not is_so():
            await asyncio.sleep(0.01)


class Watching:
    """A watcher that collects: every set it was told, and a wait for the one that is wanted."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.told: list[frozenset[ServiceInstance]] = []
        self.is_over = False
        self._news = asyncio.Condition()

    async def run(self) -> None:
        async for seen in self._registry.watch():
            async with self._news:
                self.told.append(seen)
                self._news.notify_all()
        async with self._news:
            self.is_over = True
            self._news.notify_all()

    async def wait_for(
        self, is_wanted: Callable[[frozenset[ServiceInstance]], bool], within_s: float = SEEN_S
    ) -> frozenset[ServiceInstance]:
        async with asyncio.timeout(within_s * PATIENCE), self._news:
            await self._news.wait_for(lambda: bool(self.told) and is_wanted(self.told[-1]))
            return self.told[-1]

    async def wait_ids(self, *ids: str, within_s: float = SEEN_S) -> frozenset[ServiceInstance]:
        return await self.wait_for(lambda seen: sorted(each.id for each in seen) == sorted(ids), within_s)

    async def wait_over(self) -> None:
        async with asyncio.timeout(SEEN_S * PATIENCE), self._news:
            await self._news.wait_for(lambda: self.is_over)


@asynccontextmanager
async def watching(registry: Registry) -> AsyncIterator[Watching]:
    watcher = Watching(registry)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(watcher.run())
        yield watcher
        task.cancel()


@asynccontextmanager
async def announced(url: str, instance_id: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A process that has registered `instance_id`; killed at the end."""
    async with announced_forking(url, instance_id, "alone") as (process, _):
        yield process


@asynccontextmanager
async def announced_forking(
    url: str, instance_id: str, mode: str
) -> AsyncIterator[tuple[subprocess.Popen[bytes], int]]:
    """With mode "fork" it has a forked child, whose id comes second and who is left alive; else that is 0."""
    command: list[str | Path] = [sys.executable, Path(__file__).with_name("announcer.py"), url, instance_id, mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220 - a millisecond
        try:
            assert process.stdout is not None
            word, child = (await asyncio.to_thread(process.stdout.readline)).split()
            assert word == b"announced"
            yield process, int(child)
        finally:
            process.kill()


@dataclass(frozen=True)
class Kind:
    """One kind of registry under the contract."""

    url: str
    ends_s: float = SEEN_S
    """In which a killed process's instance must be gone."""

    def open(self) -> AbstractAsyncContextManager[Registry]:
        return open_registry(self.url)
