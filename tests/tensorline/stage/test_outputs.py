"""What happens to a batch's memory while its outputs are written."""

from collections.abc import ItemsView, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from grpc import StatusCode

from tensorline.stage.backend import Batch
from tensorline.stage.execution import Executed, Execution, ModelView
from tensorline.tensor import Array
from tests.tensorline.stage.inner import MIB, Function, Place, Run, ask, open_place

BATCHED = ModelView("1", is_batched=True, outputs={"y": "FP32", "z": "FP32"})


@pytest.fixture
def place(path: Path) -> Iterator[Place]:
    with open_place(path) as place:
        yield place


def execute(place: Place, run: Run, *rows: int) -> list[Executed]:
    """One request for each number of rows, their inputs side by side in the peer's arena."""
    x = np.arange(sum(rows) * 100, dtype=np.float32).reshape(sum(rows), 100)
    requests = [ask(each, rows=count) for each, count in zip(place.put_rows("x", x, rows), rows, strict=True)]
    execution = Execution(requests, 1, "m_0", BATCHED, place.plane)
    execution.run(Function(run))
    return execution.done


def test_an_input_that_goes_to_somebody_else_while_a_view_of_it_is_copied_is_no_answer(place: Place) -> None:
    """The model is through, its output is a view of the input, and only now the block is freed and used again."""

    class Outputs(dict[str, Array]):
        def items(self) -> ItemsView[str, Array]:  # type: ignore[override]
            (handle,) = (place.peer._blocks._live[offset].handle for offset in place.peer._blocks._live)
            place.peer.release(handle.block, handle.generation)
            place.peer.allocate(handle.length).view[:] = b"\xff" * handle.length
            return super().items()

    done = execute(place, lambda batch: Outputs(y=batch.inputs["x"][:, ::2]), 1, 2)
    assert [one.result.status for one in done] == [StatusCode.UNAVAILABLE.value[0]] * 2
    assert [one.result.outputs for one in done] == [[], []]
    assert place.arena.leases == 0


def test_an_array_under_two_names_is_one_lease_for_each_request(place: Place) -> None:
    def run(batch: Batch) -> Mapping[str, Array]:
        out = batch.empty("y", "FP32", (batch.rows, 1000))
        out[:] = np.arange(batch.rows, dtype=np.float32)[:, None]
        return {"y": out, "z": out}

    done = execute(place, run, 1, 3)
    assert [len(one.blocks) for one in done] == [1, 1]
    assert place.arena.leases == 1
    for one, first in zip(done, (0, 1), strict=True):
        found = place.arrays(one.result)
        assert (found["y"] == found["z"]).all()
        assert found["y"][0, 0] == first
        place.give_back(one)


def test_a_part_of_an_array_from_the_arena_is_copied_and_the_rest_goes_back(place: Place) -> None:
    def run(batch: Batch) -> Mapping[str, Array]:
        out = batch.empty("y", "FP32", (2 * batch.rows, 1000))
        out[:] = np.arange(2 * batch.rows, dtype=np.float32)[:, None]
        return {"y": out[batch.rows :], "z": out[: batch.rows, ::10]}

    (done,) = execute(place, run, 3)
    assert place.arena.leases == 2
    found = place.arrays(done.result)
    assert found["y"][:, 0].tolist() == [3, 4, 5]
    assert found["z"].shape == (3, 100)
    place.give_back(done)


def test_an_output_that_finds_no_room_takes_the_others_with_it(path: Path) -> None:
    with open_place(path, MIB) as place:
        big = np.zeros((1, 150_000), np.float32)
        (done,) = execute(place, lambda batch: {"y": big, "z": big}, 1)
        assert done.result.status == StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert done.result.error.startswith("no room for 600000 bytes in shared memory: ")
        assert place.arena.leases == 0
        (done,) = execute(place, lambda batch: {"y": big}, 1)
        assert done.result.status == 0
        place.give_back(done)
