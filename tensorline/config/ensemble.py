"""The graph of a pipeline, as far as its own configuration shows it."""

from graphlib import CycleError, TopologicalSorter

from tensorline.config.model import ModelConfig
from tensorline.errors import ConfigError

__all__ = ["check_graph", "producers", "step_name"]


def step_name(config: ModelConfig, index: int) -> str:
    """How errors name a step: "step 1 (model 'post')"."""
    return f"step {index} (model '{config.steps[index].model}')"


def producers(config: ModelConfig) -> dict[str, int]:
    """The step that writes each pipeline tensor; -1 for the pipeline's own inputs.

    Raises:
        ConfigError: a tensor with two writers.
    """
    writers = dict.fromkeys((spec.name for spec in config.inputs), -1)
    for index, step in enumerate(config.steps):
        for tensor in step.outputs.values():
            first = writers.setdefault(tensor, index)
            if first == -1:
                raise _error(config, f"{step_name(config, index)} writes tensor '{tensor}', which is a pipeline input")
            if first != index or list(step.outputs.values()).count(tensor) > 1:
                other = step_name(config, first)
                raise _error(config, f"tensor '{tensor}' is written by {step_name(config, index)} and by {other}")
    return writers


def check_graph(config: ModelConfig) -> None:
    """Check steps, and that every tensor has one writer and a reader, and that no step waits for itself.

    Raises:
        ConfigError: names the ensemble, the step and the tensor.
    Source: model-config.md §8, rules 2 and 3.
    """
    for index, step in enumerate(config.steps):
        for what, present in (("model_name", step.model), ("input_map", step.inputs), ("output_map", step.outputs)):
            if not present:
                raise _error(config, f"step {index} (model '{step.model}') has no {what}")
        if step.version < -1:
            raise _error(config, f"{step_name(config, index)} has model_version {step.version}, must be -1 or more")
        if step.model == config.name:
            raise _error(config, f"step {index} runs the ensemble itself")
    writers = producers(config)
    read = {tensor for step in config.steps for tensor in step.inputs.values()}
    outputs = {spec.name for spec in config.outputs}
    for index, step in enumerate(config.steps):
        for name, tensor in step.inputs.items():
            if tensor not in writers:
                raise _error(
                    config, f"{step_name(config, index)} reads tensor '{tensor}' as '{name}', which nothing writes"
                )
        for name, tensor in step.outputs.items():
            if tensor not in read and tensor not in outputs:
                raise _error(
                    config, f"{step_name(config, index)} writes '{name}' to tensor '{tensor}', which nothing reads"
                )
    for spec in config.inputs:
        if spec.name not in read:
            raise _error(config, f"pipeline input '{spec.name}' is read by no step")
    for name in sorted(outputs):
        if writers.get(name, -1) == -1:
            raise _error(config, f"pipeline output '{name}' is written by no step")
    _check_acyclic(config, writers)


def _check_acyclic(config: ModelConfig, writers: dict[str, int]) -> None:
    graph = {
        index: {writers[tensor] for tensor in step.inputs.values() if writers[tensor] >= 0}
        for index, step in enumerate(config.steps)
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as err:
        circle = " -> ".join(step_name(config, index) for index in reversed(err.args[1]))
        raise _error(config, f"the steps form a cycle: {circle}") from err


def _error(config: ModelConfig, reason: str) -> ConfigError:
    return ConfigError(f"ensemble '{config.name}': {reason}")
