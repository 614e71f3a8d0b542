"""What every front end calls: its limits, its record of each request, and what it says of bugs."""

import asyncio
import contextlib
import time

import numpy as np
import pytest

from gateway.service import GatewayLimits
from tensorline.errors import (
    DeadlineError,
    InternalError,
    InvalidTensorError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from tensorline.protocol.infer import InferRequest, RequestedOutput, RequestOptions
from tensorline.tensor import Tensor
from tests.gateway.house import FP32, NO_TRACE, add, array, ensemble, infer_request, open_house
from tests.gateway.test_runner import Gate
from tests.tensorline.stage.pair import Model, config, until

X = np.array([1, 2], np.float32)
CHAIN = ensemble("chain", ("one", {"x": "x"}, {"y": "y"}))


def test_limits_count_requests() -> None:
    limits = GatewayLimits(2, 100)
    limits.enter(1)
    limits.enter(1)
    with pytest.raises(OverloadedError, match="2 requests are already in flight at this gateway"):
        limits.enter(1)
    limits.leave(1)
    limits.enter(1)
    assert (limits.in_flight, limits.bytes_in_flight) == (2, 2)


def test_limits_count_bytes_but_let_one_request_pass() -> None:
    limits = GatewayLimits(10, 100)
    limits.enter(1000)
    with pytest.raises(OverloadedError, match="1000 bytes of input are already in flight at this gateway, at most 100"):
        limits.enter(1)
    assert limits.in_flight == 1
    limits.leave(1000)
    limits.enter(60)
    with pytest.raises(OverloadedError):
        limits.enter(41)
    limits.enter(40)


async def test_too_many_requests() -> None:
    gate = Gate()
    async with open_house({"one": gate.model()}, max_in_flight=2) as house:
        flying = [asyncio.create_task(house.infer("one", X)) for _ in range(2)]
        await until(lambda: gate.came == 2)
        with pytest.raises(OverloadedError):
            await house.infer("one", X)
        gate.open()
        await asyncio.gather(*flying)
        assert array(await house.infer("one", X)).tolist() == [1, 2]
        assert (house.limits.in_flight, house.limits.bytes_in_flight) == (0, 0)


async def test_what_is_refused_holds_nothing() -> None:
    async with open_house({"one": add(1)}) as house:
        for model, x, kind in (("nobody", X, NotFoundError), ("one", X.astype(np.int32), InvalidTensorError)):
            with pytest.raises(kind):
                await house.infer(model, x)
            assert house.last.status == kind.status.value[0]
            assert house.last.error
        assert (house.limits.in_flight, house.limits.bytes_in_flight, house.held()) == (0, 0, (0, [0]))


async def test_a_stopping_gateway_takes_nothing_new() -> None:
    gate = Gate()
    async with open_house({"one": gate.model()}) as house:
        flying = asyncio.create_task(house.infer("one", X))
        await until(lambda: gate.came == 1)
        house.service.is_stopping = True
        with pytest.raises(UnavailableError, match="the gateway is shutting down"):
            await house.infer("one", X)
        gate.open()
        assert array(await flying).tolist() == [1, 2]


async def test_a_bug_is_told_as_internal_and_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    async with open_house({"one": add(1)}) as house:
        (connection,) = house.mesh.connections

        def broken(*_: object) -> int:
            raise ZeroDivisionError("row 7 of customers")

        connection.submit = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(InternalError, match=r"^internal error$"):
            await house.infer("one", X)
        assert (house.last.status, house.last.error) == (13, "internal error")
        assert "row 7 of customers" in caplog.text
        assert (house.limits.in_flight, house.held()) == (0, (0, [0]))


async def test_the_answer_repeats_the_request() -> None:
    async with open_house({"one": add(1)}, entries=[CHAIN]) as house:
        response = await house.infer("one", X, id="id 1")
        assert (response.model, response.version, response.id, response.parameters) == ("one", "1", "id 1", {})
        assert (house.last.model, house.last.version, house.last.request_id) == ("one", "1", "id 1")
        assert house.last.ended > house.last.started


async def test_pipelines_answer_with_their_sequence() -> None:
    async with open_house({"one": add(1)}, entries=[CHAIN]) as house:
        plain = (await house.infer("chain", X)).parameters
        assert plain == {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
        request = infer_request("chain", X)
        options = RequestOptions(sequence_id="s", sequence_end=True)
        request = InferRequest(request.model, "", "", request.inputs, options=options)
        answer = await house.service.infer(request, NO_TRACE, None, time.monotonic_ns(), "test/Infer")
        assert answer.parameters == {"sequence_id": "s", "sequence_start": False, "sequence_end": True}


async def test_classes_instead_of_numbers() -> None:
    async with open_house({"one": add(0)}) as house:
        x = np.array([0.25, 4, -1, 4], np.float32)
        response = await house.infer("one", x, RequestedOutput("y", 3))
        assert array(response).tolist() == [b"4.000000:1", b"4.000000:3", b"0.250000:0"]
        with pytest.raises(InvalidTensorError, match="unexpected inference output 'z'"):
            await house.infer("one", x, RequestedOutput("z", 3))


async def test_many_texts_are_checked_off_the_loop() -> None:
    """A hundred thousand elements would hold the loop for many milliseconds."""
    texts = Model(config({"x": "BYTES"}, {"y": "BYTES"}) + '\nbackend: "identity"')
    async with open_house({"texts": texts}) as house:
        count = 100_000
        data = b"".join((at % 7).to_bytes(4, "little") + b"x" * (at % 7) for at in range(count))
        request = InferRequest("texts", "", "", [Tensor("x", "BYTES", (count,), data)])
        answer = await house.service.infer(request, NO_TRACE, 5.0, time.monotonic_ns(), "test/Infer")
        assert answer.outputs[0].data == data
        broken = InferRequest("texts", "", "", [Tensor("x", "BYTES", (count,), data[:-1])])
        with pytest.raises(InvalidTensorError, match="incomplete string"):
            await house.service.infer(broken, NO_TRACE, 5.0, time.monotonic_ns(), "test/Infer")


async def test_a_flood_of_every_kind_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """SH05 and PY03, in small: refusals, deadlines, cancels and answers at once."""
    big = np.ones(1 << 16, np.float32)
    models = {"one": add(1), "two": Model(config(FP32, {"y": "FP32"}), add(2).run)}
    both = ensemble("both", ("one", {"x": "x"}, {"y": "a"}), ("two", {"x": "a"}, {"y": "y"}))
    async with open_house(models, models, entries=[both], max_in_flight=300, max_bytes=256 << 20) as house:
        rng = np.random.default_rng(3)

        async def one(number: int) -> None:
            kind = number % 5
            if kind == 0:
                with pytest.raises(InvalidTensorError):
                    await house.infer("both", big.astype(np.int8))
            elif kind == 1:
                with contextlib.suppress(DeadlineError):
                    await house.infer("both", big, timeout_s=float(rng.random()) * 0.002)
            elif kind == 2:
                flying = asyncio.create_task(house.infer("both", big))
                await asyncio.sleep(float(rng.random()) * 0.01)
                flying.cancel()
                await asyncio.gather(flying, return_exceptions=True)
            else:
                assert array(await house.infer("both", big * number))[0] == number + 3

        await asyncio.gather(*(one(number) for number in range(300)))
        await house.wait_nothing_held()
        await until(lambda: not any(connection.in_flight for connection in house.mesh.connections))
        assert (house.limits.in_flight, house.limits.bytes_in_flight) == (0, 0)
    assert "never retrieved" not in caplog.text
    assert "Traceback" not in caplog.text
