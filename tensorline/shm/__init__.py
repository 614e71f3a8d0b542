"""The shared-memory tensor plane: a process writes tensors into its own arena, its peers read them by handle."""

from tensorline.shm.arena import Arena, open_arena
from tensorline.shm.blocks import Block
from tensorline.shm.directory import ArenaDirectory, open_directory
from tensorline.shm.janitor import run_janitor, sweep
from tensorline.shm.leases import Leases
from tensorline.shm.reader import ArenaReader
from tensorline.shm.tensors import INLINE_LIMIT, write_array

__all__ = [
    "INLINE_LIMIT",
    "Arena",
    "ArenaDirectory",
    "ArenaReader",
    "Block",
    "Leases",
    "open_arena",
    "open_directory",
    "run_janitor",
    "sweep",
    "write_array",
]
