"""What every front end calls: one inference request from its values to its values, counted, traced and bounded."""

import asyncio
import logging
import time
from collections.abc import Mapping

from gateway.mesh import Mesh
from gateway.models import Models, ServedModel
from gateway.plane import GatewayPlane
from gateway.runner import RequestRunner
from tensorline.errors import (
    DeadlineError,
    InternalError,
    OverloadedError,
    TensorlineError,
    UnavailableError,
    UnsupportedError,
)
from tensorline.protocol.classification import classify_tensor
from tensorline.protocol.infer import InferRequest, InferResponse, ParameterValue
from tensorline.telemetry.context import new_span_id
from tensorline.telemetry.record import RequestRecord, TraceContext
from tensorline.telemetry.recorder import Recorder
from tensorline.tensor import Tensor

__all__ = ["GatewayLimits", "InferenceService"]

log = logging.getLogger(__name__)

CANCELLED = 1
CLOSE_S = 0.02
"""Before the deadline: a cancellation that comes so late is the deadline's."""


class GatewayLimits:
    """What this gateway has in its hands at once.

    Args:
        requests: In flight.
        byte_size: Of their inputs.
    """

    def __init__(self, requests: int, byte_size: int) -> None:
        self._max_requests = requests
        self._max_bytes = byte_size
        self.in_flight = 0
        self.bytes_in_flight = 0

    def enter(self, byte_size: int) -> None:
        """
        Raises:
            OverloadedError: this request would be one too many; it names the limit.
        """
        if self.in_flight >= self._max_requests:
            raise OverloadedError(f"{self._max_requests} requests are already in flight at this gateway")
        if self.bytes_in_flight + byte_size > self._max_bytes and self.in_flight:
            raise OverloadedError(
                f"{self.bytes_in_flight} bytes of input are already in flight at this gateway, at most "
                f"{self._max_bytes} are allowed"
            )
        self.in_flight += 1
        self.bytes_in_flight += byte_size

    def leave(self, byte_size: int) -> None:
        self.in_flight -= 1
        self.bytes_in_flight -= byte_size


class InferenceService:
    """Args:
    recorder: Told of each request once its outcome is known.
    """

    def __init__(
        self,
        mesh: Mesh,
        models: Models,
        plane: GatewayPlane,
        limits: GatewayLimits,
        default_timeout_s: float,
        recorder: Recorder,
    ) -> None:
        self.models = models
        self.limits = limits
        self.is_stopping = False
        self._mesh = mesh
        self._plane = plane
        self._default_timeout_s = default_timeout_s
        self.recorder = recorder

    async def infer(
        self, request: InferRequest, context: TraceContext, timeout_s: float | None, started_ns: int, rpc: str
    ) -> InferResponse:
        """
        Args:
            timeout_s: What the client gives us; None: the default.
            started_ns: When the request arrived, monotonic.
            rpc: Full method name, for the trace.
        Raises:
            TensorlineError: the answer is this error; its text begins with the request id where Triton's does.
        """
        record = RequestRecord(context, new_span_id(), request.model, request.version, request.id, started_ns, rpc=rpc)
        deadline = started_ns / 1e9 + (self._default_timeout_s if timeout_s is None else timeout_s)
        try:
            return await self._infer(request, record, deadline)
        except TensorlineError as error:
            record.status, record.error = error.status.value[0], str(error)
            raise
        except asyncio.CancelledError:
            # A client whose deadline passes cancels too, a moment before or after we notice ourselves.
            if time.monotonic() >= deadline - CLOSE_S:
                record.status = DeadlineError.status.value[0]
                record.error = "the deadline passed before the answer was ready"
            else:
                record.status, record.error = CANCELLED, "the client cancelled the request"
            raise
        except Exception as error:
            log.exception("request failed", extra={"model": request.model, "request_id": request.id})
            record.status, record.error = InternalError.status.value[0], "internal error"
            raise InternalError("internal error") from error
        finally:
            record.ended = time.monotonic_ns()
            self.recorder.record(record)

    async def _infer(self, request: InferRequest, record: RequestRecord, deadline: float) -> InferResponse:
        if self.is_stopping:
            raise UnavailableError("the gateway is shutting down")
        found = self.models.find(request.model, request.version)
        record.version = str(found.version)
        if found.config.decoupled or (found.plan is not None and found.plan.is_decoupled):
            raise UnsupportedError("ModelInfer RPC doesn't support models with decoupled transaction policy")
        if found.checker.is_heavy(request):
            record.rows = await asyncio.to_thread(found.checker.check, request)
        else:
            record.rows = found.checker.check(request)
        byte_size = sum(tensor.byte_size for tensor in request.inputs)
        self.limits.enter(byte_size)
        try:
            requested = frozenset(output.name for output in request.outputs)
            steps = found.steps(requested, request.version)
            runner = RequestRunner(
                self._mesh, self._plane, steps, record, deadline, request.parameters, request.options.priority
            )
            outputs = await runner.run(list(request.inputs))
        finally:
            self.limits.leave(byte_size)
        version = str(found.version) if found.plan is not None else runner.version or str(found.version)
        record.version = version
        if any(output.classification for output in request.outputs):
            outputs = self._classified(request, found, outputs)
        return InferResponse(request.model, version, request.id, outputs, self._parameters(request, found))

    def _classified(self, request: InferRequest, found: ServedModel, outputs: list[Tensor]) -> list[Tensor]:
        wanted = {output.name: output.classification for output in request.outputs if output.classification}
        labels = self.models.labels(found.config)
        return [
            classify_tensor(
                tensor, wanted[tensor.name], labels.get(tensor.name, ()), is_batched=found.config.max_batch_size > 0
            )
            if tensor.name in wanted
            else tensor
            for tensor in outputs
        ]

    def _parameters(self, request: InferRequest, found: ServedModel) -> Mapping[str, ParameterValue]:
        if found.plan is None:
            return {}
        # As Triton's pipelines answer, also without a sequence.
        options = request.options
        return {
            "sequence_id": options.sequence_id,
            "sequence_start": options.sequence_start,
            "sequence_end": options.sequence_end,
        }
