"""What a pipeline's models must have for it to load: names, datatypes, shapes, batch sizes, decoupling."""

from collections.abc import Iterator, Sequence
from typing import NoReturn

from tensorline.config.ensemble import producers, step_name
from tensorline.config.model import ModelConfig, TensorSpec
from tensorline.errors import ConfigError

__all__ = ["check_composition"]

Use = tuple[str, TensorSpec, ModelConfig]
"""A side of a pipeline tensor: how errors call it, its spec, and the model it belongs to."""


def check_composition(config: ModelConfig, models: Sequence[ModelConfig]) -> None:
    """
    Args:
        models: One for each step, in order.
    Raises:
        ConfigError: names the ensemble, the step and the tensor.
    Source: model-config.md §8, rules 3 to 7.
    """
    for index, model in enumerate(models):
        _check_step(config, index, model)
    written, read = _sides(config, models)
    for tensor, uses in read.items():
        for use in uses:
            _check_agree(config, tensor, written[tensor], use)
    _check_streams(config, models)


def _check_step(config: ModelConfig, index: int, model: ModelConfig) -> None:
    step, where = config.steps[index], step_name(config, index)
    for name, tensor in step.inputs.items():
        if model.input(name) is None:
            _refuse(config, f"{where} maps tensor '{tensor}' to input '{name}', which the model does not have")
    for name, tensor in step.outputs.items():
        if model.output(name) is None:
            _refuse(config, f"{where} maps output '{name}' to tensor '{tensor}', but the model has no such output")
    for spec in model.inputs:
        if not spec.optional and spec.name not in step.inputs:
            _refuse(config, f"{where} leaves out input '{spec.name}', which the model requires")
    if 0 < model.max_batch_size < config.max_batch_size:
        _refuse(
            config,
            f"max_batch_size is {config.max_batch_size}, must be at most {model.max_batch_size}, that of {where}",
        )


def _sides(config: ModelConfig, models: Sequence[ModelConfig]) -> tuple[dict[str, Use], dict[str, list[Use]]]:
    written: dict[str, Use] = {spec.name: ("the ensemble's input", spec, config) for spec in config.inputs}
    read: dict[str, list[Use]] = {}
    for index, model in enumerate(models):
        step, where = config.steps[index], step_name(config, index)
        for name, tensor in step.outputs.items():
            spec = model.output(name)
            if spec is not None:
                written[tensor] = (f"output '{name}' of {where}", spec, model)
        for name, tensor in step.inputs.items():
            spec = model.input(name)
            if spec is not None:
                read.setdefault(tensor, []).append((f"input '{name}' of {where}", spec, model))
    for spec in config.outputs:
        read.setdefault(spec.name, []).append(("the ensemble's output", spec, config))
    return written, read


def _check_agree(config: ModelConfig, tensor: str, writer: Use, reader: Use) -> None:
    first, made, maker = writer
    second, taken, taker = reader
    at = f"in ensemble {config.name}, ensemble tensor {tensor}: inconsistent"
    if made.datatype != taken.datatype:
        raise ConfigError(f"{at} data type: {made.datatype} for {first}, {taken.datatype} for {second}")
    if not _fit(made.dims, taken.dims) and not _fit(_full(made, maker), _full(taken, taker)):
        raise ConfigError(
            f"{at} shape: {list(_full(made, maker))} for {first}, {list(_full(taken, taker))} for {second}"
        )


def _full(spec: TensorSpec, model: ModelConfig) -> tuple[int, ...]:
    return (-1, *spec.dims) if model.max_batch_size > 0 and not spec.is_shape_tensor else spec.dims


def _fit(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def _check_streams(config: ModelConfig, models: Sequence[ModelConfig]) -> None:
    """Follow each decoupled step's responses: a step that meets two streams of them could not pair them."""
    sources: dict[int, frozenset[int]] = {}
    writers = producers(config)
    for index in _in_order(config, writers):
        arriving = frozenset[int]().union(
            *(sources[writers[tensor]] for tensor in config.steps[index].inputs.values() if writers[tensor] >= 0)
        )
        if len(arriving) > 1:
            first, second = sorted(arriving)[:2]
            _refuse(
                config,
                f"{step_name(config, index)} takes tensors that stem from two decoupled steps, "
                f"{step_name(config, first)} and {step_name(config, second)}",
            )
        sources[index] = frozenset((index,)) if models[index].decoupled else arriving


def _in_order(config: ModelConfig, writers: dict[str, int]) -> Iterator[int]:
    """Steps after those that they read from; the graph has no cycle."""
    done: set[int] = set()
    left = list(range(len(config.steps)))
    while left:
        ready = [
            index
            for index in left
            if all(writers[tensor] < 0 or writers[tensor] in done for tensor in config.steps[index].inputs.values())
        ]
        yield from ready
        done.update(ready)
        left = [index for index in left if index not in done]


def _refuse(config: ModelConfig, reason: str) -> NoReturn:
    raise ConfigError(f"ensemble '{config.name}': {reason}")
