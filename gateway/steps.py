"""What the runner drives: the one step of a model's request, and a pipeline's run."""

from collections.abc import Sequence

from gateway.plan_run import Run
from tensorline.config import ModelConfig
from tensorline.errors import TensorlineError
from tensorline.tensor import Tensor

__all__ = ["PipelineSteps", "SingleStep"]


class SingleStep:
    """A request to one model: a pipeline of one step, without a pipeline's cost."""

    __slots__ = ("_inputs", "_target", "_wanted", "is_finished", "outputs")

    def __init__(self, config: ModelConfig, version: str, wanted: tuple[str, ...]) -> None:
        self._target = (config.name, version)
        self._wanted = wanted
        self._inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.is_finished = False

    def start(self, inputs: Sequence[Tensor]) -> list[int]:
        self._inputs = list(inputs)
        return [0]

    def target(self, step: int) -> tuple[str, str]:
        return self._target

    def step_inputs(self, step: int) -> list[Tensor]:
        return self._inputs

    def wanted(self, step: int) -> tuple[str, ...]:
        return self._wanted

    def complete(self, step: int, outputs: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
        self.outputs = list(outputs)
        self.is_finished = True
        # An output may be an input passed on: the blocks of both go back when the request ends, which is now.
        return [], []

    def failure(self, step: int, error: TensorlineError) -> TensorlineError:
        return error


class PipelineSteps:
    """A pipeline's run in the form that the runner drives."""

    __slots__ = ("_run", "_targets")

    def __init__(self, run: Run, targets: Sequence[tuple[str, str]]) -> None:
        self._targets = targets
        self._run = run

    @property
    def is_finished(self) -> bool:
        return self._run.is_finished

    @property
    def outputs(self) -> list[Tensor]:
        return self._run.outputs

    def start(self, inputs: Sequence[Tensor]) -> list[int]:
        return self._run.start(inputs)

    def target(self, step: int) -> tuple[str, str]:
        return self._targets[step]

    def step_inputs(self, step: int) -> list[Tensor]:
        return self._run.step_inputs(step)

    def wanted(self, step: int) -> tuple[str, ...]:
        return self._run.step_outputs(step)

    def complete(self, step: int, outputs: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
        ready = self._run.complete(step, outputs)
        return ready, self._run.released

    def failure(self, step: int, error: TensorlineError) -> TensorlineError:
        return self._run.fail(step, error)
