"""Which stream holds which blocks, and until when: bookkeeping without clock, task or lock."""

import heapq
import itertools
from collections.abc import Hashable
from typing import Final

from tensorline.shm.arena import Arena
from tensorline.shm.blocks import Block

__all__ = ["Leases"]

COMPACT_AT: Final = 1024
"""Heap entries below which ended leases may lie in it for as long as they like."""


class Leases:
    """References to an arena's blocks, each held for somebody else until a time at the latest.

    A grant takes over one reference of its block: the one that `allocate` made, or, for several requests in one block,
    one that `Arena.retain` added. Not thread-safe: it belongs to the event loop.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        # Ends of each holder's leases by block, soonest first; nearly always there is one.
        self._held: dict[Hashable, dict[tuple[int, int], list[float]]] = {}
        self._ends: list[tuple[float, int, Hashable, tuple[int, int]]] = []
        self._order = itertools.count()  # so that the heap never compares holders
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def grant(self, holder: Hashable, block: Block, expires_at: float) -> None:
        """Hand one reference of `block` to `holder`.

        Args:
            expires_at: Monotonic seconds: the request's deadline and the rest that a late reader is given.
        """
        key = (block.offset, block.generation)
        held = self._held.get(holder)
        if held is None:
            held = self._held[holder] = {}
        ends = held.get(key)
        if ends is None:
            held[key] = [expires_at]
        else:
            ends.append(expires_at)
            ends.sort()
        self._count += 1
        heapq.heappush(self._ends, (expires_at, next(self._order), holder, key))
        if len(self._ends) > COMPACT_AT and len(self._ends) > 2 * self._count:
            self._compact()

    def release(self, holder: Hashable, block_offset: int, generation: int) -> bool:
        """End one lease; False, and no harm, when the holder has none on this block.

        Of several the soonest to expire ends: which request released is not known, and so none loses its block early.
        """
        key = (block_offset, generation)
        held = self._held.get(holder)
        ends = None if held is None else held.get(key)
        if held is None or ends is None:
            return False
        self._end(holder, held, key, ends)
        return True

    def release_all(self, holder: Hashable) -> int:
        """End all leases of a holder whose stream is gone; how many there were."""
        ended = 0
        for (block_offset, generation), ends in self._held.pop(holder, {}).items():
            for _ in ends:
                self._arena.release(block_offset, generation)
                ended += 1
        self._count -= ended
        return ended

    def expire(self, now: float) -> int:
        """End what has reached its time, in monotonic seconds; how many leases that were."""
        ended = 0
        while self._ends and self._ends[0][0] <= now:
            _, _, holder, key = heapq.heappop(self._ends)
            held = self._held.get(holder)
            ends = None if held is None else held.get(key)
            # An entry outlives a lease that was released; then what is left of that block ends later, or nothing is.
            if held is not None and ends is not None and ends[0] <= now:
                self._end(holder, held, key, ends)
                ended += 1
        return ended

    def _end(
        self, holder: Hashable, held: dict[tuple[int, int], list[float]], key: tuple[int, int], ends: list[float]
    ) -> None:
        del ends[0]
        if not ends:
            del held[key]
            if not held:
                del self._held[holder]
        self._count -= 1
        self._arena.release(*key)

    def _compact(self) -> None:
        self._ends = [
            (end, next(self._order), holder, key)
            for holder, held in self._held.items()
            for key, ends in held.items()
            for end in ends
        ]
        heapq.heapify(self._ends)
