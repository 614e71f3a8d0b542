"""What a client can call: models that stages host, and pipelines of them, with their versions and readiness."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.mesh import Mesh
from gateway.plan import Plan, compile_plan
from gateway.plan_run import Run
from gateway.runner import Steps
from gateway.steps import PipelineSteps, SingleStep
from gateway.stream_pipeline import PipelineStream
from gateway.stream_run import ModelStream, ResponseStream, StreamWork
from gateway.validation import RequestChecker
from tensorline.config import ModelConfig, RepositoryEntry, read_model_labels
from tensorline.config.model import EnsembleStep
from tensorline.errors import ConfigError, InvalidTensorError, NotFoundError, TensorlineError, UnavailableError
from tensorline.protocol.infer import shown
from tensorline.rpc.hosted import UNLOADED

__all__ = ["Models", "ServedModel"]

log = logging.getLogger(__name__)

VERSION_DIGITS = 19


@dataclass(slots=True)
class ServedModel:
    """One version of a model or a pipeline, ready to check and run requests."""

    config: ModelConfig
    version: int
    checker: RequestChecker
    plan: Plan | None
    targets: Sequence[tuple[str, str]]
    """Model and version of each step of a pipeline, the version "" for the newest."""

    @property
    def is_decoupled(self) -> bool:
        """A request may have more or fewer responses than one."""
        return self.plan.is_decoupled if self.plan is not None else self.config.decoupled

    def stream(self, work: StreamWork, requested: frozenset[str], asked_version: str) -> ResponseStream:
        """A fresh run of one request to a decoupled model; arguments as of `steps`."""
        if self.plan is not None:
            return PipelineStream(work, self.plan, str(self.version), self.targets, requested)
        return ModelStream(work, (self.config.name, str(self.version) if asked_version else ""), tuple(requested))

    def steps(self, requested: frozenset[str], asked_version: str) -> Steps:
        """A fresh run of one request; `requested` empty: all outputs."""
        if self.plan is not None:
            return PipelineSteps(Run(self.plan, requested), self.targets)
        # Not as the client wrote it: "01" is version 1 too.
        return SingleStep(self.config, str(self.version) if asked_version else "", tuple(requested))


class Models:
    """Args:
    entries: What the gateway's own repositories hold: pipelines to serve, and the names of models that stages should.
    """

    def __init__(self, mesh: Mesh, entries: Iterable[RepositoryEntry] = ()) -> None:
        self._mesh = mesh
        self._pipelines: dict[tuple[str, int], ModelConfig] = {}
        self._expected: dict[str, RepositoryEntry] = {}
        self._cache: dict[tuple[str, int], ServedModel] = {}
        self._ready: dict[str, list[int]] = {}
        self._labels: dict[str, dict[str, tuple[str, ...]]] = {}
        self._pipeline_errors: dict[str, str] = {}
        self._unloaded: dict[str, RepositoryEntry] = {}
        for entry in entries:
            self.put(entry)

    def put(self, entry: RepositoryEntry) -> None:
        """Expect a model to be served, or serve a pipeline, from now on as `entry` says. One with an error takes the
        place of nothing that serves."""
        if entry.error is not None:
            log.error("model configuration refused", extra={"model": entry.name, "cause": str(entry.error)})
            if self.versions(entry.name):
                return
        self._take_out(entry.name)
        self._unloaded.pop(entry.name, None)
        self._expected[entry.name] = entry
        if entry.config is not None and entry.config.is_ensemble:
            for version in entry.versions:
                self._pipelines[entry.name, version] = entry.config
        self.changed()

    def drop(self, name: str) -> None:
        """Expect `name` no longer; its requests are told that none of its versions is available."""
        entry = self._take_out(name)
        if entry is not None:
            self._unloaded[name] = entry
        self.changed()

    def _take_out(self, name: str) -> RepositoryEntry | None:
        for key in [key for key in self._pipelines if key[0] == name]:
            del self._pipelines[key]
        return self._expected.pop(name, None)

    def entry(self, name: str) -> RepositoryEntry | None:
        """Of what is expected."""
        return self._expected.get(name)

    @property
    def unloaded(self) -> list[RepositoryEntry]:
        """What was expected once and is no longer."""
        return list(self._unloaded.values())

    def changed(self) -> None:
        """The mesh's table is another: what was compiled from it is made again on demand."""
        self._cache.clear()
        self._labels.clear()
        self._ready.clear()
        self._pipeline_errors.clear()

    @property
    def expected(self) -> list[str]:
        """What should be served: of the gateway's own repositories, or what clients had loaded, but for pipelines that
        an unloaded model has taken with it. A model that only a stage knows comes and goes with it."""
        return sorted(name for name in self._expected if not self._lost_parts(name))

    @property
    def names(self) -> list[str]:
        return sorted({*self._expected, *self._unloaded, *self._mesh.model_names})

    def versions(self, name: str) -> list[int]:
        """Ready ones, ascending."""
        ready = self._ready.get(name)
        if ready is None:
            pipelines = [version for model, version in self._pipelines if model == name]
            if pipelines:
                ready = sorted(version for version in pipelines if self._pipeline_is_ready(name, version))
            else:
                ready = self._mesh.ready_versions(name)
            if name in self._expected or ready:  # a client's made-up names are not remembered
                self._ready[name] = ready
        return ready

    def is_ready(self, name: str, version: str) -> bool:
        """Whether a request would be served now; a pipeline needs every step's model.

        Raises:
            InvalidTensorError: `version` is no version.
        """
        number = _number(version)
        ready = self.versions(name)
        return bool(ready) if number is None else number in ready

    def find(self, name: str, version: str) -> ServedModel:
        """
        Args:
            version: As a client writes it; "" is the newest that is ready.
        Raises:
            InvalidTensorError: `version` is no version.
            NotFoundError: no such model or version.
            UnavailableError: it is known and not ready; the text names the model, or the step that is missing.
        """
        number = _number(version)
        ready = self.versions(name)
        if number is None and ready:
            number = ready[-1]
        if number in ready and number is not None:
            return self._callable(name, number)
        raise self._missing(name, number)

    def config(self, name: str, version: str) -> tuple[ModelConfig, int]:
        """The completed configuration and the version's number; errors as `find`."""
        found = self.find(name, version)
        return found.config, found.version

    def labels(self, config: ModelConfig) -> dict[str, tuple[str, ...]]:
        """Class labels by output name, from the gateway's own repository; none where the model is only hosted."""
        labels = self._labels.get(config.name)
        if labels is None:
            entry = self._expected.get(config.name)
            labels = read_model_labels(entry.path, config) if entry is not None else {}
            self._labels[config.name] = labels
        return labels

    def _callable(self, name: str, number: int) -> ServedModel:
        found = self._cache.get((name, number))
        if found is None:
            config = self._pipelines.get((name, number))
            plan = None
            if config is not None:
                plan = compile_plan(config, self._mesh.config)
            else:
                config = self._mesh.config(name, number)
            if config is None:
                raise UnavailableError(f"Request for unknown model: '{name}' version {number} is not at ready state")
            targets = (
                [(step.model, "" if step.version < 0 else str(step.version)) for step in plan.steps] if plan else []
            )
            found = self._cache[name, number] = ServedModel(config, number, RequestChecker(config), plan, targets)
        return found

    def _pipeline_is_ready(self, name: str, version: int) -> bool:
        try:
            found = self._callable(name, version)
        except ConfigError as error:
            if self._pipeline_errors.get(name) != str(error):
                self._pipeline_errors[name] = str(error)
                log.info("pipeline is not ready", extra={"model": name, "cause": str(error)})
            return False
        return all(self._mesh.is_served(*target) for target in found.targets)

    def _is_pipeline(self, name: str) -> bool:
        return any(model == name for model, _ in self._pipelines)

    def _missing(self, name: str, number: int | None) -> TensorlineError:
        known = [version for model, version in self._pipelines if model == name] or self._mesh.known_versions(name)
        is_unloaded = name in self._unloaded or (bool(known) and self._mesh.is_unloaded(name))
        entry = self._expected.get(name) or self._unloaded.get(name)
        if not known and entry is None:
            return NotFoundError(f"Request for unknown model: '{shown(name)}' is not found")
        if number is not None and number not in known and number not in (entry.versions if entry is not None else ()):
            return NotFoundError(f"Request for unknown model: '{name}' version {number} is not found")
        if is_unloaded and number is None:
            return NotFoundError(f"Request for unknown model: '{name}' has no available versions")
        if is_unloaded:
            return UnavailableError(f"Request for unknown model: '{name}' version {number} is not at ready state")
        what = f"version {number} is not at ready state" if number is not None else "has no version at ready state"
        return UnavailableError(f"Request for unknown model: '{name}' {what}{self._why(name, known)}")

    def reason(self, name: str) -> str:
        """Why a model or pipeline that is expected is not ready."""
        if self._lost_parts(name):
            return UNLOADED
        pipelines = [version for model, version in self._pipelines if model == name]
        return self._why(name, pipelines or self._mesh.known_versions(name)).removeprefix(": ")

    def _lost_parts(self, name: str) -> list[str]:
        """Models of a pipeline that somebody unloaded."""
        entry = self._expected.get(name)
        steps = entry.config.steps if entry is not None and entry.config is not None else ()
        return [step.model for step in steps if step.model in self._unloaded or self._mesh.is_unloaded(step.model)]

    def _why(self, name: str, known: Sequence[int]) -> str:
        entry = self._expected.get(name)
        if entry is not None and entry.error is not None:
            return f": {entry.error}"
        config = self._pipelines.get((name, known[-1])) if known else None
        if config is not None:
            inner = next((step.model for step in config.steps if self._is_pipeline(step.model)), None)
            if inner is not None:
                return f": its step '{inner}' is itself a pipeline, which this release does not run inside another"
            away = sorted({self._shown_step(step) for step in config.steps if not self._is_there(step)})
            if away:
                return f": no instance serves {', '.join(away)}, which it needs"
            return f": {self._pipeline_errors[name]}" if name in self._pipeline_errors else ""
        if reason := self._mesh.reason(name):
            return f": {reason}"
        backend = entry.config.backend if entry is not None and entry.config is not None else ""
        return f": no instance serves it{self.missing_backend(backend)}"

    def missing_backend(self, backend: str) -> str:
        """What an error adds where nobody can run models of `backend`; "" where somebody can."""
        there = self._mesh.backends
        if not backend or backend in there or not there:
            return ""
        return f"; none hosts backend '{backend}', those that are there host {', '.join(sorted(there))}"

    def _is_there(self, step: EnsembleStep) -> bool:
        return self._mesh.is_served(step.model, "" if step.version < 0 else str(step.version))

    def _shown_step(self, step: EnsembleStep) -> str:
        version = "" if step.version < 0 else f" version {step.version}"
        reason = self._mesh.reason(step.model)
        return f"'{step.model}'{version}{f' ({reason})' if reason else ''}"


def _number(version: str) -> int | None:
    """
    Raises:
        InvalidTensorError: as Triton answers what is no version.
    """
    if not version:
        return None
    is_short = len(version) <= VERSION_DIGITS  # what 64 bits hold; Python itself refuses to read thousands of digits
    if version.isascii() and version.isdigit() and is_short:
        return int(version)
    if version.startswith("-") and version[1:].isdigit():
        raise InvalidTensorError(f"invalid version '{shown(version)}', must be integer > 0")
    raise InvalidTensorError(f"failed to read version from string '{shown(version)}', must be integer > 0")
