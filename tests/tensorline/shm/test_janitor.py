import asyncio
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from tensorline.shm import Arena, ArenaDirectory, ArenaReader, run_janitor, sweep
from tensorline.tensor import Handle

Spawn = Callable[..., "Popen[str]"]

OWNER = """
import sys
from pathlib import Path
from tensorline.shm import Arena, open_directory
arena = Arena(open_directory(Path(sys.argv[1])), 1 << 20)
block = arena.allocate(5)
block.view[:] = b"hello"
print(arena.id.hex(), block.offset, block.generation, flush=True)
sys.stdin.read()
"""

FORKING = """
import os, sys
from pathlib import Path
from tensorline.errors import UnavailableError
from tensorline.shm import Arena, open_directory
arena = Arena(open_directory(Path(sys.argv[1])), 1 << 20)
ready, done = os.pipe()
if os.fork() == 0:
    try:
        arena.allocate(1)
    except UnavailableError:
        arena.close()
        os.write(done, b"x")
    sys.stdin.read()
    os._exit(0)
os.read(ready, 1)
print(arena.id.hex(), flush=True)
os.read(ready, 1)
"""


def arenas(directory: ArenaDirectory) -> set[str]:
    return {name for name in os.listdir(directory.path) if name.endswith(".arena")}


async def test_a_killed_owners_arena_is_gone_in_5_s_and_a_live_one_is_not(
    arena: Arena, directory: ArenaDirectory, reader: ArenaReader, spawn: Spawn
) -> None:
    owner = spawn("-c", OWNER, directory.path)
    assert owner.stdout is not None
    name, offset, generation = owner.stdout.readline().split()
    handle = Handle(bytes.fromhex(name), int(offset), int(offset) + 64, 5, int(generation))
    assert bytes(reader.view(handle)) == b"hello"
    async with asyncio.TaskGroup() as tasks:
        janitor = tasks.create_task(run_janitor(directory))
        await asyncio.to_thread(sweep, directory)
        assert len(arenas(directory)) == 2
        owner.kill()
        async with asyncio.timeout(5):
            while len(arenas(directory)) > 1:
                await asyncio.sleep(0.02)
        janitor.cancel()
    assert arenas(directory) == {f"{arena.id.hex()}.arena"}
    assert bytes(reader.view(handle)) == b"hello"  # a request in flight can still finish


def test_a_forked_child_keeps_no_lock_and_takes_nothing_away(directory: ArenaDirectory, spawn: Spawn) -> None:
    parent = spawn("-c", FORKING, directory.path)
    assert parent.stdout is not None
    name = parent.stdout.readline().strip()
    assert sweep(directory) == []  # the child has closed its arena, and that unlocked and unlinked nothing
    parent.kill()
    parent.wait()
    assert sweep(directory) == [f"{name}.arena"]  # while the child lives on: it reads our end of the pipe


def make(path: Path, age_s: float = 0) -> Path:
    path.touch(0o600)
    changed = path.stat().st_mtime - age_s
    os.utime(path, (changed, changed))
    return path


def test_a_temporary_file_is_left_to_its_maker_for_some_seconds(directory: ArenaDirectory) -> None:
    young = make(directory.path / f".{'a' * 32}.tmp")
    old = make(directory.path / f".{'b' * 32}.tmp", age_s=60)
    locked = make(directory.path / f".{'c' * 32}.tmp", age_s=60)
    with locked.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sweep(directory) == [old.name]
    assert young.exists()
    assert sweep(directory) == [locked.name]


def test_what_is_not_ours_is_not_touched(directory: ArenaDirectory, tmp_path: Path) -> None:
    names = [f"{digit * 32}.arena" for digit in "0123"]
    precious = make(tmp_path / "precious")
    (directory.path / names[0]).symlink_to(precious)
    os.mkfifo(directory.path / names[1], 0o600)
    (directory.path / names[2]).mkdir()
    make(directory.path / names[3]).chmod(0o644)
    for name in ("x.arena", f"{'A' * 32}.arena", f"{'a' * 32}.arena.bak", "nonce.tmp"):
        make(directory.path / name, age_s=60)
    before = sorted(os.listdir(directory.path))
    assert sweep(directory) == []
    assert sorted(os.listdir(directory.path)) == before
    assert precious.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_not_touched(directory: ArenaDirectory) -> None:
    path = make(directory.path / f"{'0' * 32}.arena")
    os.chown(path, 12345, 12345)
    assert sweep(directory) == []
    assert path.exists()


def test_a_directory_that_is_gone_is_no_failure(directory: ArenaDirectory) -> None:
    assert sweep(ArenaDirectory(directory.path / "gone", b"")) == []
