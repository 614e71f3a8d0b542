"""Every backend keeps the same promises, whatever it computes."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from services.model.onnx import OnnxInstance
from services.postprocess.classification import ClassificationInstance
from services.preprocess.image import ImageInstance
from tensorline.errors import InvalidTensorError
from tensorline.stage.backend import Instance
from tensorline.stage.builtin import GenerateInstance, IdentityInstance
from tensorline.tensor import Array
from tests.services.heap_batch import CPU, HeapBatch, bytes_array, model, parameters, tensor
from tests.services.onnx_models import directory, node, write_model

Inputs = dict[str, Array]


@dataclass(frozen=True)
class Case:
    """A batching model of one backend, and inputs for any number of rows, no two rows alike."""

    name: str
    make: Callable[[Path], Instance]
    inputs: Callable[[int], Inputs]
    outputs: frozenset[str]


def make_image(folder: Path) -> Instance:
    text = f"""backend: "image" max_batch_size: 8 input [ {tensor("x", "BYTES", 1)} ]
        output [ {tensor("y", "FP32", 3, 4, 4)} ] {parameters(resize_short_side=5, mean=127, std=128)}"""
    return ImageInstance(model(text, folder), CPU)


def image_inputs(rows: int) -> Inputs:
    files = []
    for row in range(rows):
        file = io.BytesIO()
        Image.new("RGB", (6 + row, 7), (row * 20, 10, 200)).save(file, "PNG")
        files.append(file.getvalue())
    return {"x": bytes_array(*files)}


def make_onnx(folder: Path) -> Instance:
    nodes = [node("Relu", ["x"], ["y"]), node("ReduceSum", ["x", "axes"], ["z"], keepdims=1)]
    write_model(
        folder,
        [node("Constant", [], ["axes"], value_ints=[1]), *nodes],
        {"x": ("FP32", ["n", 4])},
        {"y": ("FP32", ["n", 4]), "z": ("FP32", ["n", 1])},
    )
    outputs = f"{tensor('y', 'FP32', 4)}, {tensor('z', 'FP32', -1)}"
    return OnnxInstance(
        directory(folder, f"max_batch_size: 8 input [{tensor('x', 'FP32', 4)}] output [{outputs}]"), CPU
    )


def float_inputs(rows: int) -> Inputs:
    return {"x": np.random.default_rng(7).normal(size=(rows, 4)).astype(np.float32)}


def make_classification(folder: Path) -> Instance:
    (folder / "labels.txt").write_text("a\nb\nc\nd\n")
    outputs = ", ".join([tensor("class", "INT64", 2), tensor("label", "BYTES", 2), tensor("score", "FP32", 2)])
    text = f"""backend: "classification" max_batch_size: 8 input [ {tensor("x", "FP32", 4)} ] output [ {outputs} ]
        {parameters(labels="labels.txt", apply="softmax")}"""
    return ClassificationInstance(model(text, folder), CPU)


def make_identity(mode: str) -> Callable[[Path], Instance]:
    def make(folder: Path) -> Instance:
        pairs = ("FP32", 4), ("BYTES", 1)
        inputs = ", ".join(tensor(f"INPUT{i}", *pair) for i, pair in enumerate(pairs))
        outputs = ", ".join(tensor(f"OUTPUT{i}", *pair) for i, pair in enumerate(pairs))
        text = f'backend: "identity" max_batch_size: 8 input [ {inputs} ] output [ {outputs} ] {parameters(mode=mode)}'
        return IdentityInstance(model(text, folder), CPU)

    return make


def identity_inputs(rows: int) -> Inputs:
    return {"INPUT0": float_inputs(rows)["x"], "INPUT1": bytes_array(*(b"row %d" % row for row in range(rows)))}


def make_generate(folder: Path) -> Instance:
    text = f"""backend: "generate" max_batch_size: 8 input [ {tensor("byte_size", "INT64", 1)} ]
        output [ {tensor("data", "FP32", -1)} ] {parameters(fill=2.5, max_byte_size=1 << 20)}"""
    return GenerateInstance(model(text, folder), CPU)


CASES = [
    Case("image", make_image, image_inputs, frozenset({"y"})),
    Case("onnxruntime", make_onnx, float_inputs, frozenset({"y", "z"})),
    Case("classification", make_classification, float_inputs, frozenset({"class", "label", "score"})),
    Case("identity", make_identity("pass"), identity_inputs, frozenset({"OUTPUT0", "OUTPUT1"})),
    Case("identity-copy", make_identity("copy"), identity_inputs, frozenset({"OUTPUT0", "OUTPUT1"})),
    Case("generate", make_generate, lambda rows: {"byte_size": np.full((rows, 1), 64)}, frozenset({"data"})),
]
CHECKING = [case for case in CASES if not case.name.startswith("identity")]
"""identity takes whatever comes: it is the runtime that holds inputs against the configuration."""


@pytest.fixture(params=CASES, ids=lambda case: str(case.name))
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture
def instance(case: Case, tmp_path: Path) -> Instance:
    return case.make(tmp_path)


def run(instance: Instance, inputs: Inputs, rows: int) -> Mapping[str, Any]:
    return instance.execute(HeapBatch(inputs, rows))


def test_every_output_is_there_and_keeps_the_rows(case: Case, instance: Instance) -> None:
    for rows in (1, 3, 8):
        outputs = run(instance, case.inputs(rows), rows)
        assert set(outputs) == case.outputs
        assert {array.shape[0] for array in outputs.values()} == {rows}


def test_a_batch_gives_each_row_what_it_gets_alone(case: Case, instance: Instance) -> None:
    inputs = case.inputs(5)
    together = run(instance, inputs, 5)
    for row in range(5):
        alone = run(instance, {name: array[row : row + 1] for name, array in inputs.items()}, 1)
        for name, array in together.items():
            np.testing.assert_array_equal(array[row : row + 1], alone[name])


def test_no_rows_give_no_rows(case: Case, instance: Instance) -> None:
    outputs = run(instance, case.inputs(0), 0)
    assert {array.shape[0] for array in outputs.values()} == {0}
    one = run(instance, case.inputs(1), 1)
    # generate's row size is what its rows ask for, and no row asks for anything.
    same = {name for name in outputs if case.name != "generate" and outputs[name].shape[1:] == one[name].shape[1:]}
    assert case.name == "generate" or same == set(outputs)


def test_read_only_inputs_are_enough_and_stay_as_they_are(case: Case, instance: Instance) -> None:
    inputs = case.inputs(2)
    before = {name: array.copy() for name, array in inputs.items()}
    run(instance, inputs, 2)  # HeapBatch hands them on read-only
    for name, array in inputs.items():
        np.testing.assert_array_equal(array, before[name])


def test_one_output_can_be_asked_for_by_itself(case: Case, instance: Instance) -> None:
    everything = run(instance, case.inputs(2), 2)
    for name in case.outputs:
        some = instance.execute(HeapBatch(case.inputs(2), 2, [name]))
        np.testing.assert_array_equal(some[name], everything[name])


def test_arrays_of_the_batch_are_given_back_themselves(case: Case, instance: Instance) -> None:
    """A view of one would be copied by the runtime, which knows them by identity."""
    batch = HeapBatch(case.inputs(2), 2)
    outputs = instance.execute(batch)
    assert all(outputs[name] is array for name, array in batch.made.items())


def test_a_missing_input_is_named(case: Case, instance: Instance) -> None:
    name = next(iter(case.inputs(1)))
    with pytest.raises(InvalidTensorError, match=rf"^input '{name}' "):
        run(instance, {"other": np.zeros((1, 4), np.float32)}, 1)


@pytest.mark.parametrize("case", CHECKING, ids=lambda case: str(case.name))
def test_another_datatype_is_refused_by_name(case: Case, instance: Instance) -> None:
    (name,) = case.inputs(1)
    with pytest.raises(InvalidTensorError, match=rf"^input '{name}' (has datatype UINT16, model takes|must be INT64)"):
        run(instance, {name: np.zeros((1, 4), np.uint16)}, 1)


@pytest.mark.parametrize("case", CHECKING, ids=lambda case: str(case.name))
def test_another_shape_is_refused_with_both(case: Case, instance: Instance) -> None:
    ((name, array),) = case.inputs(1).items()
    for shape in ((1, 7), (1, 2, 2), ()):
        wrong = np.full(shape, array.flat[0], array.dtype)
        pattern = rf"^input '{name}' (has shape \[{', '.join(map(str, shape))}\], model takes \[-1, \d\]|must be INT64)"
        if case.name == "generate" and shape == ():
            continue  # one number is one number
        with pytest.raises(InvalidTensorError, match=pattern):
            run(instance, {name: wrong}, 1)


def test_it_runs_on_after_a_refusal_and_closes_when_idle(case: Case, instance: Instance) -> None:
    with pytest.raises(InvalidTensorError):
        run(instance, {}, 1)
    assert set(run(instance, case.inputs(1), 1)) == case.outputs
    instance.close()
