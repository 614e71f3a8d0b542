"""What is alive in the registry directory, look by look."""

import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tensorline.discovery.file_entries import (
    SUFFIX,
    TEMPORARY,
    close_entry,
    is_free,
    open_directory,
    open_entry,
    remove_dead,
)
from tensorline.discovery.instance import INSTANCE_ID, JSON_LIMIT, decode_instance
from tensorline.discovery.registry import ServiceInstance
from tensorline.errors import ConfigError

__all__ = ["EntryReader"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    instance: ServiceInstance
    descriptor: int
    listed_inode: int
    """As the listing says it: on some file systems not what `fstat` says."""


class EntryReader:
    """One reader of the directory: what is alive in it, look by look.

    It keeps each entry open. So an unchanged entry costs one system call; and an entry whose file somebody deleted but
    whose owner lives (the lock is held) stays, until its owner has put it back.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, _Known] = {}
        self._ignored: dict[str, tuple[int, int]] = {}
        self._temporary: frozenset[str] = frozenset()

    def look(self) -> frozenset[ServiceInstance]:
        """The instances whose owner lives; dead ones' entries are removed.

        Raises:
            OSError, ConfigError: the directory cannot be looked at; what was known stays known.
        """
        with open_directory(self._path) as directory:
            with os.scandir(directory) as entries:
                listed = {entry.name: entry for entry in entries}
            self._ignored = {name: mark for name, mark in self._ignored.items() if _mark(listed.get(name)) == mark}
            for name, entry in listed.items():
                known = self._known.get(name)
                is_read = known is not None and known.listed_inode == entry.inode()
                if not is_read and name not in self._ignored and not name.endswith(TEMPORARY):
                    self._read(directory, entry)
            for name, known in list(self._known.items()):
                if is_free(known.descriptor):
                    remove_dead(directory, name, known.descriptor)
                    close_entry(self._known.pop(name).descriptor)
            self._sweep(directory, frozenset(name for name in listed if name.endswith(TEMPORARY)))
        return frozenset(known.instance for known in self._known.values())

    def close(self) -> None:
        for known in self._known.values():
            close_entry(known.descriptor)
        self._known.clear()

    def _read(self, directory: int, entry: os.DirEntry[str]) -> None:
        try:
            descriptor = open_entry(directory, entry.name)
        except FileNotFoundError:
            return
        except ConfigError as err:
            self._ignore(entry, err)
            return
        try:
            instance = _parse(entry.name, descriptor)
        except ConfigError as err:
            close_entry(descriptor)
            self._ignore(entry, err)
            return
        if entry.name in self._known:
            close_entry(self._known[entry.name].descriptor)
        self._known[entry.name] = _Known(instance, descriptor, entry.inode())

    def _ignore(self, entry: os.DirEntry[str], err: ConfigError) -> None:
        mark = _mark(entry)
        if mark is not None:
            self._ignored[entry.name] = mark  # so it is said once, and read again when somebody mends it
            log.warning("file %r in the registry directory ignored: %s", entry.name[:256], err)

    def _sweep(self, directory: int, names: frozenset[str]) -> None:
        """Remove what writers that crashed left. A living writer is done within one look and the next."""
        for name in names & self._temporary:
            with suppress(OSError, ConfigError):
                descriptor = open_entry(directory, name)
                try:
                    if is_free(descriptor):
                        remove_dead(directory, name, descriptor)
                finally:
                    close_entry(descriptor)
        self._temporary = names


def _mark(entry: os.DirEntry[str] | None) -> tuple[int, int] | None:
    """Which file this is, and in which state."""
    with suppress(OSError):
        if entry is not None:
            status = entry.stat(follow_symlinks=False)
            return status.st_ino, status.st_mtime_ns
    return None


def _parse(name: str, descriptor: int) -> ServiceInstance:
    instance_id = name.removesuffix(SUFFIX)
    if instance_id == name or not INSTANCE_ID.fullmatch(instance_id):
        raise ConfigError(f"its name is not an id and {SUFFIX}")
    raw = os.pread(descriptor, JSON_LIMIT + 1, 0)
    if len(raw) > JSON_LIMIT:
        raise ConfigError(f"it is over {JSON_LIMIT} bytes")
    instance = decode_instance(raw)
    if instance.id != instance_id:
        raise ConfigError("its id is not that of its name")
    return instance
