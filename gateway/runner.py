"""One request on its way through its steps: started when their inputs exist, retried elsewhere, ended exactly once.

No task per step: results arrive as callbacks of the stage streams and start what they make ready in the same turn.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from gateway.ledger import Ledger
from gateway.mesh import Mesh
from gateway.plane import GatewayPlane
from gateway.regions import RequestRegions
from gateway.retries import failure_of, is_worth_another_try
from tensorline.errors import DeadlineError, InternalError, TensorlineError
from tensorline.rpc.connection import StageConnection
from tensorline.rpc.frames import ParameterValue, StageResult, Submission
from tensorline.telemetry.context import new_span_id
from tensorline.telemetry.record import RequestRecord, StepRecord
from tensorline.tensor import Tensor

__all__ = ["RequestRunner", "Steps", "place_inputs"]

log = logging.getLogger(__name__)


class Steps(Protocol):
    """The order of one request's steps: a pipeline's run, or a single model's."""

    @property
    def outputs(self) -> list[Tensor]:
        """The requested tensors, once finished."""

    @property
    def is_finished(self) -> bool: ...

    def start(self, inputs: Sequence[Tensor]) -> list[int]:
        """Steps that can begin."""

    def target(self, step: int) -> tuple[str, str]:
        """Model and version ("" is the newest) that the step runs."""

    def step_inputs(self, step: int) -> list[Tensor]: ...

    def wanted(self, step: int) -> tuple[str, ...]:
        """Outputs of the step that anybody reads; empty: all."""

    def complete(self, step: int, outputs: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
        """Steps that can begin now, and tensors whose last reader is done."""

    def failure(self, step: int, error: TensorlineError) -> TensorlineError:
        """The error as the client is told of it."""


class RequestRunner:
    """Args:
    deadline: Monotonic seconds.
    record: Filled with each step as it ends.
    regions: Where inputs are, and outputs are wanted, in the client's shared memory; None: nowhere.
    ledger: For what the request holds, closed by the caller when he is done with it; None: it ends with `run`.
    """

    __slots__ = (
        "_deadline",
        "_done",
        "_is_ledger_own",
        "_ledger",
        "_mesh",
        "_open",
        "_parameters",
        "_plane",
        "_priority",
        "_record",
        "_regions",
        "_steps",
        "version",
    )

    def __init__(
        self,
        mesh: Mesh,
        plane: GatewayPlane,
        steps: Steps,
        record: RequestRecord,
        deadline: float,
        parameters: Mapping[str, ParameterValue],
        priority: int = 0,
        regions: RequestRegions | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._mesh = mesh
        self._plane = plane
        self._steps = steps
        self._record = record
        self._deadline = deadline
        self._parameters = parameters
        self._priority = priority
        self._regions = regions
        self._ledger = Ledger(plane.give_back) if ledger is None else ledger
        self._is_ledger_own = ledger is None
        self._open: dict[int, tuple[StageConnection, int]] = {}
        self._done: asyncio.Future[None] | None = None
        self.version = ""
        """Of the model that ran last: what a single model's response names."""

    async def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """The requested outputs, with their bytes.

        Raises:
            DeadlineError: it passed; nothing of the request runs on.
            TensorlineError: a step failed, no instance could be had, or no room for the inputs.
        """
        loop = asyncio.get_running_loop()
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError("the deadline had passed when the request arrived")
        self._done = loop.create_future()
        timer = loop.call_later(left, self._expire)
        try:
            if self._regions is not None or self._plane.needs_placing(inputs):
                left = self._deadline - time.monotonic()
                inputs = await place_inputs(self._plane, self._ledger, inputs, self._regions, left)
            for step in self._steps.start(inputs):
                self._begin(step, 1)
            if self._steps.is_finished and not self._done.done():
                self._done.set_result(None)
            await self._done
            return await self._plane.fetch(self._steps.outputs, self._regions)
        finally:
            timer.cancel()
            if self._done.done() and not self._done.cancelled():
                self._done.exception()  # what ends us here may be another: asyncio would log this one as lost
            for step, (connection, number) in self._open.items():
                connection.cancel(number, self._steps.step_inputs(step))
            self._open.clear()
            if self._is_ledger_own:
                self._ledger.close()

    def _expire(self) -> None:
        self._fail(DeadlineError("the deadline passed before the answer was ready"))

    def _fail(self, error: TensorlineError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def _begin(self, step: int, attempt: int, exclude: Sequence[StageConnection] = ()) -> None:
        if self._done is None or self._done.done():
            return
        model, version = self._steps.target(step)
        rows = self._record.rows
        known = version or self._mesh.newest(model)  # what its stage says when it answers replaces this
        record = StepRecord(model, known, new_span_id(), time.monotonic_ns(), attempt=attempt, rows=rows)
        self._record.steps.append(record)
        try:
            connection = self._mesh.pick(model, version, exclude)
            record.process = connection.process
            context = self._record.context
            work = Submission(
                model,
                version,
                self._plane.carried(self._steps.step_inputs(step), connection),
                self._steps.wanted(step),
                self._record.request_id,
                self._deadline - time.monotonic(),
                self._parameters,
                self._priority,
                context.trace_id,
                record.span_id,
                context.flags,
                context.state,
            )
            number = connection.submit(work, self._taker(step, connection, record))
        except TensorlineError as error:
            record.ended = time.monotonic_ns()
            record.status, record.error = error.status.value[0], str(error)
            self._fail(self._steps.failure(step, error))
            return
        self._open[step] = (connection, number)
        self._mesh.budget(model).note_request()

    def _taker(self, step: int, connection: StageConnection, record: StepRecord) -> Callable[[StageResult], None]:
        def take(result: StageResult) -> None:
            try:
                self._take(step, connection, record, result)
            except Exception:  # nobody above would end the request, and its client would wait for its deadline
                log.exception("step failed", extra={"model": record.model, "request_id": self._record.request_id})
                self._fail(InternalError("internal error"))

        return take

    def _take(self, step: int, connection: StageConnection, record: StepRecord, result: StageResult) -> None:
        self._open.pop(step, None)
        record.ended = time.monotonic_ns()
        record.timing = result.timing
        record.clock_offset, record.clock_error = connection.clock.offset_ns, connection.clock.error_ns
        if result.version:
            record.version = self.version = result.version
        has_handles = any(tensor.handle is not None for tensor in result.outputs)
        if has_handles:
            self._ledger.hold(result.outputs, self._steps.step_inputs(step))
        if self._done is None or self._done.done():
            self._ledger.drop(result.outputs)
            return
        if result.status:
            record.status, record.error = result.status, result.error
            self._take_failure(step, connection, record, result)
            return
        try:
            ready, released = self._steps.complete(step, result.outputs)
        except TensorlineError as error:
            self._fail(self._steps.failure(step, error))
            return
        self._ledger.drop(released)
        for following in ready:
            self._begin(following, 1)
        if self._steps.is_finished and not self._done.done():
            self._done.set_result(None)

    def _take_failure(self, step: int, connection: StageConnection, record: StepRecord, result: StageResult) -> None:
        if is_worth_another_try(self._mesh, self._steps.target(step), connection, record, result):
            self._begin(step, record.attempt + 1, (connection,))
        else:
            self._fail(self._steps.failure(step, failure_of(connection, record, result)))


async def place_inputs(
    plane: GatewayPlane, ledger: Ledger, inputs: list[Tensor], regions: RequestRegions | None, patience_s: float
) -> list[Tensor]:
    """The inputs where stages can read them; what that takes of our arena is in `ledger`.

    Raises:
        TensorlineError: as `GatewayPlane.place` and `place_region`.
    """
    placed, ends_at = [], time.monotonic() + patience_s
    for tensor in inputs:
        left = ends_at - time.monotonic()
        if regions is not None and tensor.name in regions.inputs:
            in_arena = await plane.place_region(tensor, regions, left)
        else:
            in_arena = await plane.place(tensor, left)
        if in_arena is not tensor:
            ledger.hold((in_arena,))
        placed.append(in_arena)
    return placed
