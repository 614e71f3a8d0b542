"""Unix sockets of the mesh: one path per process, never taken over, cleared away when their owner died."""

import contextlib
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from tensorline.errors import ConfigError

__all__ = ["claim_socket", "sweep_sockets"]

log = logging.getLogger(__name__)

PATH_LIMIT = 107
"""Bytes of a socket path that the kernel takes."""

LOCK_AGE_S = 5.0
"""A lock file that has no socket yet is left to its maker for so long."""

_NAME = re.compile(r"([A-Za-z0-9._-]{1,80})\.(?:sock|lock)")
_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


@contextlib.contextmanager
def claim_socket(directory: Path, name: str) -> Iterator[Path]:
    """A path to bind `<name>.sock` at, held by a lock file for as long as the block lasts, then removed.

    Binding replaces a socket file without a word, so that the lock has to be what keeps a second process off.

    Raises:
        ConfigError: another process holds it, or the path is too long for a socket.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{name}.sock"
    if len(os.fsencode(path)) > PATH_LIMIT:
        raise ConfigError(
            f"the socket path has {len(os.fsencode(path))} bytes, at most {PATH_LIMIT} can be bound: {path}"
        )
    lock = directory / f"{name}.lock"
    try:
        descriptor = _take_lock(lock)
    except BlockingIOError as error:
        raise ConfigError(f"another process serves at {path}") from error
    _held.add(descriptor)
    try:
        path.unlink(missing_ok=True)
        yield path
    finally:
        if descriptor in _held:  # not in a forked child, whose parent serves on
            path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
            _held.discard(descriptor)
            os.close(descriptor)


def _take_lock(lock: Path) -> int:
    """A descriptor that holds `lock` until it is closed.

    Raises:
        BlockingIOError: somebody else holds it.
    """
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(lock, follow_symlinks=False)):
                return descriptor
        except FileNotFoundError:
            pass  # swept between the two calls: another file has to be locked
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _let_go_in_child() -> None:
    """A forked child shares the locks, and would keep them when its parent is dead."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def sweep_sockets(directory: Path) -> list[str]:
    """Remove sockets whose owner holds no lock any more; their names. A live one, or a file not ours, stays."""
    removed = []
    try:
        names = {found[1] for found in map(_NAME.fullmatch, os.listdir(directory)) if found}
    except OSError:
        return []
    for name in sorted(names):
        path, lock = directory / f"{name}.sock", directory / f"{name}.lock"
        try:
            if not _may_sweep(path, lock):
                continue
            descriptor = _take_lock(lock)
            try:
                path.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
                removed.append(path.name)
            finally:
                os.close(descriptor)
        except BlockingIOError:
            continue  # alive
        except OSError as error:
            log.debug("socket not swept", extra={"cause": str(error)})
    return removed


def _may_sweep(path: Path, lock: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:  # a process that died before it bound, or one that is about to
        status = lock.lstat()
        is_ours = stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > LOCK_AGE_S
    else:
        is_ours = stat.S_ISSOCK(status.st_mode)
    return is_ours and status.st_uid == os.getuid()
