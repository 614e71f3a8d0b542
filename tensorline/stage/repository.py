"""What a stage does about its model repositories: at the start, when a gateway asks, and when they change."""

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorline.config import Footprint, ModelConfig, RepositoryEntry, find_entry, footprint, model_paths, scan
from tensorline.config.override import load_error, refused, write_files
from tensorline.config.values import config_to_message
from tensorline.config.watch import RepositoryWatch
from tensorline.errors import ConfigError, InternalError, TensorlineError, UnavailableError
from tensorline.rpc.frames import LoadOrder
from tensorline.settings import EXPLICIT
from tensorline.stage.host import ModelHost
from tensorline.stage.loading import reason_of

__all__ = ["StageRepository"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a model was loaded from."""

    config: ModelConfig
    versions: tuple[int, ...]
    seen: Footprint
    """Of its directory in the repository, also where files took the place of that."""
    override: str = ""
    folder: Path | None = None
    """Holds the files that took the directory's place."""


class StageRepository:
    """Args:
    paths: The repositories.
    mode: "none", "poll" or "explicit".
    names: Models to load at the start in mode explicit; "*" is all of them.
    """

    def __init__(self, host: ModelHost, paths: Sequence[Path], mode: str = "none", names: Iterable[str] = ()) -> None:
        self._host = host
        self._paths = list(paths)
        self._mode = mode
        self._names = frozenset(names)
        self._origins: dict[str, _Origin] = {}
        self._watch = RepositoryWatch(self._paths)
        self._loads: dict[tuple[str, str], asyncio.Task[bool]] = {}
        self._folders: set[Path] = set()
        self._cleaning: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load what the mode says. A model that fails is UNAVAILABLE with its reason.

        Raises:
            ConfigError: a repository cannot be read.
        """
        if self._mode == "poll":
            await self._watch.begin()
        seen, entries = await asyncio.to_thread(self._look)
        if self._mode == EXPLICIT and "*" not in self._names:
            entries = [entry for entry in entries if entry.name in self._names]
        mine = [entry for entry in entries if self._is_mine(entry)]
        self._host.expect(mine)
        for entry in entries:
            if entry.error is not None:
                self._host.refuse(entry.name, str(entry.error))
        # A gateway's order for one of them joins its load.
        keys = {(entry.name, ""): entry for entry in mine}
        loads = [self._loads.get(key) or self._begin(key, self._load_first(entry, seen)) for key, entry in keys.items()]
        for each in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(each, BaseException) and not isinstance(each, TensorlineError):
                raise each

    async def _load_first(self, entry: RepositoryEntry, seen: Mapping[str, Footprint]) -> bool:
        failed = await self._load_entry(entry, seen.get(entry.name, Footprint()), is_partial=True)
        if failed:
            raise ConfigError(_failed(entry.name, failed))
        return True

    def _begin(self, key: tuple[str, str], work: Coroutine[object, object, bool]) -> "asyncio.Task[bool]":
        def ended(task: "asyncio.Task[bool]") -> None:
            self._loads.pop(key, None)
            if not task.cancelled():
                task.exception()  # told to whoever waits; that may be nobody

        task = self._loads[key] = asyncio.create_task(work)
        task.add_done_callback(ended)
        return task

    def _is_mine(self, entry: RepositoryEntry) -> bool:
        return entry.config is not None and entry.config.backend in self._host.backends

    async def load(self, order: LoadOrder) -> bool:
        """Load a model beside what serves under its name, or again if it has changed. Equal orders join.

        Returns:
            Whether it is a model of this stage: one of its repositories or of the order, and of its backends.
        Raises:
            UnavailableError: the mode is another one.
            InternalError: the model's configuration cannot be used.
            ConfigError: a version could not be loaded. What served before goes on.
        """
        if self._mode != EXPLICIT:
            raise _not_explicit(self._mode)
        key = order.model, order.override
        task = self._loads.get(key)
        if task is None:
            task = self._begin(key, self._load(order))
        return await asyncio.shield(task)

    async def _load(self, order: LoadOrder) -> bool:
        with self._folder_of(order) as folder:
            try:
                entry, seen = await asyncio.to_thread(self._find, order, folder)
            except OSError as error:
                raise InternalError(f"{refused(order.model)}: {reason_of(error)}") from error
            except ConfigError as error:  # its text has the place
                log.error("model repositories not read", extra={"cause": str(error)})
                raise InternalError(f"{refused(order.model)}: a repository cannot be read") from error
            if entry is None:
                return bool(self._host.ready_versions(order.model)) and not order.override
            if entry.error is not None:
                if not order.override:
                    self._host.refuse(order.model, str(entry.error))
                raise load_error(order.model, entry.error)
            if not self._is_mine(entry):
                return False
            failed = await self._load_entry(entry, seen, override=order.override, folder=folder)
            if failed:
                raise ConfigError(_failed(order.model, failed))
        return True

    @contextlib.contextmanager
    def _folder_of(self, order: LoadOrder) -> Iterator[Path | None]:
        """For the files of an order; removed with the block unless the model came to be loaded from it."""
        if not order.files:
            yield None
            return
        folder = Path(tempfile.mkdtemp(prefix="tensorline-model-"))
        self._folders.add(folder)
        try:
            yield folder
        finally:
            origin = self._origins.get(order.model)
            if origin is None or origin.folder != folder:
                self._remove(folder)

    def _look(self) -> tuple[dict[str, Footprint], list[RepositoryEntry]]:
        # As in `_find`: first what the directories look like, so that what changes meanwhile is another next time.
        seen = {name: footprint(paths[0]) for name, paths in model_paths(self._paths).items() if len(paths) == 1}
        return seen, scan(self._paths)

    def _find(self, order: LoadOrder, folder: Path | None) -> tuple[RepositoryEntry | None, Footprint]:
        seen = self._footprint(order.model)
        if folder is None:
            return find_entry(self._paths, order.model, order.config), seen
        write_files(folder / order.model, order.files)
        return find_entry([folder], order.model, order.config), seen

    def _footprint(self, name: str) -> Footprint:
        paths = model_paths(self._paths).get(name, ())
        return footprint(paths[0]) if len(paths) == 1 else Footprint()

    async def _load_entry(
        self,
        entry: RepositoryEntry,
        seen: Footprint,
        *,
        override: str = "",
        folder: Path | None = None,
        is_partial: bool = False,
    ) -> dict[int, Exception]:
        """Load what has changed since the last time; why versions could not be.

        Args:
            seen: What the model's directory looked like before `entry` was read from it.
        """
        config = entry.config
        if config is None:
            raise AssertionError("an entry with an error is refused before")
        name = entry.name
        origin = self._origins.get(name)
        # A client's override stays in force until the directory changes.
        is_same = origin is not None and origin.seen == seen and override in ("", origin.override)
        if is_same and origin is not None and self._host.ready_versions(name) == list(origin.versions):
            return {}
        keeps = _unchanged(origin, config, seen, override) if folder is None else []
        failed = await self._host.load(entry, keeps=keeps, is_partial=is_partial, override=override)
        if not failed or (is_partial and self._host.ready_versions(name)):
            self._origins[name] = _Origin(config, entry.versions, seen, override, folder)
            if origin is not None and origin.folder is not None:
                self._remove_later(name, origin.folder)
        return failed

    async def unload(self, name: str) -> None:
        """What `name` has in flight finishes; it takes nothing new from now on.

        Raises:
            UnavailableError: the mode is another one.
        """
        if self._mode != EXPLICIT:
            raise _not_explicit(self._mode)
        await self._host.unload(name)
        origin = self._origins.pop(name, None)
        if origin is not None and origin.folder is not None:
            self._remove_later(name, origin.folder)

    def _remove_later(self, name: str, folder: Path) -> None:
        async def remove() -> None:
            await self._host.wait_left(name)
            self._remove(folder)

        task = asyncio.create_task(remove())
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    def _remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._folders.discard(folder)

    async def watch(self, every_s: float) -> None:
        """Follow what changes in the repositories, until cancelled."""
        while self._mode == "poll":
            await asyncio.sleep(every_s)
            try:
                await self.follow()
            except ConfigError as error:  # a repository is away: what serves goes on
                log.error("model repositories not polled", extra={"cause": str(error)})
            except Exception:
                log.exception("model repositories not polled")
        await asyncio.Event().wait()

    async def follow(self) -> None:
        """Look at the repositories once, and load, load again and unload what has changed.

        Raises:
            ConfigError: a repository cannot be read.
        """
        await asyncio.gather(*map(self._follow_one, await self._watch.changed()))

    async def _follow_one(self, name: str) -> None:
        entry, seen = await asyncio.to_thread(self._find, LoadOrder(name), None)
        if entry is not None and entry.error is not None:
            self._host.refuse(name, str(entry.error))
        elif entry is not None and self._is_mine(entry):
            await self._load_entry(entry, seen)
        else:
            self._origins.pop(name, None)
            await self._host.forget(name)

    async def aclose(self) -> None:
        """Remove what clients' files were kept in. The host has ended before."""
        for task in (*self._loads.values(), *self._cleaning):
            task.cancel()
        await asyncio.gather(*self._loads.values(), *self._cleaning, return_exceptions=True)
        for folder in list(self._folders):
            self._remove(folder)


def _unchanged(origin: _Origin | None, config: ModelConfig, seen: Footprint, override: str) -> list[int]:
    """Versions that need not be loaded again: nothing that they were made of is another."""
    if origin is None or origin.folder is not None or origin.override != override or origin.seen.rest != seen.rest:
        return []
    if _without_policy(origin.config) != _without_policy(config):
        return []
    return [number for number, mark in seen.versions.items() if origin.seen.versions.get(number) == mark]


def _without_policy(config: ModelConfig) -> bytes:
    message = config_to_message(config)
    message.ClearField("version_policy")
    return message.SerializeToString(deterministic=True)


def _not_explicit(mode: str) -> TensorlineError:
    return UnavailableError(
        f"explicit model load / unload is not allowed at this stage, whose control mode is '{mode}'"
    )


def _failed(model: str, failed: Mapping[int, Exception]) -> str:
    parts = [
        f"version {version} is at UNAVAILABLE state: {_status(error)}: {reason_of(error)};\n"
        for version, error in sorted(failed.items())
    ]
    return f"load failed for model '{model}': {''.join(parts)}"


def _status(error: Exception) -> str:
    """As Triton writes it: "Invalid argument"."""
    status = error.status if isinstance(error, TensorlineError) else InternalError.status
    return status.name.replace("_", " ").capitalize()
