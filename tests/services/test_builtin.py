"""identity and generate, which every service brings along."""

import numpy as np
import pytest

from tensorline.errors import ConfigError, InvalidTensorError
from tensorline.stage.builtin import GenerateInstance, IdentityInstance
from tests.services.heap_batch import CPU, HeapBatch, bytes_array, model, parameters, tensor


def identity(inputs: str, outputs: str, **values: object) -> IdentityInstance:
    text = f'backend: "identity" input [ {inputs} ] output [ {outputs} ] {parameters(**values)}'
    return IdentityInstance(model(text), CPU)


def generate(outputs: str, inputs: str = "", **values: object) -> GenerateInstance:
    given = f"input [ {inputs} ]" if inputs else ""
    return GenerateInstance(model(f'backend: "generate" {given} output [ {outputs} ] {parameters(**values)}'), CPU)


def test_identity_hands_on_the_input_itself() -> None:
    batch = HeapBatch({"a": np.arange(3)})
    assert identity(tensor("a", "INT64", 3), tensor("b", "INT64", 3)).execute(batch)["b"] is batch.inputs["a"]
    assert batch.made == {}


def test_identity_pairs_by_name_then_by_place() -> None:
    two = {"INPUT_0": np.array([0]), "INPUT_1": np.array([1])}
    inputs = f"{tensor('INPUT_0', 'INT64', 1)}, {tensor('INPUT_1', 'INT64', 1)}"
    crossed = identity(inputs, f"{tensor('OUTPUT_1', 'INT64', 1)}, {tensor('OUTPUT_0', 'INT64', 1)}")
    assert {name: array.tolist() for name, array in crossed.execute(HeapBatch(two)).items()} == {
        "OUTPUT_1": [1],
        "OUTPUT_0": [0],
    }
    placed = identity(inputs, f"{tensor('b', 'INT64', 1)}, {tensor('c', 'INT64', 1)}")
    assert {name: array.tolist() for name, array in placed.execute(HeapBatch(two)).items()} == {"b": [0], "c": [1]}


def test_identity_copies_when_told_to() -> None:
    backend = identity(tensor("a", "FP32", -1), tensor("b", "FP32", -1), mode="copy")
    batch = HeapBatch({"a": np.arange(3, dtype=np.float32)})
    result = backend.execute(batch)["b"]
    assert result is batch.made["b"]
    assert result.tolist() == [0, 1, 2]
    text = identity(tensor("a", "BYTES", 1), tensor("b", "BYTES", 1), mode="copy")
    assert text.execute(HeapBatch({"a": bytes_array(b"x", shape=(1,))}))["b"].tolist() == [b"x"]


def test_identity_is_instant_unless_it_waits() -> None:
    one = tensor("a", "FP32", 1), tensor("b", "FP32", 1)
    assert identity(*one).instant_bytes > 1 << 40
    assert 0 < identity(*one, mode="copy").instant_bytes < 1 << 20
    assert identity(*one, execute_delay_ms="0.5").instant_bytes == 0


@pytest.mark.parametrize(
    ("inputs", "outputs", "values", "text"),
    [
        ("a", "b", {"mode": "move"}, "parameter 'mode' is 'move'; allowed: pass, copy"),
        ("a", "b", {"execute_delay_ms": "-1"}, "parameter 'execute_delay_ms' is '-1'; allowed: 0 to 3600000"),
        (
            "a",
            "b",
            {"delay_ms": "1"},
            "parameter 'delay_ms' is not one of backend 'identity'; did you mean 'execute_delay",
        ),
        ("a", "bc", {}, "backend 'identity' needs an input for each output; 1 for 2 are given"),
    ],
)
def test_identity_refuses_at_load(inputs: str, outputs: str, values: dict[str, object], text: str) -> None:
    ins, outs = (", ".join(tensor(name, "FP32", 1) for name in names) for names in (inputs, outputs))
    with pytest.raises(ConfigError) as caught:
        identity(ins, outs, **values)
    assert str(caught.value).startswith(text)


def test_identity_refuses_to_change_the_datatype() -> None:
    with pytest.raises(ConfigError, match=r"^output 'b' is FP16, its input 'a' is FP32$"):
        identity(tensor("a", "FP32", 1), tensor("b", "FP16", 1))


def test_generate_makes_what_is_asked_for() -> None:
    backend = generate(tensor("d", "FP32", -1, 2), tensor("byte_size", "INT64", 1), fill=0.5, max_byte_size=1000)
    batch = HeapBatch({"byte_size": np.array([24])})
    result = backend.execute(batch)["d"]
    assert result is batch.made["d"]
    assert result.tolist() == [[0.5, 0.5]] * 3
    for wrong, text in (
        (1008, "is 1008, allowed are 0 to 1000"),
        (-8, "is -8, allowed are"),
        (12, "is 12, not a multiple of 8"),
    ):
        with pytest.raises(InvalidTensorError, match=text):
            backend.execute(HeapBatch({"byte_size": np.array([wrong])}))


def test_generate_without_an_input_has_its_size_from_the_parameter() -> None:
    assert generate(tensor("d", "UINT8", -1), byte_size=64 << 20).execute(HeapBatch({}))["d"].nbytes == 64 << 20


@pytest.mark.parametrize(
    ("outputs", "inputs", "text"),
    [
        (tensor("d", "UINT8", 4), "", "output 'd' must have one dimension of -1, and not be BYTES"),
        (tensor("d", "BYTES", -1), "", "output 'd' must have one dimension of -1, and not be BYTES"),
        (tensor("d", "UINT8", -1), tensor("n", "INT32", 1), "backend 'generate' takes one INT64 input"),
    ],
)
def test_generate_refuses_at_load(outputs: str, inputs: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        generate(outputs, inputs)
