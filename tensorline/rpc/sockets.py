"""Unix sockets of the mesh: one path per process, never taken over, cleared away when their owner died."""

import contextlib
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from tensorline.errors import ConfigError

__all__ = ["claim_socket", "sweep_sockets"]

log = logging.getLogger(__name__)

PATH_LIMIT = 107
"""Bytes of a socket path that the kernel takes."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}\.sock")


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
    lock = path.with_suffix(".lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another process serves at {path}") from error
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        yield path
    finally:
        for leftover in (path, lock):
            with contextlib.suppress(FileNotFoundError):
                leftover.unlink()
        os.close(descriptor)


def sweep_sockets(directory: Path) -> list[str]:
    """Remove sockets whose owner holds no lock any more; their names. A live one, or a file not ours, stays."""
    removed = []
    try:
        names = [name for name in os.listdir(directory) if _NAME.fullmatch(name)]
    except OSError:
        return []
    for name in names:
        path = directory / name
        lock = path.with_suffix(".lock")
        try:
            status = path.lstat()
            if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.getuid():
                continue
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_ino == os.stat(lock).st_ino:
                    path.unlink(missing_ok=True)
                    lock.unlink(missing_ok=True)
                    removed.append(name)
            finally:
                os.close(descriptor)
        except BlockingIOError:
            continue  # alive
        except OSError as error:
            log.debug("socket not swept", extra={"cause": str(error)})
    return removed
