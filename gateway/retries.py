"""What becomes of a step that failed: another try elsewhere, or the error that its client is told."""

import time

from gateway.mesh import Mesh
from tensorline.errors import OverloadedError, TensorlineError, UnavailableError, error_for_status
from tensorline.rpc.connection import StageConnection
from tensorline.rpc.frames import StageResult
from tensorline.telemetry.record import StepRecord

__all__ = ["failure_of", "is_worth_another_try"]

ATTEMPTS = 2
UNAVAILABLE = UnavailableError.status.value[0]


def is_worth_another_try(
    mesh: Mesh, target: tuple[str, str], connection: StageConnection, record: StepRecord, result: StageResult
) -> bool:
    """Whether the step is to go to another instance than `connection`; the model's budget has then paid for it.

    Args:
        target: Model and version of the step.
        record: Of the failed attempt; noted in it is whether the stage refused it before the model ran.
    """
    record.is_refused = result.status == UNAVAILABLE and result.not_started
    may_repeat = record.is_refused or (result.status == UNAVAILABLE and not connection.is_open)
    if not may_repeat or record.attempt >= ATTEMPTS:
        return False
    # If nobody else can run it, the first refusal is the answer: it says more.
    if not any(other.accepts and other is not connection for other in mesh.serving(*target)):
        return False
    # A stage that drains refuses what was on its way to it: that is no failure, and costs nothing of the budget.
    is_free = connection.is_draining and record.is_refused
    return is_free or mesh.budget(record.model).take(time.monotonic())


def failure_of(connection: StageConnection, record: StepRecord, result: StageResult) -> TensorlineError:
    """The error of a failed step that is not tried again."""
    if not connection.is_open:
        return UnavailableError(f"the instance of model '{record.model}' that ran the request is gone")
    if record.is_refused:
        return OverloadedError(result.error)
    return error_for_status(result.status, result.error)
