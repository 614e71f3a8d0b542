"""Removes the arenas of processes that died: whoever lives has its file locked."""

import asyncio
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tensorline.shm.directory import ArenaDirectory
from tensorline.shm.layout import ARENA_NAME, TEMPORARY_NAME

__all__ = ["run_janitor", "sweep"]

TEMPORARY_AGE_S: Final = 5.0
"""A start is in its temporary name for milliseconds; the nonce, which nobody locks, too."""

log = logging.getLogger(__name__)


def sweep(directory: ArenaDirectory) -> list[str]:
    """Remove the arenas, and older temporary files, that nobody has locked; their names. Never raises OSError."""
    removed: list[str] = []
    try:
        names = os.listdir(directory.path)
    except OSError as err:
        log.warning("arena directory cannot be swept: %s", err)
        return removed
    for name in names:
        if ARENA_NAME.fullmatch(name) or TEMPORARY_NAME.fullmatch(name):
            try:
                if _remove_abandoned(directory.path / name):
                    removed.append(name)
            except FileNotFoundError:
                pass  # its owner or another janitor was first
            except OSError as err:
                log.warning("abandoned arena cannot be removed: %s", err)
    return removed


async def run_janitor(directory: ArenaDirectory, interval_s: float = 2.0) -> None:
    """Sweep now and every `interval_s` until cancelled: a dead process's arena is gone within 5 s."""
    while True:
        removed = await asyncio.to_thread(sweep, directory)
        if removed:
            log.info("removed %d abandoned arenas", len(removed))
        await asyncio.sleep(interval_s)


def _remove_abandoned(path: Path) -> bool:
    with _opened(path) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return False
        # By the wall clock, which may jump: a start that loses its temporary file makes another.
        if TEMPORARY_NAME.fullmatch(path.name) and time.time() - status.st_mtime < TEMPORARY_AGE_S:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not os.path.samestat(status, os.stat(path, follow_symlinks=False)):
            return False
        os.unlink(path)
        return True


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    # Without O_NONBLOCK a pipe of that name would hold us until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
