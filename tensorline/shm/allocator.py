"""Which bytes of an arena are free: numbers only, no memory and no lock."""

import bisect
from typing import Final

from tensorline.shm.layout import ALIGNMENT, HEADER_BYTES

__all__ = ["Allocator", "block_size"]

ALIGNMENT_BITS: Final = ALIGNMENT.bit_length() - 1
STEPS_BITS: Final = 3
"""2^3 sizes for each doubling: a payload is rounded up by at most an eighth."""


def block_size(byte_size: int) -> int:
    """Bytes that a payload of `byte_size` takes: its size class and the header.

    The payload alone is rounded, so a tensor of 16 MiB takes 16 MiB and not the next class.
    """
    last = byte_size - 1
    shift = last.bit_length() - STEPS_BITS - 1
    if shift < ALIGNMENT_BITS:
        shift = ALIGNMENT_BITS
    return (((last >> shift) + 1) << shift) + HEADER_BYTES


class Allocator:
    """Free lists by exact size, last freed first (its pages are warm), before extents that merge.

    Neighbours are merged only when a size is not to be had otherwise: all lists at once, in O(n log n) of the free
    blocks. That is rare, and keeps the usual `take` and `give` at one list operation each.
    """

    def __init__(self) -> None:
        self._quick: dict[int, list[int]] = {}
        self._extents: list[tuple[int, int]] = []  # (size, start), sorted: the first that is large enough fits best

    def add(self, start: int, size: int) -> None:
        """Hand over new space; it merges with a free neighbour."""
        self._extents.append((size, start))
        self._merge()

    def take(self, size: int) -> int | None:
        """Offset of `size` bytes, or None."""
        quick = self._quick.get(size)
        if quick:
            return quick.pop()
        offset = self._carve(size)
        if offset is None and any(self._quick.values()):
            self._merge()
            offset = self._carve(size)
        return offset

    def give(self, offset: int, size: int) -> None:
        """Take back what `take` gave."""
        quick = self._quick.get(size)
        if quick is None:
            quick = self._quick[size] = []
        quick.append(offset)

    def is_free(self, size: int) -> bool:
        """`take` would find it."""
        if any(self._quick.values()):
            self._merge()
        return bool(self._extents) and self._extents[-1][0] >= size

    def free_before(self, end: int) -> int:
        """Free bytes that end exactly at `end`."""
        return next((size for size, start in self._extents if start + size == end), 0)

    def _carve(self, size: int) -> int | None:
        index = bisect.bisect_left(self._extents, (size, 0))
        if index == len(self._extents):
            return None
        found, start = self._extents.pop(index)
        if found > size:
            bisect.insort(self._extents, (found - size, start + size))
        return start

    def _merge(self) -> None:
        pieces = [(start, size) for size, start in self._extents]
        pieces += [(start, size) for size, starts in self._quick.items() for start in starts]
        pieces.sort()
        self._quick.clear()
        self._extents.clear()
        begin = end = 0
        for start, size in pieces:
            if start != end:
                self._keep(begin, end)
                begin = start
            end = start + size
        self._keep(begin, end)
        self._extents.sort()

    def _keep(self, begin: int, end: int) -> None:
        if end > begin:
            self._extents.append((end - begin, begin))
