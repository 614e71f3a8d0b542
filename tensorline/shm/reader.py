"""The reader's side of the tensor plane: peers' arenas, mapped read-only and kept, and the checks on every handle."""

import contextlib
import itertools
import logging
import mmap
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tensorline.errors import StaleHandleError
from tensorline.shm.arena import Arena
from tensorline.shm.directory import ArenaDirectory
from tensorline.shm.layout import (
    ALIGNMENT,
    ARENA_ID_BYTES,
    GENERATION,
    HEADER_BYTES,
    LAYOUT_VERSION,
    LENGTH,
    MADV_POPULATE_READ,
    MAGIC,
    WORD_BYTES,
    arena_name,
    magic_of,
    populate,
)
from tensorline.tensor import BYTES, Array, Handle, Tensor, decode_array

__all__ = ["ArenaReader"]

PEER_LIMIT: Final = 64
POPULATE_LIMIT: Final = 64 << 20

log = logging.getLogger(__name__)


def _stale() -> StaleHandleError:
    """One sentence for all that can be wrong: which check failed is nothing a client should learn."""
    return StaleHandleError("a tensor in shared memory is no longer there")


@contextlib.contextmanager
def _answering_stale() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as err:
        raise _stale() from err
    except (OSError, ValueError) as err:  # ValueError: mmap found the file shorter than it was
        log.warning("a peer's arena cannot be read: %s", err)
        raise _stale() from err


class ArenaReader:
    """Reads what handles point at. Callable from any thread.

    A peer's arena is mapped once, and again only after it has grown. A dropped mapping lives on under its views.

    Args:
        peer_limit: Peers mapped at a time; the one that was not read for longest makes room.
    """

    def __init__(self, directory: ArenaDirectory, *, peer_limit: int = PEER_LIMIT) -> None:
        self._directory = directory
        self._peer_limit = peer_limit
        self._arenas: dict[bytes, _Mapped] = {}
        self._lock = threading.Lock()
        self._clock = itertools.count()

    def attach(self, own_arena: Arena) -> None:
        """Read an arena of this process through its owner's mapping instead of a second one."""
        with self._lock:
            self._arenas[own_arena.id] = _Own(own_arena)

    def view(self, handle: Handle) -> memoryview:
        """The bytes, read-only. They are the handle's until its lease ends: `check` after having used them.

        Raises:
            StaleHandleError: the block is gone or was used again, its arena is not there, or this never was a handle.
        """
        return self._verified(handle).memory[handle.offset : handle.offset + handle.length]

    def check(self, handle: Handle) -> None:
        """Verify again, after copying or computing, that the bytes were the handle's all along.

        Raises:
            StaleHandleError: as `view`; what came of the bytes must be thrown away.
        """
        self._verified(handle)

    def array(self, tensor: Tensor) -> Array:
        """A tensor's elements, inline or not: a read-only view to `check` after use; BYTES are copied and checked here.

        Raises:
            StaleHandleError: as `view`.
            InvalidTensorError: the bytes do not fit datatype and shape.
        """
        if tensor.handle is None:
            return decode_array(tensor.datatype, tensor.shape, memoryview(tensor.data or b"").toreadonly())
        raw = self.view(tensor.handle)
        if tensor.datatype != BYTES:
            return decode_array(tensor.datatype, tensor.shape, raw)
        try:
            return decode_array(tensor.datatype, tensor.shape, raw)
        finally:
            self.check(tensor.handle)  # bytes that changed under the decoder are stale, not malformed

    def forget(self, arena_id: bytes) -> None:
        """Drop a mapping: the peer has gone. Views of it stay valid."""
        with self._lock:
            mapped = self._arenas.pop(arena_id, None)
            if mapped is not None:
                mapped.close()

    def close(self) -> None:
        """Forget all."""
        for arena_id in list(self._arenas):
            self.forget(arena_id)

    def _verified(self, handle: Handle) -> "_Mapped":
        """Nothing is trusted: not the handle, and of the header only what agrees with it and with the file's size."""
        mapped = self._arenas.get(handle.arena)
        if mapped is None:
            mapped = self._map(handle.arena)
        mapped.used = next(self._clock)
        block, generation, first = handle.block, handle.generation, handle.block + HEADER_BYTES
        end = handle.offset + handle.length
        if block < HEADER_BYTES or block % ALIGNMENT or handle.offset < first or handle.length < 0 or generation <= 0:
            raise _stale()
        if end > mapped.size:
            with self._lock, _answering_stale():
                mapped.refresh(block)
            if end > mapped.size:
                raise _stale()
        words, word = mapped.words, block // WORD_BYTES
        if (
            words[word + MAGIC] != mapped.magic
            or words[word + GENERATION] != generation
            or end > first + words[word + LENGTH]
        ):
            raise _stale()
        return mapped

    def _map(self, arena_id: bytes) -> "_Mapped":
        if len(arena_id) != ARENA_ID_BYTES:
            raise _stale()
        with self._lock, _answering_stale():
            mapped = self._arenas.get(arena_id)
            if mapped is None:
                mapped = _Peer(self._directory.path, arena_id)
                self._make_room()
                self._arenas[arena_id] = mapped
            return mapped

    def _make_room(self) -> None:
        peers = [mapped for mapped in self._arenas.values() if isinstance(mapped, _Peer)]
        if len(peers) >= self._peer_limit:
            oldest = min(peers, key=lambda peer: peer.used)
            del self._arenas[oldest.id]
            oldest.close()


class _Mapped:
    """An arena as it is read: `size` bytes of `memory` may be touched; `words` is the same, by header words."""

    __slots__ = ("id", "magic", "memory", "size", "used", "words")

    def __init__(self, arena_id: bytes) -> None:
        self.id = arena_id
        self.magic = magic_of(arena_id)
        self.memory = self.words = memoryview(b"")
        self.size = 0
        self.used = 0

    def refresh(self, block: int) -> None:
        """See whether the arena has grown; `block` is the offset that will be read."""

    def close(self) -> None:
        """Let go of what is not memory."""


class _Own(_Mapped):
    __slots__ = ("_arena",)

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena.id)
        self._arena = arena
        self.memory = arena.memory.toreadonly()
        self.words = self.memory.cast("Q")
        self.size = arena.capacity

    def refresh(self, block: int) -> None:
        self.size = self._arena.capacity


class _Peer(_Mapped):
    __slots__ = ("_descriptor",)

    def __init__(self, directory: Path, arena_id: bytes) -> None:
        super().__init__(arena_id)
        # Kept open: an arena whose owner died has lost its name, and may have grown since it was mapped.
        self._descriptor = os.open(directory / arena_name(arena_id), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise PermissionError("not a private file of this user")
            self.refresh(0)
            if self.memory[:ARENA_ID_BYTES] != arena_id or self.words[ARENA_ID_BYTES // WORD_BYTES] != LAYOUT_VERSION:
                raise OSError("not an arena of this layout")
        except BaseException:
            self.close()
            raise

    def refresh(self, block: int) -> None:
        size = os.fstat(self._descriptor).st_size if self._descriptor >= 0 else 0
        if size <= self.size or size % mmap.PAGESIZE:
            return
        memory = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        window = min(size, POPULATE_LIMIT)  # the rest is mapped as it is read: populating takes time and counts as RSS
        populate(memory, MADV_POPULATE_READ, min(block, size - window), window)
        self.memory = memoryview(memory)
        self.words = self.memory.cast("Q")
        self.size = size  # last: other threads look at it before they touch the memory

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
