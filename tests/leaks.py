"""Nothing may be left behind: descriptors, threads, tasks, child processes, arenas and leases as they were before.

Use it around what a test does: `async with no_leaks(directory, arenas=[arena]): …`. It waits up to 5 s for the state to
be as before, which is what docs/robustness.md promises, and says what is not.
"""

import asyncio
import gc
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tensorline.shm import Arena

__all__ = ["LeakError", "Snapshot", "no_leaks", "opened_in"]

WITHIN_S = 5.0
DESCRIPTORS = 3
"""More than before that are no leak: a library's own."""
THREADS = 2


class LeakError(AssertionError):
    """What is there now and was not before."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a process holds."""

    descriptors: int
    threads: int
    tasks: Counter[str]
    """By what they run: a server replaces its own all the time."""
    children: frozenset[int]
    files: frozenset[str]
    """Names in the mesh directory: arenas, sockets, registry entries."""
    leases: int

    @classmethod
    def take(cls, directory: Path | None = None, arenas: Iterable[Arena] = ()) -> "Snapshot":
        return cls(
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            tasks=Counter(_work_of(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()),
            children=frozenset(child.pid for child in psutil.Process().children(recursive=True)),
            files=frozenset(_names(directory)) if directory is not None else frozenset(),
            leases=sum(arena.leases for arena in arenas),
        )

    def leaked_since(self, before: "Snapshot") -> list[str]:
        """Sentences, one for each thing that is more than before."""
        said = []
        if self.descriptors > before.descriptors + DESCRIPTORS:
            said.append(f"{self.descriptors - before.descriptors} descriptors: {_targets()}")
        if self.threads > before.threads + THREADS:
            said.append(f"{self.threads - before.threads} threads: {[t.name for t in threading.enumerate()]}")
        if self.tasks - before.tasks:
            said.append(f"tasks {dict(self.tasks - before.tasks)}")
        if self.children - before.children:
            said.append(f"child processes {sorted(self.children - before.children)}")
        if self.files - before.files:
            said.append(f"files {sorted(self.files - before.files)}")
        if self.leases > before.leases:
            said.append(f"{self.leases - before.leases} leases")
        return said


@asynccontextmanager
async def no_leaks(
    directory: Path | None = None, arenas: Iterable[Arena] = (), within_s: float = WITHIN_S
) -> AsyncIterator[None]:
    """
    Args:
        directory: The mesh directory, whose names are compared.
        arenas: Whose leases are counted. They must be open at both ends.
    Raises:
        LeakError: after the block, when something is still there `within_s` later.
    """
    arenas = tuple(arenas)
    before = Snapshot.take(directory, arenas)
    yield
    until = asyncio.get_running_loop().time() + within_s
    while leaked := Snapshot.take(directory, arenas).leaked_since(before):
        if asyncio.get_running_loop().time() > until:
            raise LeakError("; ".join(leaked))
        gc.collect()  # what only a cycle holds is no leak
        await asyncio.sleep(0.02)


def _work_of(task: "asyncio.Task[object]") -> str:
    return getattr(task.get_coro(), "__qualname__", repr(task))


def _names(directory: Path) -> list[str]:
    return [str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()]


def opened_in(directory: Path) -> list[str]:
    """What this process's descriptors are open on in `directory`; a removed file ends in "(deleted)"."""
    return [target for target in _targets() if target.startswith(f"{directory}/")]


def _targets() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # it was the one that lists
            continue
    return sorted(found)
