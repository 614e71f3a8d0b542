"""What a team implements to add a stage: an instance that runs batches, and a factory for it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tensorline.config.model import ModelConfig
from tensorline.tensor import Array

__all__ = [
    "Backends",
    "Batch",
    "CompletingFactory",
    "Device",
    "Instance",
    "InstanceFactory",
    "ModelDirectory",
    "ParameterValue",
    "StreamInstance",
]

ParameterValue = bool | int | str | float


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """One version of a repository entry, as an instance is made from it."""

    config: ModelConfig
    version: int
    path: Path
    """`<repository>/<model>`: labels and other files beside the versions."""
    version_path: Path
    """`<repository>/<model>/<version>`: the model file."""

    @property
    def model_file(self) -> Path:
        return self.version_path / self.config.default_model_filename


@dataclass(frozen=True, slots=True)
class Device:
    """Where an instance runs: kind "cpu" or "gpu", and the GPU's ordinal."""

    kind: str = "cpu"
    ordinal: int = 0


class Batch(Protocol):
    """The requests that are run together."""

    @property
    def inputs(self) -> Mapping[str, Array]:
        """Arrays by tensor name, read-only, of shape [rows, ...]; without batching as the client sent them.

        They are views of shared memory and valid until `execute` returns: copy what must live longer.
        """

    @property
    def rows(self) -> int:
        """Sum of the requests' batch sizes; 1 for a model without batching."""

    @property
    def parameters(self) -> Sequence[Mapping[str, ParameterValue]]:
        """The custom parameters of each request."""

    @property
    def request_ids(self) -> Sequence[str]:
        """The clients' ids, empty where none was given."""

    @property
    def requested_outputs(self) -> frozenset[str]:
        """Names that at least one request wants; a backend may leave out the rest. Empty: all of them."""

    def is_cancelled(self) -> bool:
        """Nobody waits for this batch any more: a long computation should stop. Cheap, callable from any thread."""

    def empty(self, name: str, datatype: str, shape: tuple[int, ...]) -> Array:
        """An uninitialised array in the arena to write output `name` into: returning it costs no copy.

        Every element must be written. Not for BYTES.
        """


class Instance(Protocol):
    """One execution slot of a loaded model, on one device.

    An instance may have an attribute `instant_bytes`: batches with at most so many input bytes are then run on the
    event loop itself. For work of some microseconds that never blocks: a thread's turn costs more than that.
    """

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        """Run one batch: arrays of shape [rows, ...] by output name. Called on the instance's own thread.

        An array from `batch.empty` and an input passed on unchanged are not copied; any other is, once.

        Raises:
            InvalidTensorError: a datatype, shape or content that the model does not accept.
            BackendError: the framework failed; the text reaches the client.
        """

    def close(self) -> None:
        """Free what the instance holds. Called once, when nothing runs."""


class StreamInstance(Protocol):
    """One execution slot of a decoupled model: `model_transaction_policy { decoupled: true }` in its configuration.

    An instance may have an attribute `max_streams`: so many requests are then run at once, each on a thread of its own.
    Without it one request at a time is run, and a client that reads slowly keeps the instance from the next.
    """

    def stream(self, request: Batch) -> Iterator[Mapping[str, Array]]:
        """Answer one request with any number of responses, each sent as soon as it is there.

        A generator is what this is made for. It is not asked for the next response while a few are unread: that is
        where a slow client holds it up. When nobody waits any more it is closed (GeneratorExit at its `yield`); within
        a long computation `request.is_cancelled()` tells. What it raises ends the request with that error, after the
        responses that were sent. A response that it *returns*, rather than yields, is the last by that and marked so;
        otherwise the end follows by itself.

        Args:
            request: A batch of one request; its inputs are valid until the end of the stream. An array from its
                `empty` is part of the next response.
        Raises:
            InvalidTensorError: a datatype, shape or content that the model does not accept.
            BackendError: the framework failed; the text reaches the client.
        """

    def close(self) -> None:
        """Free what the instance holds. Called once, when nothing runs."""


InstanceFactory = Callable[[ModelDirectory, Device], Instance | StreamInstance]
"""Load one instance: a `StreamInstance` for a decoupled model, else an `Instance`. Called on a worker thread at load
time; what it raises makes the version UNAVAILABLE."""


class CompletingFactory(Protocol):
    """An `InstanceFactory` that can say what a configuration leaves out."""

    def __call__(self, model: ModelDirectory, device: Device) -> Instance | StreamInstance: ...

    def complete(self, model: ModelDirectory) -> ModelConfig:
        """The configuration with the inputs, outputs and max_batch_size that the model file has where it names none
        (`tensorline.config.with_signature`). Called on a worker thread before the first instance is made; what it
        raises makes the version UNAVAILABLE.
        """


Backends = Mapping[str, InstanceFactory]
"""Factories by the name that `backend` has in config.pbtxt."""
