"""The gateway's side of the tensor plane: what goes into its arena comes out as it was, and nobody's block is lost."""

import asyncio
import threading
import time

import numpy as np
import pytest

from gateway.plane import OFF_LOOP_BYTES, GatewayPlane
from tensorline.errors import ResourceExhaustedError, StaleHandleError
from tensorline.tensor import Array, Handle, Tensor
from tests.gateway.house import House, add, open_house
from tests.tensorline.stage.pair import MIB, until

SIZES = [4097, OFF_LOOP_BYTES - 1, OFF_LOOP_BYTES, 3 * OFF_LOOP_BYTES + 5]


def plane_of(house: House) -> GatewayPlane:
    return house.service._plane


def tensor(byte_size: int) -> Tensor:
    data = np.random.default_rng(byte_size).bytes(byte_size)
    return Tensor("x", "UINT8", (byte_size,), data)


@pytest.mark.parametrize("byte_size", SIZES)
async def test_what_is_placed_is_fetched(byte_size: int) -> None:
    async with open_house({"one": add(1)}) as house:
        plane, given = plane_of(house), tensor(byte_size)
        assert plane.needs_placing([given])
        placed = await plane.place(given, 1.0)
        assert placed.data is None
        assert placed.handle is not None
        assert house.arena.leases == 1
        (fetched,) = await plane.fetch([placed])
        assert fetched == given
        plane.give_back(placed.handle)
        assert house.arena.leases == 0
        plane.give_back(placed.handle)  # once too often is no harm
        with pytest.raises(StaleHandleError):
            await plane.fetch([placed])


async def test_what_a_frame_can_hold_stays_there() -> None:
    async with open_house({"one": add(1)}) as house:
        plane, small = plane_of(house), tensor(4096)
        assert not plane.needs_placing([small])
        assert await plane.place(small, 1.0) is small
        assert await plane.fetch([small]) == [small]
        empty = Tensor("x", "FP32", (0,), b"")
        assert await plane.place(empty, 1.0) is empty


async def test_nothing_is_placed_that_nobody_could_read() -> None:
    async with open_house() as house:
        assert not plane_of(house).needs_placing([tensor(MIB)])


async def test_room_is_waited_for_no_longer_than_the_request_has() -> None:
    async with open_house({"one": add(1)}, arena_bytes=MIB) as house:
        plane = plane_of(house)
        began = time.monotonic()
        with pytest.raises(ResourceExhaustedError):
            await plane.place(tensor(4 * MIB), 0.05)
        with pytest.raises(ResourceExhaustedError):
            await plane.place(tensor(4 * MIB), -1.0)
        assert time.monotonic() - began < 2
        assert house.arena.leases == 0


async def test_a_block_is_nobody_elses_while_a_thread_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that leaves cannot stop the thread that copies for it."""
    writing, go = threading.Event(), threading.Event()
    copyto = np.copyto

    def slow(target: Array, source: Array) -> None:
        writing.set()
        go.wait(5)
        copyto(target, source)

    monkeypatch.setattr(np, "copyto", slow)
    async with open_house({"one": add(1)}) as house:
        placing = asyncio.create_task(plane_of(house).place(tensor(2 * MIB), 1.0))
        await until(writing.is_set)
        placing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await placing
        assert house.arena.leases == 1
        go.set()
        await until(lambda: not house.arena.leases)


async def test_a_block_of_a_stage_that_is_gone_is_nobodys() -> None:
    async with open_house({"one": add(1)}) as house:
        plane = plane_of(house)
        gone = Handle(b"no such arena...", 64, 64, 16, 1)
        plane.give_back(gone)
        with pytest.raises(StaleHandleError) as caught:
            await plane.fetch([Tensor("y", "UINT8", (16,), None, gone)])
        assert str(caught.value) == "a tensor in shared memory is no longer there"
