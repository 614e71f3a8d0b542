"""From a pipeline's configuration to the plan that its requests follow."""

from collections.abc import Callable
from dataclasses import replace

from gateway.plan_graph import Plan, PlanStep, Port, Selection, TensorUse
from gateway.plan_rules import check_composition
from gateway.plan_run import Run
from tensorline.config.ensemble import check_graph
from tensorline.config.model import ModelConfig
from tensorline.errors import ConfigError

__all__ = ["FindModel", "Plan", "PlanStep", "Port", "Run", "Selection", "TensorUse", "compile_plan"]

FindModel = Callable[[str, int], ModelConfig | None]
"""Configuration of a model's version, -1 the newest; None: not available."""


def compile_plan(config: ModelConfig, find: FindModel) -> Plan:
    """Check a pipeline against its models and make its plan.

    Args:
        find: Asked for each step's model, and for those of pipelines inside the pipeline.
    Raises:
        ConfigError: names the ensemble, the step and the tensor.
    Source: model-config.md §8; scheduling.md §13.
    """
    if not config.is_ensemble:
        raise ConfigError(f"model '{config.name}' is no ensemble: its platform is '{config.platform}'")
    check_graph(config)
    models = _found(config, find)
    _check_nesting(config, find, (config.name,))
    # Whether a pipeline is decoupled stands in its steps, not in its configuration.
    models = [
        replace(model, decoupled=compile_plan(model, find).is_decoupled) if model.is_ensemble else model
        for model in models
    ]
    check_composition(config, models)
    return Plan(config, models)


def _found(config: ModelConfig, find: FindModel) -> list[ModelConfig]:
    found = [find(step.model, step.version) for step in config.steps]
    missing = [
        step.model if step.version < 0 else f"{step.model} version {step.version}"
        for step, model in zip(config.steps, found, strict=True)
        if model is None
    ]
    if missing:
        names = ", ".join(dict.fromkeys(missing))
        raise ConfigError(f"ensemble {config.name} contains models that are not available or ambiguous: {names}")
    return [model for model in found if model is not None]


def _check_nesting(config: ModelConfig, find: FindModel, path: tuple[str, ...]) -> None:
    """Pipelines inside pipelines are fine, unless one runs inside itself."""
    for step in config.steps:
        if step.model in path:
            raise ConfigError(f"ensemble '{path[0]}': ensembles form a cycle: {' -> '.join((*path, step.model))}")
        inner = find(step.model, step.version)
        if inner is not None and inner.is_ensemble:
            _check_nesting(inner, find, (*path, step.model))
