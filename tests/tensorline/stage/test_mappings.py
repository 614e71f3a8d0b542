import asyncio
import gc
from pathlib import Path

import numpy as np
import pytest

from tensorline.errors import StaleHandleError
from tensorline.shm import Arena, ArenaReader, open_directory
from tensorline.stage import mappings
from tensorline.stage.mappings import GoneArenas, forget_gone_arenas
from tests.leaks import opened_in
from tests.tensorline.stage.pair import MIB, until

pytestmark = pytest.mark.usefixtures("one_loop")

ONE, TWO = f"{'1' * 32}.arena", f"{'2' * 32}.arena"


def test_an_arena_is_forgotten_once_and_only_after_its_rest() -> None:
    gone = GoneArenas(rest_s=10.0)
    assert gone.look([ONE, TWO, "nonce", "sockets"], 0.0) == []
    assert gone.look([TWO], 5.0) == []
    assert gone.look([TWO], 14.9) == []
    assert gone.look([], 15.0) == [bytes.fromhex("1" * 32)]
    assert gone.look([], 25.0) == [bytes.fromhex("2" * 32)]
    assert gone.look([], 100.0) == []


def mapped(path: Path) -> list[str]:
    return [target for target in opened_in(path) if target.endswith("(deleted)")]


async def test_a_peers_memory_is_let_go_after_its_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "LOOK_S", 0.02)
    monkeypatch.setattr(mappings, "GoneArenas", lambda: GoneArenas(rest_s=0.3))
    directory = open_directory(path)
    reader = ArenaReader(directory)
    forgetting = asyncio.create_task(forget_gone_arenas(directory, reader))
    with Arena(directory, MIB) as peer:
        block = peer.allocate(100_000)
        block.view[:] = b"x" * 100_000
        view = reader.view(block.handle)
        await asyncio.sleep(0.05)
        handle = block.handle
    await asyncio.sleep(0.1)
    assert bytes(reader.view(handle)[:1]) == b"x"  # requests in flight still read it
    assert (np.frombuffer(view, np.uint8) == ord("x")).all()
    del view, block, peer
    gc.collect()

    def is_gone() -> bool:
        try:
            reader.check(handle)
        except StaleHandleError:
            return True
        return False

    await until(is_gone)
    await until(lambda: not mapped(path))
    forgetting.cancel()
    reader.close()


async def test_a_directory_that_is_away_ends_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "LOOK_S", 0.01)
    directory = open_directory(path / "mesh")
    reader = ArenaReader(directory)
    forgetting = asyncio.create_task(forget_gone_arenas(directory, reader))
    (path / "mesh" / "nonce").unlink()
    (path / "mesh").rmdir()
    await asyncio.sleep(0.05)
    assert not forgetting.done()
    forgetting.cancel()
