"""ModelStreamInfer over a real server on a free port: order, in-band errors, final flags, half-close, cancel."""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode, aio

from gateway import grpc_stream
from tensorline.errors import BackendError
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.stage.backend import Batch
from tensorline.tensor import Array
from tests.gateway.house import FP32, add, open_house
from tests.gateway.streams import REPEAT, Talk, repeat_request, serving, streamed, told
from tests.gateway.test_grpc_v2 import request
from tests.gateway.test_runner import fail
from tests.tensorline.stage.pair import Model, config, until

pytestmark = pytest.mark.usefixtures("one_loop")

X = np.array([1, 2], np.float32)


def finals(messages: list[pb.ModelStreamInferResponse]) -> list[bool]:
    return [m.infer_response.parameters["triton_final_response"].bool_param for m in messages]


async def test_one_request_many_responses() -> None:
    async with open_house({"repeat": REPEAT}) as house, serving(house) as channel:
        talk = Talk(channel)
        await talk.send(repeat_request(4, 5, 6, id="a"))
        messages = await talk.rest()
        assert told(messages) == [("a", 4), ("a", 5), ("a", 6)]
        assert finals(messages) == [False, False, False]
        assert [m.infer_response.model_name for m in messages] == ["repeat"] * 3
        assert {m.infer_response.model_version for m in messages} == {"1"}
        assert await talk.call.code() is StatusCode.OK
        (record,) = house.records
        assert (record.status, record.steps[0].status, len(record.steps)) == (0, 0, 1)
        assert record.steps[0].timing is not None
        assert record.rpc.endswith("/ModelStreamInfer")
        await house.wait_nothing_held()
        assert house.limits.in_flight == 0


async def test_the_end_alone_is_sent_to_who_asks_for_it() -> None:
    async with open_house({"repeat": REPEAT}) as house, serving(house) as channel:
        talk = Talk(channel)
        await talk.send(repeat_request(id="none"), repeat_request(id="end", empty_final=True))
        (end,) = await talk.rest()
        assert end.infer_response.id == "end"
        assert end.infer_response.model_name == "repeat"
        assert not end.infer_response.outputs
        assert finals([end]) == [True]
        talk = Talk(channel)
        await talk.send(repeat_request(7, id="one", empty_final=True))
        assert finals(await talk.rest()) == [False, True]


async def test_an_empty_stream_ends_well() -> None:
    async with open_house({"repeat": REPEAT}) as house, serving(house) as channel:
        talk = Talk(channel)
        assert await talk.rest() == []
        assert await talk.call.code() is StatusCode.OK


async def test_requests_side_by_side_keep_their_own_order() -> None:
    async with open_house({"repeat": REPEAT}) as house, serving(house) as channel:
        talk = Talk(channel)
        wanted = {"a": 1, "b": 5, "c": 50}
        for id, count in wanted.items():
            await talk.send(repeat_request(*range(count), id=id, delay_ms=1, empty_final=True))
        messages = await talk.rest(20)
        for id, count in wanted.items():
            mine = [m for m in messages if m.infer_response.id == id]
            assert [n for _, n in told(mine[:-1])] == list(range(count))
            assert finals(mine) == [False] * count + [True]


def held(gates: Mapping[str, threading.Event]) -> Model:
    """One response, when the gate of the request's id opens."""

    def run(batch: Batch) -> Mapping[str, Array]:
        gates[batch.request_ids[0]].wait(5)
        return {"y": batch.inputs["x"]}

    return Model(config(FP32, {"y": "FP32"}, more="instance_group [ { count: 2 } ]"), run)


async def test_single_responses_keep_the_order_of_their_requests() -> None:
    gates = {"slow": threading.Event(), "fast": threading.Event()}
    gates["fast"].set()
    async with open_house({"held": held(gates), "repeat": REPEAT}) as house, serving(house) as channel:
        talk = Talk(channel)
        await talk.send(request("held", id="slow"), request("held", id="fast"), request("nobody", id="no"))
        await talk.send(repeat_request(1, 2, id="many"))
        assert [id for id, _ in told(await talk.take(2))] == ["many", "many"]  # which waits for nobody
        await until(lambda: any(record.request_id == "fast" for record in house.records))
        gates["slow"].set()
        messages = await talk.rest()
        assert [m.infer_response.id for m in messages] == ["slow", "fast", "no"]
        assert finals(messages) == [True, True, False]


async def test_a_bad_request_is_answered_in_its_place() -> None:
    """cases.md C10."""
    bad = request("one", id="bad")
    bad.inputs[0].shape[0] = 3
    parameter = request("one", id="parameter")
    parameter.parameters["priority"].string_param = "high"
    for metadata in ([], [("triton_grpc_error", "true")]):
        async with open_house({"one": add(1)}) as house, serving(house) as channel:
            talk = Talk(channel, *metadata)
            await talk.send(request("one", id="1"), bad, parameter, request("gone", id="gone"), request("one", id="2"))
            messages = await talk.rest()
            assert [m.infer_response.id for m in messages] == ["1", "bad", "parameter", "gone", "2"]
            assert [bool(m.error_message) for m in messages] == [False, True, True, True, False]
            assert "Request for unknown model: 'gone' is not found" in messages[3].error_message
            assert not messages[1].infer_response.model_name
            assert not messages[1].infer_response.parameters
            assert await talk.call.code() is StatusCode.OK


async def test_an_error_of_execution_is_final_and_named() -> None:
    def broken(batch: Batch) -> Iterator[Mapping[str, Array]]:
        yield {"y": batch.inputs["x"]}
        raise BackendError("no luck")

    async with (
        open_house({"failing": fail(BackendError("no luck")), "broken": streamed(broken)}) as house,
        serving(house) as channel,
    ):
        talk = Talk(channel)
        await talk.send(request("failing", id="f"), request("broken", id="b"))
        messages = await talk.rest()
        errors = [m for m in messages if m.error_message]
        assert {(m.error_message, m.infer_response.model_name) for m in errors} == {
            ("no luck", "failing"),
            ("no luck", "broken"),
        }
        assert finals(errors) == [True, True]
        assert len(messages) == 3
        assert await talk.call.code() is StatusCode.OK
        await house.wait_nothing_held()


@pytest.mark.parametrize("value", ["true", "True", "1"])
async def test_an_error_of_execution_ends_the_stream_of_who_asks_for_it(value: str) -> None:
    async with (
        open_house({"failing": fail(BackendError("no luck")), "one": add(1)}) as house,
        serving(house) as channel,
    ):
        talk = Talk(channel, ("triton_grpc_error", value))
        await talk.send(request("one", id="1"), request("failing"), request("one", id="2"))
        if value == "true":
            await talk.next()
            with pytest.raises(aio.AioRpcError) as caught:
                await talk.rest()
            assert (caught.value.code(), caught.value.details()) == (StatusCode.INTERNAL, "no luck")
        else:
            assert len(await talk.rest()) == 3
            assert await talk.call.code() is StatusCode.OK
        await until(lambda: house.limits.in_flight == 0)


async def test_what_is_no_message_ends_the_stream() -> None:
    async with open_house({"one": add(1)}) as house, serving(house) as channel:
        talk = Talk(channel)
        await talk.send(b"\xff\xff")
        with pytest.raises(aio.AioRpcError) as caught:
            await talk.rest()
        assert (caught.value.code(), caught.value.details()) == (StatusCode.INTERNAL, "Unable to parse request")


async def test_a_stream_that_ends_while_its_first_answer_leaves_has_a_status() -> None:
    async with open_house({"one": add(1)}) as house, serving(house) as channel:
        for _ in range(50):
            talk = Talk(channel)
            await talk.send(request("gone"), b"\xff\xff")
            with pytest.raises(aio.AioRpcError):
                await talk.rest()
            assert await talk.call.code() is StatusCode.INTERNAL


async def test_typed_in_typed_out_and_classes() -> None:
    async with open_house({"one": add(1)}) as house, serving(house) as channel:
        typed = pb.ModelInferRequest(model_name="one", id="t")
        typed.inputs.add(name="x", datatype="FP32", shape=X.shape).contents.fp32_contents.extend(X.tolist())
        classes = request("one", id="c")
        classes.outputs.add(name="y").parameters["classification"].int64_param = 1
        talk = Talk(channel)
        await talk.send(typed, classes)
        first, second = await talk.rest()
        assert list(first.infer_response.outputs[0].contents.fp32_contents) == [2, 3]
        assert not first.infer_response.raw_output_contents
        assert second.infer_response.raw_output_contents[0][4:] == b"3.000000:1"


async def test_a_response_over_the_limit_fails_its_request_alone() -> None:
    made = Model(config(FP32, {"y": "FP32"}), lambda batch: {"y": np.zeros(1 << 19, np.float32)})
    async with open_house({"made": made, "one": add(1)}) as house, serving(house) as channel:
        talk = Talk(channel)
        await talk.send(request("made", id="big"), request("one", id="2"))
        big, second = await talk.rest()
        assert "at most" in big.error_message
        assert second.infer_response.id == "2"


async def test_cancel_cancels_everything() -> None:
    seen: list[str] = []

    def endless(batch: Batch) -> Iterator[Mapping[str, Array]]:
        try:
            while True:
                yield {"y": batch.inputs["x"]}
                time.sleep(0.005)
        finally:
            seen.append(batch.request_ids[0])

    async with open_house({"endless": streamed(endless, max_streams=4)}) as house, serving(house) as channel:
        talk = Talk(channel)
        await talk.send(request("endless", id="a"), request("endless", id="b"))
        await talk.take(5)
        talk.call.cancel()
        await until(lambda: sorted(seen) == ["a", "b"])
        await until(lambda: house.limits.in_flight == 0)
        assert [record.status for record in house.records] == [1, 1]
        await house.wait_nothing_held()


async def test_the_streams_deadline_is_each_requests() -> None:
    def endless(batch: Batch) -> Iterator[Mapping[str, Array]]:
        while True:
            yield {"y": batch.inputs["x"]}
            time.sleep(0.02)

    async with open_house({"endless": streamed(endless)}) as house, serving(house) as channel:
        talk = Talk(channel, timeout_s=0.3)
        await talk.send(request("endless"))
        with contextlib.suppress(aio.AioRpcError):  # both ends notice at the same time
            assert (await talk.rest())[-1].error_message == "the deadline passed before the last response"
        await until(lambda: house.records and house.limits.in_flight == 0)
        assert house.last.status == 4
        await house.wait_nothing_held()


async def test_who_does_not_read_is_waited_for() -> None:
    """What the model has made stays bounded, and nobody else is kept waiting."""
    made = 0

    def eager(batch: Batch) -> Iterator[Mapping[str, Array]]:
        nonlocal made
        for _ in range(1000):
            made += 1
            out = batch.empty("y", "FP32", (32 << 10,))
            out.fill(1)
            yield {"y": out}

    async with open_house({"eager": streamed(eager), "one": add(1)}) as house, serving(house) as channel:
        talk = Talk(channel)
        await talk.send(request("eager", id="e"))
        await talk.next()
        stood = 0
        while stood != made:  # what the connection itself takes in comes on top
            stood = made
            await asyncio.sleep(0.3)
        assert made < 500
        other = Talk(channel)
        await other.send(request("one", id="o"))
        assert [m.infer_response.id for m in await other.rest()] == ["o"]
        assert len(await talk.rest(20)) == 999
        assert made == 1000
        await house.wait_nothing_held()


async def test_who_never_reads_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream, "UNREAD_S", 0.3)

    def endless(batch: Batch) -> Iterator[Mapping[str, Array]]:
        while True:
            yield {"y": np.zeros(64 << 10, np.float32)}

    async with open_house({"endless": streamed(endless)}) as house, serving(house) as channel:
        talk = Talk(channel)
        await talk.send(request("endless"))
        await until(lambda: house.limits.in_flight == 1)
        await until(lambda: house.limits.in_flight == 0)
        await until(lambda: not house.stages[0].end.in_flight)
        await house.wait_nothing_held()
        with pytest.raises(aio.AioRpcError) as caught:
            await talk.rest(20)
        assert (caught.value.code(), caught.value.details()) == (
            StatusCode.DEADLINE_EXCEEDED,
            "the client has read nothing for 0.3 s",
        )


async def test_requests_beyond_the_bound_wait_on_the_way() -> None:
    gate = threading.Event()

    def run(batch: Batch) -> Mapping[str, Array]:
        gate.wait(5)
        return {"y": batch.inputs["x"]}

    async with open_house({"held": Model(config(FP32, {"y": "FP32"}), run)}) as house, serving(house) as channel:
        talk = Talk(channel)
        await talk.send(*(request("held", id=str(n)) for n in range(100)))
        await until(lambda: house.limits.in_flight == 64)
        await asyncio.sleep(0.1)
        assert house.limits.in_flight == 64
        gate.set()
        assert [m.infer_response.id for m in await talk.rest()] == [str(n) for n in range(100)]


async def test_clients_that_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever they have asked for and however they leave, nothing of it stays."""
    dice = random.Random(7)

    async def visit(channel: aio.Channel, number: int) -> None:
        talk = Talk(channel, timeout_s=dice.choice([None, 0.2]))
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError, aio.InternalError):
            count = dice.randrange(1, 6)
            for _ in range(count):
                many = repeat_request(*range(20), id=str(number), delay_ms=dice.choice([0, 2]))
                some: list[pb.ModelInferRequest | bytes] = [many, request("one")]
                await talk.send(dice.choice([*some, request("gone"), b"\xff"] if number % 5 == 0 else some))
            await talk.take(dice.randrange(count + 1))  # each has one at least
            if dice.random() < 0.5:
                await talk.rest(20)
        talk.call.cancel()

    async with open_house({"repeat": REPEAT, "one": add(1)}) as house, serving(house) as channel:
        for begin in range(0, 80, 8):
            await asyncio.gather(*(visit(channel, begin + number) for number in range(8)))
        await until(lambda: not house.limits.in_flight)
        await until(lambda: not house.stages[0].end.in_flight)
        await house.wait_nothing_held()
        talk = Talk(channel)
        await talk.send(request("one", id="still"))
        assert [m.infer_response.id for m in await talk.rest()] == ["still"]
    assert "error" not in caplog.text.lower()
    assert "never" not in caplog.text


async def test_unary_calls_refuse_decoupled_models() -> None:
    async with open_house({"repeat": REPEAT}) as house, serving(house) as channel:
        unary: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(aio.AioRpcError) as caught:
            await unary(repeat_request(1).SerializeToString())
        assert caught.value.code() is StatusCode.UNIMPLEMENTED
