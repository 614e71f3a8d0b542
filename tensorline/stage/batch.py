"""The requests of one batch as the backend sees them: their inputs stacked, room for its outputs."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tensorline.errors import BackendError, InvalidTensorError
from tensorline.shm import Arena, ArenaReader, Block
from tensorline.stage.backend import ParameterValue
from tensorline.stage.request import StageRequest
from tensorline.tensor import BYTES, DATATYPES, Array, Handle, Tensor, expected_byte_size

__all__ = ["Plane", "RunningBatch", "stack_inputs"]

ARENA_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Plane:
    """The process's place in the tensor plane."""

    arena: Arena
    reader: ArenaReader
    inline_bytes: int
    """Tensors up to this size travel in the frame."""
    expose_model_errors: bool = False
    attaches_context: bool = False
    """Let the spans that a backend's own code opens be children of the request's: an OpenTelemetry SDK is installed."""


class RunningBatch:
    """The requests that run together, as the backend sees them (`tensorline.stage.backend.Batch`)."""

    def __init__(
        self, requests: Sequence[StageRequest], inputs: dict[str, Array], plane: Plane, *, may_wait: bool
    ) -> None:
        self.requests = requests
        self.inputs: Mapping[str, Array] = inputs
        self.rows = sum(request.rows for request in requests)
        self.made: dict[int, tuple[Array, Block]] = {}
        """Arrays that `empty` gave out of the arena, by identity."""
        self._plane = plane
        self._may_wait = may_wait

    @property
    def parameters(self) -> Sequence[Mapping[str, ParameterValue]]:
        return [request.parameters for request in self.requests]

    @property
    def request_ids(self) -> Sequence[str]:
        return [request.request_id for request in self.requests]

    @property
    def requested_outputs(self) -> frozenset[str]:
        names = [request.outputs for request in self.requests]
        return frozenset() if not all(names) else frozenset(name for wanted in names for name in wanted)

    def is_cancelled(self) -> bool:
        return all(request.is_cancelled for request in self.requests)

    def empty(self, name: str, datatype: str, shape: tuple[int, ...]) -> Array:
        size = expected_byte_size(datatype, shape)
        if size is None:
            raise BackendError(f"output '{name}': a BYTES array cannot be made ahead of its elements")
        if size <= self._plane.inline_bytes * len(self.requests):
            return np.empty(shape, DATATYPES[datatype])
        block = self._allocate(size)
        array = block.array(datatype, shape)
        self.made[id(array)] = (array, block)
        return array

    def _allocate(self, size: int) -> Block:
        arena = self._plane.arena
        if not self._may_wait:  # on the loop, whose releases make the room
            return arena.allocate(size)
        left = max(request.deadline for request in self.requests) - time.monotonic()
        return arena.allocate_blocking(size, min(ARENA_WAIT_S, max(0.0, left)))


def stack_inputs(
    requests: Sequence[StageRequest], arrays: Sequence[dict[str, Array]], reader: ArenaReader
) -> dict[str, Array]:
    """The batch's arrays: of one request its own; of several, neighbours in a block as one view, else one copy."""
    if len(requests) == 1:
        return arrays[0]
    stacked: dict[str, Array] = {}
    for index, tensor in enumerate(requests[0].inputs):
        name = tensor.name
        parts = [request.inputs[index] for request in requests]
        if any(part.name != name for part in parts):
            raise InvalidTensorError("the requests of one batch name their inputs in different orders")
        merged = _neighbours(parts)
        if merged is not None:
            # As the parts are seen: the configuration may reshape them.
            stacked[name] = reader.array(merged).reshape((merged.shape[0], *arrays[0][name].shape[1:]))
        else:
            stacked[name] = gathered = np.concatenate([inputs[name] for inputs in arrays], axis=0)
            gathered.setflags(write=False)
    return stacked


def _neighbours(parts: Sequence[Tensor]) -> Tensor | None:
    first = parts[0].handle
    if first is None or parts[0].datatype == BYTES:
        return None
    end = first.offset
    for part in parts:
        at = part.handle
        if at is None or at.arena != first.arena or at.block != first.block or at.offset != end:
            return None
        end = at.offset + at.length
    rows = sum(part.shape[0] for part in parts)
    handle = Handle(first.arena, first.block, first.offset, end - first.offset, first.generation)
    shape = (rows, *parts[0].shape[1:])
    return Tensor(parts[0].name, parts[0].datatype, shape, None, handle) if math.prod(shape) else None
