"""The contract of what carries an outbox, and what the outbox itself decides."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.rpc.channels import CHUNK_BYTES, MESSAGE_BYTES
from tensorline.rpc.frames import ChunkStore, decode_tensors
from tensorline.rpc.outbox import INLINE_BYTES, Outbox, TensorList
from tensorline.tensor import Handle, Tensor
from tests.tensorline.rpc.carriers import CARRIERS, Carrier
from tests.tensorline.stage.pair import until

pytestmark = pytest.mark.usefixtures("one_loop")

MIB = 1 << 20


@pytest.fixture(params=CARRIERS)
async def carrier(request: pytest.FixtureRequest, path: Path) -> AsyncIterator[Carrier]:
    async with CARRIERS[request.param](path) as carrier:
        yield carrier


def put_cancels(outbox: Outbox, numbers: range) -> None:
    for number in numbers:
        outbox.frame().cancel.id = number


def numbers_in(messages: list[pb.Frames]) -> list[int]:
    return [frame.cancel.id for message in messages for frame in message.frames]


def put(outbox: Outbox, number: int, *tensors: Tensor) -> None:
    def room() -> TensorList:
        wire = outbox.frame().submit
        wire.id = number
        return wire.inputs

    outbox.put_tensors(tensors, room)


def filled(name: str, size: int) -> Tensor:
    return Tensor(name, "UINT8", (size,), bytes([size % 251]) * size)


def submissions(messages: list[pb.Frames]) -> dict[int, list[Tensor]]:
    """What a peer makes of the messages, in order."""
    store, found = ChunkStore(1 << 30), {}
    for message in messages:
        for frame in message.frames:
            if frame.WhichOneof("kind") == "chunk":
                store.add(frame.chunk)
            elif frame.WhichOneof("kind") == "submit":
                found[frame.submit.id] = decode_tensors(frame.submit.inputs, store)
    assert store.held_bytes == 0
    return found


async def drained(outbox: Outbox) -> list[pb.Frames]:
    messages: list[pb.Frames] = []

    async def write(message: pb.Frames) -> None:
        messages.append(message)

    outbox.end()
    await outbox.pump(write)
    return messages


async def test_what_is_added_in_one_turn_of_the_loop_leaves_in_one_message(carrier: Carrier) -> None:
    outbox = Outbox()
    carrier.start(outbox)
    await asyncio.sleep(0.01)
    for turn in range(3):
        put_cancels(outbox, range(turn * 10, turn * 10 + 10))
        await until(lambda turn=turn: len(carrier.received) == turn + 1)  # type: ignore[misc]
    assert [len(message.frames) for message in carrier.received] == [10, 10, 10]
    assert numbers_in(carrier.received) == list(range(30))


async def test_what_was_added_before_the_start_leaves_at_the_start(carrier: Carrier) -> None:
    outbox = Outbox()
    put_cancels(outbox, range(5))
    carrier.start(outbox)
    await until(lambda: len(carrier.received) == 1)
    assert numbers_in(carrier.received) == list(range(5))


async def test_every_frame_arrives_once_and_in_order_whatever_the_turns(carrier: Carrier) -> None:
    outbox = Outbox()
    carrier.start(outbox)
    for turn in range(100):
        put_cancels(outbox, range(turn * 7, turn * 7 + 7))
        if turn % 3:
            await asyncio.sleep(0)
    outbox.end()
    await carrier.wait_ended()
    assert numbers_in(carrier.received) == list(range(700))


async def test_the_end_comes_after_the_rest_is_written(carrier: Carrier) -> None:
    outbox = Outbox()
    carrier.start(outbox)
    put(outbox, 1, filled("x", 6 * MIB))
    put_cancels(outbox, range(3))
    outbox.end()
    await carrier.wait_ended()
    assert submissions(carrier.received)[1] == [filled("x", 6 * MIB)]
    assert outbox.is_empty


async def test_an_end_with_nothing_to_write_is_at_once(carrier: Carrier) -> None:
    outbox = Outbox()
    carrier.start(outbox)
    await asyncio.sleep(0.01)
    outbox.end()
    await carrier.wait_ended()
    assert carrier.received == []


async def test_a_peer_that_does_not_read_costs_nothing_but_its_time(carrier: Carrier) -> None:
    outbox = Outbox()
    carrier.start(outbox)
    put_cancels(outbox, range(1))
    await until(lambda: carrier.received)
    carrier.hold()
    for number in range(12):
        put(outbox, number, filled("x", 2 * MIB + number))
        await asyncio.sleep(0)
    await asyncio.sleep(0.1)
    assert not outbox.is_empty  # kept here, not in buffers below
    before = len(carrier.received)
    assert before <= 4
    carrier.resume()
    outbox.end()
    await carrier.wait_ended()
    assert submissions(carrier.received) == {number: [filled("x", 2 * MIB + number)] for number in range(12)}


@pytest.mark.parametrize(
    "size", [0, 1, INLINE_BYTES, INLINE_BYTES + 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * MIB + 3]
)
async def test_a_tensor_of_any_size_arrives_whole(carrier: Carrier, size: int) -> None:
    outbox = Outbox()
    put(outbox, 1, filled("x", size), filled("y", 10))
    carrier.start(outbox)
    outbox.end()
    await carrier.wait_ended()
    assert submissions(carrier.received) == {1: [filled("x", size), filled("y", 10)]}
    assert all(message.ByteSize() <= MESSAGE_BYTES for message in carrier.received)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([0, 1, 4096, 400_000, INLINE_BYTES, INLINE_BYTES + 1, CHUNK_BYTES + 1]), max_size=12),
        max_size=6,
    )
)
async def test_no_message_is_larger_than_allowed_whatever_is_put_in(sizes: list[list[int]]) -> None:
    outbox = Outbox()
    sent = {
        number: [filled(f"x{index}", size) for index, size in enumerate(row)] for number, row in enumerate(sizes, 1)
    }
    for number, tensors in sent.items():
        put(outbox, number, *tensors)
    messages = await drained(outbox)
    assert all(message.ByteSize() <= MESSAGE_BYTES for message in messages)
    assert submissions(messages) == sent


async def test_many_tensors_below_the_inline_limit_do_not_make_a_message_too_large() -> None:
    outbox = Outbox()
    tensors = [filled(f"x{index}", INLINE_BYTES) for index in range(20)]
    put(outbox, 1, *tensors)
    messages = await drained(outbox)
    assert max(message.ByteSize() for message in messages) <= MESSAGE_BYTES
    assert submissions(messages) == {1: tensors}


async def test_text_counts_as_data_does() -> None:
    outbox = Outbox()
    for number in range(200):
        frame = outbox.frame(64 << 10)
        frame.submit.id = number
        frame.submit.request_id = "r" * (64 << 10)
    messages = await drained(outbox)
    assert max(message.ByteSize() for message in messages) <= MESSAGE_BYTES
    assert [frame.submit.id for message in messages for frame in message.frames] == list(range(200))


async def test_frames_and_handles_without_end_make_several_messages() -> None:
    outbox = Outbox()
    handle = Handle(b"a" * 16, 1 << 40, 1 << 40, 1 << 40, 1 << 63)
    tensors = [Tensor(f"output_{index}", "FP32", (1 << 20,) * 4, None, handle) for index in range(1000)]
    for number in range(20):
        put(outbox, number, *tensors)
    messages = await drained(outbox)
    assert max(message.ByteSize() for message in messages) <= MESSAGE_BYTES
    assert submissions(messages)[19] == tensors


async def test_what_a_write_raises_ends_the_pump() -> None:
    async def write(message: pb.Frames) -> None:
        raise ConnectionResetError

    outbox = Outbox()
    put_cancels(outbox, range(1))
    with pytest.raises(ConnectionResetError):
        await outbox.pump(write)
