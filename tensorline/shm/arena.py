"""The owner's side of the tensor plane: one arena for each process, counted blocks, and waiting when it is full."""

import asyncio
import contextlib
import errno
import functools
import logging
import mmap
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from tensorline.errors import ResourceExhaustedError, StaleHandleError, UnavailableError
from tensorline.shm.allocator import block_size
from tensorline.shm.arena_file import ArenaFile
from tensorline.shm.blocks import Block, BlockTable
from tensorline.shm.directory import ArenaDirectory
from tensorline.shm.layout import ARENA_ID_BYTES, HEADER_BYTES, LAYOUT_VERSION, WORD_BYTES

__all__ = ["Arena", "open_arena"]

FIRST_SEGMENT_BYTES: Final = 8 << 20
WAITER_LIMIT: Final = 256
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG})

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiter:
    byte_size: int
    wake: Callable[[], object]
    block: Block | None = None


class Arena:
    """Shared memory that this process writes and its peers read.

    Callable from any thread; one uncontended lock guards it. Not from finalizers: they can run while the lock is held.

    Args:
        arena_bytes: Limit. The file starts with `first_segment_bytes`, doubles when it must, and never shrinks.
        waiter_limit: Requests that may wait for room at a time.
    Raises:
        ResourceExhaustedError: there is no room for the first segment.
    """

    def __init__(
        self,
        directory: ArenaDirectory,
        arena_bytes: int,
        *,
        first_segment_bytes: int = FIRST_SEGMENT_BYTES,
        waiter_limit: int = WAITER_LIMIT,
    ) -> None:
        self.limit: Final = max(arena_bytes // mmap.PAGESIZE, 1) * mmap.PAGESIZE
        self.capacity = _whole_pages(min(first_segment_bytes, self.limit))
        """Bytes reserved so far."""
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._waiters: deque[_Waiter] = deque()
        self._waiter_limit = waiter_limit
        try:
            self._file = _create(directory, self.limit, self.capacity)
        except OSError as err:
            raise ResourceExhaustedError(f"the host has no {self.capacity} bytes of shared memory left") from err
        self.id: Final = self._file.id
        self.memory = memoryview(self._file.memory)
        self._blocks = BlockTable(self)
        self._blocks.add(HEADER_BYTES, self.capacity - HEADER_BYTES)

    def __enter__(self) -> "Arena":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def leases(self) -> int:
        """Live blocks."""
        return len(self._blocks)

    @property
    def leased_bytes(self) -> int:
        """Bytes in live blocks, headers and rounding included."""
        return self._blocks.leased_bytes

    @property
    def waiters(self) -> int:
        """Requests that wait for room."""
        return len(self._waiters)

    def allocate(self, byte_size: int) -> Block:
        """A block with one reference; grows the arena when it must, which blocks (about 1 ms a MiB).

        Args:
            byte_size: At least 1: a tensor of no bytes travels inline.
        Raises:
            ResourceExhaustedError: full.
        """
        while True:
            block = self._take(byte_size)
            if block is not None:
                return block
            self.grow(byte_size)

    async def allocate_or_wait(self, byte_size: int, timeout_s: float) -> Block:
        """Like `allocate`, but grows in a thread, and when full waits its turn until others release.

        Raises:
            ResourceExhaustedError: still full after `timeout_s`, or too many wait already.
        """
        while not self._waiters:
            block = self._take(byte_size)
            if block is not None:
                return block
            if self.capacity == self.limit:
                break
            try:
                await asyncio.to_thread(self.grow, byte_size)
            except ResourceExhaustedError:
                break
        woken = asyncio.Event()
        waiter = self._join(byte_size, functools.partial(_wake_loop, asyncio.get_running_loop(), woken))
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await woken.wait()
        except BaseException:
            with contextlib.suppress(ResourceExhaustedError, UnavailableError):
                self._leave(waiter).release()
            raise
        return self._leave(waiter)

    def allocate_blocking(self, byte_size: int, timeout_s: float) -> Block:
        """Like `allocate_or_wait`, for a thread that may block."""
        if not self._waiters:
            with contextlib.suppress(ResourceExhaustedError):
                return self.allocate(byte_size)
        woken = threading.Event()
        waiter = self._join(byte_size, woken.set)
        woken.wait(timeout_s)
        return self._leave(waiter)

    def retain(self, block_offset: int, generation: int, n: int = 1) -> None:
        """Add `n` references, one for each further reader.

        Raises:
            StaleHandleError: the block is gone; going on with it would be wrong.
        """
        with self._lock:
            block = self._blocks.find(block_offset, generation)
            if block is None:
                raise StaleHandleError("a tensor in shared memory is no longer there")
            block.references += n

    def release(self, block_offset: int, generation: int) -> bool:
        """Give one reference back; the last one frees the block. False, and no harm, when there is no such block."""
        with self._lock:
            block = self._blocks.find(block_offset, generation)
            if block is None:
                return False
            block.references -= 1
            if block.references == 0:
                self._blocks.free(block)
                if self._waiters:
                    self._serve()
            return True

    def grow(self, byte_size: int) -> None:
        """See to it that a block of `byte_size` fits, by a further segment if need be. Blocks: call it from a thread.

        Raises:
            ResourceExhaustedError: it would take more than the limit, or than the host has.
        """
        with self._growing:
            with self._lock:
                if not self._file.is_open:
                    raise _closed()
                missing = _whole_pages(self._blocks.missing(byte_size, self.capacity))
            room = self.limit - self.capacity
            if missing == 0:
                return
            if missing > room:
                raise self._full(byte_size)
            try:
                added = self._extend(min(max(missing, self.capacity), room), missing)
            except OSError as err:
                raise self._full(byte_size, "; the host has no more") from err
            with self._lock:
                self._blocks.add(self.capacity, added)
                self.capacity += added
                self._serve()

    def close(self) -> None:
        """Unlink the file. Readers keep what they have mapped; our own mapping goes with its last view."""
        if not self._file.is_open:  # also in a forked child, where the locks may never be free
            return
        with self._growing, self._lock:
            self._file.close()
            self.memory = memoryview(b"")
            self._blocks = BlockTable(self)
            waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            waiter.wake()

    def _extend(self, wanted: int, least: int) -> int:
        """Bytes added: `wanted`, or `least` where the host has no room to double."""
        try:
            self._file.extend(self.capacity, wanted)
        except OSError as err:
            if wanted == least or err.errno not in NO_SPACE:
                raise
            log.warning("arena grows by %d instead of %d bytes: %s", least, wanted, err.strerror)
            self._file.extend(self.capacity, least)
            return least
        return wanted

    def _take(self, byte_size: int) -> Block | None:
        if byte_size < 1:
            raise ValueError("a tensor of no bytes has no block")
        with self._lock:
            if self._file.is_open:
                return self._blocks.take(byte_size)
        raise _closed()

    def _join(self, byte_size: int, wake: Callable[[], object]) -> _Waiter:
        waiter = _Waiter(byte_size, wake)
        with self._lock:
            if not self._file.is_open:
                raise _closed()
            if len(self._waiters) >= self._waiter_limit or block_size(byte_size) > self.limit - HEADER_BYTES:
                raise self._full(byte_size)
            self._waiters.append(waiter)
            self._serve()
        return waiter

    def _leave(self, waiter: _Waiter) -> Block:
        with self._lock:
            if waiter.block is not None:
                return waiter.block
            if not self._file.is_open:
                raise _closed()
            self._waiters.remove(waiter)
            self._serve()  # it may have been a large one that kept smaller ones waiting
        raise self._full(waiter.byte_size)

    def _serve(self) -> None:
        """With the lock held: first come, first served, so that a large block is not starved by small ones."""
        while self._waiters:
            waiter = self._waiters[0]
            waiter.block = self._blocks.take(waiter.byte_size)
            if waiter.block is None:
                return
            self._waiters.popleft()
            waiter.wake()

    def _full(self, byte_size: int, more: str = "") -> ResourceExhaustedError:
        free = self.limit - self.leased_bytes
        return ResourceExhaustedError(
            f"no room for {byte_size} bytes in shared memory: {free} of {self.limit} bytes are free{more}"
        )


@contextlib.asynccontextmanager
async def open_arena(
    directory: ArenaDirectory, arena_bytes: int, *, first_segment_bytes: int = FIRST_SEGMENT_BYTES
) -> AsyncIterator[Arena]:
    """This process's arena, gone with the block.

    Raises:
        ConfigError: the host has less room than `arena_bytes`.
        ResourceExhaustedError: it is taken already.
    """
    directory.check_space(arena_bytes)
    with Arena(directory, arena_bytes, first_segment_bytes=first_segment_bytes) as arena:
        yield arena


def _create(directory: ArenaDirectory, limit: int, first_segment: int) -> ArenaFile:
    """A published file with its header and first segment: peers never see an arena that is half made."""
    while True:
        file = ArenaFile(directory.path, limit)
        try:
            file.extend(0, first_segment)
            file.memory[:ARENA_ID_BYTES] = file.id
            memoryview(file.memory).cast("Q")[ARENA_ID_BYTES // WORD_BYTES] = LAYOUT_VERSION
            file.publish()
        except FileNotFoundError:
            file.close()
        except BaseException:
            file.close()
            raise
        else:
            return file


def _closed() -> UnavailableError:
    return UnavailableError("shutting down")


def _whole_pages(byte_size: int) -> int:
    return -(-byte_size // mmap.PAGESIZE) * mmap.PAGESIZE


def _wake_loop(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # a closed loop: nobody waits there any more
        loop.call_soon_threadsafe(woken.set)
