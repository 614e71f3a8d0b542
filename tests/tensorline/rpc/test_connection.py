"""The gateway's end of a stream, beside stages that keep to the protocol and stages that do not."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio

from tensorline import __version__
from tensorline.errors import InvalidTensorError, UnavailableError
from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.rpc import connecting
from tensorline.rpc import connection as module
from tensorline.rpc.channels import CHUNK_BYTES, MESSAGE_BYTES, PROTOCOL
from tensorline.rpc.connection import StageConnection
from tensorline.rpc.frames import StageResult, Submission
from tensorline.tensor import Handle, Tensor
from tests.leaks import no_leaks
from tests.tensorline.rpc.carriers import open_raw_server
from tests.tensorline.rpc.scripted import ARENA, Gateway, ScriptedStage, frames, hello, open_gateway, open_scripted
from tests.tensorline.stage.pair import until

pytestmark = pytest.mark.usefixtures("one_loop")

MIB = 1 << 20
UNAVAILABLE = StatusCode.UNAVAILABLE.value[0]
X = Tensor("x", "UINT8", (3,), b"abc")


@pytest.fixture(params=["stream", "lane"])
async def stage(request: pytest.FixtureRequest, path: Path) -> AsyncIterator[ScriptedStage]:
    async with open_scripted(path, has_lane=request.param == "lane") as stage:
        yield stage


@pytest.fixture
async def gateway(stage: ScriptedStage) -> AsyncIterator[Gateway]:
    async with open_gateway(stage.target) as gateway:
        yield gateway


def result(number: int, *outputs: pb.Tensor, status: int = 0, error: str = "", final: bool = True) -> pb.Frame:
    return pb.Frame(result=pb.Result(id=number, outputs=outputs, status=status, error=error, final=final))


def held(block: int, arena: bytes = ARENA, name: str = "y") -> pb.Tensor:
    at = pb.Handle(arena=arena, block=block, offset=block + 64, length=8, generation=block + 1)
    return pb.Tensor(name=name, datatype="UINT8", shape=[8], handle=at)


def chunks(chunk_id: int, size: int, total: int | None = None) -> list[pb.Frame]:
    return [
        pb.Frame(
            chunk=pb.Chunk(id=chunk_id, data=b"c" * min(CHUNK_BYTES, size - at), total=size if total is None else total)
        )
        for at in range(0, size, CHUNK_BYTES)
    ]


def chunked(chunk_id: int, size: int) -> pb.Tensor:
    return pb.Tensor(name="y", datatype="UINT8", shape=[size], chunked=pb.Chunked(id=chunk_id, length=size))


def released(stage: ScriptedStage) -> list[tuple[int, int]]:
    return [(b.block, b.generation) for frame in stage.of_kind("release") for b in frame.release.blocks]


# ---- hello


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (frames(), "did not begin with a message of hello alone"),
        (frames(pb.Frame(beat=pb.Beat())), "did not begin with a message of hello alone"),
        (frames(pb.Frame(hello=hello()), pb.Frame(beat=pb.Beat())), "did not begin with a message of hello alone"),
        (frames(pb.Frame(hello=hello(protocol=PROTOCOL + 1))), "speaks protocol 2, this release speaks 1"),
        (frames(pb.Frame(hello=hello(protocol=0))), "speaks protocol 0, this release speaks 1"),
        (frames(pb.Frame(hello=hello(instance_id="model-2"))), "another instance answers at the registered address"),
        (frames(pb.Frame(hello=hello(instance_id=""))), "another instance answers at the registered address"),
    ],
)
async def test_a_peer_that_is_not_who_it_should_be_is_refused(path: Path, first: pb.Frames, reason: str) -> None:
    async with open_scripted(path, first) as stage:
        with pytest.raises(UnavailableError, match=reason):
            async with open_gateway(stage.target):
                pass


async def test_any_instance_is_taken_where_the_registry_knows_none(path: Path) -> None:
    async with (
        open_scripted(path, instance_id="who-knows") as stage,
        open_gateway(stage.target, expected_id="") as gateway,
    ):
        assert gateway.connection.instance_id == "who-knows"


async def test_both_learn_who_the_other_is(stage: ScriptedStage, gateway: Gateway) -> None:
    connection, told = gateway.connection, stage.hello
    assert told is not None
    assert (told.protocol, told.release, told.service, told.instance_id) == (
        PROTOCOL,
        __version__,
        "gateway",
        "gateway-1",
    )
    assert (connection.instance_id, connection.service, connection.arena) == ("model-1", "model", ARENA)
    assert connection.is_colocated
    assert connection.max_in_flight == 8


@pytest.mark.parametrize("nonce", [b"", b"another nonce..."])
async def test_a_stage_with_another_nonce_is_not_near(path: Path, nonce: bytes) -> None:
    async with open_scripted(path, nonce=nonce) as stage, open_gateway(stage.target) as gateway:
        assert not gateway.connection.is_colocated
        gateway.submit(X)
        await until(lambda: stage.of_kind("submit"))
        assert stage.of_kind("submit")[0].submit.inline_only


async def test_peers_without_a_nonce_are_not_near_though_they_are_equal(path: Path) -> None:
    async with open_scripted(path, nonce=b"") as stage, open_gateway(stage.target, nonce=b"") as gateway:
        assert not gateway.connection.is_colocated


async def test_nobody_there_is_said_soon(path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(UnavailableError):
        async with open_gateway(f"unix:{path}/none.sock"):
            pass
    assert time.monotonic() - started < 12


async def test_a_stage_that_never_says_hello_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "HELLO_S", 0.2)
    async with open_scripted(path, None) as stage:
        with pytest.raises(UnavailableError, match="the stage did not say hello in time"):
            async with open_gateway(stage.target):
                pass


@pytest.mark.parametrize("code", [StatusCode.UNAVAILABLE, StatusCode.CANCELLED, StatusCode.INTERNAL])
async def test_a_stage_that_refuses_the_stream_is_unavailable_whatever_its_status(path: Path, code: StatusCode) -> None:
    async def exchange(
        requests: AsyncIterator[pb.Frames], context: "aio.ServicerContext[pb.Frames, pb.Frames]"
    ) -> None:
        await context.read()
        await context.abort(code, "no")

    async with open_raw_server(path / "s.sock", exchange) as target:
        with pytest.raises(UnavailableError, match=code.name):
            async with open_gateway(target):
                pass


async def test_a_server_that_stops_before_its_hello_is_unavailable(path: Path) -> None:
    got_here = asyncio.Event()

    async def exchange(
        requests: AsyncIterator[pb.Frames], context: "aio.ServicerContext[pb.Frames, pb.Frames]"
    ) -> None:
        got_here.set()
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        async with open_raw_server(path / "s.sock", exchange) as target:

            async def connect() -> None:
                with pytest.raises(UnavailableError):
                    async with open_gateway(target):
                        pass

            tasks.create_task(connect())
            await got_here.wait()


async def test_a_peer_that_speaks_another_language_is_unavailable(path: Path) -> None:
    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(garbage, path / "s.sock")
    with pytest.raises(UnavailableError):
        async with open_gateway(f"unix:{path}/s.sock"):
            pass
    server.close()


async def test_bytes_that_are_no_message_end_the_stream(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = frames(pb.Frame(hello=hello())).SerializeToString()
    garbage = b"\xff\xff\xff"

    for said in ([garbage], [first, garbage]):

        async def exchange(
            requests: AsyncIterator[bytes],
            context: "aio.ServicerContext[bytes, bytes]",
            said: list[bytes] = said,
        ) -> None:
            await context.read()
            for each in said:
                await context.write(each)
            await asyncio.Event().wait()

        server = aio.server()
        method: Any = grpc.stream_stream_rpc_method_handler(exchange)
        handler = grpc.method_handlers_generic_handler("tensorline.v1.Stage", {"Exchange": method})
        server.add_generic_rpc_handlers((handler,))
        server.add_insecure_port(f"unix:{path}/{len(said)}.sock")
        await server.start()
        try:
            if len(said) == 1:
                with pytest.raises(UnavailableError, match="did not begin with a message of hello alone"):
                    async with open_gateway(f"unix:{path}/1.sock"):
                        pass
            else:
                async with open_gateway(f"unix:{path}/2.sock") as gateway:
                    await gateway.wait_ended()
                    assert not gateway.connection.is_open
        finally:
            await server.stop(0)
    assert not [record for record in caplog.records if record.exc_info and record.name.startswith("tensorline")]


# ---- the lane


async def test_a_lane_that_cannot_be_had_leaves_the_stream(path: Path) -> None:
    async with (
        open_scripted(path, lane=f"{path}/none.sock", lane_token=b"t" * 16) as stage,
        open_gateway(stage.target) as gateway,
    ):
        _, results = gateway.submit(X)
        await until(lambda: stage.of_kind("submit"))
        await stage.say(result(1))
        await until(lambda: results)


async def test_a_lane_that_the_stage_closes_at_once_ends_the_stream_at_once(path: Path) -> None:
    class Closing(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.close()

    server = await asyncio.get_running_loop().create_unix_server(Closing, f"{path}/closing.sock")
    try:
        async with (
            open_scripted(path, lane=f"{path}/closing.sock", lane_token=b"t" * 16) as stage,
            open_gateway(stage.target) as gateway,
        ):
            await gateway.wait_ended(1.0)
            assert not gateway.connection.is_open
    finally:
        server.close()


async def test_a_wrong_token_ends_the_stream_at_once(path: Path) -> None:
    async with open_scripted(path, has_lane=True) as stage:
        stage.is_lane_refused = True
        async with open_gateway(stage.target) as gateway:
            await gateway.wait_ended(1.0)
            assert not gateway.connection.is_open


async def test_a_lane_is_closed_with_whatever_opening_it_led_to(path: Path) -> None:
    def refuse(connection: StageConnection) -> None:
        raise UnavailableError("not this one")

    async with open_scripted(path, has_lane=True) as stage, no_leaks():
        for _ in range(5):
            with pytest.raises(UnavailableError, match="not this one"):
                async with open_gateway(stage.target, on_open=refuse):
                    pass
        assert len(stage.lanes) == 5


async def test_what_was_sent_by_the_lane_before_the_end_is_not_lost_to_the_streams_end(path: Path) -> None:
    """The stream's end may be read before the lane's last bytes: here by a gateway whose loop stood still."""
    async with open_scripted(path, has_lane=True) as stage, open_gateway(stage.target) as gateway:
        answers = [gateway.submit(X)[1] for _ in range(50)]
        await until(lambda: len(stage.of_kind("submit")) == 50)
        body = pb.Tensor(name="y", datatype="UINT8", shape=[200_000], inline=b"y" * 200_000)
        for number in range(1, 51):
            await stage.say(result(number, body))
        stage.lanes[-1].close()
        stage.end()
        await asyncio.to_thread(time.sleep, 0.0)
        for _ in range(20):  # the sender needs turns of the same loop to get rid of it
            await asyncio.sleep(0)
            time.sleep(0.01)  # noqa: ASYNC251 - the loop stands still
        await gateway.wait_ended()
        assert [[each.status for each in results] for results in answers] == [[0]] * 50


# ---- frames


async def test_a_submission_arrives_with_all_that_it_has(stage: ScriptedStage, gateway: Gateway) -> None:
    handle = Handle(b"g" * 16, 64, 128, 8, 5)
    work = Submission(
        "m",
        "3",
        [X, Tensor("h", "INT64", (1,), None, handle)],
        ("a", "b"),
        "id-1",
        1.5,
        {"flag": True, "big": (1 << 64) - 1},
        7,
        b"t" * 16,
        b"s" * 8,
        1,
        "k=v",
    )
    number = gateway.connection.submit(work, lambda _: None)
    await until(lambda: stage.of_kind("submit"))
    wire = stage.of_kind("submit")[0].submit
    assert (wire.id, wire.model, wire.version, wire.request_id, wire.timeout_us) == (number, "m", "3", "id-1", 1500000)
    assert (list(wire.outputs), wire.priority, wire.inline_only) == (["a", "b"], 7, False)
    assert wire.parameters["flag"].bool_value
    assert wire.parameters["big"].uint64_value == (1 << 64) - 1
    assert (wire.trace_id, wire.span_id, wire.trace_flags, wire.tracestate) == (b"t" * 16, b"s" * 8, 1, "k=v")
    assert [each.name for each in wire.inputs] == ["x", "h"]
    assert wire.inputs[1].handle.generation == 5


async def test_each_answer_goes_to_its_own_caller_once(stage: ScriptedStage, gateway: Gateway) -> None:
    answers = dict(gateway.submit(X) for _ in range(5))
    await until(lambda: len(stage.of_kind("submit")) == 5)
    for number in (3, 1, 5, 4, 2):
        await stage.say(result(number, error=f"{number}"))
    await until(lambda: gateway.connection.in_flight == 0)
    assert {number: [each.error for each in results] for number, results in answers.items()} == {
        number: [str(number)] for number in answers
    }


async def test_an_answer_may_come_in_several_parts(stage: ScriptedStage, gateway: Gateway) -> None:
    number, results = gateway.submit(X)
    await stage.say(result(number, error="1", final=False), result(number, error="2", final=False), result(number))
    await until(lambda: gateway.connection.in_flight == 0)
    assert [each.final for each in results] == [False, False, True]


async def test_answers_that_nobody_asked_for_give_back_their_blocks(stage: ScriptedStage, gateway: Gateway) -> None:
    number, results = gateway.submit(X)
    await stage.say(result(number, held(64)), result(number, held(128)), result(99, held(192), held(192)))
    await until(lambda: released(stage))
    assert len(results) == 1
    await until(lambda: len(released(stage)) == 2)
    assert released(stage) == [(128, 129), (192, 193)]


async def test_a_late_answer_gives_each_of_its_blocks_back_once(stage: ScriptedStage, gateway: Gateway) -> None:
    number, results = gateway.submit(X)
    gateway.connection.cancel(number)
    await until(lambda: stage.of_kind("cancel"))
    assert stage.of_kind("cancel")[0].cancel.id == number
    assert gateway.connection.in_flight == 1  # until the stage has said so
    # Two names in one block, and one of another's arena.
    await stage.say(result(number, held(64), held(64, name="z"), held(128), held(256, arena=b"o" * 16)))
    await until(lambda: released(stage))
    assert released(stage) == [(64, 65), (128, 129)]
    assert results == []
    assert gateway.connection.in_flight == 0


async def test_a_late_answer_does_not_give_back_what_it_only_passed_on(stage: ScriptedStage, gateway: Gateway) -> None:
    """The block of an input has its own lease, and after that one others may hold the block."""
    passed = Tensor("x", "UINT8", (8,), None, Handle(ARENA, 64, 128, 8, 65))
    number, _ = gateway.submit(passed)
    gateway.connection.cancel(number, [passed])
    await stage.say(result(number, held(64), held(128)))
    await until(lambda: released(stage))
    assert released(stage) == [(128, 129)]


async def test_responses_that_come_after_a_cancel(stage: ScriptedStage, gateway: Gateway) -> None:
    """Each is given back but for the input that it passes on, until the last has come."""
    passed = Tensor("x", "UINT8", (8,), None, Handle(ARENA, 64, 128, 8, 65))
    number, results = gateway.submit(passed)
    gateway.connection.cancel(number, [passed])
    for block in (128, 256):
        await stage.say(result(number, held(64), held(block), final=block == 256))
    await until(lambda: len(released(stage)) == 2)
    assert released(stage) == [(128, 129), (256, 257)]
    assert results == []
    assert gateway.connection.in_flight == 0


async def test_what_was_passed_on_is_told(stage: ScriptedStage, gateway: Gateway) -> None:
    number, results = gateway.submit(X)
    await stage.say(result(number, final=False))
    await until(lambda: results)
    assert gateway.connection.in_flight == 1
    gateway.connection.take(number)
    await until(lambda: stage.of_kind("taken"))
    assert [(f.taken.id, f.taken.responses) for f in stage.of_kind("taken")] == [(number, 1)]
    await stage.say(result(number))
    await until(lambda: gateway.connection.in_flight == 0)
    gateway.connection.take(number)  # nobody is there to make more
    await asyncio.sleep(0.02)
    assert len(stage.of_kind("taken")) == 1


async def test_an_answer_that_cannot_be_read_fails_its_request_alone(stage: ScriptedStage, gateway: Gateway) -> None:
    bad, good = gateway.submit(X), gateway.submit(X)
    await stage.say(
        *chunks(1, 10),
        result(bad[0], held(64), chunked(1, 10), chunked(2, 10), pb.Tensor(name="none")),
        result(good[0], held(128)),
    )
    await until(lambda: good[1])
    assert [(each.status, each.error) for each in bad[1]] == [
        (StatusCode.INTERNAL.value[0], "a tensor refers to chunks that never came")
    ]
    assert good[1][0].status == 0
    await until(lambda: released(stage))
    assert released(stage) == [(64, 65)]
    assert gateway.connection.is_open


async def test_an_answer_over_the_inline_limit_fails_its_request_alone(path: Path) -> None:
    async with open_scripted(path) as stage, open_gateway(stage.target, inline_limit=2 * MIB) as gateway:
        big, small = gateway.submit(X), gateway.submit(X)
        for frame in chunks(1, 3 * MIB):
            await stage.say(frame)
        await stage.say(result(big[0], chunked(1, 3 * MIB)))
        for frame in chunks(2, 2 * MIB):
            await stage.say(frame)
        await stage.say(result(small[0], chunked(2, 2 * MIB)))
        await until(lambda: small[1])
        assert big[1][0].status == StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert big[1][0].error == f"inline tensors of {3 * MIB} bytes on one stream, at most {2 * MIB} are allowed"
        assert small[1][0].outputs[0].data == b"c" * (2 * MIB)


async def test_frames_of_unknown_kinds_are_counted_and_ignored(stage: ScriptedStage, gateway: Gateway) -> None:
    number, results = gateway.submit(X)
    await stage.say(pb.Frame(), pb.Frame(hello=hello()), pb.Frame(submit=pb.Submit(id=1)), result(number))
    await until(lambda: results)
    assert gateway.connection.unknown_frames == 3


async def test_models_credit_and_drain_are_heard(stage: ScriptedStage, gateway: Gateway) -> None:
    connection = gateway.connection
    model = pb.Model(name="m", version="1", state="READY", config=b"c")
    await stage.say(pb.Frame(models=pb.Models(models=[model])), pb.Frame(credit=pb.Credit(max_in_flight=1)))
    await until(lambda: gateway.models)
    assert [(each.name, each.version, each.state) for each in gateway.models[0]] == [("m", "1", "READY")]
    assert connection.accepts
    gateway.submit(X)
    assert not connection.accepts
    await stage.say(result(1))
    await until(lambda: connection.accepts)
    await stage.say(pb.Frame(drain=pb.Drain(reason="bye")))
    await until(lambda: len(gateway.models) == 2)
    assert connection.is_draining
    assert not connection.accepts


async def test_beats_are_sent_and_answered_and_tell_of_load(
    stage: ScriptedStage, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: stage.of_kind("beat"))
    asked = stage.of_kind("beat")[0].beat
    assert asked.sent_ns
    assert not asked.echo_ns
    await stage.say(
        pb.Frame(beat=pb.Beat(sent_ns=7, echo_ns=asked.sent_ns, queued=5, arena_bytes=6)),
        pb.Frame(beat=pb.Beat(sent_ns=99)),
    )
    await until(lambda: len(stage.of_kind("beat")) > 1)
    assert stage.of_kind("beat")[1].beat.echo_ns == 99
    assert gateway.connection.clock.offset_ns > 0
    assert gateway.connection.queued == 0  # of the question that came last


# ---- limits


async def test_a_request_with_too_much_text_is_refused_alone(stage: ScriptedStage, gateway: Gateway) -> None:
    texts = {f"k{index}": "v" * (64 << 10) for index in range(256)}
    with pytest.raises(
        InvalidTensorError, match=r"request id, parameters and output names have 167\d{5} bytes, at most"
    ):
        gateway.connection.submit(Submission("m", "", [X], parameters=texts), lambda _: None)
    with pytest.raises(InvalidTensorError, match="parameter 'k' is 18446744073709551616, which 64 bits do not hold"):
        gateway.connection.submit(Submission("m", "", [X], parameters={"k": 1 << 64}), lambda _: None)
    assert gateway.connection.in_flight == 0
    number, _ = gateway.submit(X)
    await until(lambda: stage.of_kind("submit"))
    assert [frame.submit.id for frame in stage.of_kind("submit")] == [number]


async def test_long_ids_and_parameters_of_many_requests_do_not_make_a_message_too_large(
    stage: ScriptedStage, gateway: Gateway
) -> None:
    for _ in range(200):
        work = Submission("m", "", [X], request_id="漢" * (20 << 10), parameters={"k": "v" * 1000})
        gateway.connection.submit(work, lambda _: None)
    await until(lambda: len(stage.of_kind("submit")) == 200)
    assert gateway.connection.is_open


async def test_inputs_near_the_inline_limit_do_not_make_a_message_too_large(path: Path) -> None:
    async with open_scripted(path, nonce=b"far") as stage, open_gateway(stage.target) as gateway:
        gateway.submit(*(Tensor(f"x{index}", "UINT8", (500_000,), bytes(500_000)) for index in range(10)))
        await until(lambda: stage.of_kind("submit"))
        assert sum(len(frame.chunk.data) for frame in stage.of_kind("chunk")) == 9 * 500_000 < MESSAGE_BYTES * 2
        assert gateway.connection.is_open


# ---- the end


async def test_the_end_of_the_stream_fails_what_is_pending_once(stage: ScriptedStage, gateway: Gateway) -> None:
    answers = [gateway.submit(X)[1] for _ in range(3)]
    cancelled, unwanted = gateway.submit(X)
    gateway.connection.cancel(cancelled)
    await stage.say(result(1))
    await until(lambda: answers[0])
    stage.end()
    await gateway.wait_ended()
    assert [[each.status for each in results] for results in answers] == [[0], [UNAVAILABLE], [UNAVAILABLE]]
    assert answers[1][0].final
    assert unwanted == []
    assert (gateway.connection.in_flight, gateway.connection.is_open, gateway.connection.accepts) == (0, False, False)
    with pytest.raises(UnavailableError, match="the stage is gone"):
        gateway.submit(X)
    gateway.connection.cancel(2)
    gateway.connection.release([Handle(ARENA, 64, 128, 8, 65)])


async def test_a_callback_that_fails_does_not_keep_the_others_from_being_told(
    stage: ScriptedStage, gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(result: StageResult) -> None:
        raise ZeroDivisionError("in a callback")

    gateway.connection.submit(Submission("m", "", [X]), broken)
    first, results = gateway.submit(X)
    gateway.connection.submit(Submission("m", "", [X]), broken)
    _, last = gateway.submit(X)
    await stage.say(result(1), result(first))
    await until(lambda: results)
    stage.end()
    await gateway.wait_ended()
    assert [each.status for each in last] == [UNAVAILABLE]
    assert "a result's taker failed" in caplog.text


async def test_a_silent_stage_is_taken_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    for has_lane in (False, True):
        async with open_scripted(path, has_lane=has_lane) as stage, open_gateway(stage.target) as gateway:
            assert gateway.connection.is_responsive
            _, results = gateway.submit(X)
            await asyncio.sleep(0.15)
            assert not gateway.connection.is_responsive
            await gateway.wait_ended(2.0)
            assert [each.status for each in results] == [UNAVAILABLE]


async def test_our_own_loops_stand_still_is_no_silence_of_the_stages(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.1)
    async with open_scripted(path) as stage, open_gateway(stage.target) as gateway, asyncio.TaskGroup() as tasks:

        async def answering() -> None:
            while True:
                await stage.say(pb.Frame(beat=pb.Beat(sent_ns=1)))
                await asyncio.sleep(0.02)

        answer = tasks.create_task(answering())
        await asyncio.sleep(0.15)
        time.sleep(0.8)  # noqa: ASYNC251 - eight beats
        await asyncio.sleep(0.3)
        assert gateway.connection.is_open
        answer.cancel()


async def test_nothing_is_left_of_a_stream_however_it_ends(path: Path) -> None:
    async def once(how: str, has_lane: bool) -> None:
        async with open_scripted(path, has_lane=has_lane) as stage:
            async with open_gateway(stage.target) as gateway:
                gateway.submit(X)
                await until(lambda: stage.of_kind("submit"))
                if how == "stage":
                    stage.end()
                    await gateway.wait_ended()
                elif how == "lane" and has_lane:
                    stage.lanes[0].close()
                    await gateway.wait_ended()

    await once("stage", True)
    async with no_leaks():
        for how in ("stage", "gateway", "lane"):
            for has_lane in (True, False):
                await once(how, has_lane)
