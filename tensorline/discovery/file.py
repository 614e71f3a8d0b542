"""The embedded registry: a directory on one host, no daemon. file:///directory."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tensorline.discovery.file_entries import (
    close_entry,
    is_in_place,
    open_directory,
    remove_entry,
    write_entry,
)
from tensorline.discovery.file_reader import EntryReader
from tensorline.discovery.instance import check_instance
from tensorline.discovery.registry import Registry, ServiceInstance
from tensorline.discovery.url import FileUrl
from tensorline.discovery.watching import Background, Watched, forever
from tensorline.errors import ConfigError, UnavailableError

__all__ = ["FileRegistry", "open_file_registry"]

LOOK_S = 0.2
"""Between two looks at the directory: a change is seen in less than half a second."""
UPKEEP_S = 1.0
"""Between two checks that our own entries are still there."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Own:
    """An entry of ours, as it should be and as it was last written."""

    wanted: ServiceInstance
    written: ServiceInstance | None = None
    descriptor: int = -1


class FileRegistry:
    """Looks only while somebody watches; checks its own entries only while it has some."""

    def __init__(self, directory: Path, *, look_s: float = LOOK_S, upkeep_s: float = UPKEEP_S) -> None:
        """
        Raises:
            ConfigError: the directory cannot be made, or is not ours alone.
        """
        self._directory = directory
        self._look_s = look_s
        self._upkeep_s = upkeep_s
        self._watched = Watched()
        self._background = Background()
        self._reader = EntryReader(directory)
        self._registered: dict[str, _Own] = {}
        self._is_fresh = True
        self._is_closed = False
        try:
            with open_directory(directory):
                pass
        except OSError as err:
            raise ConfigError(f"registry directory {str(directory)!r} cannot be used: {err.strerror}") from err

    async def register(self, instance: ServiceInstance) -> None:
        check_instance(instance)
        if self._is_closed:
            raise UnavailableError("the registry is closed")
        self._registered.setdefault(instance.id, _Own(instance)).wanted = instance
        self._try(self._keep_registered)
        self._background.start("upkeep", lambda: forever("upkeep", self._upkeep))

    async def deregister(self, instance_id: str) -> None:
        own = self._registered.pop(instance_id, None)
        if own is not None:
            self._try(lambda: self._remove(instance_id, own.descriptor))
            close_entry(own.descriptor)

    async def watch(self) -> AsyncIterator[frozenset[ServiceInstance]]:
        if not self._is_closed:
            self._try(self._look)
        self._background.start("look", lambda: forever("look", self._look_again))
        async for seen in self._watched.watch():
            yield seen

    @property
    def is_fresh(self) -> bool:
        return self._is_fresh

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await self._background.aclose()
        self._watched.close()
        for instance_id in list(self._registered):
            await self.deregister(instance_id)
        self._reader.close()

    async def _upkeep(self) -> None:
        await asyncio.sleep(self._upkeep_s)
        if self._registered:
            self._try(self._keep_registered)

    async def _look_again(self) -> None:
        await asyncio.sleep(self._look_s)
        self._try(self._look)

    def _look(self) -> None:
        self._watched.publish(self._reader.look())

    def _keep_registered(self) -> None:
        with open_directory(self._directory) as directory:
            for instance_id, own in self._registered.items():
                if own.written is own.wanted and is_in_place(directory, instance_id, own.descriptor):
                    continue
                if own.written is own.wanted:
                    log.warning("registry entry of %s was taken away, put back", instance_id)
                before, own.descriptor = own.descriptor, write_entry(directory, own.wanted)
                own.written = own.wanted
                # Only now: while the old file is in place it is locked, so no reader takes this instance for dead.
                close_entry(before)

    def _remove(self, instance_id: str, descriptor: int) -> None:
        with open_directory(self._directory) as directory:
            remove_entry(directory, instance_id, descriptor)

    def _try(self, work: Callable[[], None]) -> None:
        """Do file work now. When the directory is away that is said once, and the next look or upkeep tries again."""
        try:
            work()
        except (OSError, ConfigError, UnavailableError) as err:
            if self._is_fresh:
                log.warning("registry directory %s is away: %s", self._directory, err)
            self._is_fresh = False
        else:
            self._is_fresh = True


@asynccontextmanager
async def open_file_registry(url: FileUrl) -> AsyncIterator[Registry]:
    registry = FileRegistry(url.directory)
    try:
        yield registry
    finally:
        await registry.aclose()
