import asyncio
import itertools
import os
import random
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from tensorline.directories import default_mesh_directory
from tensorline.errors import InvalidTensorError, ResourceExhaustedError, StaleHandleError, UnavailableError
from tensorline.shm import Arena, ArenaDirectory, ArenaReader, Block, open_arena, open_directory
from tensorline.tensor import Handle

MIB = 1 << 20


def fill(arena: Arena) -> list[Block]:
    """Take all there is: blocks of half a MiB first, then ever smaller ones."""
    blocks, byte_size = [], MIB // 2
    while byte_size:
        try:
            blocks.append(arena.allocate(byte_size))
        except ResourceExhaustedError:
            byte_size //= 2
    return blocks


async def settled() -> None:
    """The tasks that could run have run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


class Blocks(RuleBasedStateMachine):
    """Whatever is done with an arena: live blocks are apart and keep their bytes, freed ones are stale for a reader."""

    live = Bundle("live")
    freed = Bundle("freed")

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="tensorline-test-", dir=default_mesh_directory().parent))
        directory = open_directory(self.path)
        self.arena = Arena(directory, MIB, first_segment_bytes=64 << 10)
        self.reader = ArenaReader(directory)
        self.held: dict[Block, int] = {}
        self.seeds: dict[Block, int] = {}

    def teardown(self) -> None:
        self.reader.close()
        self.arena.close()
        shutil.rmtree(self.path)

    @rule(target=live, byte_size=st.integers(1, 4096) | st.integers(1, 300_000), seed=st.integers(0, 255))
    def allocate(self, byte_size: int, seed: int) -> object:
        try:
            block = self.arena.allocate(byte_size)
        except ResourceExhaustedError:
            return multiple()
        assert block.offset % 64 == 0
        block.view[:] = bytes([seed]) * byte_size
        self.held[block], self.seeds[block] = 1, seed
        return block

    @rule(byte_size=st.integers(1, 400_000))
    def grow(self, byte_size: int) -> None:
        before = self.arena.capacity
        try:
            self.arena.grow(byte_size)
        except ResourceExhaustedError:
            assert self.arena.capacity == before

    @rule(block=live, n=st.integers(1, 3))
    def retain(self, block: Block, n: int) -> None:
        if self.held.get(block):
            self.arena.retain(block.offset, block.generation, n)
            self.held[block] += n
        else:
            with pytest.raises(StaleHandleError):
                self.arena.retain(block.offset, block.generation, n)

    @rule(target=freed, block=consumes(live))
    def free(self, block: Block) -> Block:
        assert self.reader.view(block.handle) == bytes([self.seeds[block]]) * block.byte_size
        for _ in range(self.held.pop(block)):
            assert self.arena.release(block.offset, block.generation)
        return block

    @rule(block=freed)
    def use_after_free(self, block: Block) -> None:
        assert not self.arena.release(block.offset, block.generation)
        with pytest.raises(StaleHandleError):
            self.reader.view(block.handle)

    @invariant()
    def live_blocks_are_apart_and_counted(self) -> None:
        spans = sorted((block.offset, block.offset + block.size) for block in self.held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert not spans or (spans[0][0] >= 64 and spans[-1][1] <= self.arena.capacity <= self.arena.limit)
        assert self.arena.leases == len(spans)
        assert self.arena.leased_bytes == sum(end - start for start, end in spans)


def test_no_two_live_blocks_overlap() -> None:
    run_state_machine_as_test(Blocks, settings=settings(max_examples=60, stateful_step_count=60, deadline=None))


def test_the_file_is_private_reserved_and_gone_at_the_end(directory: ArenaDirectory) -> None:
    with Arena(directory, 4 * MIB, first_segment_bytes=MIB) as arena:
        (name,) = set(os.listdir(directory.path)) - {"nonce"}
        status = (directory.path / name).stat()
        assert name == f"{arena.id.hex()}.arena"
        assert status.st_mode & 0o777 == 0o600
        assert status.st_size == status.st_blocks * 512 == arena.capacity == MIB
    assert os.listdir(directory.path) == ["nonce"]


def test_it_grows_to_its_limit_and_then_says_what_was_asked_free_and_allowed(arena: Arena) -> None:
    blocks = fill(arena)
    assert arena.capacity == arena.limit == 4 * MIB
    with pytest.raises(ResourceExhaustedError, match=rf"no room for {MIB} bytes .*: \d+ of {4 * MIB} bytes are free"):
        arena.allocate(MIB)
    assert all(block.release() for block in blocks)
    assert (arena.leases, arena.leased_bytes) == (0, 0)


def test_a_block_may_lie_across_segments(arena: Arena) -> None:
    arena.allocate(MIB // 2)
    block = arena.allocate(3 * MIB)
    assert block.offset < MIB < block.offset + block.size
    block.array("UINT8", (3 * MIB,))[:] = 7
    assert bytes(block.view) == b"\x07" * (3 * MIB)


def test_a_freed_block_is_used_again_warm_under_another_generation(arena: Arena) -> None:
    first = arena.allocate(1000)
    first.release()
    second = arena.allocate(990)
    assert second.offset == first.offset
    assert second.generation != first.generation


def test_releasing_what_is_stale_or_unknown_does_no_harm(arena: Arena) -> None:
    old = arena.allocate(1000)
    old.release()
    new = arena.allocate(1000)
    assert not old.release()
    assert not arena.release(12345, 1)
    assert not arena.release(-64, 0)
    assert arena.leases == 1
    assert new.release()


def test_handles_of_rows_lie_in_their_block(arena: Arena) -> None:
    block = arena.allocate(100)
    assert block.handle == Handle(arena.id, block.offset, block.offset + 64, 100, block.generation)
    assert block.slice(20, 40) == Handle(arena.id, block.offset, block.offset + 84, 40, block.generation)
    for start, length in ((-1, 1), (0, 101), (100, 1), (0, -1)):
        with pytest.raises(ValueError, match="out of its block"):
            block.slice(start, length)


def test_a_block_as_an_array_is_written_in_place(arena: Arena) -> None:
    block = arena.allocate(24)
    block.array("FP32", (2, 3))[:] = np.arange(6).reshape(2, 3)
    assert bytes(block.view) == np.arange(6, dtype=np.float32).tobytes()
    with pytest.raises(InvalidTensorError):
        block.array("FP32", (7,))


def test_no_bytes_have_no_block(arena: Arena) -> None:
    with pytest.raises(ValueError, match="no bytes"):
        arena.allocate(0)


def test_threads_share_an_arena(directory: ArenaDirectory) -> None:
    failures: list[BaseException] = []

    def hammer(seed: int) -> None:
        chance = random.Random(seed)
        held: list[tuple[Block, int]] = []
        try:
            for turn in range(1500):
                if len(held) > 8 or (held and chance.random() < 0.4):
                    block, value = held.pop(chance.randrange(len(held)))
                    assert block.view == bytes([value]) * block.byte_size
                    assert block.release()
                else:
                    block = arena.allocate_blocking(chance.choice((100, 5000, 60_000)), 10)
                    block.view[:] = bytes([turn % 256]) * block.byte_size
                    held.append((block, turn % 256))
            for block, _ in held:
                assert block.release()
        except BaseException as err:
            failures.append(err)

    with Arena(directory, 2 * MIB, first_segment_bytes=64 << 10) as arena:
        threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert (arena.leases, arena.leased_bytes, arena.waiters) == (0, 0, 0)
        arena.allocate(arena.capacity - 64 - (256 << 10))  # all that was freed has merged


async def test_open_arena_is_gone_with_its_block(directory: ArenaDirectory) -> None:
    async with open_arena(directory, MIB) as arena:
        assert arena.capacity == MIB
    assert os.listdir(directory.path) == ["nonce"]


async def test_waiting_grows_the_arena_first(arena: Arena) -> None:
    block = await arena.allocate_or_wait(2 * MIB, 0)
    assert block.byte_size == 2 * MIB
    assert arena.waiters == 0


async def test_waiters_are_served_in_their_order(arena: Arena) -> None:
    blocks = fill(arena)
    served: list[str] = []

    async def want(name: str, byte_size: int) -> Block:
        block = await arena.allocate_or_wait(byte_size, 60)
        served.append(name)
        return block

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(want("large", MIB))
        await settled()
        tasks.create_task(want("small", 100_000))
        await settled()
        assert arena.waiters == 2
        blocks[0].release()  # enough for the small one, which came later
        await settled()
        assert served == []
        blocks[1].release()
        blocks[2].release()
    assert served == ["large", "small"]


async def test_a_release_in_a_thread_wakes_the_loop(arena: Arena) -> None:
    blocks = fill(arena)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(arena.allocate_or_wait(10_000, 60))
        await settled()
        await asyncio.to_thread(blocks[0].release)
    assert task.result().byte_size == 10_000


async def test_waiting_ends_at_its_time_and_leaves_nothing(arena: Arena) -> None:
    blocks = fill(arena)
    with pytest.raises(ResourceExhaustedError, match=f"no room for {MIB} bytes"):
        await arena.allocate_or_wait(MIB, 0)
    assert arena.waiters == 0
    blocks[0].release()
    assert arena.leases == len(blocks) - 1


async def test_a_cancelled_waiter_keeps_no_block(arena: Arena) -> None:
    blocks = fill(arena)
    waiting = asyncio.ensure_future(arena.allocate_or_wait(10_000, 60))
    await settled()
    blocks[0].release()  # granted, not yet noticed
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (arena.waiters, arena.leases) == (0, len(blocks) - 1)


async def test_one_that_gives_up_lets_the_next_one_through(arena: Arena) -> None:
    blocks = fill(arena)
    large = asyncio.ensure_future(arena.allocate_or_wait(2 * MIB, 60))
    await settled()
    small = asyncio.ensure_future(arena.allocate_or_wait(10_000, 60))
    await settled()
    blocks[0].release()
    await settled()
    assert not small.done()
    large.cancel()
    assert (await small).byte_size == 10_000


async def test_the_number_of_waiters_is_bounded(directory: ArenaDirectory) -> None:
    with Arena(directory, MIB, waiter_limit=1) as arena:
        arena.allocate(MIB // 2)
        waiting = asyncio.ensure_future(arena.allocate_or_wait(MIB // 2, 60))
        await settled()
        with pytest.raises(ResourceExhaustedError):
            await arena.allocate_or_wait(MIB // 2, 60)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_what_can_never_fit_does_not_wait(arena: Arena) -> None:
    with pytest.raises(ResourceExhaustedError):
        await arena.allocate_or_wait(4 * MIB, 60)
    with pytest.raises(ResourceExhaustedError):
        arena.allocate_blocking(4 * MIB, 60)


async def test_closing_ends_all_waiting(directory: ArenaDirectory) -> None:
    arena = Arena(directory, MIB)
    block = arena.allocate(MIB // 2)
    waiting = asyncio.ensure_future(arena.allocate_or_wait(MIB // 2, 60))
    await settled()
    arena.close()
    with pytest.raises(UnavailableError):
        await waiting
    with pytest.raises(UnavailableError):
        arena.allocate(1)
    assert not block.release()
    arena.close()


def test_a_thread_waits_too(arena: Arena) -> None:
    blocks = fill(arena)
    with pytest.raises(ResourceExhaustedError):
        arena.allocate_blocking(10_000, 0)
    got: list[Block] = []
    thread = threading.Thread(target=lambda: got.append(arena.allocate_blocking(10_000, 60)))
    thread.start()
    while not arena.waiters:
        os.sched_yield()
    blocks[0].release()
    thread.join()
    assert got[0].byte_size == 10_000


def test_views_outlive_the_arena(directory: ArenaDirectory) -> None:
    with Arena(directory, MIB) as arena:
        array = arena.allocate(400).array("INT32", (100,))
        array[:] = range(100)
    del arena
    assert array.tolist() == list(range(100))
