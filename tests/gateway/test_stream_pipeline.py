"""Pipelines with a decoupled step: what is before it runs once, what is after it for each response."""

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from gateway import stream_pipeline
from tensorline.errors import BackendError, InternalError, UnsupportedError
from tensorline.protocol.infer import RequestedOutput
from tensorline.stage.backend import Batch
from tensorline.tensor import Array
from tests.gateway.house import House, add, array, ensemble, open_house
from tests.gateway.streams import Talk, serving, streamed
from tests.gateway.test_grpc_stream import finals
from tests.gateway.test_grpc_v2 import request
from tests.gateway.test_infer_stream import BIG, COUNTING, asking, everything
from tests.gateway.test_runner import fail
from tests.tensorline.stage.pair import Model, config, until

pytestmark = pytest.mark.usefixtures("one_loop")

X = np.array([3, 2], np.float32)


def both(batch: Batch) -> Mapping[str, Array]:
    a, b = (batch.inputs[name].astype(np.float32) for name in "ab")
    return {"y": a * np.float32(100) + b}


SUM = Model(config({"a": "FP32", "b": "FP32"}, {"y": "FP32"}), both)
MODELS = {"add": add(1), "count": COUNTING, "sum": SUM, "ten": add(10)}
CHAIN = ensemble(
    "chain", ("add", {"x": "x"}, {"y": "a"}), ("count", {"x": "a"}, {"y": "b"}), ("ten", {"x": "b"}, {"y": "y"})
)
MIXED = ensemble(
    "mixed",
    ("count", {"x": "x"}, {"y": "b"}),
    ("ten", {"x": "x"}, {"y": "c"}),
    ("sum", {"a": "b", "b": "c"}, {"y": "y"}),
)
FIRST = ensemble("first", ("count", {"x": "x"}, {"y": "y"}))


async def values(house: House, model: str, x: Array, timeout_s: float | None = 5.0) -> list[float]:
    responses = await everything(house, model, x, timeout_s)
    assert [response.is_final for response in responses] == [False] * (len(responses) - 1) + [True]
    return [float(array(response)[0]) for response in responses if response.outputs]


@pytest.mark.parametrize("timeout_s", [5.0, None])
@pytest.mark.parametrize("x", [X, np.where(BIG == 0, 3, BIG).astype(np.float32)], ids=["inline", "arena"])
async def test_each_response_goes_through_the_steps_after_it(x: Array, timeout_s: float | None) -> None:
    async with open_house(MODELS, entries=[CHAIN, MIXED, FIRST]) as house:
        assert await values(house, "chain", x, timeout_s) == [10, 11, 12, 13]
        assert sorted(step.model for step in house.last.steps) == ["add", "count", *["ten"] * 4]
        assert await values(house, "mixed", x, timeout_s) == [13, 113, 213]
        assert sorted(step.model for step in house.last.steps) == ["count", *["sum"] * 3, "ten"]
        assert await values(house, "first", x, timeout_s) == [0, 1, 2]
        assert [record.status for record in house.records] == [0, 0, 0]
        await house.wait_nothing_held()
        assert house.limits.in_flight == 0


async def test_no_response_is_an_end() -> None:
    async with open_house(MODELS, entries=[CHAIN]) as house:
        (end,) = await everything(house, "chain", np.array([-1, 0], np.float32))
        assert (end.outputs, end.is_final) == ((), True)


async def test_many_responses_in_order_and_a_bounded_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_pipeline, "STEPS_KEPT", 50)
    async with open_house(MODELS, MODELS, entries=[CHAIN]) as house:
        assert await values(house, "chain", np.array([199, 0], np.float32)) == list(range(10, 210))
        assert len(house.last.steps) == 50
        await house.wait_nothing_held()


async def test_closing_ends_everything() -> None:
    async with open_house(MODELS, entries=[MIXED]) as house:
        x = BIG.copy()
        x[0] = 1000
        async with asking(house, "mixed", x) as responses:
            await anext(responses)
        await house.wait_nothing_held()
        (connection,) = house.mesh.connections
        await until(lambda: not connection.in_flight)
        assert house.last.status == 1


async def test_whose_failure_it_is() -> None:
    def broken(batch: Batch) -> Iterator[Mapping[str, Array]]:
        yield {"y": batch.inputs["x"]}
        raise BackendError("no luck")

    models = {"broken": streamed(broken), "count": COUNTING, "bad": fail(BackendError("no"))}
    steps = {
        "one": ("broken", {"x": "x"}, {"y": "y"}),
        "two": ("bad", {"x": "a"}, {"y": "y"}),
    }
    entries = [ensemble("one", steps["one"]), ensemble("two", ("count", {"x": "x"}, {"y": "a"}), steps["two"])]
    async with open_house(models, entries=entries) as house:
        async with asking(house, "one", BIG) as responses:
            await anext(responses)
            with pytest.raises(InternalError, match=r"^in ensemble 'one', model 'broken': no luck$") as caught:
                await anext(responses)
            assert caught.value.has_run
        with pytest.raises(InternalError, match=r"^in ensemble 'two', model 'bad': no$"):
            await everything(house, "two", BIG + 1)
        await house.wait_nothing_held()


async def test_responses_without_a_wanted_output_are_left_out() -> None:
    def every_other(batch: Batch) -> Iterator[Mapping[str, Array]]:
        for number in range(6):
            yield {"y" if number % 2 else "z": np.array([number], np.float32)}

    model = streamed(every_other, more='output [ { name: "z" data_type: TYPE_FP32 dims: [ -1 ] } ]')
    async with open_house({"m": model}, entries=[ensemble("p", ("m", {"x": "x"}, {"y": "y"}))]) as house:
        assert await values(house, "p", X) == [1, 3, 5]


async def test_outputs_that_need_no_decoupled_step() -> None:
    wide = ensemble("wide", ("count", {"x": "x"}, {"y": "y"}), ("ten", {"x": "x"}, {"y": "z"}), outputs=("y", "z"))
    async with open_house(MODELS, entries=[wide]) as house, serving(house) as channel:
        message = request("wide", id="z")
        message.outputs.add(name="z")
        talk = Talk(channel)
        await talk.send(message)
        messages = await talk.rest()
        assert finals(messages) == [True]
        assert np.frombuffer(messages[0].infer_response.raw_output_contents[0], "<f4").tolist() == [11, 12]


async def test_several_decoupled_steps_are_refused() -> None:
    two = ensemble("two", ("count", {"x": "x"}, {"y": "a"}), ("count", {"x": "a"}, {"y": "y"}))
    async with open_house(MODELS, entries=[two]) as house:
        with pytest.raises(UnsupportedError, match="pipeline 'two' has several decoupled steps, 'count' and 'count'"):
            await everything(house, "two", X)
        assert house.limits.in_flight == 0
        with pytest.raises(UnsupportedError, match="ModelInfer RPC doesn't support"):
            await house.infer("two", X, RequestedOutput("y"))
