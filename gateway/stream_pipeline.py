"""A request to a pipeline with a decoupled step: the steps before it once, those after it for each of its responses."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from gateway.ledger import Ledger
from gateway.plan import Plan
from gateway.plan_run import Run
from gateway.runner import RequestRunner
from gateway.steps import PipelineSteps
from gateway.stream_run import StreamWork
from gateway.stream_step import StreamStep
from tensorline.errors import DeadlineError, InvalidTensorError, TensorlineError, UnsupportedError
from tensorline.tensor import Tensor

__all__ = ["PipelineStream"]

HOLD_S = 300.0
"""Of a stream without a deadline: how long stages keep for it what the steps before the decoupled one made."""

STEPS_KEPT = 2048
"""Of one request in its record: a stream may have any number of responses."""


class PipelineStream:
    """Responses come in the order in which the decoupled step made theirs: one goes through the steps after it while
    the next few are made.

    Raises:
        UnsupportedError: the requested outputs need several decoupled steps.
    """

    def __init__(
        self, work: StreamWork, plan: Plan, version: str, targets: Sequence[tuple[str, str]], requested: frozenset[str]
    ) -> None:
        self.version = version
        self._work = work
        self._targets = targets
        self._base = Run(plan, requested)
        self._ledger = Ledger(work.plane.give_back)
        needed = [index for index in plan.select(requested).steps if index in plan.decoupled]
        if len(needed) > 1:
            names = " and ".join(f"'{plan.steps[index].model}'" for index in needed)
            raise UnsupportedError(
                f"pipeline '{plan.name}' has several decoupled steps, {names}: this release runs one in a request"
            )
        self._decoupled = needed[0] if needed else -1
        self._step: StreamStep | None = None

    async def start(self, inputs: list[Tensor]) -> None:
        patience, index = self._work.patience, self._decoupled
        deadline = patience.deadline if patience.deadline < math.inf else time.monotonic() + HOLD_S
        first = _StepsBefore(self._base, self._targets, index)
        try:
            async with asyncio.timeout(patience.ends_at - time.monotonic()):
                await self._runner(first, deadline, self._ledger).run(inputs)
        except TimeoutError as error:
            raise patience.error() from error
        if self._base.is_at(index):
            self._step = self._work.step(self._targets[index], self._base.step_outputs(index), self._ledger)
            self._step.start(self._base.step_inputs(index))

    async def next(self) -> tuple[list[Tensor], bool]:
        step, index = self._step, self._decoupled
        if step is None:  # it is not needed, or was left out with the inputs that it reads
            return await self._work.plane.fetch(self._base.outputs, self._work.regions), True
        while True:
            try:
                response, is_end = await step.next()
            except DeadlineError:
                raise
            except TensorlineError as error:
                raise self._base.fail(index, error) from error
            if is_end:
                return [], True
            after = _StepsAfter(self._base.fork(), self._targets, index, response)
            outputs = await self._runner(after, self._work.patience.ends_at).run([])
            step.let_go()
            if outputs:
                return outputs, step.is_at_end

    def close(self) -> None:
        if self._step is not None:
            self._step.close()
        self._ledger.close()

    def _runner(
        self, steps: "_StepsBefore | _StepsAfter", deadline: float, ledger: Ledger | None = None
    ) -> RequestRunner:
        work = self._work
        record = work.record
        if len(record.steps) >= STEPS_KEPT:
            record = replace(record, steps=[])
        return RequestRunner(
            *(work.mesh, work.plane, steps, record, deadline),
            *(work.parameters, work.priority, work.regions, ledger),
        )


class _StepsBefore(PipelineSteps):
    """Everything that does not wait for the decoupled step; what was made stays with the run."""

    def __init__(self, run: Run, targets: Sequence[tuple[str, str]], decoupled: int) -> None:
        super().__init__(run, targets)
        self._decoupled = decoupled

    @property
    def is_finished(self) -> bool:
        return self._run.is_finished or self._run.is_at(self._decoupled)

    @property
    def outputs(self) -> list[Tensor]:
        return []

    def start(self, inputs: Sequence[Tensor]) -> list[int]:
        return [step for step in super().start(inputs) if step != self._decoupled]

    def complete(self, step: int, outputs: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
        ready, released = super().complete(step, outputs)
        return [each for each in ready if each != self._decoupled], released


class _StepsAfter(PipelineSteps):
    """What follows one response of the decoupled step."""

    def __init__(self, run: Run, targets: Sequence[tuple[str, str]], decoupled: int, response: list[Tensor]) -> None:
        super().__init__(run, targets)
        self._decoupled = decoupled
        self._response = response

    def start(self, inputs: Sequence[Tensor]) -> list[int]:
        return self._run.complete(self._decoupled, self._response)

    @property
    def outputs(self) -> list[Tensor]:
        """None at all, rather than an error, where this response leads to no requested output: it is left out."""
        try:
            return self._run.outputs
        except InvalidTensorError:
            return []
