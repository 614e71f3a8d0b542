"""The registry directory of one host: entry files that are also locks.

An entry is `<id>.json`, written under a temporary name, locked (`flock`), then renamed into place; its owner keeps the
descriptor, and with it the lock, for as long as the entry stands. So an entry whose lock is free has no owner, whatever
became of it: never PIDs, which zombies, re-use and namespaces make lie. Contents and lock are one inode, so a reader
cannot pair the one with another's.

All calls here block, each for a handful of system calls on a local directory: short enough for the event loop.
"""

import errno
import fcntl
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tensorline.discovery.instance import encode_instance
from tensorline.discovery.registry import ServiceInstance
from tensorline.errors import ConfigError, UnavailableError

__all__ = [
    "SUFFIX",
    "TEMPORARY",
    "close_entry",
    "is_free",
    "is_in_place",
    "open_directory",
    "open_entry",
    "remove_dead",
    "remove_entry",
    "write_entry",
]

SUFFIX = ".json"
TEMPORARY = ".tmp"
ATTEMPTS = 5
NOT_OURS = frozenset({errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.ENODEV, errno.EISDIR})
"""What opening a file that is none of ours fails with; anything else is trouble of the directory."""

log = logging.getLogger(__name__)

_descriptors: set[int] = set()
"""Open here. A forked child shares our locks: it closes them, or an owner that died would look alive while it runs."""


def _close_in_child() -> None:
    for descriptor in _descriptors:
        with suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def open_directory(path: Path) -> Iterator[int]:
    """A descriptor of the directory, made 0700 if it is not there.

    Raises:
        ConfigError: it is a link, another user's, or open to others.
        OSError: it cannot be made or opened.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise ConfigError(f"registry directory {str(path)!r} is a link or a file") from None
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"registry directory {str(path)!r} has mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}; "
                f"wanted are 0700 and {os.geteuid()}"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def write_entry(directory: int, instance: ServiceInstance) -> int:
    """Put the entry in place, over an older one of the same id.

    Returns:
        The descriptor that holds its lock: to `close_entry`, after `remove_entry` unless the entry was replaced.
    Raises:
        OSError, UnavailableError: it is not in place.
    """
    raw = encode_instance(instance)
    for _ in range(ATTEMPTS):
        temporary = f".{secrets.token_hex(8)}{TEMPORARY}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = _keep(os.open(temporary, flags, 0o600, dir_fd=directory))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            written = os.write(descriptor, raw)
            if written != len(raw):
                raise OSError(errno.ENOSPC, "entry cut short")
            os.rename(temporary, _file_name(instance.id), src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException as err:
            close_entry(descriptor)
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=directory)
            # Before our lock was on it, somebody's sweep may have taken the file for a crashed writer's.
            if not isinstance(err, BlockingIOError | FileNotFoundError):
                raise
        else:
            return descriptor
    raise UnavailableError("the registry directory does not keep its files")


def is_in_place(directory: int, instance_id: str, descriptor: int) -> bool:
    """The name still leads to the file that we hold."""
    return descriptor in _descriptors and _is_named(directory, _file_name(instance_id), os.fstat(descriptor))


def remove_entry(directory: int, instance_id: str, descriptor: int) -> None:
    """Take the entry away, if it is the one that we hold. Before it is unlocked: no reader sees it free."""
    if is_in_place(directory, instance_id, descriptor):
        os.unlink(_file_name(instance_id), dir_fd=directory)


def close_entry(descriptor: int) -> None:
    """Give the lock up. Nothing happens in a forked child, which has closed it."""
    if descriptor in _descriptors:
        _descriptors.discard(descriptor)
        os.close(descriptor)


def _file_name(instance_id: str) -> str:
    return f"{instance_id}{SUFFIX}"


def _keep(descriptor: int) -> int:
    _descriptors.add(descriptor)
    return descriptor


def open_entry(directory: int, name: str) -> int:
    """
    Raises:
        ConfigError: not a plain file of ours that nobody else may touch.
    """
    try:
        # Without O_NONBLOCK a FIFO would hold the loop.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError as err:
        if err.errno in NOT_OURS:
            raise ConfigError("not a plain file that can be read") from None
        raise
    status = os.fstat(descriptor)
    if (
        not stat.S_ISREG(status.st_mode)
        or status.st_uid != os.geteuid()
        or status.st_mode & 0o077
        or status.st_nlink > 1
    ):
        os.close(descriptor)
        raise ConfigError("not a plain file of this user's with mode 0600 and one name")
    return _keep(descriptor)


def is_free(descriptor: int) -> bool:
    """Nobody holds its lock. Shared, so that two readers do not look like owners to one another."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_dead(directory: int, name: str, descriptor: int) -> None:
    """Unlink a file whose lock we have just got, if the name still leads to it; errors leave it to the next reader."""
    try:
        if _is_named(directory, name, os.fstat(descriptor)):
            os.unlink(name, dir_fd=directory)
    except OSError as err:
        log.warning("dead entry %r not removed: %s", name, err)


def _is_named(directory: int, name: str, status: os.stat_result) -> bool:
    try:
        named = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (status.st_dev, status.st_ino)
