"""Values that several processes agree about without a leader: of two that were set for one key, the later one holds."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

__all__ = ["NEVER", "Entry", "Registers", "entries_of"]

Key = tuple[str, ...]
Stamp = tuple[int, int]
Entry = tuple[Key, Any, Stamp]
"""A key, a JSON value (None: cleared), and when it was set and by whom."""
NEVER: Final[Stamp] = (0, 0)


class Registers:
    """Each process has one, tells the others what it sets, and merges what it is told, in whatever order that comes.

    Args:
        owner: This process's number, another one for each: it decides between two of one nanosecond.
        now_ns: Wall clock; the processes share a host.
    """

    def __init__(self, owner: int, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._owner = owner
        self._now_ns = now_ns
        self._entries: dict[Key, tuple[Any, Stamp]] = {}
        self._newest = 0

    def set(self, changes: Mapping[Key, Any]) -> list[Entry]:
        """Set all of them at one time; what the other processes should be told."""
        self._newest = max(self._now_ns(), self._newest + 1)  # later than all that we know of, whatever the clock says
        stamp = (self._newest, self._owner)
        for key, value in changes.items():
            self._entries[key] = (value, stamp)
        return [(key, value, stamp) for key, value in changes.items()]

    def merge(self, entries: Iterable[Entry]) -> dict[Key, Any]:
        """Take what is later than what is here: that of it which changed something."""
        changed = {}
        for key, value, stamp in entries:
            known = self._entries.get(key)
            self._newest = max(self._newest, stamp[0])
            if known is None or known[1] < stamp:
                self._entries[key] = (value, stamp)
                changed[key] = value
        return changed

    def stamp(self, key: Key) -> Stamp:
        """When the value was set, or NEVER."""
        known = self._entries.get(key)
        return known[1] if known is not None else NEVER

    @property
    def entries(self) -> list[Entry]:
        """Everything, for a process that has just begun."""
        return [(key, value, stamp) for key, (value, stamp) in self._entries.items()]


def entries_of(given: Iterable[Any]) -> Iterable[Entry]:
    """From the lists that JSON makes of them."""
    return ((tuple(key), value, (at, owner)) for key, value, (at, owner) in given)
