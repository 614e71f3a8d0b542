"""Running one request of a decoupled model: each response sent as it is made, no further ahead than it is read."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import cast

from tensorline.errors import CancelledByPeerError, DeadlineError, UnavailableError
from tensorline.rpc.frames import StageResult
from tensorline.stage.backend import Instance, StreamInstance
from tensorline.stage.batch import Plane, RunningBatch
from tensorline.stage.execution import Executed, Execution, ModelView
from tensorline.stage.request import StageRequest

__all__ = ["StreamExecution"]

log = logging.getLogger(__name__)


class StreamExecution(Execution):
    """One request on its way through an instance that streams. `done` has its end, with the last response or bare.

    Args:
        respond: Takes each response before; called on the instance's thread.
    """

    def __init__(
        self,
        request: StageRequest,
        batch_id: int,
        instance_name: str,
        model: ModelView,
        plane: Plane,
        respond: Callable[[Executed], None],
    ) -> None:
        super().__init__([request], batch_id, instance_name, model, plane)
        self._respond = respond

    def _run(self, instance: Instance | StreamInstance, *, may_wait: bool) -> None:
        live, arrays = self.read_inputs()
        self.input_ready = time.monotonic_ns()
        if not live:
            return
        request, batch = live[0], RunningBatch(live, arrays[0], self.plane, may_wait=may_wait)
        responses: Iterator[object] | None = None
        try:
            with self.context(request):
                # The host has seen to it that a decoupled model's instance streams.
                responses = iter(cast(StreamInstance, instance).stream(batch))
                self._send_all(request, batch, responses)
        except BaseException as error:  # as in a batch: still only this request's failure
            self.executions = 1
            self.fail([request], error)
        finally:
            self._close(request, responses)
            self._let_go(batch)

    def _send_all(self, request: StageRequest, batch: RunningBatch, responses: Iterator[object]) -> None:
        while True:
            self.computed = 0
            _wait_turn(request)
            try:
                outputs = next(responses)
            except StopIteration as end:
                self._end(request, batch, end.value)
                return
            self.computed = time.monotonic_ns()
            self.write_outputs(batch, self.checked(batch, outputs))
            self._let_go(batch)
            if self.done[0].result.status:  # an input was freed meanwhile
                return
            response = self.done.pop()
            response.result.final = False
            if request.window is not None:
                request.window.add(sum(tensor.byte_size for tensor in response.result.outputs))
            self._respond(response)

    def _end(self, request: StageRequest, batch: RunningBatch, outputs: object) -> None:
        self.computed = time.monotonic_ns()
        self.executions = 1  # told with the end, not with the first response: gateways keep the timing of the end
        if outputs is not None:
            self.write_outputs(batch, self.checked(batch, outputs))
            return
        timing = self.timing(request, self.input_ready, self.computed, time.monotonic_ns(), request.rows)
        self.done.append(Executed(request, StageResult(0, version=self.version, timing=timing)))

    def _close(self, request: StageRequest, responses: Iterator[object] | None) -> None:
        close = getattr(responses, "close", None)
        if close is not None:
            try:
                close()
            except BaseException:  # the request has its end: what its generator says now reaches the log
                log.exception("a stream did not close", extra={"model": request.model})

    def _let_go(self, batch: RunningBatch) -> None:
        """What `empty` gave out holds one reference of the batch's own; the responses have theirs."""
        made, batch.made = batch.made, {}
        for _, block in made.values():
            self.plane.arena.release(block.handle.block, block.handle.generation)


def _wait_turn(request: StageRequest) -> None:
    """Until the client has read enough for another response to be made.

    Raises:
        CancelledByPeerError, DeadlineError, UnavailableError: it will not be read.
    """
    is_open = True
    if request.window is not None:
        left = request.deadline - time.monotonic()
        is_open = request.window.wait_room(None if left == math.inf else max(0.0, left))
    if request.is_cancelled:
        raise CancelledByPeerError("cancelled between two responses")
    if request.deadline <= time.monotonic():
        raise DeadlineError("the deadline passed between two responses")
    if not is_open:
        raise UnavailableError("the stage stopped between two responses")
