import asyncio
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.rpc.channels import MESSAGE_BYTES
from tensorline.rpc.lane import FULL_BYTES, TOKEN_BYTES, Lane, open_lane
from tests.tensorline.stage.pair import until

pytestmark = pytest.mark.usefixtures("one_loop")

TOKEN = bytes(range(TOKEN_BYTES))


def message(*numbers: int, size: int = 0) -> pb.Frames:
    frames = pb.Frames()
    for number in numbers:
        frame = frames.frames.add()
        frame.submit.id = number
        frame.submit.request_id = "r" * size
    return frames


def packed(*messages: pb.Frames) -> bytes:
    parts = [each.SerializeToString() for each in messages]
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


class Far:
    """The stage's end: knows one token, keeps what comes."""

    def __init__(self) -> None:
        self.received: list[pb.Frames] = []
        self.tokens: list[bytes] = []
        self.lost = 0
        self.lane = Lane(self._on_token)

    def _on_token(self, lane: Lane, token: bytes) -> bool:
        self.tokens.append(token)
        if token != TOKEN:
            return False
        lane.on_message = self.received.append
        lane.on_lost = self._count_loss
        return True

    def _count_loss(self) -> None:
        self.lost += 1


class Listener:
    def __init__(self, path: str) -> None:
        self.path = path
        self.ends: list[Far] = []

    def accept(self) -> Lane:
        self.ends.append(Far())
        return self.ends[-1].lane


@asynccontextmanager
async def listening(path: Path) -> AsyncIterator[Listener]:
    listener = Listener(str(path / "lane.sock"))
    server = await asyncio.get_running_loop().create_unix_server(listener.accept, listener.path)
    try:
        yield listener
    finally:
        server.close()
        for end in listener.ends:
            end.lane.close()


@pytest.fixture
async def listener(path: Path) -> AsyncIterator[Listener]:
    async with listening(path) as listener:
        yield listener


class Raw:
    """A peer that writes whatever it likes."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    async def wait_closed(self) -> None:
        self._socket.settimeout(5)
        assert await asyncio.to_thread(self._socket.recv, 1) == b""


async def test_messages_pass_both_ways_after_the_token(listener: Listener) -> None:
    near = await open_lane(listener.path, 1.0)
    back: list[pb.Frames] = []
    near.on_message = back.append
    near.write_token(TOKEN)
    near.write(message(1, 2))
    await until(lambda: listener.ends and listener.ends[0].received)
    listener.ends[0].lane.write(message(3))
    await until(lambda: back)
    assert (listener.ends[0].received, back) == ([message(1, 2)], [message(3)])
    near.close()
    await until(lambda: listener.ends[0].lost)
    assert listener.ends[0].lost == 1


@pytest.mark.parametrize("token", [bytes(TOKEN_BYTES), TOKEN[::-1], b"x" * 100])
async def test_a_wrong_token_closes_the_connection(listener: Listener, token: bytes) -> None:
    with Raw(listener.path) as raw:
        raw.send(token + packed(message(1)))
        await raw.wait_closed()
    assert listener.ends[0].received == []
    assert listener.ends[0].tokens == [token[:TOKEN_BYTES]]


async def test_nothing_is_taken_before_the_whole_token_is_there(listener: Listener) -> None:
    with Raw(listener.path) as raw:
        raw.send(TOKEN[:-1])
        await until(lambda: listener.ends)
        await asyncio.sleep(0.05)
        assert listener.ends[0].tokens == []
        raw.send(TOKEN[-1:] + packed(message(5)))
        await until(lambda: listener.ends[0].received)
    assert listener.ends[0].received == [message(5)]


async def test_a_connection_that_never_says_its_token_does_not_stay(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorline.rpc.lane.TOKEN_S", 0.1)
    with Raw(listener.path) as silent, Raw(listener.path) as short:
        short.send(TOKEN[:5])
        await silent.wait_closed()
        await short.wait_closed()
    near = await open_lane(listener.path, 1.0)
    near.write_token(TOKEN)
    await asyncio.sleep(0.2)
    near.write(message(1))  # one that did stays
    await until(lambda: listener.ends[-1].received)
    near.close()


class Sink(asyncio.WriteTransport):
    """Where a lane under a test of its parser writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def close(self) -> None:
        self.is_closed = True


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 1 << 40), max_size=5), max_size=6),
    st.lists(st.integers(1, 400), max_size=40),
    st.booleans(),
)
async def test_messages_are_whole_wherever_they_are_split(
    numbers: list[list[int]], cuts: list[int], has_token: bool
) -> None:
    far = Far()
    lane = far.lane if has_token else Lane()
    lane.on_message = far.received.append
    lane.connection_made(Sink())
    sent = [message(*row) for row in numbers]
    data = (TOKEN if has_token else b"") + packed(*sent)
    at = 0
    for cut in [*cuts, len(data)]:
        if at < len(data):
            lane.data_received(data[at : at + cut])
            at += cut
    assert far.received == sent


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 50))
async def test_garbage_ends_the_lane_or_waits_for_more_and_is_never_an_exception(data: bytes, cut: int) -> None:
    lane, sink = Lane(), Sink()
    received: list[pb.Frames] = []
    lane.connection_made(sink)
    lane.on_message = received.append
    for at in range(0, len(data), cut):
        if not sink.is_closed:
            lane.data_received(data[at : at + cut])
    if sink.is_closed:
        return
    (length,) = struct.unpack("<I", data[:4]) if len(data) >= 4 else (0,)
    assert length <= MESSAGE_BYTES


async def test_a_message_of_the_largest_size_passes_and_one_more_byte_closes(listener: Listener) -> None:
    body = message(1, size=MESSAGE_BYTES - 100)
    body.frames[0].submit.request_id = "r" * (MESSAGE_BYTES - (body.ByteSize() - (MESSAGE_BYTES - 100)))
    assert body.ByteSize() == MESSAGE_BYTES
    with Raw(listener.path) as raw:
        await asyncio.to_thread(raw.send, TOKEN + packed(body))
        await until(lambda: listener.ends[0].received)
        raw.send(struct.pack("<I", MESSAGE_BYTES + 1))
        await raw.wait_closed()
    assert listener.ends[0].received == [body]
    assert listener.ends[0].lost == 1


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", struct.pack("<I", 3) + b"\xff\xff\xff"])
async def test_what_is_no_message_closes_that_connection_and_no_other(listener: Listener, garbage: bytes) -> None:
    near = await open_lane(listener.path, 1.0)
    near.write_token(TOKEN)
    with Raw(listener.path) as raw:
        raw.send(TOKEN + packed(message(1)) + garbage + packed(message(2)))
        await raw.wait_closed()
    near.write(message(3))
    await until(lambda: listener.ends[0].received)
    assert listener.ends[0].received == [message(3)]
    assert listener.ends[1].received == [message(1)]
    again = await open_lane(listener.path, 1.0)
    again.write_token(TOKEN)
    again.write(message(4))
    await until(lambda: listener.ends[2].received)
    for lane in (near, again):
        lane.close()


async def test_a_lane_is_full_while_its_peer_does_not_read(listener: Listener) -> None:
    near = await open_lane(listener.path, 1.0)
    near.write_token(TOKEN)
    await until(lambda: listener.ends and listener.ends[0].tokens)
    rooms: list[bool] = []
    near.on_room = lambda: rooms.append(near.is_full)
    far = listener.ends[0].lane
    far._transport.pause_reading()  # type: ignore[union-attr]
    written = 0
    while not near.is_full:
        near.write(message(written, size=1 << 20))
        written += 1
        await asyncio.sleep(0)
    assert written <= FULL_BYTES // (1 << 20) + 4
    far._transport.resume_reading()  # type: ignore[union-attr]
    await until(lambda: len(listener.ends[0].received) == written)
    assert rooms == [False]
    near.close()


async def test_what_is_written_goes_out_before_the_close(listener: Listener) -> None:
    near = await open_lane(listener.path, 1.0)
    near.write_token(TOKEN)
    for number in range(8):
        near.write(message(number, size=1 << 20))
    near.close()
    await until(lambda: listener.ends[0].lost)
    assert [each.frames[0].submit.id for each in listener.ends[0].received] == list(range(8))


async def test_a_lane_that_is_lost_says_so_also_to_those_who_ask_later(listener: Listener) -> None:
    near = await open_lane(listener.path, 1.0)
    assert near.is_open
    listener.ends[0].lane.close()
    await until(lambda: not near.is_open)
    near.write_token(TOKEN)
    near.write(message(1))
    near.close()


async def test_nobody_there_is_said_at_once(path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        await open_lane(str(path / "none.sock"), 1.0)


def test_a_raw_socket_is_private_only_by_its_directory(path: Path) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
