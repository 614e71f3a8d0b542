"""Backend `onnxruntime`: ONNX models on ONNX Runtime, which reads its inputs from and writes its outputs to the arena.

Parameters in config.pbtxt, by the names that Triton gives them: `intra_op_thread_count` (default: the cores, shared out
among the instances), `inter_op_thread_count` (default 1), `execution_mode` (0 sequential, 1 parallel),
`enable_mem_arena` and `enable_mem_pattern` (1 or 0).
"""

import logging
import os
import re
import threading
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from services.model.signature import check_signature, model_tensors
from tensorline.config import ModelConfig, with_signature
from tensorline.errors import BackendError, ConfigError, InvalidTensorError, TensorlineError
from tensorline.stage.backend import Batch, Device, ModelDirectory
from tensorline.stage.builtin import Parameters, input_array, is_wanted
from tensorline.tensor import BYTES, Array

__all__ = ["OnnxInstance", "complete"]

log = logging.getLogger(__name__)

# Releases from 1.32 on report usage over the network unless this is set before the library is loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

THREAD_LIMIT: Final = 1024
SWITCH: Final = {"1": True, "0": False}


class OnnxInstance:
    """One session of its own."""

    def __init__(self, model: ModelDirectory, device: Device) -> None:
        import onnxruntime  # here: only a process that hosts this backend needs it installed

        self._ort: Any = onnxruntime
        self._config = config = model.config
        self._session = _open_session(onnxruntime, model, device)
        given = model_tensors(self._session.get_inputs()), model_tensors(self._session.get_outputs())
        shapes = check_signature(config, *given)
        self._inputs = [(spec, shapes[spec.name]) for spec in config.inputs]
        self._outputs = [(spec, shapes[spec.name]) for spec in config.outputs]
        self._has_text = BYTES in {spec.datatype for spec in (*config.inputs, *config.outputs)}
        self._binding = self._session.io_binding()
        self._lock = threading.Lock()

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        arrays = {
            spec.name: input_array(batch, spec.name, spec.datatype, shape)
            for spec, shape in self._inputs
            if not spec.optional or spec.name in batch.inputs
        }
        with self._lock:
            if self._session is None:
                raise BackendError(f"model '{self._config.name}' is unloaded")
            try:
                return self._run_with_text(batch, arrays) if self._has_text else self._run(batch, arrays)
            except (TensorlineError, MemoryError):
                raise
            except Exception as error:  # ONNX Runtime raises RuntimeError and some ten classes of its own
                raise BackendError(
                    f"onnxruntime could not run model '{self._config.name}': {_reason(error)}"
                ) from error

    def close(self) -> None:
        with self._lock:  # waits for a run on another thread; the session must not go from under it
            self._session = self._binding = None

    def _run(self, batch: Batch, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Everything by reference: ONNX Runtime reads the callers' memory, and writes where the output is to lie."""
        value, binding = self._ort.OrtValue.ortvalue_from_numpy, self._binding
        written: dict[str, Array] = {}
        names = [spec.name for spec, _ in self._outputs if is_wanted(batch, spec.name)]
        try:
            for name, array in arrays.items():
                binding.bind_ortvalue_input(name, value(np.ascontiguousarray(array) if array.ndim else array))
            for spec, shape in self._outputs:
                if spec.name not in names:
                    continue
                size = (batch.rows, *shape[1:]) if self._config.max_batch_size > 0 else shape
                if -1 in size:
                    binding.bind_output(spec.name, "cpu")
                else:
                    written[spec.name] = batch.empty(spec.name, spec.datatype, size)
                    binding.bind_ortvalue_output(spec.name, value(written[spec.name]))
            self._session.run_with_iobinding(binding)
            given = binding.get_outputs()  # in the order they were bound
            return {name: written[name] if name in written else given[at].numpy() for at, name in enumerate(names)}
        finally:
            # A binding is made once (28 us); its references to the batch's memory must not outlive the batch.
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()

    def _run_with_text(self, batch: Batch, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Strings cannot be bound, and are `str` to ONNX Runtime."""
        names = [spec.name for spec, _ in self._outputs if is_wanted(batch, spec.name)]
        fed = {name: _decoded(name, array) if array.dtype == np.object_ else array for name, array in arrays.items()}
        return dict(zip(names, map(_encoded, self._session.run(names, fed)), strict=True))


def complete(model: ModelDirectory) -> ModelConfig:
    """With the tensors of the model file where the configuration names none; else it is left as it is."""
    config = model.config
    if config.inputs and config.outputs:
        return config
    import onnxruntime

    session = _open_session(onnxruntime, model, Device("cpu"), is_run=False)
    given = [model_tensors(session.get_inputs()), model_tensors(session.get_outputs())]
    inputs, outputs = ([(each.name, each.datatype, each.shape or ()) for each in tensors] for tensors in given)
    return with_signature(config, inputs, outputs)


def _open_session(ort: Any, model: ModelDirectory, device: Device, *, is_run: bool = True) -> Any:
    provider = (
        ("CUDAExecutionProvider", {"device_id": device.ordinal}) if device.kind == "gpu" else "CPUExecutionProvider"
    )
    if device.kind == "gpu" and "CUDAExecutionProvider" not in ort.get_available_providers():
        raise ConfigError("instance_group asks for a GPU, but the installed onnxruntime has no CUDA provider")
    name = model.config.default_model_filename
    if not model.model_file.is_file():
        raise ConfigError(f"version {model.version} has no file '{name}'")
    options = _options(ort, model.config)
    if not is_run:  # only to be looked at
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return ort.InferenceSession(str(model.model_file), options, providers=[provider])
    except Exception as error:
        raise BackendError(f"onnxruntime cannot load '{name}' of version {model.version}: {_reason(error)}") from error


def _options(ort: Any, config: ModelConfig) -> Any:
    p, options = Parameters(config), ort.SessionOptions()
    instances = sum(max(1, group.count) for group in config.instance_groups) or 1
    share = max(1, len(os.sched_getaffinity(0)) // instances)
    # 0 is ONNX Runtime's and Triton's word for "you decide".
    options.intra_op_num_threads = p.integer("intra_op_thread_count", 0, 0, THREAD_LIMIT) or share
    options.inter_op_num_threads = p.integer("inter_op_thread_count", 1, 0, THREAD_LIMIT)
    modes = {"0": ort.ExecutionMode.ORT_SEQUENTIAL, "1": ort.ExecutionMode.ORT_PARALLEL}
    options.execution_mode = p.choice("execution_mode", modes, "0")
    options.enable_cpu_mem_arena = p.choice("enable_mem_arena", SWITCH, "1")
    options.enable_mem_pattern = p.choice("enable_mem_pattern", SWITCH, "1")
    # Threads that spin for work take the cores of the other stages on this machine.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.log_severity_level = 4  # what fails is raised as well, and logged by the runtime with its request
    for unknown in p.unknown():  # not refused: repositories written for Triton have settings of its other providers
        log.warning(
            "parameter of the onnxruntime backend is ignored", extra={"model": config.name, "parameter": unknown}
        )
    return options


def _reason(error: Exception) -> str:
    """The kind of failure. Not the whole text: it has paths and source lines, and goes to the log with `error`."""
    text = str(error)
    code = re.search(r"\[ONNXRuntimeError\] : \d+ : ([A-Z_]+)", text)
    node = re.search(r"while running (\w+) node", text)
    return (code[1] if code else type(error).__name__) + (f" in a {node[1]} node" if node else "")


def _decoded(name: str, array: Array) -> Array:
    try:
        texts = [element.decode() for element in array.reshape(-1).tolist()]
    except UnicodeDecodeError as error:
        raise InvalidTensorError(f"input '{name}' has an element that is not UTF-8 text") from error
    return np.array(texts, dtype=np.object_).reshape(array.shape)


def _encoded(array: Any) -> Array:
    if array.dtype.kind not in "OU":
        return np.asarray(array)
    elements = np.empty(array.size, dtype=np.object_)
    elements[:] = [str(element).encode() for element in array.reshape(-1).tolist()]
    return elements.reshape(array.shape)
