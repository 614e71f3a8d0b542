"""The directory that the arenas of one mesh share, and the room that there is for them."""

import contextlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tensorline.errors import ConfigError
from tensorline.shm.layout import temporary_name

__all__ = ["ArenaDirectory", "memory_limit", "open_directory"]

NONCE_NAME: Final = "nonce"
NONCE_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class ArenaDirectory:
    """A directory that only this user can enter. Processes with equal nonces can read each other's arenas."""

    path: Path
    nonce: bytes

    def can_read(self, nonce: bytes) -> bool:
        """The process that announced `nonce` is co-located: handles can pass between it and us."""
        return nonce == self.nonce

    def check_space(self, arena_bytes: int) -> None:
        """Refuse at the start what would be a full tmpfs, or the end of the container, later.

        Raises:
            ConfigError: the file system, or the memory limit of the control group, is smaller; it names both numbers.
        """
        space = os.statvfs(self.path)
        free = space.f_bavail * space.f_frsize
        if arena_bytes > free:
            raise ConfigError(f"an arena of {_bytes(arena_bytes)} does not fit: {self.path} has {_bytes(free)} free")
        limit = memory_limit()
        if limit is not None and arena_bytes > limit:
            raise ConfigError(
                f"an arena of {_bytes(arena_bytes)} does not fit: the memory limit of this container is {_bytes(limit)}"
            )


def open_directory(path: Path) -> ArenaDirectory:
    """The mesh's directory; made, with its nonce, by the first process that asks.

    Raises:
        ConfigError: it cannot be made, is no directory or a symbolic link, or others own it or can enter it. The text
            names the path: it is for the operator who starts the process.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check_private(path, os.fstat(descriptor))
            return ArenaDirectory(path, _read_nonce(descriptor) or _make_nonce(descriptor))
        finally:
            os.close(descriptor)
    except OSError as err:
        raise ConfigError(f"arena directory {path} cannot be used: {err.strerror}") from err


def _check_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise ConfigError(f"arena directory {path} belongs to user {status.st_uid}, not to {os.geteuid()}")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"arena directory {path} has mode {stat.S_IMODE(status.st_mode):04o}, it must be 0700")


def _read_nonce(directory: int) -> bytes | None:
    try:
        descriptor = os.open(NONCE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    try:
        nonce = os.read(descriptor, NONCE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(nonce) != NONCE_BYTES:
        raise ConfigError(
            f"the arena directory's nonce has {len(nonce)} bytes, not {NONCE_BYTES}: remove the directory"
        )
    return nonce


def _make_nonce(directory: int) -> bytes:
    """Written under a temporary name and linked, so that nobody reads half of one and only the first one counts."""
    nonce, temporary = secrets.token_bytes(NONCE_BYTES), temporary_name()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        os.write(descriptor, nonce)
    finally:
        os.close(descriptor)
    try:
        os.link(temporary, NONCE_NAME, src_dir_fd=directory, dst_dir_fd=directory)
    except FileExistsError:
        return _read_nonce(directory) or _make_nonce(directory)
    finally:
        os.unlink(temporary, dir_fd=directory)
    return nonce


def memory_limit(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Smallest memory limit in bytes of the control groups that this process is in; None where there is none.

    Source: cgroup-v2 `memory.max`; version 1 `memory.limit_in_bytes`, which says "none" with a number near 2^63.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return None
    limits: list[int] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            limits += _limits(root, group, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(root / "memory", group, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits(root: Path, group: str, name: str) -> list[int]:
    """Of the group and all above it. Inside a container the path may be the host's: then only the root exists."""
    found: list[int] = []
    below = Path(group.lstrip("/"))
    for folder in (below, *below.parents):
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            limit = int((root / folder / name).read_text())
            if limit < 1 << 60:
                found.append(limit)
    return found


def _bytes(count: int) -> str:
    return f"{count} bytes ({count / (1 << 20):.1f} MiB)"
