"""The stage's end of a stream, beside gateways that do not keep to the protocol."""

import asyncio
import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import numpy as np
import pytest
from grpc import StatusCode, aio

from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.rpc.channels import CHUNK_BYTES, MESSAGE_BYTES, PROTOCOL, open_stage_channel
from tensorline.rpc.hosted import HostedModel
from tensorline.stage.backend import Batch
from tensorline.tensor import Array
from tests.leaks import no_leaks
from tests.tensorline.stage.pair import MIB, Model, Stage, config, open_caller, open_stage, tensor, until
from tests.tensorline.stage.raw import RawGateway, frame, inline, open_raw_gateway, submit

pytestmark = pytest.mark.usefixtures("one_loop")

INVALID = StatusCode.INVALID_ARGUMENT.value[0]


def status(code: StatusCode) -> int:
    number: int = code.value[0]
    return number


def slow(batch: Batch) -> Mapping[str, Array]:
    until_s = time.monotonic() + 3
    while not batch.is_cancelled() and time.monotonic() < until_s:
        time.sleep(0.002)
    return {"y": batch.inputs["x"]}


def big(batch: Batch) -> Mapping[str, Array]:
    return {"y": np.zeros(10_000, np.uint8)}


MODELS = {
    "echo": Model(f'backend: "identity"\n{config({"x": "UINT8", "z": "UINT8"}, {"y": "UINT8"})}'),
    "slow": Model(config({"x": "UINT8"}, {"y": "UINT8"}), run=slow),
    "big": Model(config({"x": "UINT8"}, {"y": "UINT8"}), run=big),
}


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_stage(MODELS, inline_limit=4 * MIB) as stage:
        yield stage


@pytest.fixture
async def raw(stage: Stage) -> AsyncIterator[RawGateway]:
    async with open_raw_gateway(stage) as raw:
        yield raw


def chunk(chunk_id: int, data: bytes, total: int) -> pb.Frame:
    return frame(chunk=pb.Chunk(id=chunk_id, data=data, total=total))


def chunked(chunk_id: int, length: int, name: str = "x") -> pb.Tensor:
    return pb.Tensor(name=name, datatype="UINT8", shape=[length], chunked=pb.Chunked(id=chunk_id, length=length))


async def works(raw: RawGateway, number: int = 999) -> bool:
    """The stream still serves."""
    await raw.say(submit(number, inline("x", b"ok")))
    return (await raw.result(number)).outputs[0].inline == b"ok"


# ---- hello


@pytest.mark.parametrize(
    "first",
    [
        [frame(beat=pb.Beat(sent_ns=1))],
        [frame(submit=pb.Submit(id=1, model="echo"))],
        [frame()],
        [frame(hello=pb.Hello(protocol=PROTOCOL)), frame(beat=pb.Beat(sent_ns=1))],
    ],
)
async def test_a_stream_that_does_not_begin_with_hello_alone_is_refused(stage: Stage, first: list[pb.Frame]) -> None:
    async with open_raw_gateway(stage, first) as raw:
        assert await raw.ended() == (
            StatusCode.UNAVAILABLE,
            "a stage stream begins with a message of hello alone",
        )
    assert stage.end.streams == 0


async def test_a_stream_that_ends_before_hello_is_refused(stage: Stage) -> None:
    async with open_raw_gateway(stage, []) as raw:
        await raw.call.done_writing()
        assert (await raw.ended())[0] is StatusCode.UNAVAILABLE


async def test_a_gateway_that_never_says_hello_is_given_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorline.stage.server.HELLO_S", 0.1)
    async with open_raw_gateway(stage, []) as raw:
        assert await raw.ended() == (StatusCode.UNAVAILABLE, "the gateway did not say hello in time")


@pytest.mark.parametrize("protocol", [0, PROTOCOL + 1, (1 << 32) - 1])
async def test_another_protocol_is_refused_with_both_numbers(stage: Stage, protocol: int) -> None:
    async with open_raw_gateway(stage, protocol=protocol) as raw:
        assert await raw.ended() == (
            StatusCode.UNAVAILABLE,
            f"this stage speaks protocol {PROTOCOL}, the gateway speaks {protocol}",
        )
        await until(lambda: raw.received)
        assert raw.hello.protocol == PROTOCOL  # so that the gateway can say it too
        assert raw.hello.lane == ""


@asynccontextmanager
async def garbage_call(stage: Stage) -> "AsyncIterator[aio.StreamStreamCall[bytes, bytes]]":
    channel = open_stage_channel(stage.target)
    call: aio.StreamStreamCall[bytes, bytes] = channel.stream_stream("/tensorline.v1.Stage/Exchange")()
    try:
        yield call
    finally:
        call.cancel()
        await channel.close()


async def test_bytes_that_are_no_message_end_their_stream_and_no_other(
    stage: Stage, raw: RawGateway, caplog: pytest.LogCaptureFixture
) -> None:
    hello = pb.Frames(frames=[frame(hello=pb.Hello(protocol=PROTOCOL, nonce=b"far"))]).SerializeToString()
    for first in ([b"\xff\xff\xff"], [hello, b"\xff\xff\xff"]):
        async with garbage_call(stage) as call:
            for each in first:
                await call.write(each)
            async with asyncio.timeout(5):
                with contextlib.suppress(aio.AioRpcError):
                    while await call.read() is not aio.EOF:
                        pass
    await until(lambda: stage.end.streams == 1)
    assert await works(raw)
    assert "Traceback" not in caplog.text


# ---- frames


async def test_frames_of_unknown_kinds_are_counted_and_ignored(stage: Stage, raw: RawGateway) -> None:
    unknown = pb.Frame.FromString(b"\xa2\x06\x03new")
    await raw.say(
        unknown,
        frame(hello=pb.Hello()),
        frame(result=pb.Result(id=1)),
        frame(drain=pb.Drain()),
        frame(credit=pb.Credit(max_in_flight=0)),
        frame(models=pb.Models()),
    )
    assert await works(raw)
    (session,) = stage.end._sessions
    assert session.unknown_frames == 6


@pytest.mark.parametrize(
    ("inputs", "code", "text"),
    [
        ([pb.Tensor(name="x")], StatusCode.INVALID_ARGUMENT, "tensor 'x' came without data"),
        ([chunked(5, 4)], StatusCode.INVALID_ARGUMENT, "a tensor refers to chunks that never came"),
        ([inline("x", b"abc", "FP33")], StatusCode.INVALID_ARGUMENT, "datatype 'FP33' is unknown; use one of BOOL"),
        ([inline("x", b"abc", "FP32")], StatusCode.INVALID_ARGUMENT, "byte size mismatch for FP32"),
        ([inline("x", b"abc", shape=[-3])], StatusCode.INVALID_ARGUMENT, "shape [-3] has a negative dimension"),
        ([inline("x", b"", shape=[0, 1 << 62])], StatusCode.INVALID_ARGUMENT, "shape [0, 4611686018427387904] has"),
        ([inline("x", b"a", shape=[1] * 40)], StatusCode.INVALID_ARGUMENT, "shape has 40 dimensions"),
        ([inline("x", b"\xff\0\0\0a", "BYTES", [1])], StatusCode.INVALID_ARGUMENT, "incomplete string data"),
        (
            [pb.Tensor(name="x", datatype="UINT8", shape=[3], handle=pb.Handle())],
            StatusCode.UNAVAILABLE,
            "a tensor in shared memory is no longer there",
        ),
        ([], StatusCode.INVALID_ARGUMENT, "input 'x' is missing"),
        ([inline("other", b"a")], StatusCode.INVALID_ARGUMENT, "input 'x' is missing"),
    ],
)
async def test_a_bad_input_fails_its_request_alone(
    raw: RawGateway, inputs: list[pb.Tensor], code: StatusCode, text: str
) -> None:
    await raw.say(submit(1, inline("x", b"a")), submit(2, *inputs), submit(3, inline("x", b"b")))
    bad = await raw.result(2)
    assert (bad.status, bad.final, bad.error[: len(text)]) == (status(code), True, text)
    assert (await raw.result(1)).outputs[0].inline == b"a"
    assert (await raw.result(3)).outputs[0].inline == b"b"


async def test_an_unknown_model_is_said_whatever_its_name_is(raw: RawGateway) -> None:
    names = ["none", "", "../../etc", "a\nb\x1b[2J", "x" * 100_000]
    await raw.say(*(submit(at, inline("x", b"a"), model=name) for at, name in enumerate(names, 1)))
    for number in range(1, 6):
        result = await raw.result(number)
        assert (result.status, result.not_started) == (status(StatusCode.NOT_FOUND), True)
        assert result.error.startswith("Request for unknown model: '")
        assert len(result.error) < 1100
        assert result.error.isprintable()


async def test_a_number_in_use_is_not_taken_twice(raw: RawGateway) -> None:
    await raw.say(submit(1, inline("x", b"a"), model="slow"))
    await raw.say(submit(1, inline("x", b"b")), frame(cancel=pb.Cancel(id=1)))
    await raw.result(1)
    await raw.say(submit(1, inline("x", b"c")))  # free again: the peer's affair
    await until(lambda: len([f for f in raw.received if f.WhichOneof("kind") == "result"]) == 2)


async def test_cancels_and_releases_of_what_is_not_there_are_no_harm(stage: Stage, raw: RawGateway) -> None:
    await raw.say(
        frame(cancel=pb.Cancel(id=7)),
        frame(cancel=pb.Cancel()),
        frame(release=pb.Release(blocks=[pb.Block(), pb.Block(block=64, generation=1), pb.Block(block=(1 << 64) - 1)])),
        frame(release=pb.Release()),
    )
    assert await works(raw)


async def test_nobody_can_release_what_another_holds(stage: Stage, raw: RawGateway) -> None:
    async with open_caller(stage) as other:
        held = await other.call("big", tensor("x", np.zeros(1, np.uint8)))
        handle = held.outputs[0].handle
        assert handle is not None
        await raw.say(
            frame(release=pb.Release(blocks=[pb.Block(block=handle.block, generation=handle.generation)] * 9))
        )
        assert await works(raw)
        assert stage.arena.leases == 1
        assert len(other.read(held)["y"]) == 10_000


async def test_a_release_that_is_said_twice_counts_once(stage: Stage, raw: RawGateway) -> None:
    await raw.say(submit(1, inline("x", b"a"), model="big"), submit(2, inline("x", b"a"), model="big"))
    first, second = await raw.result(1), await raw.result(2)
    at = first.outputs[0].handle
    block = pb.Block(block=at.block, generation=at.generation)
    await raw.say(frame(release=pb.Release(blocks=[block, block])), frame(release=pb.Release(blocks=[block])))
    assert await works(raw)
    assert stage.arena.leases == 1
    assert second.outputs[0].handle.block != at.block


async def test_beats_are_answered_with_the_load(stage: Stage, raw: RawGateway) -> None:
    await raw.say(submit(1, inline("x", b"a"), model="big"))
    await raw.result(1)
    await raw.say(frame(beat=pb.Beat(sent_ns=5)), frame(beat=pb.Beat(sent_ns=6, echo_ns=7)))
    await until(lambda: [f for f in raw.received if f.WhichOneof("kind") == "beat"])
    await works(raw)
    (answer,) = (f.beat for f in raw.received if f.WhichOneof("kind") == "beat")
    assert (answer.echo_ns, answer.queued) == (5, 0)
    assert answer.sent_ns > 0
    assert answer.arena_bytes >= 10_000


# ---- chunks


async def test_chunks_in_any_order_and_mixed_make_their_tensors(raw: RawGateway) -> None:
    one, two = bytes(range(256)) * 6000, b"z" * (CHUNK_BYTES + 1)
    await raw.say(chunk(1, one[:CHUNK_BYTES], len(one)), chunk(2, two[:100], len(two)))
    await raw.say(chunk(2, two[100:], len(two)), chunk(1, one[CHUNK_BYTES:], len(one)))
    await raw.say(submit(1, chunked(1, len(one))), submit(2, chunked(2, len(two))))
    parts = {1: b"", 2: b""}
    for number, sent in ((1, one), (2, two)):
        (output,) = (await raw.result(number)).outputs
        parts[number] = b"".join(
            f.chunk.data for f in raw.received if f.WhichOneof("kind") == "chunk" and f.chunk.id == output.chunked.id
        )
        assert parts[number] == sent


async def test_hostile_chunks_cost_their_own_request_alone(raw: RawGateway) -> None:
    await raw.say(
        chunk(1, b"abc", 2),  # more than announced
        chunk(2, b"", 1 << 63),
        chunk(3, b"x", (1 << 64) - 1),
        chunk(4, b"abc", 4),  # incomplete
        chunk(5, b"abcd", 4),
        chunk(5, b"e", 4),
        submit(1, chunked(1, 3)),
        submit(2, chunked(2, 0)),
        submit(3, chunked(3, 1)),
        submit(4, chunked(4, 4)),
        submit(5, chunked(5, 4)),
        submit(6, chunked(4, 3)),
    )
    assert [(await raw.result(number)).status for number in range(1, 7)] == [
        INVALID,
        status(StatusCode.RESOURCE_EXHAUSTED),
        status(StatusCode.RESOURCE_EXHAUSTED),
        INVALID,
        INVALID,
        INVALID,
    ]
    assert await works(raw)


async def test_a_request_that_fails_leaves_no_chunks_behind(stage: Stage, raw: RawGateway) -> None:
    """More rounds than the limit would hold if each left its chunks."""
    data = b"x" * CHUNK_BYTES
    for number in range(1, 9):
        await raw.say(chunk(number, data, CHUNK_BYTES))
        await raw.say(submit(number, pb.Tensor(name="z"), chunked(number, CHUNK_BYTES)))
        assert (await raw.result(number)).error == "tensor 'z' came without data"
    (session,) = stage.end._sessions
    assert session._chunks.held_bytes == 0
    await raw.say(chunk(50, data, CHUNK_BYTES))
    await raw.say(submit(50, chunked(50, CHUNK_BYTES)))
    assert (await raw.result(50)).status == 0


async def test_no_message_to_a_gateway_is_larger_than_allowed(stage: Stage) -> None:
    async with open_raw_gateway(stage, nonce=b"far") as raw:
        data = b"x" * (400 << 10)
        for number in range(1, 30):
            await raw.say(submit(number, inline("x", data), inline_only=True))
        for number in range(1, 30):
            assert (await raw.result(number)).outputs[0].inline == data
    assert max(raw.sizes) <= MESSAGE_BYTES


async def test_a_gateway_that_does_not_read_its_answers_is_refused_more_and_then_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It goes on to ask and to beat; here is no room for the answers of one that never takes them."""
    asked = 0

    async def ask(raw: RawGateway) -> None:
        nonlocal asked
        while True:
            asked += 1
            size = 400 << 10 if asked < 20 else 1000
            await raw.say(submit(asked, inline("x", b"x" * size), inline_only=True))

    async with open_stage(MODELS, inline_limit=1 << 19, has_lane=False) as stage:
        async with open_raw_gateway(stage, nonce=b"far") as raw:
            raw.reading.clear()
            asking = asyncio.create_task(ask(raw))
            await until(lambda: not stage.end.streams)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    assert 20 < asked < 20_000
    assert "gateway does not read its answers" in caplog.text


async def test_more_models_than_a_message_holds_do_not_break_the_stream() -> None:
    async with open_stage(MODELS) as stage, open_caller(stage) as caller:
        (session,) = stage.end._sessions
        many = [HostedModel(f"m{at}", "1", "READY", "", bytes(1 << 19)) for at in range(20)]
        told = caller.told
        session.send_models(many)
        await until(lambda: caller.told > told)
        assert [model.name for model in caller.models] == ["m0", "m1", "m2"]
        assert (await caller.call("echo", tensor("x", np.zeros(1, np.uint8)))).status == 0


async def test_the_sockets_are_private(stage: Stage) -> None:
    for each in (stage.target.removeprefix("unix:"), stage.identity.lane):
        assert stat.S_IMODE(os.stat(each).st_mode) == 0o600


async def test_a_message_over_the_limit_ends_its_stream_and_no_other(stage: Stage, raw: RawGateway) -> None:
    async with garbage_call(stage) as call:
        hello = pb.Frames(frames=[frame(hello=pb.Hello(protocol=PROTOCOL, nonce=b"far"))]).SerializeToString()
        await call.write(hello)
        large = pb.Frames(frames=[submit(1, inline("x", b"x" * MESSAGE_BYTES))]).SerializeToString()
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(large)
            while await call.read() is not aio.EOF:
                pass
        assert call.done()
    assert await works(raw)


# ---- the lane


class LanePeer:
    """A plain socket to the stage's lane."""

    def __init__(self, stage: Stage) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(5)
        self._socket.connect(stage.identity.lane)

    def __enter__(self) -> "LanePeer":
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def say(self, *frames: pb.Frame) -> None:
        data = pb.Frames(frames=frames).SerializeToString()
        self.send(struct.pack("<I", len(data)) + data)

    async def hear(self) -> pb.Frames:
        def receive(count: int) -> bytes:
            data = b""
            while len(data) < count:
                part = self._socket.recv(count - len(data))
                if not part:
                    raise EOFError
                data += part
            return data

        (length,) = struct.unpack("<I", await asyncio.to_thread(receive, 4))
        return pb.Frames.FromString(await asyncio.to_thread(receive, length))

    async def is_closed(self) -> bool:
        try:
            while True:
                await self.hear()
        except EOFError:
            return True


async def test_the_lane_carries_the_frames_of_who_has_the_token(stage: Stage, raw: RawGateway) -> None:
    assert raw.hello.lane == stage.identity.lane
    with LanePeer(stage) as lane:
        lane.send(raw.hello.lane_token)
        assert (await lane.hear()).frames[0].WhichOneof("kind") == "models"
        lane.say(submit(1, inline("x", b"abc")))
        assert (await lane.hear()).frames[0].result.outputs[0].inline == b"abc"
        with LanePeer(stage) as second:  # a token opens one lane
            second.send(raw.hello.lane_token)
            assert await second.is_closed()
        lane.say(submit(2, inline("x", b"def")))
        assert (await lane.hear()).frames[0].result.outputs[0].inline == b"def"
    await until(lambda: stage.end.streams == 0)  # the end of the lane is the end of both
    assert (await raw.ended())[0] is StatusCode.OK


async def test_the_end_of_the_stream_is_the_end_of_its_lane_and_its_token(stage: Stage) -> None:
    async with open_raw_gateway(stage) as raw:
        token = raw.hello.lane_token
        with LanePeer(stage) as lane:
            lane.send(token)
            await lane.hear()
            raw.call.cancel()
            assert await lane.is_closed()
    async with open_raw_gateway(stage) as raw:
        unused = raw.hello.lane_token
    await until(lambda: stage.end.streams == 0)
    for old in (token, unused):
        with LanePeer(stage) as lane:
            lane.send(old)
            assert await lane.is_closed()
    assert stage.end._offers == {}


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", struct.pack("<I", 3) + b"\xff\xff\xff"])
async def test_garbage_on_a_lane_ends_its_stream_and_no_other(stage: Stage, garbage: bytes) -> None:
    async with open_raw_gateway(stage) as bad, open_raw_gateway(stage) as good:
        with LanePeer(stage) as lane:
            lane.send(bad.hello.lane_token)
            lane.say(submit(1, inline("x", b"a"), model="slow"))
            lane.send(garbage)
            assert await lane.is_closed()
        await bad.ended()
        assert await works(good)
        assert stage.end.in_flight == 0


# ---- silence and the end


async def test_a_silent_gateway_is_taken_out_and_its_leases_end(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorline.stage.session.BEAT_S", 0.05)
    async with open_raw_gateway(stage) as silent:
        await silent.say(submit(1, inline("x", b"a"), model="big"), submit(2, inline("x", b"a"), model="slow"))
        await silent.result(1)
        assert stage.arena.leases == 1
        await until(lambda: stage.end.streams == 0, 2.0)
        assert stage.arena.leases == 0
        assert (await silent.ended())[0] is StatusCode.OK


async def test_an_open_stream_without_a_first_word_does_not_hold_up_the_end() -> None:
    started = time.monotonic()
    async with open_stage(MODELS) as stage, open_raw_gateway(stage) as quiet:
        quiet.received.clear()
        stage.end.drain()
        stage.end.end_streams()
    assert time.monotonic() - started < 16


async def test_a_half_closed_stream_ends(stage: Stage, raw: RawGateway) -> None:
    await raw.say(submit(1, inline("x", b"a"), model="slow"))
    await until(lambda: stage.end.in_flight == 1)
    await raw.call.done_writing()
    assert (await raw.ended())[0] is StatusCode.OK
    await until(lambda: stage.end.streams == 0)


async def test_nothing_is_left_of_gateways_that_misbehave(stage: Stage) -> None:
    async def once() -> None:
        async with open_raw_gateway(stage) as raw:
            await raw.say(chunk(1, b"abc", 2), chunk(2, b"x" * 1000, 5000), submit(1, chunked(1, 2)), frame())
            await raw.say(submit(2, inline("x", b"a"), model="big"), submit(3, inline("x", b"a"), model="slow"))
            await raw.result(2)
        async with open_raw_gateway(stage, [frame()]) as refused:
            await refused.ended()
        with LanePeer(stage) as lane:
            lane.send(b"nonsense" * 10)
            assert await lane.is_closed()

    await once()
    async with no_leaks(stage.directory.path, [stage.arena]):
        for _ in range(4):
            await once()
