"""The regions that clients have registered, one table for all workers of a gateway.

A client registers through whichever worker its connection reached, and uses the region through others. So the table is
a directory of the mesh: a file for each region, which every worker opens when it first needs it. Who uses a region has
its file locked (shared); Unregister takes the file's name away, and the last user, or whoever gets the lock once all
users are gone, removes it. A worker that dies loses its locks with its life.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tensorline.errors import AlreadyExistsError, InvalidTensorError, NotFoundError, ResourceExhaustedError
from tensorline.shm.directory import ArenaDirectory
from tensorline.shm.regions import Region, RegionSpec, no_descriptors, open_object, reopen_object

__all__ = ["OpenRegion", "RegionTable", "region_directory"]

NAME_LIMIT: Final = 1024
OWNER: Final = "owner"
NEW: Final = "new"
MAKING: Final = ".making-"
READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def region_directory(mesh: ArenaDirectory) -> Iterator[Path]:
    """An empty directory for a table, gone with the block: regions end with the gateway that they were registered at.

    What gateways that were killed have left is removed.
    """
    parent = mesh.path / "regions"
    parent.mkdir(mode=0o700, exist_ok=True)
    _sweep(parent)
    making = Path(tempfile.mkdtemp(prefix=MAKING, dir=parent))
    path = parent / making.name.removeprefix(MAKING)
    try:
        with open(making / OWNER, "wb", opener=functools.partial(os.open, mode=0o600)) as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            making.rename(path)  # now it may be swept, once nobody has that file locked
            yield path
    finally:
        for each in (making, path):
            shutil.rmtree(each, ignore_errors=True)


def _sweep(parent: Path) -> None:
    for path in parent.iterdir():
        with contextlib.suppress(OSError), (path / OWNER).open("rb") as owner:
            if not path.name.startswith(MAKING):
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


class RegionTable:
    """Callable from any thread. `take` and `give` are a few system calls on a tmpfs; the others may wait for a lock.

    Args:
        directory: Of `region_directory`; the other workers have the same.
        private: Directory whose files no client may name.
        limit: Regions at a time, all workers together. Each takes up to two descriptors in every worker.
    """

    def __init__(self, directory: Path, private: Path, limit: int) -> None:
        self._path = directory
        self._private = private
        self._limit = limit
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._entries: dict[str, OpenRegion] = {}
        self._is_closed = False

    def __enter__(self) -> "RegionTable":
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._is_closed = True
            for entry in self._entries.values():
                if not entry.uses:  # else its last user closes it
                    entry.close()
            self._entries.clear()
            os.close(self._directory)

    def register(self, spec: RegionSpec) -> None:
        """
        Raises:
            AlreadyExistsError: the name is taken; its region stays as it is.
            InvalidTensorError, InternalError: as `open_object`.
            ResourceExhaustedError: there are as many regions as may be.
        """
        if len(spec.name) > NAME_LIMIT:
            raise InvalidTensorError(
                f"shared memory region name '{spec.name[:64]}…' has {len(spec.name)} characters, at most {NAME_LIMIT} "
                "are allowed"
            )
        file = _file_name(spec.name)
        with self._exclusively():
            files = self._reaped()
            if any(each == file or each.startswith(file + ".") for each in files):
                raise AlreadyExistsError(f"shared memory region '{spec.name}' already in manager")
            if len(files) >= self._limit:
                raise ResourceExhaustedError(
                    f"{len(files)} shared memory regions are registered at this gateway, at most {self._limit} are "
                    "allowed"
                )
            region = Region(spec, open_object(spec, self._private))
            try:
                self._write(file, region)
                entry = OpenRegion(region, os.open(file, READ_FLAGS, dir_fd=self._directory))
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=self._directory)
                region.close()
                raise
            with self._lock:
                self._replace(spec.name, entry)

    def unregister(self, name: str) -> None:
        """Take the name away at once; the region itself goes with its last use. An unknown name is no error.

        Args:
            name: Empty: all of them.
        """
        with self._exclusively():
            files = [_file_name(name)] if name else [each for each in self._reaped() if "." not in each]
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    inode = os.stat(file, dir_fd=self._directory, follow_symlinks=False).st_ino
                    os.rename(file, f"{file}.{inode}", src_dir_fd=self._directory, dst_dir_fd=self._directory)
            self._reaped()
        self.forget_unregistered()

    def status(self, name: str) -> list[RegionSpec]:
        """The regions with a use or a name, by name; of one `name`, or with "" all.

        Raises:
            NotFoundError: there is none of that name.
        """
        specs = []
        with self._exclusively():
            for file in self._reaped():
                with contextlib.suppress(FileNotFoundError):  # its last use has ended since
                    descriptor = os.open(file, READ_FLAGS, dir_fd=self._directory)
                    try:
                        specs.append(_read(descriptor)[0])
                    finally:
                        os.close(descriptor)
        if name:
            specs = [spec for spec in specs if spec.name == name]
            if not specs:
                raise NotFoundError(f"Unable to find system shared memory region: '{name}'")
        return sorted(specs, key=lambda spec: spec.name)

    def take(self, name: str) -> "OpenRegion":
        """The region, for one use; `give` it back.

        Raises:
            NotFoundError: nobody registered it, or its object is gone.
            ResourceExhaustedError: the process has no descriptor left.
        """
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or not self._has_name(entry):
                entry = self._load(name)
                self._replace(name, entry)
            entry.begin_use()
            return entry

    def give(self, entry: "OpenRegion") -> None:
        """End a use. The last one of a region that has been unregistered removes it."""
        with self._lock:
            if entry.end_use() and (self._is_closed or not self._has_name(entry)):
                self._drop(entry)

    def forget_unregistered(self) -> None:
        """Close what was unregistered through another worker: memory that a client has freed would stay with us."""
        with self._lock:
            for entry in [*self._entries.values()]:
                if not entry.uses and not self._has_name(entry):
                    self._drop(entry)
        self._reaped()  # also after a worker that died in the middle of a use

    # Below: the lock is held, or the exclusive one of the directory.

    def _replace(self, name: str, entry: "OpenRegion") -> None:
        """One of the same name that is still in use is closed by its last user."""
        before = self._entries.get(name)
        self._entries[name] = entry
        if before is not None and not before.uses:
            self._end(before)

    def _drop(self, entry: "OpenRegion") -> None:
        name = entry.region.spec.name
        if self._entries.get(name) is entry:
            del self._entries[name]
        self._end(entry)

    def _end(self, entry: "OpenRegion") -> None:
        if not self._is_closed and entry.is_last():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{entry.file}.{entry.inode}", dir_fd=self._directory)
        entry.close()

    def _has_name(self, entry: "OpenRegion") -> bool:
        try:
            status = os.stat(entry.file, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return status.st_ino == entry.inode  # no other file can have it while we have this one open

    def _load(self, name: str) -> "OpenRegion":
        try:
            descriptor = os.open(_file_name(name), READ_FLAGS, dir_fd=self._directory)
        except FileNotFoundError as error:
            raise NotFoundError(f"Unable to find shared memory region: '{name}'") from error
        except OSError as error:
            raise no_descriptors(error) from error
        try:
            spec, identity, holder = _read(descriptor)
            return OpenRegion(Region(spec, reopen_object(spec, identity, holder)), descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def _write(self, file: str, region: Region) -> None:
        """Under another name first: the other workers read without a lock."""
        spec, status = region.spec, os.fstat(region.descriptor)
        said = [
            *(spec.name, spec.key, spec.offset, spec.byte_size),
            *(status.st_dev, status.st_ino, os.getpid(), region.descriptor),
        ]
        descriptor = os.open(NEW, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=self._directory)
        try:
            os.write(descriptor, json.dumps(said).encode())
        finally:
            os.close(descriptor)
        os.rename(NEW, file, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def _reaped(self) -> list[str]:
        """The files that are left when those of unregistered regions without a use are removed."""
        left = []
        for file in os.listdir(self._directory):
            if file not in (NEW, OWNER) and not ("." in file and self._reap(file)):
                left.append(file)
        return left

    def _reap(self, file: str) -> bool:
        try:
            descriptor = os.open(file, READ_FLAGS, dir_fd=self._directory)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file, dir_fd=self._directory)
            return True
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """One change at a time, whatever worker and thread makes it."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


class OpenRegion:
    """A region as this worker has it open, and its file in the table. The table counts its uses."""

    __slots__ = ("_descriptor", "file", "inode", "region", "uses")

    def __init__(self, region: Region, descriptor: int) -> None:
        self.region = region
        self.file = _file_name(region.spec.name)
        self.inode = os.fstat(descriptor).st_ino
        self.uses = 0
        self._descriptor = descriptor

    def begin_use(self) -> None:
        if not self.uses:
            # Whoever has it exclusively is about to remove it: this use began just before that.
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self.uses += 1

    def end_use(self) -> bool:
        """Whether that was the last use in this worker."""
        self.uses -= 1
        if not self.uses:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return not self.uses

    def is_last(self) -> bool:
        """No other worker has it in use."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)
        self.region.close()


def _file_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _read(descriptor: int) -> tuple[RegionSpec, tuple[int, int], tuple[int, int]]:
    """What `_write` wrote: the region, its object's device and inode, who has it open."""
    said = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    name, key, offset, byte_size, device, inode, process, held = json.loads(said)
    return RegionSpec(name, key, offset, byte_size), (device, inode), (process, held)
