"""One batch through one instance: what the model sees, what comes back, and that no block stays behind."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import ml_dtypes
import numpy as np
import pytest
from grpc import StatusCode
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorline.errors import BackendError, InvalidTensorError
from tensorline.stage.backend import Batch
from tensorline.stage.execution import Executed, Execution, ModelView
from tensorline.stage.request import StageRequest
from tensorline.tensor import DATATYPES, Array
from tests.tensorline.stage.inner import INLINE, MIB, Function, Place, Run, ask, exposed, inline, open_place
from tests.tensorline.stage.pair import mesh_directory

ALONE = ModelView("1")
BATCHED = ModelView("1", is_batched=True)
OK, INTERNAL, INVALID, STALE, FULL = (
    status.value[0]
    for status in (
        StatusCode.OK,
        StatusCode.INTERNAL,
        StatusCode.INVALID_ARGUMENT,
        StatusCode.UNAVAILABLE,
        StatusCode.RESOURCE_EXHAUSTED,
    )
)


@pytest.fixture
def place(path: Path) -> Iterator[Place]:
    """Afterwards no block of ours may be left."""
    with open_place(path) as place:
        yield place


def run(
    place: Place, run: Run, *requests: StageRequest, model: ModelView = ALONE, on_loop: bool = False
) -> list[Executed]:
    """What became of the requests, in their order: each has exactly one end."""
    execution = Execution(list(requests), 7, "m_0", model, place.plane)
    execution.run(Function(run), on_loop=on_loop)
    assert len(execution.done) == len(requests)
    ends = {id(one.request): one for one in execution.done}
    return [ends[id(request)] for request in requests]


def told(*executed: Executed) -> list[tuple[int, str]]:
    return [(one.result.status, one.result.error) for one in executed]


def numbers(rows: int, columns: int = 32, start: int = 0) -> Array:
    """At 32 columns a row has twice the bytes that travel inline."""
    return np.arange(start, start + rows * columns, dtype=np.float32).reshape(rows, columns)


def filled(batch: Batch, name: str = "y", columns: int = 32) -> Array:
    """Each of its rows is the input's row, in an array from the arena."""
    out = batch.empty(name, "FP32", (batch.rows, columns))
    np.copyto(out, batch.inputs["x"])
    return out


EXAMPLES: Mapping[str, Array] = {
    name: np.array([b"a" * 90, b"", b"\xff"], dtype=np.object_)
    if name == "BYTES"
    else (np.arange(90) % 3).astype(dtype).reshape(3, 30)
    for name, dtype in DATATYPES.items()
}


@pytest.mark.parametrize("datatype", EXAMPLES)
@pytest.mark.parametrize("is_inline", [True, False])
@pytest.mark.parametrize("is_copy", [True, False])
def test_every_datatype_comes_in_and_goes_out(place: Place, datatype: str, is_inline: bool, is_copy: bool) -> None:
    array = EXAMPLES[datatype]
    seen: list[bool] = []

    def model(batch: Batch) -> Mapping[str, Array]:
        seen.append(batch.inputs["x"].flags.writeable)
        assert batch.inputs["x"].dtype == array.dtype
        return {"y": batch.inputs["x"].copy() if is_copy else batch.inputs["x"]}

    tensor = inline("x", array) if is_inline else place.put("x", array)
    (done,) = run(place, model, ask(tensor))
    np.testing.assert_array_equal(place.arrays(done.result)["y"], array)
    assert done.result.outputs[0].datatype == datatype
    assert seen == [False]
    place.give_back(done)


def test_a_bad_handle_fails_its_request_alone(place: Place) -> None:
    good, gone = place.put("x", numbers(1)), place.put("x", numbers(1))
    assert gone.handle is not None
    assert good.handle is not None
    place.peer.release(gone.handle.block, gone.handle.generation)
    forged = [
        good._replace(handle=good.handle._replace(generation=good.handle.generation + 1)),
        good._replace(handle=good.handle._replace(arena=bytes(16))),
        good._replace(handle=good.handle._replace(offset=good.handle.offset + 64)),
        good._replace(handle=good.handle._replace(offset=1 << 60)),
        good._replace(handle=good.handle._replace(block=0)),
    ]
    bad = [gone, *forged]
    done = run(
        place, lambda batch: {"y": filled(batch)}, ask(good), *[ask(each) for each in bad], ask(good), model=BATCHED
    )
    assert [one.result.status for one in done] == [OK, *[STALE] * len(bad), OK]
    assert {one.result.error for one in done[1:-1]} == {"a tensor in shared memory is no longer there"}
    assert done[0].result.timing is not None
    assert done[0].result.timing.batch_size == 2
    place.give_back(*done)


def test_a_shape_that_its_bytes_do_not_have_is_refused(place: Place) -> None:
    wrong = [place.put("x", numbers(2))._replace(shape=(3, 32)), inline("x", numbers(1))._replace(shape=(2,))]
    done = run(place, lambda batch: {}, *[ask(each) for each in wrong])
    assert [one.result.status for one in done] == [INVALID, INVALID]


def test_an_input_that_was_freed_while_the_model_ran_is_no_answer(place: Place) -> None:
    tensors = [place.put("x", numbers(1, start=start)) for start in (0, 100)]
    handle = tensors[0].handle
    assert handle is not None

    def model(batch: Batch) -> Mapping[str, Array]:
        place.peer.release(handle.block, handle.generation)
        return {"y": filled(batch), "z": batch.inputs["x"]}

    done = run(place, model, *[ask(each) for each in tensors], model=BATCHED)
    assert [one.result.status for one in done] == [STALE, OK]
    assert not done[0].blocks
    np.testing.assert_array_equal(place.arrays(done[1].result)["y"], numbers(1, start=100))
    place.give_back(*done)


# What a model may return. Each makes the outputs of a batch whose input `x` has rows of 32 FP32.


def two_names(batch: Batch) -> Mapping[str, Array]:
    out = filled(batch)
    return {"y": out, "z": out}


def two_of_two(batch: Batch) -> Mapping[str, Array]:
    return {"y": filled(batch), "z": filled(batch, "z")}


def piece(batch: Batch) -> Mapping[str, Array]:
    return {"y": filled(batch)[:, 2:30]}


def unused(batch: Batch) -> Mapping[str, Array]:
    batch.empty("w", "INT8", (5000,))
    return {"y": np.array(batch.inputs["x"])}


def big_endian(batch: Batch) -> Mapping[str, Array]:
    return {"y": batch.inputs["x"].astype(">f4")}


def read_only(batch: Batch) -> Mapping[str, Array]:
    array = np.array(batch.inputs["x"])
    array.setflags(write=False)
    return {"y": array}


SHAPES_OF_ANSWERS: Mapping[str, Run] = {
    "whole": lambda batch: {"y": filled(batch)},
    "two names": two_names,
    "two of two": two_of_two,
    "piece": piece,
    "unused": unused,
    "passed on": lambda batch: {"y": batch.inputs["x"]},
    "passed on twice": lambda batch: {"y": batch.inputs["x"], "z": batch.inputs["x"]},
    "passed on and made": lambda batch: {"y": batch.inputs["x"], "z": filled(batch)},
    "view of the input": lambda batch: {"y": batch.inputs["x"][:, ::-1]},
    "not contiguous": lambda batch: {"y": np.repeat(batch.inputs["x"], 2, axis=1)[:, ::2]},
    "Fortran order": lambda batch: {"y": np.asfortranarray(batch.inputs["x"])},
    "big endian": big_endian,
    "read-only": read_only,
    "strings": lambda batch: {"y": np.array(batch.inputs["x"]).astype(str)},
    "BF16": lambda batch: {"y": np.array(batch.inputs["x"]).astype(ml_dtypes.bfloat16)},
    "no columns": lambda batch: {"y": np.zeros((batch.rows, 0), np.int8)},
    "no columns, made": lambda batch: {"y": batch.empty("y", "FP32", (batch.rows, 0))},
    "one number a row": lambda batch: {"y": batch.inputs["x"][:, 0]},
    "nothing": lambda batch: {},
}


@pytest.mark.parametrize("name", SHAPES_OF_ANSWERS)
@pytest.mark.parametrize("rows", [[1], [3], [1, 1], [2, 1, 3]])
@pytest.mark.parametrize("is_inline", [True, False])
@pytest.mark.parametrize("is_inline_only", [True, False])
@pytest.mark.parametrize("on_loop", [True, False])
def test_each_gets_its_rows_and_no_block_stays(
    place: Place, name: str, rows: list[int], is_inline: bool, is_inline_only: bool, on_loop: bool
) -> None:
    arrays = [numbers(count, start=1000 * at) for at, count in enumerate(rows)]
    requests = [
        ask(inline("x", array) if is_inline else place.put("x", array), rows=len(array), is_inline_only=is_inline_only)
        for array in arrays
    ]
    model = SHAPES_OF_ANSWERS[name]
    done = run(place, model, *requests, model=BATCHED, on_loop=on_loop)
    for one, array in zip(done, arrays, strict=True):
        expected = model(cast(Batch, Heap(array)))
        got = place.arrays(one.result)
        assert got.keys() == expected.keys()
        for key, want in expected.items():
            native = np.char.encode(want.astype(str)).astype(object) if want.dtype.kind == "U" else want
            np.testing.assert_array_equal(got[key], native)
            assert got[key].shape == want.shape
        if is_inline_only:
            assert not any(each.handle for each in one.result.outputs)
            assert not one.blocks
        held = {each.handle.block for each in one.result.outputs if each.handle and each.handle.arena == place.arena.id}
        assert held == {block.offset for block in one.blocks}
        assert one.result.timing is not None
        assert (one.result.timing.batch_size, one.result.timing.batch_id) == (sum(rows), 7)
    place.give_back(*done)
    assert place.arena.leases == 0


class Heap:
    """The batch that one request would be alone."""

    def __init__(self, array: Array) -> None:
        self.inputs = {"x": array}
        self.rows = len(array)

    def empty(self, name: str, datatype: str, shape: tuple[int, ...]) -> Array:
        return np.zeros(shape, DATATYPES[datatype])


def test_what_is_passed_on_keeps_its_place(place: Place) -> None:
    tensors = [place.put("x", numbers(1, start=start)) for start in (0, 100)] + [inline("x", numbers(1))]
    done = run(place, lambda batch: {"y": batch.inputs["x"]}, *[ask(each) for each in tensors], model=BATCHED)
    assert [one.result.outputs[0][1:] for one in done] == [tensor[1:] for tensor in tensors]
    assert place.arena.leases == 0


def test_an_array_from_the_arena_is_not_copied(place: Place) -> None:
    where: list[int] = []

    def model(batch: Batch) -> Mapping[str, Array]:
        out = filled(batch)
        where.append(out.ctypes.data)
        return {"y": out}

    done = run(place, model, *[ask(inline("x", numbers(2)), rows=2) for _ in range(2)], model=BATCHED)
    views = [place.reader.array(one.result.outputs[0]) for one in done]
    assert [view.ctypes.data - where[0] for view in views] == [0, 2 * 32 * 4]
    assert place.arena.leases == 1
    place.give_back(done[0])
    np.testing.assert_array_equal(place.arrays(done[1].result)["y"], numbers(2))
    place.give_back(done[1])


@pytest.mark.parametrize("value", [np.array(5, np.int64), np.float32(5), np.array("five"), np.array(True)])
def test_a_single_number_is_an_output(place: Place, value: Array) -> None:
    for inline_bytes in (INLINE, 0):
        near = replace(place, plane=replace(place.plane, inline_bytes=inline_bytes))
        (done,) = run(near, lambda batch: {"y": value}, ask())
        got = near.arrays(done.result)["y"]
        assert got.shape == ()
        assert got == (b"five" if got.dtype == object else value)
        near.give_back(done)


def test_only_the_outputs_that_were_asked_for(place: Place) -> None:
    wanted: list[frozenset[str]] = []

    def model(batch: Batch) -> Mapping[str, Array]:
        wanted.append(batch.requested_outputs)
        return two_of_two(batch)

    tensor = inline("x", numbers(1))
    done = run(place, model, ask(tensor, outputs=("z",)), ask(tensor, outputs=("y", "nowhere")), model=BATCHED)
    assert [sorted(place.arrays(one.result)) for one in done] == [["z"], ["y"]]
    place.give_back(*done)
    done = run(place, model, ask(tensor, outputs=("z",)), ask(tensor), model=BATCHED)
    assert [sorted(place.arrays(one.result)) for one in done] == [["z"], ["y", "z"]]
    place.give_back(*done)
    assert wanted == [frozenset({"y", "z", "nowhere"}), frozenset()]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "the model returned NoneType, not arrays by output name"),
        ([np.zeros(1)], "the model returned list, not arrays by output name"),
        ({"y": [1.0]}, "output 'y' is list, not an array"),
        ({"y": None}, "output 'y' is NoneType, not an array"),
        ({5: np.zeros((2, 1))}, "an output is named by int, not by str"),
        ({"y": np.zeros((3, 1))}, "output 'y' has shape [3, 1], a batch of 2 rows must keep its rows"),
        ({"y": np.zeros(())}, "output 'y' has shape [], a batch of 2 rows must keep its rows"),
        ({"y": np.array([b"a", 5], dtype=object)}, "output 'y': a BYTES element is int, not bytes or str"),
        ({"y": np.zeros(2, np.complex64)}, "output 'y': numpy dtype complex64 has no tensor datatype"),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_no_answer_is_the_models_failure(place: Place, answer: object, said: str, count: int) -> None:
    def model(batch: Batch) -> Mapping[str, Array]:
        first = {"a": filled(batch)}
        return {**first, **answer} if isinstance(answer, dict) else cast(Mapping[str, Array], answer)

    requests = [ask(inline("x", numbers(2 // count)), rows=2 // count) for _ in range(count)]
    done = run(place, model, *requests, model=BATCHED)
    for one in done:
        assert one.result.status == INTERNAL
        if count == 1:
            assert one.result.error.startswith(said)
        assert not one.result.outputs
        assert not one.blocks


def test_an_arena_that_is_full_at_the_second_output(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorline.stage.batch.ARENA_WAIT_S", 0.01)

    def made(batch: Batch) -> Mapping[str, Array]:
        return {"y": batch.empty("y", "INT8", (batch.rows, 200_000)), "z": batch.empty("z", "INT8", (900_000,))}

    def plain(batch: Batch) -> Mapping[str, Array]:
        return {"y": np.zeros((batch.rows, 200_000), np.int8), "z": np.zeros((batch.rows, 900_000), np.int8)}

    with open_place(path, arena_bytes=MIB) as place:
        for model in (made, plain):
            for on_loop in (True, False):
                done = run(place, model, ask(rows=1), ask(rows=1), model=BATCHED, on_loop=on_loop)
                assert [one.result.status for one in done] == [FULL, FULL]
                assert "no room for 900000 bytes in shared memory" in done[0].result.error
                assert place.arena.leases == 0


def test_a_batch_waits_for_room_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorline.stage.batch.ARENA_WAIT_S", 0.2)

    def model(batch: Batch) -> Mapping[str, Array]:
        return {"y": batch.empty("y", "INT8", (batch.rows, 500_000))}

    with open_place(path, arena_bytes=MIB) as place:
        taken = place.arena.allocate(700_000)
        began = time.monotonic()
        done = run(place, model, *[ask() for _ in range(8)], model=BATCHED)
        assert time.monotonic() - began < 3.2
        assert [one.result.status for one in done] == [FULL] * 8
        taken.release()


def test_neighbours_in_one_block_are_one_view(place: Place) -> None:
    array = numbers(6)
    tensors = place.put_rows("x", array, [1, 2, 3])
    seen: list[bool] = []

    def model(batch: Batch) -> Mapping[str, Array]:
        seen.append(np.shares_memory(batch.inputs["x"], np.frombuffer(place.reader.view(whole), np.uint8)))
        np.testing.assert_array_equal(np.sort(batch.inputs["x"], axis=0), array)
        assert not batch.inputs["x"].flags.writeable
        return {"y": filled(batch)}

    handles = [tensor.handle for tensor in tensors if tensor.handle]
    whole = handles[0]._replace(length=array.nbytes)
    for order in ([0, 1, 2], [1, 0, 2]):
        requests = [ask(tensors[at], rows=tensors[at].shape[0]) for at in order]
        done = run(place, model, *requests, model=BATCHED)
        for at, one in zip(order, done, strict=True):
            np.testing.assert_array_equal(place.arrays(one.result)["y"], place.reader.array(tensors[at]))
        place.give_back(*done)
    assert seen == [True, False]


def test_neighbours_are_reshaped_like_others(place: Place) -> None:
    view = ModelView("1", is_batched=True, input_shapes={"x": ((32,), (4, 8))})
    for tensors in (place.put_rows("x", numbers(3), [1, 2]), [inline("x", numbers(1)), inline("x", numbers(2))]):
        shapes: list[tuple[int, ...]] = []

        def model(batch: Batch, shapes: list[tuple[int, ...]] = shapes) -> Mapping[str, Array]:
            shapes.append(batch.inputs["x"].shape)
            return {"y": batch.inputs["x"]}

        done = run(place, model, *[ask(each, rows=each.shape[0]) for each in tensors], model=view)
        assert shapes == [(3, 4, 8)]
        assert [place.arrays(one.result)["y"].shape for one in done] == [(1, 4, 8), (2, 4, 8)]


def test_inputs_in_another_order_run_apart(place: Place) -> None:
    x, z = inline("x", numbers(1)), inline("z", numbers(1, start=7))
    sizes: list[int] = []

    def model(batch: Batch) -> Mapping[str, Array]:
        sizes.append(batch.rows)
        return {"y": np.subtract(batch.inputs["z"], batch.inputs["x"])}

    done = run(place, model, ask(x, z), ask(z, x), ask(x), model=BATCHED)
    assert sizes == [1, 1, 1]
    assert [one.result.status for one in done] == [OK, OK, INTERNAL]
    place.give_back(*done)


def test_a_model_cannot_change_what_it_was_given(place: Place) -> None:
    """Else what is passed on would differ from what the model sees: by handle, inline, stacked and BYTES."""

    def model(batch: Batch) -> Mapping[str, Array]:
        array = batch.inputs["x"]
        array[0] = array[-1]
        return {"y": array}

    words = np.array([b"a", b"b"], dtype=object)
    for tensors in (
        [place.put("x", numbers(2))],
        [inline("x", numbers(2))],
        [place.put("x", numbers(2)), inline("x", numbers(2))],
        [inline("x", words)],
        [inline("x", words), inline("x", words)],
    ):
        done = run(place, model, *[ask(each, rows=2) for each in tensors], model=BATCHED)
        assert {one.result.status for one in done} == {INTERNAL}


class OddError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "status", "text", "exposed_text"),
    [
        (InvalidTensorError("x is odd"), INVALID, "x is odd", "x is odd"),
        (BackendError("no luck"), INTERNAL, "no luck", "no luck"),
        (ValueError("row 7 of /etc/passwd"), INTERNAL, "{} ValueError", "{} ValueError: row 7 of /etc/passwd"),
        (SystemExit(3), INTERNAL, "{} SystemExit", "{} SystemExit: 3"),
        (KeyboardInterrupt(), INTERNAL, "{} KeyboardInterrupt", "{} KeyboardInterrupt: "),
        (asyncio.CancelledError(), INTERNAL, "{} CancelledError", "{} CancelledError: "),
        (GeneratorExit(), INTERNAL, "{} GeneratorExit", "{} GeneratorExit: "),
        (StopIteration(), INTERNAL, "{} StopIteration", "{} StopIteration: "),
        (MemoryError("1 GiB"), FULL, "{} MemoryError", "{} MemoryError: 1 GiB"),
        (OddError(), INTERNAL, "{} OddError", "{} OddError: OddError"),
        (BackendError("a\nb\udc80"), INTERNAL, "a\\u000ab\\udc80", "a\\u000ab\\udc80"),
    ],
)
@pytest.mark.parametrize("is_exposed", [False, True])
def test_what_a_model_raises_is_told_in_its_own_words_or_not_at_all(
    place: Place, error: BaseException, status: int, text: str, exposed_text: str, is_exposed: bool
) -> None:
    def model(batch: Batch) -> Mapping[str, Array]:
        batch.empty("y", "INT8", (5000,))
        raise error

    (done,) = run(exposed(place) if is_exposed else place, model, ask(request_id="r-1"))
    wanted = (exposed_text if is_exposed else text).format("[request id: r-1] model 'm' failed:")
    assert told(done) == [(status, wanted)]


def test_a_long_text_is_cut(place: Place) -> None:
    def model(batch: Batch) -> Mapping[str, Array]:
        raise BackendError("x" * (1 << 20))

    (done,) = run(place, model, ask())
    assert len(done.result.error) <= 513


def boom(batch: Batch) -> Mapping[str, Array]:
    if (batch.inputs["x"].astype(np.float32) < 0).any():
        raise BackendError("bad row")
    return {"y": filled(batch)}


@pytest.mark.parametrize("guilty", range(8))
def test_one_bad_row_is_not_its_neighbours_failure(place: Place, guilty: int) -> None:
    arrays = [numbers(1, start=-5000 if at == guilty else 100 * at) for at in range(8)]
    done = run(place, boom, *[ask(inline("x", array)) for array in arrays], model=BATCHED)
    for at, (one, array) in enumerate(zip(done, arrays, strict=True)):
        if at == guilty:
            assert told(one) == [(INTERNAL, "bad row")]
        else:
            np.testing.assert_array_equal(place.arrays(one.result)["y"], array)
    place.give_back(*done)


def test_nobody_who_has_left_is_run_again(place: Place) -> None:
    ran: list[int] = []
    requests = [ask(inline("x", numbers(1))) for _ in range(3)]

    def model(batch: Batch) -> Mapping[str, Array]:
        ran.append(batch.rows)
        requests[0].is_cancelled = True
        requests[1].deadline = time.monotonic() - 1
        raise BackendError("always")

    done = run(place, model, *requests, model=BATCHED)
    cancelled, deadline = StatusCode.CANCELLED.value[0], StatusCode.DEADLINE_EXCEEDED.value[0]
    assert [one.result.status for one in done] == [cancelled, deadline, INTERNAL]
    assert ran == [3, 1]


def test_foreign_failures_go_to_the_log_with_the_request(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    def model(batch: Batch) -> Mapping[str, Array]:
        raise KeyError("row 7 of customers")

    with caplog.at_level(logging.ERROR):
        run(place, model, ask(request_id="r-1"))
    (record,) = caplog.records
    assert record.message == "model failed"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)


def test_times_never_run_backwards(place: Place) -> None:
    tensor = inline("x", numbers(1))
    done = run(place, boom, ask(tensor), ask(tensor), ask(inline("x", numbers(1, start=-5000))), model=BATCHED)
    for one in done:
        timing = one.result.timing
        assert timing is not None
        steps = [timing.input_ready, timing.computed, timing.output_ready]
        reached = [step for step in steps if step]
        assert reached == sorted(reached)
        assert len(reached) == (3 if one.result.status == OK else 1)
        assert (timing.batch_id, timing.batch_size, timing.instance) == (7, 1, "m_0")
        assert one.result.version == "1"
    place.give_back(*done)


@pytest.mark.parametrize("is_batched", [True, False])
def test_the_backend_sees_and_gives_other_shapes_than_the_client(place: Place, is_batched: bool) -> None:
    view = ModelView("1", is_batched, {"x": ((32,), (4, 8))}, {"y": ((4, 8), (2, 16))})
    batch_shape = (2,) if is_batched else ()
    seen: list[tuple[int, ...]] = []

    def model(batch: Batch) -> Mapping[str, Array]:
        seen.append(batch.inputs["x"].shape)
        out = batch.empty("y", "FP32", batch.inputs["x"].shape)
        np.copyto(out, batch.inputs["x"])
        return {"y": out, "z": batch.inputs["x"]}

    array = numbers(2) if is_batched else numbers(1)[0]
    for tensor in (inline("x", array), place.put("x", array)):
        (done,) = run(place, model, ask(tensor, rows=2 if is_batched else 1), model=view)
        got = place.arrays(done.result)
        np.testing.assert_array_equal(got["y"], array.reshape(*batch_shape, 2, 16))
        np.testing.assert_array_equal(got["z"], array.reshape(*batch_shape, 4, 8))
        place.give_back(done)
    assert seen == [(*batch_shape, 4, 8)] * 2


def test_sizes_left_open_are_taken_over_in_their_order(place: Place) -> None:
    view = ModelView("1", True, {"x": ((-1, 6, -1), (-1, 2, 3, -1))}, {"y": ((-1, 2, 3, -1), (-1, -1, 6))})
    array = np.arange(2 * 5 * 6 * 4, dtype=np.int32).reshape(2, 5, 6, 4)
    (done,) = run(
        place, lambda b: {"y": b.inputs["x"], "z": b.inputs["x"]}, ask(inline("x", array), rows=2), model=view
    )
    got = place.arrays(done.result)
    assert got["z"].shape == (2, 5, 2, 3, 4)
    np.testing.assert_array_equal(got["y"], array.reshape(2, 5, 4, 6))
    place.give_back(done)


def test_an_impossible_shape_is_refused(place: Place) -> None:
    view = ModelView("1", True, {"x": ((32,), (5, 5))})
    (done,) = run(place, lambda batch: {}, ask(inline("x", numbers(1))), model=view)
    assert told(done) == [(INVALID, "'x' of shape [1, 32] does not reshape to [5, 5]")]
    view = ModelView("1", True, {}, {"y": ((32,), (5, 5))})
    (done,) = run(place, lambda batch: {"y": filled(batch)}, ask(inline("x", numbers(1))), model=view)
    assert told(done) == [(INTERNAL, "output 'y' of shape [1, 32] does not reshape to [5, 5]")]


def test_outputs_that_the_configuration_does_not_know(place: Place) -> None:
    view = ModelView("1", outputs={"y": "FP32"})
    (done,) = run(place, lambda b: {"y": b.inputs["x"], "debug": object()}, ask(inline("x", numbers(1))), model=view)  # type: ignore[dict-item]
    assert [each.name for each in done.result.outputs] == ["y"]
    (done,) = run(place, lambda b: {"y": b.inputs["x"]}, ask(inline("x", np.zeros(3, np.int8))), model=view)
    assert told(done) == [(INTERNAL, "output 'y' is INT8, the configuration says FP32")]


KINDS: Mapping[str, Callable[[Batch, str, Array], Array]] = {
    "plain": lambda batch, name, array: array.copy(),
    "made": lambda batch, name, array: _made(batch, name, array),
    "piece": lambda batch, name, array: _made(batch, name, np.repeat(array, 2, axis=1))[:, ::2],
    "turned": lambda batch, name, array: np.asfortranarray(array),
    "swapped": lambda batch, name, array: array.astype(array.dtype.newbyteorder(">")),
    "input": lambda batch, name, array: array,
}


def _made(batch: Batch, name: str, array: Array) -> Array:
    datatype = next(key for key, dtype in DATATYPES.items() if dtype == array.dtype)
    out = batch.empty(name, datatype, array.shape)
    np.copyto(out, array)
    return out


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["BOOL", "UINT8", "INT16", "FP32", "INT64", "BF16"]),
    st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), min_size=1, max_size=4),
    st.lists(st.integers(0, 5), max_size=2),
    st.lists(st.sampled_from(sorted(KINDS)), max_size=3),
    st.booleans(),
)
def test_whatever_it_is_it_arrives(
    datatype: str, asked: list[tuple[int, bool, bool]], dims: list[int], kinds: list[str], is_failing: bool
) -> None:
    """`asked`: rows, whether inline, whether inline only. `is_failing`: an output that is none comes last."""
    shape = (7, *dims)

    def model(batch: Batch) -> Mapping[str, Array]:
        outputs = {f"{at}": KINDS[kind](batch, f"{at}", batch.inputs["x"]) for at, kind in enumerate(kinds)}
        return {**outputs, "bad": cast(Array, None)} if is_failing else outputs

    with mesh_directory() as path, open_place(path) as place:
        requests, arrays = [], []
        for at, (rows, is_inline, is_inline_only) in enumerate(asked):
            array = (np.arange(rows * math.prod(shape)) + 50 * at).astype(DATATYPES[datatype]).reshape(rows, *shape)
            tensor = inline("x", array) if is_inline or not array.size else place.put("x", array)
            requests.append(ask(tensor, rows=rows, is_inline_only=is_inline_only))
            arrays.append(array)
        done = run(place, model, *requests, model=BATCHED)
        for one, array in zip(done, arrays, strict=True):
            if is_failing:
                assert one.result.status == INTERNAL
                continue
            got = place.arrays(one.result)
            assert len(got) == len(kinds)
            for output in got.values():
                assert output.dtype == array.dtype
                np.testing.assert_array_equal(output, array)
        place.give_back(*done)
        assert place.arena.leases == 0
