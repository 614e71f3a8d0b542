"""A client's shared-memory object, opened by its name: read and written through a descriptor, never mapped.

A client can shrink its object at any time. A process that had it mapped would die of SIGBUS; a read through a
descriptor comes back short, and that is a clean error.
"""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tensorline.errors import (
    InternalError,
    InvalidTensorError,
    NotFoundError,
    ResourceExhaustedError,
    TensorlineError,
)

__all__ = ["CLIENT_MEMORY", "Region", "RegionSpec", "Window", "no_descriptors", "open_object", "reopen_object"]

CLIENT_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is, not a file of ours
KEY_LIMIT: Final = 255
RESERVED_PREFIX: Final = "triton_python_backend_shm_region_"
OPEN_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """A region as its client registered it; offset and size in bytes of the object."""

    name: str
    key: str
    offset: int
    byte_size: int


def open_object(spec: RegionSpec, private: Path) -> int:
    """A descriptor of the object that `spec.key` names, big enough for the region. The caller closes it.

    Args:
        private: A directory whose files no client may name: the mesh's own.
    Raises:
        InvalidTensorError: the key is none, the object is no plain shared memory of this user, or the region does not
            fit into it.
        InternalError: there is no such object; Triton's status for it.
        ResourceExhaustedError: the process has no descriptor left.
    Source: protocol.md §7.1, robustness.md §4.3.
    """
    name = _object_name(spec.key)
    refusal = f"failed to register shared memory region '{spec.name}'"
    if spec.byte_size <= 0:
        raise InvalidTensorError(f"{refusal}: byte size must be at least 1, got {spec.byte_size}")
    try:
        folder = os.open(CLIENT_MEMORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # A container may have the mesh's directory mounted in this very place.
            if private.exists() and os.path.samestat(os.fstat(folder), private.stat()):
                raise _not_opened(spec.key)
            # Looked at before it is opened: opening a device can have effects.
            _check_object(spec.key, os.stat(name, dir_fd=folder, follow_symlinks=False))
            descriptor = os.open(name, OPEN_FLAGS, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise (no_descriptors(error) if error.errno in NO_DESCRIPTORS else _not_opened(spec.key)) from error
    try:
        status = os.fstat(descriptor)
        _check_object(spec.key, status)
        if spec.offset < 0 or spec.offset + spec.byte_size > status.st_size:
            raise InvalidTensorError(
                f"{refusal}: invalid args: offset {spec.offset} and byte size {spec.byte_size} reach beyond the "
                f"{status.st_size} bytes of '{spec.key}'"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def reopen_object(spec: RegionSpec, identity: tuple[int, int], holder: tuple[int, int]) -> int:
    """A second descriptor of an object that another worker has registered.

    Args:
        identity: Device and inode of the object: its name may lead to another by now.
        holder: Process and descriptor that have it open, for an object whose client has taken its name away.
    Raises:
        NotFoundError: it is gone, and nobody has it open.
        ResourceExhaustedError: the process has no descriptor left.
    """
    process, descriptor = holder
    for path, flags in (
        (CLIENT_MEMORY / _object_name(spec.key), OPEN_FLAGS),
        (Path(f"/proc/{process}/fd/{descriptor}"), OPEN_FLAGS & ~os.O_NOFOLLOW),
    ):
        try:
            found = os.open(path, flags)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                raise no_descriptors(error) from error
            continue
        status = os.fstat(found)
        if (status.st_dev, status.st_ino) == identity:
            return found
        os.close(found)
    raise NotFoundError(f"Unable to find shared memory region: '{spec.name}': its object '{spec.key}' is gone")


def _object_name(key: str) -> str:
    """Source: protocol.md §7.1 (3): slashes before the name mean nothing."""
    name = key.lstrip("/")
    if name.startswith(RESERVED_PREFIX):
        raise InvalidTensorError(f"shm key '{key[:KEY_LIMIT]}' contains the reserved prefix '{RESERVED_PREFIX}'")
    if name in ("", ".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > KEY_LIMIT:
        raise InvalidTensorError(
            f"invalid shm key '{key[:KEY_LIMIT]}': it must be the name of a shared memory object, 1 to {KEY_LIMIT} "
            "bytes without '/' but in front"
        )
    return name


def _check_object(key: str, status: os.stat_result) -> None:
    is_ours = status.st_uid == os.geteuid() or status.st_mode & 0o006 == 0o006
    if not stat.S_ISREG(status.st_mode) or not is_ours or status.st_nlink != 1:
        # A second link could be a file of the mesh, or of anybody, under another name.
        raise InvalidTensorError(
            f"shm key '{key}' is no shared memory that can be used: it must be one plain object, of this server's "
            "user or open to everybody"
        )


def _not_opened(key: str) -> TensorlineError:
    return InternalError(f"Unable to open shared memory region: '{key}'")


def no_descriptors(error: OSError) -> TensorlineError:
    """What a client is told when the process can open nothing more."""
    return ResourceExhaustedError(f"too many shared memory regions are open at this gateway: {error.strerror}")


class Region:
    """An open object and the part of it that was registered. Callable from any thread until `close`."""

    __slots__ = ("_descriptor", "spec")

    def __init__(self, spec: RegionSpec, descriptor: int) -> None:
        self.spec = spec
        self._descriptor = descriptor

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def window(self, offset: int, byte_size: int) -> "Window":
        """A part of the region, whatever integers the client wrote.

        Args:
            offset: Bytes from the region's begin.
        Raises:
            InvalidTensorError: it is not within the region.
        Source: protocol.md §7.2 (2).
        """
        whole = self.spec.byte_size
        if not 0 <= offset < whole:
            raise InvalidTensorError(
                f"Invalid offset for shared memory region: '{self.spec.name}': got {offset}, it has {whole} bytes"
            )
        if not 0 < byte_size <= whole - offset:
            raise InvalidTensorError(
                f"Invalid offset + byte size for shared memory region: '{self.spec.name}': got {offset} + {byte_size}, "
                f"it has {whole} bytes"
            )
        return Window(self, self.spec.offset + offset, byte_size)

    def close(self) -> None:
        """The object stays: its client removes it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a region that a tensor lies in or goes to; the offset in bytes of the object."""

    region: Region
    offset: int
    byte_size: int

    def read_into(self, target: memoryview) -> None:
        """Fill `target`, which is as long as the window.

        Raises:
            InvalidTensorError: the client made its object shorter.
        """
        at, end, descriptor = self.offset, self.offset + self.byte_size, self.region.descriptor
        try:
            while at < end:
                count = os.preadv(descriptor, [target[at - self.offset :]], at)
                if count == 0:
                    raise self._too_short()
                at += count
        except OSError as error:
            raise InvalidTensorError(
                f"shared memory region '{self.region.spec.name}' cannot be read: {error.strerror}"
            ) from error

    def write_from(self, data: bytes | memoryview) -> None:
        """Write `data`, no longer than the window, to its begin.

        Raises:
            InvalidTensorError: the client made its object shorter.
            ResourceExhaustedError: the host has no memory for it.
        """
        descriptor, view, done = self.region.descriptor, memoryview(data), 0
        try:
            # A write would make it longer again, which is not ours to do.
            if os.fstat(descriptor).st_size < self.offset + len(view):
                raise self._too_short()
            while done < len(view):
                done += os.pwritev(descriptor, [view[done:]], self.offset + done)
        except OSError as error:
            text = f"shared memory region '{self.region.spec.name}' cannot be written: {error.strerror}"
            kind = ResourceExhaustedError if error.errno in NO_SPACE else InvalidTensorError
            raise kind(text) from error

    def _too_short(self) -> InvalidTensorError:
        spec = self.region.spec
        return InvalidTensorError(
            f"shared memory region '{spec.name}' was registered with {spec.byte_size} bytes at offset {spec.offset} of "
            f"'{spec.key}', which has been made shorter since"
        )
