"""One call of a decoupled model on its way: responses as they are asked for, each held as long as it is looked at."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from gateway.ledger import Ledger
from gateway.mesh import Mesh
from gateway.plane import GatewayPlane
from gateway.retries import failure_of, is_worth_another_try
from tensorline.errors import DeadlineError, InternalError, TensorlineError
from tensorline.rpc.connection import StageConnection
from tensorline.rpc.frames import ParameterValue, StageResult, Submission
from tensorline.telemetry.context import new_span_id
from tensorline.telemetry.record import RequestRecord, ResponseTiming, StepRecord
from tensorline.tensor import Tensor

__all__ = ["WINDOW", "Patience", "StreamStep"]

log = logging.getLogger(__name__)

WINDOW = 8
"""Responses of one request between the model and its client: enough to keep a stage busy over one round trip."""

RESPONSES_KEPT = 256
"""Of one request, for statistics."""


class Patience:
    """How long a stream may take: until its client's deadline, or, without one, as long as something moves.

    Args:
        deadline: Monotonic seconds; infinity for none.
        idle_s: Without a deadline: how long no response may come or be taken.
    """

    __slots__ = ("_idle_s", "_moved", "deadline")

    def __init__(self, deadline: float, idle_s: float) -> None:
        self.deadline = deadline
        self._idle_s = idle_s
        self._moved = time.monotonic()

    def moved(self) -> None:
        self._moved = time.monotonic()

    @property
    def ends_at(self) -> float:
        """Monotonic seconds."""
        return self.deadline if self.deadline < math.inf else self._moved + self._idle_s

    def error(self) -> DeadlineError:
        if self.deadline < math.inf:
            return DeadlineError("the deadline passed before the last response")
        return DeadlineError(f"no response came or was read for {self._idle_s:g} s")


class StreamStep:
    """Started once, read to its end or closed before. Tried again elsewhere only before its first response.

    Args:
        target: Model and version, "" for the newest.
        wanted: Outputs; empty: all.
        record: Filled with the step when it ends.
        ledger: What the request holds: its inputs, and the responses that are here. Closed with the step.
    """

    def __init__(
        self,
        mesh: Mesh,
        plane: GatewayPlane,
        target: tuple[str, str],
        wanted: tuple[str, ...],
        record: RequestRecord,
        patience: Patience,
        parameters: Mapping[str, ParameterValue],
        priority: int,
        ledger: Ledger,
    ) -> None:
        self._mesh = mesh
        self._plane = plane
        self._target = target
        self._inputs: list[Tensor] = []
        self._wanted = wanted
        self._record = record
        self._patience = patience
        self._parameters = parameters
        self._priority = priority
        self._ledger = ledger
        self._open: tuple[StageConnection, int] | None = None
        self._ready: deque[tuple[StageConnection, int, list[Tensor]]] = deque()
        self._shown: tuple[StageConnection, int, list[Tensor]] | None = None
        self._is_ended = False
        self._error: TensorlineError | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.version = ""
        """That runs, as its stage says with the first response."""

    def start(self, inputs: list[Tensor]) -> None:
        self._inputs = inputs
        self._watch_time()
        self._begin(1)

    async def next(self) -> tuple[list[Tensor], bool]:
        """The next response, readable until the next call, and whether it is the last. A last one without tensors is
        the end alone.

        Raises:
            TensorlineError: the request failed; responses that came before were given out before.
        """
        self._pass_on()
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._is_ended:
                return [], True
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self._shown = self._ready.popleft()
        return self._shown[2], False

    @property
    def is_at_end(self) -> bool:
        """Nothing comes after the response that was given out last."""
        return self._is_ended and not self._ready and self._error is None

    def let_go(self) -> None:
        """The tensors given out last are not looked at any more; whether the client has them is another matter."""
        if self._shown is not None:
            self._ledger.drop(self._shown[2])
            self._shown = (*self._shown[:2], [])

    def close(self) -> None:
        """The request has ended, here or for its client: nothing of it runs on or is held."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._open is not None:
            connection, number = self._open
            self._open = None
            connection.cancel(number, self._inputs)
        self._ready.clear()
        self._shown = None
        self._is_ended = True
        self._ledger.close()

    def _pass_on(self) -> None:
        """The client has the response that was given out: the stage may make another."""
        if self._shown is None:
            return
        self.let_go()
        connection, number, _ = self._shown
        self._shown = None
        self._patience.moved()
        if self._open is not None:
            connection.take(number)

    def _watch_time(self) -> None:
        left = self._patience.ends_at - time.monotonic()
        if left <= 0:
            error = self._patience.error()
            self.close()
            self._fail(error)
        else:
            self._timer = asyncio.get_running_loop().call_later(left, self._watch_time)

    def _fail(self, error: TensorlineError) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _begin(self, attempt: int, exclude: Sequence[StageConnection] = ()) -> None:
        if self._is_ended or self._error is not None:
            return
        model, version = self._target
        request = self._record
        known = version or self._mesh.newest(model)
        record = StepRecord(model, known, new_span_id(), time.monotonic_ns(), attempt=attempt, rows=request.rows)
        request.steps.append(record)
        has_deadline = self._patience.deadline < math.inf
        try:
            connection = self._mesh.pick(model, version, exclude)
            record.process = connection.process
            work = Submission(
                model,
                version,
                self._plane.carried(self._inputs, connection),
                self._wanted,
                request.request_id,
                self._patience.deadline - time.monotonic() if has_deadline else None,
                self._parameters,
                self._priority,
                request.context.trace_id,
                record.span_id,
                request.context.flags,
                request.context.state,
                WINDOW,
            )
            number = connection.submit(work, self._taker(connection, record))
        except TensorlineError as error:
            record.ended = time.monotonic_ns()
            record.status, record.error = error.status.value[0], str(error)
            self._fail(error)
            return
        self._open = (connection, number)
        self._mesh.budget(model).note_request()

    def _taker(self, connection: StageConnection, record: StepRecord) -> Callable[[StageResult], None]:
        def take(result: StageResult) -> None:
            try:
                self._take(connection, record, result)
            except Exception:  # nobody above would end the request, and its client would wait for its deadline
                log.exception("step failed", extra={"model": record.model, "request_id": self._record.request_id})
                self._fail(InternalError("internal error"))

        return take

    def _take(self, connection: StageConnection, record: StepRecord, result: StageResult) -> None:
        number = self._open[1] if self._open is not None else 0
        self._ledger.hold(result.outputs, self._inputs)
        if result.final:
            self._open = None
            _note_end(record, connection, result)
        if self._is_ended or self._error is not None:
            self._ledger.drop(result.outputs)
            return
        self._patience.moved()
        if result.version:
            record.version = self.version = result.version
        if result.status:
            _note_response(record, result)
            if record.first_response or not is_worth_another_try(self._mesh, self._target, connection, record, result):
                self._fail(failure_of(connection, record, result))
            else:
                self._begin(record.attempt + 1, (connection,))
            return
        _note_response(record, result)
        if not result.final or result.outputs:
            self._ready.append((connection, number, result.outputs))
        self._is_ended = result.final
        self._wake()


def _note_end(record: StepRecord, connection: StageConnection, result: StageResult) -> None:
    record.ended = time.monotonic_ns()
    record.timing = result.timing
    record.status, record.error = result.status, result.error
    record.clock_offset, record.clock_error = connection.clock.offset_ns, connection.clock.error_ns


def _note_response(record: StepRecord, result: StageResult) -> None:
    is_empty = result.final and not result.outputs
    if not record.first_response and not is_empty:
        record.first_response = time.monotonic_ns()
    if record.responses is None:
        record.responses = []
    timing = result.timing
    if timing is not None and len(record.responses) < RESPONSES_KEPT:
        computed = timing.computed or timing.sent
        written = computed if is_empty else timing.output_ready
        record.responses.append(ResponseTiming(computed, written, result.status, is_empty))
