"""What every front end calls: one inference request from its values to its values, counted, traced and bounded."""

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncGenerator, Mapping

from gateway.mesh import Mesh
from gateway.models import Models, ServedModel
from gateway.plane import GatewayPlane
from gateway.regions import RequestRegions, has_regions, open_regions
from gateway.runner import RequestRunner
from gateway.stream_run import StreamWork
from gateway.stream_step import Patience
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
from tensorline.shm.region_table import RegionTable
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
    regions: Of the clients; None: their shared memory is switched off.
    """

    def __init__(
        self,
        mesh: Mesh,
        models: Models,
        plane: GatewayPlane,
        limits: GatewayLimits,
        default_timeout_s: float,
        recorder: Recorder,
        regions: RegionTable | None = None,
    ) -> None:
        self.models = models
        self.limits = limits
        self.is_stopping = False
        self._mesh = mesh
        self._plane = plane
        self._default_timeout_s = default_timeout_s
        self.recorder = recorder
        self._regions = regions

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
            found = self._find(request, record)
            if found.is_decoupled:
                raise UnsupportedError("ModelInfer RPC doesn't support models with decoupled transaction policy")
            return await self._infer(request, found, record, deadline)
        except BaseException as error:
            told = _told(error, request, record, deadline)
            if told is error:
                raise
            raise told from error
        finally:
            record.ended = time.monotonic_ns()
            self.recorder.record(record)

    async def infer_stream(
        self, request: InferRequest, context: TraceContext, timeout_s: float | None, started_ns: int, rpc: str
    ) -> AsyncGenerator[InferResponse, None]:
        """Every response of one request, each as soon as it is there; the last has `is_final`, and says of a decoupled
        model perhaps no more than that. With each step the caller says that its client has the response before: a model
        runs a few responses ahead and then waits. Closing the iterator cancels the request.

        Args:
            timeout_s: What the client gives us; None: as long as responses come and are taken.
            started_ns, rpc: As of `infer`.
        Raises:
            TensorlineError: as of `infer`, also after some responses. Its `has_run` tells whether a model had begun.
        """
        record = RequestRecord(context, new_span_id(), request.model, request.version, request.id, started_ns, rpc=rpc)
        deadline = math.inf if timeout_s is None else started_ns / 1e9 + timeout_s
        try:
            async with contextlib.aclosing(self._responses(request, record, deadline)) as responses:
                async for response in responses:
                    if response.is_final:
                        break
                    yield response
        except BaseException as error:
            told = _told(error, request, record, deadline)
            if isinstance(told, TensorlineError):
                told.has_run = bool(record.steps) and not record.steps[-1].is_refused
            if told is error:
                raise
            raise told from error
        finally:
            record.ended = time.monotonic_ns()
            self.recorder.record(record)
        yield response  # when its request is over and counted: how long the client takes to read it is not its affair

    def is_decoupled(self, model: str, version: str) -> bool:
        """Whether a request may have more or fewer responses than one; False also where there is no such model."""
        try:
            return self.models.find(model, version).is_decoupled
        except TensorlineError:
            return False

    async def _responses(
        self, request: InferRequest, record: RequestRecord, deadline: float
    ) -> AsyncGenerator[InferResponse, None]:
        found = self._find(request, record)
        if not found.is_decoupled:
            ends_at = deadline if deadline < math.inf else record.started / 1e9 + self._default_timeout_s
            yield await self._infer(request, found, record, ends_at)
            return
        regions = self._take_regions(request, found)
        byte_size = 0 if regions is None else regions.input_bytes
        byte_size += sum(tensor.byte_size for tensor in request.inputs)
        patience = Patience(deadline, self._default_timeout_s)
        work = StreamWork(
            self._mesh, self._plane, record, patience, request.parameters, request.options.priority, regions
        )
        try:
            await self._check(request, found, record)
            stream = found.stream(work, frozenset(output.name for output in request.outputs), request.version)
            self.limits.enter(byte_size)
            try:
                await stream.start(list(request.inputs))
                is_last = False
                while not is_last:
                    outputs, is_last = await stream.next()
                    record.version = stream.version or record.version
                    if is_last and not outputs:
                        yield InferResponse(request.model, "", request.id, ())
                    else:
                        yield self._response(request, found, record.version, outputs, regions, is_last=is_last)
            finally:
                stream.close()
                self.limits.leave(byte_size)
        finally:
            if regions is not None:
                regions.close()

    def _find(self, request: InferRequest, record: RequestRecord) -> ServedModel:
        if self.is_stopping:
            raise UnavailableError("the gateway is shutting down")
        found = self.models.find(request.model, request.version)
        record.version = str(found.version)
        return found

    async def _infer(
        self, request: InferRequest, found: ServedModel, record: RequestRecord, deadline: float
    ) -> InferResponse:
        regions = self._take_regions(request, found)
        try:
            return await self._run(request, found, record, deadline, regions)
        finally:
            if regions is not None:
                regions.close()

    def _take_regions(self, request: InferRequest, found: ServedModel) -> RequestRegions | None:
        """Before the request is checked: Triton, too, looks for the data first."""
        if not has_regions(request):
            return None
        return open_regions(self._regions, request, functools.partial(found.checker.check_text, request))

    async def _run(
        self,
        request: InferRequest,
        found: ServedModel,
        record: RequestRecord,
        deadline: float,
        regions: RequestRegions | None,
    ) -> InferResponse:
        await self._check(request, found, record)
        byte_size = sum(tensor.byte_size for tensor in request.inputs)
        if regions is not None:
            byte_size += regions.input_bytes
        self.limits.enter(byte_size)
        try:
            requested = frozenset(output.name for output in request.outputs)
            steps = found.steps(requested, request.version)
            runner = RequestRunner(
                self._mesh, self._plane, steps, record, deadline, request.parameters, request.options.priority, regions
            )
            outputs = await runner.run(list(request.inputs))
        finally:
            self.limits.leave(byte_size)
        version = str(found.version) if found.plan is not None else runner.version or str(found.version)
        record.version = version
        return self._response(request, found, version, outputs, regions, is_last=True)

    async def _check(self, request: InferRequest, found: ServedModel, record: RequestRecord) -> None:
        if found.checker.is_heavy(request):
            record.rows = await asyncio.to_thread(found.checker.check, request)
        else:
            record.rows = found.checker.check(request)

    def _response(
        self,
        request: InferRequest,
        found: ServedModel,
        version: str,
        outputs: list[Tensor],
        regions: RequestRegions | None,
        *,
        is_last: bool,
    ) -> InferResponse:
        if any(output.classification for output in request.outputs):
            outputs = self._classified(request, found, outputs)
        used = {} if regions is None else regions.used
        parameters = self._parameters(request, found)
        return InferResponse(request.model, version, request.id, outputs, parameters, is_last, used)

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


def _told(error: BaseException, request: InferRequest, record: RequestRecord, deadline: float) -> BaseException:
    """What ended the request as its client is told of it, noted in the record."""
    if isinstance(error, TensorlineError):
        record.status, record.error = error.status.value[0], str(error)
    elif isinstance(error, Exception):
        log.error("request failed", exc_info=error, extra={"model": request.model, "request_id": request.id})
        record.status, record.error = InternalError.status.value[0], "internal error"
        return InternalError("internal error")
    elif time.monotonic() >= deadline - CLOSE_S:
        # A client whose deadline passes cancels too, a moment before or after we notice ourselves.
        record.status = DeadlineError.status.value[0]
        record.error = "the deadline passed before the answer was ready"
    else:
        record.status, record.error = CANCELLED, "the client cancelled the request"
    return error
