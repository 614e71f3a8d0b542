"""A pipeline as a graph of steps, made once by `gateway.plan` and walked by `gateway.plan_run`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tensorline.config.ensemble import producers
from tensorline.config.model import ModelConfig, TensorSpec

__all__ = ["ADD", "DROP", "KEEP", "Plan", "PlanStep", "Port", "Selection", "TensorUse"]

KEEP: Final = 0
ADD: Final = 1
"""A batch dimension of 1 is added to a tensor of exactly the model's dims."""
DROP: Final = 2
"""A batch dimension of 1 is dropped from a tensor of one dimension too many."""

SELECTIONS_KEPT: Final = 256


@dataclass(frozen=True, slots=True)
class Port:
    """Where a pipeline tensor enters a model, or leaves the pipeline."""

    name: str
    """Of the model's input, or of the pipeline's output."""
    tensor: str
    dims: tuple[int, ...]
    bridge: int
    is_required: bool


@dataclass(frozen=True, slots=True)
class PlanStep:
    index: int
    model: str
    version: int
    """-1: the newest that is ready."""
    inputs: tuple[tuple[str, str], ...]
    """(model input, pipeline tensor)"""
    outputs: tuple[tuple[str, str], ...]
    """(model output, pipeline tensor)"""
    ports: tuple[Port, ...]
    """The inputs, with what a request's tensors need."""
    reads: frozenset[str]
    writes: Mapping[str, str]
    """The outputs as a mapping."""


@dataclass(frozen=True, slots=True)
class TensorUse:
    """Who writes and who reads a pipeline tensor."""

    producer: int
    """Step; -1: the request brings it."""
    consumers: tuple[int, ...]
    is_output: bool
    """Of the pipeline."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What must run for one set of requested outputs, and the counters that a run begins with."""

    outputs: frozenset[str]
    steps: tuple[int, ...]
    waits: tuple[int, ...]
    """For every step of the plan, the distinct tensors it reads."""
    readers: Mapping[str, int]
    """Steps of this selection that read a tensor, plus one where it is requested; tensors without any are left out."""
    consumers: Mapping[str, tuple[int, ...]]
    wanted: Mapping[int, tuple[str, ...]]
    """Model outputs to ask of each step."""


class Plan:
    """A pipeline that may run: every rule of loading has been checked."""

    def __init__(self, config: ModelConfig, models: Sequence[ModelConfig]) -> None:
        self.config = config
        self.name = config.name
        self.decoupled = frozenset(index for index, model in enumerate(models) if model.decoupled)
        """The steps that give any number of responses."""
        self.is_decoupled = bool(self.decoupled)
        batched = _batched_tensors(config, models)
        self.steps = tuple(_step(config, index, model, batched) for index, model in enumerate(models))
        self.tensors = _uses(config)
        self.outputs = tuple(_port(spec, spec.name, config, batched) for spec in config.outputs)
        self._all = frozenset(spec.name for spec in config.outputs)
        self._selections: dict[frozenset[str], Selection] = {}

    def select(self, outputs: frozenset[str] = frozenset()) -> Selection:
        """The steps that these pipeline outputs need; none given: all outputs.

        The outputs must be the pipeline's. Selections are kept; a pipeline of many outputs keeps a bounded number.
        """
        wanted = outputs or self._all
        found = self._selections.get(wanted)
        if found is None:
            if len(self._selections) >= SELECTIONS_KEPT:
                self._selections.clear()
            found = self._selections[wanted] = self._selected(wanted)
        return found

    def source_of(self, output: str) -> tuple[int, str]:
        """Step and model output that make a pipeline output; a label file is inherited from there."""
        index = self.tensors[output].producer
        return index, next(name for name, tensor in self.steps[index].outputs if tensor == output)

    def _selected(self, outputs: frozenset[str]) -> Selection:
        needed: set[int] = set()
        front = [self.tensors[name].producer for name in outputs]
        while front:
            index = front.pop()
            if index < 0 or index in needed:
                continue
            needed.add(index)
            front.extend(self.tensors[tensor].producer for tensor in self.steps[index].reads)
        consumers = {
            name: tuple(index for index in use.consumers if index in needed) for name, use in self.tensors.items()
        }
        readers = {name: len(consumers[name]) + (name in outputs) for name in self.tensors}
        return Selection(
            outputs=outputs,
            steps=tuple(sorted(needed)),
            waits=tuple(len(step.reads) for step in self.steps),
            readers={name: count for name, count in readers.items() if count},
            consumers=consumers,
            wanted={
                index: tuple(name for name, tensor in self.steps[index].outputs if readers[tensor]) for index in needed
            },
        )


def _batched_tensors(config: ModelConfig, models: Sequence[ModelConfig]) -> dict[str, bool]:
    """Whether each pipeline tensor leaves its writer with a batch dimension."""
    batched = {spec.name: _is_batched(spec, config) for spec in config.inputs}
    for step, model in zip(config.steps, models, strict=True):
        for name, tensor in step.outputs.items():
            spec = model.output(name)
            batched[tensor] = spec is not None and _is_batched(spec, model)
    return batched


def _is_batched(spec: TensorSpec, model: ModelConfig) -> bool:
    return model.max_batch_size > 0 and not spec.is_shape_tensor


def _step(config: ModelConfig, index: int, model: ModelConfig, batched: Mapping[str, bool]) -> PlanStep:
    step = config.steps[index]
    specs = {spec.name: spec for spec in model.inputs}
    return PlanStep(
        index=index,
        model=step.model,
        version=step.version,
        inputs=tuple(step.inputs.items()),
        outputs=tuple(step.outputs.items()),
        ports=tuple(_port(specs[name], tensor, model, batched) for name, tensor in step.inputs.items()),
        reads=frozenset(step.inputs.values()),
        writes=dict(step.outputs),
    )


def _port(spec: TensorSpec, tensor: str, reader: ModelConfig, batched: Mapping[str, bool]) -> Port:
    wants = _is_batched(spec, reader)
    bridge = KEEP if wants == batched[tensor] else ADD if wants else DROP
    return Port(spec.name, tensor, spec.dims, bridge, not spec.optional)


def _uses(config: ModelConfig) -> dict[str, TensorUse]:
    outputs = {spec.name for spec in config.outputs}
    return {
        name: TensorUse(
            producer=producer,
            consumers=tuple(index for index, step in enumerate(config.steps) if name in step.inputs.values()),
            is_output=name in outputs,
        )
        for name, producer in producers(config).items()
    }
