"""An arena's file as its owner holds it: locked for life, reserved segment by segment, mapped once."""

import contextlib
import fcntl
import mmap
import os
import secrets
import weakref
from pathlib import Path

import numpy as np

from tensorline.shm.layout import (
    ARENA_ID_BYTES,
    MADV_POPULATE_WRITE,
    arena_name,
    populate,
    temporary_name,
)

__all__ = ["ArenaFile"]


class ArenaFile:
    """A file of 0 bytes under a temporary name, mapped up to `limit`; `extend` makes the mapping usable piece by piece.

    The mapping reaches beyond the end of the file, where a touch is SIGBUS: use only what `extend` has reserved. So the
    owner has one address range for all segments, and a block may lie across two of them.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.id = secrets.token_bytes(ARENA_ID_BYTES)
        self._directory = directory
        self._name = temporary_name()
        self._lock = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.is_open = True
        """False once closed, and in a forked child: it shares the memory and must not touch it."""
        _files.add(self)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # mmap keeps a duplicate of its descriptor, which a forked child cannot close and which would keep the lock.
            # The lock belongs to the open file: map through another one.
            descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.ftruncate(descriptor, limit)  # Python maps no further than the file reaches, the kernel does
                self.memory = mmap.mmap(descriptor, limit)
                os.ftruncate(descriptor, 0)
            finally:
                os.close(descriptor)
            with contextlib.suppress(OSError, AttributeError):
                self.memory.madvise(mmap.MADV_DONTDUMP)  # clients' tensors do not belong in a core file
        except BaseException:
            self.close()
            raise

    @property
    def _path(self) -> Path:
        return self._directory / self._name

    def extend(self, start: int, length: int) -> None:
        """Reserve `length` bytes at `start`, the present end of the file, and map their pages. Blocks.

        Raises:
            OSError: no space; the file is as before.
        """
        os.posix_fallocate(self._lock, start, length)
        if not populate(self.memory, MADV_POPULATE_WRITE, start, length):
            np.frombuffer(self.memory, np.uint8)[start : start + length : mmap.PAGESIZE] = 0

    def publish(self) -> None:
        """Rename into place: from here on peers may map it.

        Raises:
            FileNotFoundError: a janitor took the file for a dead start's, in the instant before it was locked.
        """
        name = arena_name(self.id)
        os.rename(self._path, self._directory / name)
        self._name = name

    def close(self) -> None:
        """Unlink and unlock. The mapping goes with its last view: closing it under one is an error in Python."""
        if self.is_open:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self.abandon()

    def abandon(self) -> None:
        """Close the descriptor alone: a forked child must not keep the lock, nor unlock what its parent holds too."""
        if self.is_open:
            self.is_open = False
            os.close(self._lock)


_files: "weakref.WeakSet[ArenaFile]" = weakref.WeakSet()


def _abandon_all() -> None:
    for file in list(_files):
        file.abandon()


os.register_at_fork(after_in_child=_abandon_all)
