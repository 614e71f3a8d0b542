"""Letting go of peers' arenas: a mapping keeps the memory of a file that was removed long ago."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable

from tensorline.shm import ArenaDirectory, ArenaReader
from tensorline.shm.layout import ARENA_NAME

__all__ = ["GoneArenas", "forget_gone_arenas"]

FORGET_S = 60.0
"""After an arena's end, for requests in flight that still read it."""
LOOK_S = 2.0


class GoneArenas:
    """Which arenas have been gone for so long that nobody reads them any more. Without clock and directory."""

    def __init__(self, rest_s: float = FORGET_S) -> None:
        self._rest_s = rest_s
        self._present: set[str] = set()
        self._gone: dict[str, float] = {}

    def look(self, present: Iterable[str], now: float) -> list[bytes]:
        """
        Args:
            present: Names in the arena directory.
            now: Monotonic seconds.
        Returns:
            Ids of the arenas to forget now, each once.
        """
        names = {name for name in present if ARENA_NAME.fullmatch(name)}
        for name in self._present - names:
            self._gone[name] = now
        self._present = names
        over = [name for name, since in self._gone.items() if now - since >= self._rest_s]
        for name in over:
            del self._gone[name]
        return [bytes.fromhex(name.removesuffix(".arena")) for name in over]


async def forget_gone_arenas(directory: ArenaDirectory, reader: ArenaReader) -> None:
    """Drop the reader's mappings of arenas that were removed, until cancelled."""
    gone = GoneArenas()
    while True:
        with contextlib.suppress(OSError):  # the directory is away: nothing is known
            for arena_id in gone.look(await asyncio.to_thread(os.listdir, directory.path), time.monotonic()):
                reader.forget(arena_id)
        await asyncio.sleep(LOOK_S)
