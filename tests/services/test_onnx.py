"""The ONNX Runtime backend over small graphs."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.model.onnx import OnnxInstance, complete
from tensorline.config import DynamicBatching
from tensorline.errors import BackendError, ConfigError, InvalidTensorError
from tensorline.stage.backend import Device, ModelDirectory
from tests.services.heap_batch import CPU, HeapBatch, bytes_array, parameters, tensor
from tests.services.onnx_models import Tensors, directory, node, write_model

TWICE = [node("Add", ["x", "x"], ["y"])]
X4: Tensors = {"x": ("FP32", ["n", 4])}
Y4: Tensors = {"y": ("FP32", ["n", 4])}
CONFIG = f"max_batch_size: 8 input [ {tensor('x', 'FP32', 4)} ] output [ {tensor('y', 'FP32', 4)} ]"


def test_the_library_keeps_no_usage_records() -> None:
    program = """
import os, services.model.onnx, onnxruntime
links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
print([os.readlink(link) for link in links if os.path.lexists(link) and "onnxruntime.db" in os.readlink(link)])
"""
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert told.stdout == "[]\n"


@pytest.fixture
def twice(tmp_path: Path) -> OnnxInstance:
    write_model(tmp_path, TWICE, X4, Y4)
    return OnnxInstance(directory(tmp_path, CONFIG), CPU)


def test_an_output_of_known_shape_is_written_where_the_batch_says(twice: OnnxInstance) -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    batch = HeapBatch({"x": x}, 2)
    y = twice.execute(batch)["y"]
    assert y is batch.made["y"]
    np.testing.assert_array_equal(y, 2 * x)


def test_an_output_of_open_shape_is_taken_from_the_engine(tmp_path: Path) -> None:
    nodes = [node("NonZero", ["x"], ["at"]), node("Transpose", ["at"], ["y"])]
    write_model(tmp_path, nodes, {"x": ("FP32", ["n", 4])}, {"y": ("INT64", ["k", 2])})
    text = f"input [ {tensor('x', 'FP32', -1, 4)} ] output [ {tensor('y', 'INT64', -1, 2)} ]"
    backend = OnnxInstance(directory(tmp_path, text), CPU)
    got = [backend.execute(HeapBatch({"x": np.eye(4, dtype=np.float32)[:rows]}))["y"] for rows in (3, 2)]
    assert [array.tolist() for array in got] == [[[0, 0], [1, 1], [2, 2]], [[0, 0], [1, 1]]]


def test_a_size_that_only_the_file_fixes_is_held_too(tmp_path: Path) -> None:
    write_model(tmp_path, TWICE, X4, Y4)
    backend = OnnxInstance(directory(tmp_path, CONFIG.replace("[4]", "[-1]")), CPU)
    batch = HeapBatch({"x": np.ones((1, 4), np.float32)})
    assert backend.execute(batch)["y"] is batch.made["y"]
    with pytest.raises(InvalidTensorError, match=r"^input 'x' has shape \[1, 5\], model takes \[-1, 4\]$"):
        backend.execute(HeapBatch({"x": np.ones((1, 5), np.float32)}))


def test_inputs_may_lie_in_memory_in_any_order(twice: OnnxInstance) -> None:
    x = np.arange(8, dtype=np.float32).reshape(4, 2).T
    np.testing.assert_array_equal(twice.execute(HeapBatch({"x": x}, 2))["y"], 2 * x)


def test_only_the_outputs_asked_for_are_computed(tmp_path: Path) -> None:
    nodes = [node("Add", ["x", "x"], ["y"]), node("Neg", ["x"], ["z"])]
    write_model(tmp_path, nodes, X4, {**Y4, "z": ("FP32", ["n", 4])})
    config = CONFIG.replace("output [", f"output [ {tensor('z', 'FP32', 4)},")
    backend = OnnxInstance(directory(tmp_path, config), CPU)
    x = np.ones((1, 4), np.float32)
    assert set(backend.execute(HeapBatch({"x": x}))) == {"y", "z"}
    only_y = HeapBatch({"x": x}, outputs=["y"])
    assert backend.execute(only_y)["y"].tolist() == [[2, 2, 2, 2]]
    assert set(only_y.made) == {"y"}


def test_scalars_by_reshape(tmp_path: Path) -> None:
    write_model(tmp_path, [node("Neg", ["x"], ["y"])], {"x": ("INT64", ["n"])}, {"y": ("INT64", ["n"])})
    scalar = "{ name: '%s' data_type: TYPE_INT64 dims: [1] reshape { shape: [] } }"
    text = f"max_batch_size: 4 input [ {scalar % 'x'} ] output [ {scalar % 'y'} ]"
    backend = OnnxInstance(directory(tmp_path, text), CPU)
    assert backend.execute(HeapBatch({"x": np.array([3, 4])}, 2))["y"].tolist() == [-3, -4]


def test_strings_go_in_and_come_out_as_utf8(tmp_path: Path) -> None:
    write_model(tmp_path, [node("Identity", ["x"], ["y"])], {"x": ("BYTES", ["n", 2])}, {"y": ("BYTES", ["n", 2])})
    text = f"max_batch_size: 4 input [ {tensor('x', 'BYTES', 2)} ] output [ {tensor('y', 'BYTES', 2)} ]"
    backend = OnnxInstance(directory(tmp_path, text), CPU)
    words = bytes_array("é".encode(), b"", shape=(1, 2))
    assert backend.execute(HeapBatch({"x": words}))["y"].tolist() == [["é".encode(), b""]]
    with pytest.raises(InvalidTensorError, match=r"^input 'x' has an element that is not UTF-8 text$"):
        backend.execute(HeapBatch({"x": bytes_array(b"\xff", b"", shape=(1, 2))}))


def test_what_fails_in_the_engine_is_told_without_its_words(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        [node("Reshape", ["x", "s"], ["y"])],
        {"x": ("FP32", ["n"]), "s": ("INT64", [1])},
        {"y": ("FP32", ["k"])},
    )
    ins = f"{tensor('x', 'FP32', -1)}, {tensor('s', 'INT64', 1)}"
    backend = OnnxInstance(directory(tmp_path, f"input [ {ins} ] output [ {tensor('y', 'FP32', -1)} ]"), CPU)
    with pytest.raises(BackendError) as caught:
        backend.execute(HeapBatch({"x": np.ones(4, np.float32), "s": np.array([3])}))
    assert str(caught.value).startswith(f"onnxruntime could not run model '{tmp_path.name}': ")
    assert "/" not in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_configuration_that_promises_another_output_shape_fails_cleanly(tmp_path: Path) -> None:
    write_model(tmp_path, TWICE, {"x": ("FP32", ["n", "m"])}, {"y": ("FP32", ["n", "m"])})
    wrong = f"max_batch_size: 8 input [ {tensor('x', 'FP32', 4)} ] output [ {tensor('y', 'FP32', 5)} ]"
    with pytest.raises(BackendError, match=r"could not run model '.*': INVALID_ARGUMENT in a Add node$"):
        OnnxInstance(directory(tmp_path, wrong), CPU).execute(HeapBatch({"x": np.ones((1, 4), np.float32)}))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (CONFIG.replace('"x"', '"a"'), "input 'a' is not in the model file, which has 'x'"),
        (CONFIG.replace('"y"', '"b"'), "output 'b' is not in the model file, which has 'y'"),
        (
            CONFIG.replace("TYPE_FP32 dims: [4] } ] output", "TYPE_INT64 dims: [4] } ] output"),
            "input 'x' is INT64, but FP32",
        ),
        (
            CONFIG.replace("[4] } ] output", "[5] } ] output"),
            r"input 'x' has shape \[-1, 5\] \(the first is the batch dim",
        ),
        (CONFIG.replace("max_batch_size: 8", ""), r"input 'x' has shape \[4\], but \[-1, 4\] in the model file"),
        (f"max_batch_size: 8 output [ {tensor('y', 'FP32', 4)} ]", "the model file needs input 'x'"),
        (
            f"max_batch_size: 8 input [ {tensor('x', 'FP32', 4)} ]",
            "the configuration has no output; the model file has 'y'",
        ),
        (CONFIG + parameters(intra_op_thread_count="two"), "'intra_op_thread_count' is 'two'; allowed: whole numbers"),
        (CONFIG + parameters(execution_mode="2"), "parameter 'execution_mode' is '2'; allowed: 0, 1"),
    ],
)
def test_a_configuration_that_does_not_fit_the_file_is_refused_at_load(tmp_path: Path, config: str, text: str) -> None:
    write_model(tmp_path, TWICE, X4, Y4)
    with pytest.raises(ConfigError, match=text):
        OnnxInstance(directory(tmp_path, config), CPU)


def test_a_file_of_fixed_batch_size_cannot_batch(tmp_path: Path) -> None:
    write_model(tmp_path, TWICE, {"x": ("FP32", [1, 4])}, {"y": ("FP32", [1, 4])})
    with pytest.raises(
        ConfigError, match=r"input 'x' has shape \[1, 4\] in the model file, whose first dimension is fix"
    ):
        OnnxInstance(directory(tmp_path, CONFIG), CPU)


def test_no_file_and_no_model_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^version 1 has no file 'model.onnx'$"):
        OnnxInstance(directory(tmp_path, CONFIG), CPU)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").write_bytes(b"junk")
    with pytest.raises(BackendError, match=r"^onnxruntime cannot load 'model.onnx' of version 1: INVALID_PROTOBUF$"):
        OnnxInstance(directory(tmp_path, CONFIG), CPU)


def test_a_gpu_that_the_package_cannot_use_is_refused_at_load(tmp_path: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    write_model(tmp_path, TWICE, X4, Y4)
    with pytest.raises(ConfigError, match="no CUDA provider"):
        OnnxInstance(directory(tmp_path, CONFIG), Device("gpu", 0))


def test_a_parameter_of_another_provider_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, TWICE, X4, Y4)
    OnnxInstance(directory(tmp_path, CONFIG + parameters(cudnn_conv_algo_search="1")), CPU)
    assert [record.__dict__["parameter"] for record in caplog.records] == ["cudnn_conv_algo_search"]


def test_close_waits_for_a_run_and_then_refuses(twice: OnnxInstance) -> None:
    x = np.ones((1, 4), np.float32)
    failures: list[Exception] = []

    def use() -> None:
        try:
            while True:
                twice.execute(HeapBatch({"x": x}))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    twice.close()
    for thread in threads:
        thread.join(10)
    assert [type(error) for error in failures] == [BackendError] * 4


def completed(folder: Path, text: str, inputs: Tensors = X4, outputs: Tensors = Y4) -> ModelDirectory:
    write_model(folder, TWICE, inputs, outputs)
    given = directory(folder, text)
    return replace(given, config=complete(given))


def test_a_minimal_configuration_is_completed_from_the_file(tmp_path: Path) -> None:
    model = completed(tmp_path, "")
    config = model.config
    assert (config.max_batch_size, config.dynamic_batching) == (4, DynamicBatching(preferred_batch_sizes=(4,)))
    assert [(spec.name, spec.datatype, spec.dims) for spec in (*config.inputs, *config.outputs)] == [
        ("x", "FP32", (4,)),
        ("y", "FP32", (4,)),
    ]
    x = np.ones((2, 4), np.float32)
    assert OnnxInstance(model, CPU).execute(HeapBatch({"x": x}, rows=2))["y"].tolist() == (2 * x).tolist()


@pytest.mark.parametrize(
    ("text", "shape", "rows", "dims"),
    [
        ("", [3, 4], 0, (3, 4)),
        ("max_batch_size: 8", ["n", 4], 8, (4,)),
        (f"input [ {tensor('x', 'FP32', -1, 4)} ]", ["n", 4], 0, (-1, 4)),
        ("dynamic_batching { max_queue_delay_microseconds: 5 }", ["n", "m"], 4, (-1,)),
    ],
)
def test_what_is_completed(tmp_path: Path, text: str, shape: list[int | str], rows: int, dims: tuple[int, ...]) -> None:
    config = completed(tmp_path, text, {"x": ("FP32", shape)}, {"y": ("FP32", shape)}).config
    assert (config.max_batch_size, config.inputs[0].dims, config.outputs[0].dims) == (rows, dims, dims)
    assert bool(config.dynamic_batching) == (rows == 4)


def test_a_configuration_that_says_it_all_is_left_as_it_is(tmp_path: Path) -> None:
    given = directory(tmp_path, CONFIG)  # without a file to look at
    assert complete(given) is given.config
