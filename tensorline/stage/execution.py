"""Running one batch: inputs from handles to arrays, the model, outputs from arrays to handles.

Runs on the instance's thread, or on the event loop for instances that declare themselves instant.
"""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from grpc import StatusCode

from tensorline.errors import (
    BackendError,
    CancelledByPeerError,
    DeadlineError,
    InternalError,
    InvalidTensorError,
    ResourceExhaustedError,
    TensorlineError,
)
from tensorline.rpc.frames import StageResult
from tensorline.shm import Block
from tensorline.stage.backend import Instance, StreamInstance
from tensorline.stage.batch import Plane, RunningBatch, stack_inputs
from tensorline.stage.request import StageRequest
from tensorline.telemetry.logs import logged_request, one_line
from tensorline.telemetry.record import StageTiming
from tensorline.telemetry.sdk import stage_span_scope
from tensorline.tensor import (
    BYTES,
    DATATYPES,
    Array,
    Tensor,
    datatype_of,
    decode_array,
    encode_array,
    encode_bytes_tensor,
)

__all__ = ["Executed", "Execution", "ModelView"]

log = logging.getLogger(__name__)

MODEL_TEXT_LIMIT = 512
"""Characters of what a model says of its failure."""


Reshape = tuple[tuple[int, ...], tuple[int, ...]]
"""Dimensions before and after, without the batch dimension; the sizes that are open (-1) keep their order."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """What an execution needs to know of its model."""

    version: str
    is_batched: bool = False
    input_shapes: Mapping[str, Reshape] = field(default_factory=dict)
    """Of the inputs that the configuration reshapes: as the client sends them, and as the backend sees them."""
    output_shapes: Mapping[str, Reshape] = field(default_factory=dict)
    """Of the outputs that the backend makes in another shape: as it makes them, and as the client sees them."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Datatypes by name; empty where the configuration names no output."""
    keeps_rows: bool = True
    """An output of a batched model has a row for each of its inputs'; a decoupled model's responses need not."""


@dataclass(slots=True)
class Executed:
    """What became of one request: its result, and the blocks of our arena that its outputs hold, one reference each."""

    request: StageRequest
    result: StageResult
    blocks: list[Block] = field(default_factory=list)


class Execution:
    """One batch on its way through one instance."""

    def __init__(
        self, requests: list[StageRequest], batch_id: int, instance_name: str, model: ModelView, plane: Plane
    ) -> None:
        self.requests = requests
        self.done: list[Executed] = []
        self._batch_id = batch_id
        self._instance_name = instance_name
        self._model = model
        self.version = model.version
        self.plane = plane
        self.input_ready = self.computed = 0
        self.executions = 0
        """Of the model, that no answer has told of yet."""

    def run(self, instance: Instance | StreamInstance, *, on_loop: bool = False) -> None:
        """Fill `done` with one entry for each request. Raises nothing."""
        try:
            self._run(instance, may_wait=not on_loop)
        except BaseException:  # of ours, not of the model: the instance's thread has to live on
            log.exception("execution failed")
            answered = {id(entry.request) for entry in self.done}
            self.fail([r for r in self.requests if id(r) not in answered], InternalError("internal error"))

    def _run(self, instance: Instance | StreamInstance, *, may_wait: bool) -> None:
        instance = cast(Instance, instance)  # the host has seen to it that it executes
        live, arrays = self.read_inputs()
        self.input_ready = time.monotonic_ns()
        if not live:
            return
        error = self._run_together(instance, live, arrays, may_wait=may_wait)
        if error is None:
            return
        if len(live) == 1:
            self.fail(live, error)
            return
        # One bad request is not its neighbours' failure: each gets a run, and an answer, of its own.
        answered = {id(entry.request) for entry in self.done}
        is_full = isinstance(error, ResourceExhaustedError)  # it has waited for room: eight would wait eight times
        for request, inputs in zip(live, arrays, strict=True):
            if id(request) not in answered:
                alone = _given_up(request) or self._run_together(
                    instance, [request], [inputs], may_wait=may_wait and not is_full
                )
                if alone is not None:
                    self.fail([request], alone)

    def _run_together(
        self, instance: Instance, live: Sequence[StageRequest], arrays: Sequence[dict[str, Array]], *, may_wait: bool
    ) -> BaseException | None:
        """Run the requests as one batch; what went wrong, in which case none of them has an answer by it."""
        self.computed = 0
        try:
            batch = RunningBatch(live, stack_inputs(live, arrays, self.plane.reader), self.plane, may_wait=may_wait)
        except Exception as error:
            return error
        self.executions += 1
        try:
            with self.context(live[0]):
                outputs = instance.execute(batch)
            self.computed = time.monotonic_ns()
            self.write_outputs(batch, self.checked(batch, outputs))
        except BaseException as error:  # a model may raise SystemExit or CancelledError: still only its own failure
            return error
        finally:
            # What `empty` gave out holds one reference of the batch's own; the requests have theirs.
            for _, block in batch.made.values():
                self.plane.arena.release(block.handle.block, block.handle.generation)
        return None

    def context(self, request: StageRequest) -> contextlib.AbstractContextManager[object]:
        """Log lines and spans of the model's own code belong to the (first) request."""
        if not self.plane.attaches_context:
            return contextlib.nullcontext()
        return stage_span_scope(
            request.trace_id, request.span_id, request.trace_flags, request.request_id, request.tracestate
        )

    def read_inputs(self) -> tuple[list[StageRequest], list[dict[str, Array]]]:
        live: list[StageRequest] = []
        arrays: list[dict[str, Array]] = []
        for request in self.requests:
            try:
                inputs = {}
                for tensor in request.inputs:
                    if tensor.handle is None:
                        array = decode_array(tensor.datatype, tensor.shape, tensor.data or b"")
                    else:
                        array = self.plane.reader.array(tensor)
                    if tensor.datatype == BYTES:  # a copy; everything else is as read-only as its memory
                        array.setflags(write=False)
                    inputs[tensor.name] = array
                if self._model.input_shapes:
                    _reshape(inputs, self._model.input_shapes, self._model.is_batched)
            except Exception as error:
                self.fail([request], error)
                continue
            live.append(request)
            arrays.append(inputs)
        return live, arrays

    def checked(self, batch: RunningBatch, outputs: object) -> dict[str, Array]:
        """What the model returned, held against its configuration; outputs that this does not name are dropped.

        Raises:
            BackendError: not arrays by name, a datatype that was not announced, or rows lost.
        """
        if type(outputs) is not dict and not isinstance(outputs, Mapping):
            raise BackendError(f"the model returned {type(outputs).__name__}, not arrays by output name")
        declared, is_batched, checked = self._model.outputs, self._model.is_batched, {}
        for name, array in outputs.items():
            if declared and name not in declared:
                continue
            if not isinstance(name, str):
                raise BackendError(f"an output is named by {type(name).__name__}, not by str")
            if not isinstance(array, np.ndarray):
                if not isinstance(array, np.generic):
                    raise BackendError(f"output '{name}' is {type(array).__name__}, not an array")
                array = np.asarray(array)
            # numpy has one object for each dtype that is usual.
            if not declared or array.dtype is not DATATYPES[declared[name]]:
                datatype = _output_datatype(name, array)
                if declared and datatype != declared[name]:
                    raise BackendError(f"output '{name}' is {datatype}, the configuration says {declared[name]}")
            if is_batched and self._model.keeps_rows and (not array.ndim or array.shape[0] != batch.rows):
                raise BackendError(
                    f"output '{name}' has shape {list(array.shape)}, a batch of {batch.rows} rows must keep its rows"
                )
            checked[name] = array
        if self._model.output_shapes:
            try:
                _reshape(checked, self._model.output_shapes, self._model.is_batched)
            except InvalidTensorError as error:  # the model's mistake, not the client's
                raise BackendError(f"output {error}") from error
        return checked

    def write_outputs(self, batch: RunningBatch, outputs: Mapping[str, Array]) -> None:
        given = {id(array): name for name, array in batch.inputs.items()}
        executed = [Executed(request, StageResult(0, version=self._model.version)) for request in batch.requests]
        try:
            for name, array in outputs.items():
                row = 0
                for entry in executed:
                    request = entry.request
                    if not request.outputs or name in request.outputs:
                        self._write_output(entry, name, array, row, batch, given.get(id(array)))
                    row += request.rows
        except BaseException:
            for entry in executed:
                self._give_back(entry)
            raise
        timing = (self.input_ready, self.computed, time.monotonic_ns())
        for entry in executed:
            stale = self._overtaken(entry.request)
            if stale is None:
                entry.result.timing = self.timing(entry.request, *timing, batch.rows)
                self.done.append(entry)
            else:
                self._give_back(entry)
                self.fail([entry.request], stale)

    def _overtaken(self, request: StageRequest) -> TensorlineError | None:
        """Whether an input was freed while it was in use, up to the copy of an output that is a view of it."""
        try:
            for tensor in request.inputs:
                if tensor.handle is not None:
                    self.plane.reader.check(tensor.handle)
        except TensorlineError as error:
            return error
        return None

    def _write_output(
        self, entry: Executed, name: str, array: Array, row: int, batch: RunningBatch, passed_on: str | None
    ) -> None:
        request, plane = entry.request, self.plane
        is_whole = len(batch.requests) == 1
        if passed_on is not None:
            source = next(tensor for tensor in request.inputs if tensor.name == passed_on)
            if source.handle is None or not request.is_inline_only:
                # Of the array, not of the source: the configuration may reshape the input.
                shape = array.shape if is_whole else (request.rows, *array.shape[1:])
                entry.result.outputs.append(Tensor(name, source.datatype, shape, source.data, source.handle))
                return
        made = batch.made.get(id(array))
        rows = array if is_whole else array[row : row + request.rows]
        datatype = datatype_of(array.dtype)
        if made is not None and not request.is_inline_only:
            block = made[1]
            row_bytes = array.nbytes // batch.rows if not is_whole else 0
            handle = block.handle if is_whole else block.slice(row * row_bytes, request.rows * row_bytes)
            if not any(held is block for held in entry.blocks):
                plane.arena.retain(handle.block, handle.generation)
                entry.blocks.append(block)
            entry.result.outputs.append(Tensor(name, datatype, rows.shape, None, handle))
            return
        raw: bytes | memoryview
        size = len(raw := _encoded_output(name, rows)) if datatype == BYTES else rows.nbytes
        if size <= plane.inline_bytes or request.is_inline_only:
            data = bytes(raw) if datatype == BYTES else bytes(encode_array(rows))
            entry.result.outputs.append(Tensor(name, datatype, rows.shape, data))
            return
        block = batch._allocate(size)
        entry.blocks.append(block)
        if datatype == BYTES:
            block.view[:] = raw
        else:
            np.copyto(block.array(datatype, rows.shape), rows)
        entry.result.outputs.append(Tensor(name, datatype, rows.shape, None, block.handle))

    def _give_back(self, entry: Executed) -> None:
        for block in entry.blocks:
            self.plane.arena.release(block.handle.block, block.handle.generation)
        entry.blocks.clear()

    def fail(self, requests: Sequence[StageRequest], error: BaseException) -> None:
        for request in requests:
            result = StageResult(
                _status(error).value[0],
                self._text(error, request),
                version=self._model.version,
                # Zeros for what it never reached: the phase that it ended in is the one that failed.
                timing=self.timing(request, self.input_ready, self.computed, 0, request.rows),
            )
            self.done.append(Executed(request, result))
        if requests and not isinstance(error, TensorlineError):
            first = requests[0]
            with logged_request(first.trace_id, first.span_id, first.request_id):
                log.error("model failed", exc_info=error, extra={"model": first.model})

    def _text(self, error: BaseException, request: StageRequest) -> str:
        if isinstance(error, TensorlineError):
            return one_line(_said(error), MODEL_TEXT_LIMIT)
        asked = f"[request id: {request.request_id[:256] or '<id_unknown>'}]"
        text = f"{asked} model '{request.model}' failed: {type(error).__name__}"
        return f"{text}: {one_line(_said(error), MODEL_TEXT_LIMIT)}" if self.plane.expose_model_errors else text

    def timing(self, request: StageRequest, ready: int, computed: int, written: int, rows: int) -> StageTiming:
        executions = 0
        if not request.is_cancelled:  # a gateway drops the answer to what it has cancelled, and what is told with it
            executions, self.executions = self.executions, 0
        return StageTiming(
            request.received_ns,
            request.queued_ns,
            request.batched_ns,
            ready,
            max(computed, ready) if computed else 0,
            written,
            0,
            self._batch_id,
            rows,
            self._instance_name,
            executions,
        )


def _reshape(arrays: dict[str, Array], shapes: Mapping[str, Reshape], is_batched: bool) -> None:
    for name, (before, after) in shapes.items():
        array = arrays.get(name)
        if array is not None:
            rows, sizes = array.shape[:is_batched], array.shape[is_batched:]
            # numpy itself takes one open size, and none beside a size of 0.
            kept = iter([size for size, dim in zip(sizes, before, strict=False) if dim < 0])
            try:
                arrays[name] = array.reshape(rows + tuple(next(kept, -1) if dim < 0 else dim for dim in after))
            except ValueError as error:
                raise InvalidTensorError(
                    f"'{name}' of shape {list(array.shape)} does not reshape to {list(after)}"
                ) from error


def _given_up(request: StageRequest) -> TensorlineError | None:
    if request.is_cancelled:
        return CancelledByPeerError("cancelled while its batch failed")
    if request.deadline <= time.monotonic():
        return DeadlineError("the deadline passed while its batch failed")
    return None


def _output_datatype(name: str, array: Array) -> str:
    try:
        return datatype_of(array.dtype)
    except InvalidTensorError as error:
        raise BackendError(f"output '{name}': {error}") from error


def _encoded_output(name: str, array: Array) -> bytes:
    try:
        return encode_bytes_tensor(array)
    except InvalidTensorError as error:
        raise BackendError(f"output '{name}': {error}") from error


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a class of the model's own
        return type(error).__name__


def _status(error: BaseException) -> StatusCode:
    if isinstance(error, TensorlineError):
        return error.status
    return StatusCode.RESOURCE_EXHAUSTED if isinstance(error, MemoryError) else StatusCode.INTERNAL
