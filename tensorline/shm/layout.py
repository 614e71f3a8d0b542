"""How an arena's file looks: names, headers, alignment. Both sides of the shared memory read this page."""

import contextlib
import mmap
import re
import secrets
import sys
from typing import Final

__all__ = [
    "ALIGNMENT",
    "ARENA_ID_BYTES",
    "ARENA_NAME",
    "GENERATION",
    "HEADER_BYTES",
    "LAYOUT_VERSION",
    "LENGTH",
    "MADV_POPULATE_READ",
    "MADV_POPULATE_WRITE",
    "MAGIC",
    "TEMPORARY_NAME",
    "WORD_BYTES",
    "arena_name",
    "magic_of",
    "populate",
    "temporary_name",
]

LAYOUT_VERSION: Final = 1
"""Third word of an arena, after its id. A reader refuses any other."""

ALIGNMENT: Final = 64
"""Of headers and payloads: a cache line, and what the widest vector loads want."""

HEADER_BYTES: Final = 64
"""In front of each payload, and at the start of the arena; so no block lies at 0, the value of a field left unset."""

WORD_BYTES: Final = 8
MAGIC, GENERATION, LENGTH = 0, 1, 2
"""Words of a block's header. They are native and aligned, so that each is stored whole and a reader never sees half."""

ARENA_ID_BYTES: Final = 16
ARENA_NAME: Final = re.compile(r"[0-9a-f]{32}\.arena")
TEMPORARY_NAME: Final = re.compile(r"\.[0-9a-f]{32}\.tmp")

# Linux 5.14; Python has no names for them.
MADV_POPULATE_READ: Final = 22
MADV_POPULATE_WRITE: Final = 23
POPULATE_STEP: Final = 1 << 20
"""mmap.madvise keeps the interpreter's lock, so ask for little at a time: about 1 ms."""


def arena_name(arena_id: bytes) -> str:
    return f"{arena_id.hex()}.arena"


def temporary_name() -> str:
    return f".{secrets.token_hex(16)}.tmp"


def magic_of(arena_id: bytes) -> int:
    """First word of every block's header: no client knows it, so no tensor's content can pass for a header."""
    return int.from_bytes(arena_id[:WORD_BYTES], sys.byteorder)


def populate(memory: mmap.mmap, advice: int, start: int, length: int) -> bool:
    """Map the pages now rather than at first touch; False when the kernel cannot."""
    start -= start % mmap.PAGESIZE
    end = start + length
    with contextlib.suppress(OSError):
        for at in range(start, end, POPULATE_STEP):
            memory.madvise(advice, at, min(POPULATE_STEP, end - at))
        return True
    return False
