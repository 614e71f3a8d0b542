"""ModelStreamInfer: any number of requests on one stream, each with its own responses.

Source: protocol.md §8.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from dataclasses import dataclass
from typing import Any, Final

from grpc import aio

from gateway.forwarding import NO_FORWARDING, Forwarding
from gateway.service import InferenceService
from tensorline.errors import DeadlineError, InternalError, ResourceExhaustedError, TensorlineError
from tensorline.protocol.contents import varint
from tensorline.protocol.infer import InferRequest, InferResponse
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.protocol.wire import decode_request_wire, encode_response_wire

__all__ = ["InferStream"]

log = logging.getLogger(__name__)

RPC: Final = "inference.GRPCInferenceService/ModelStreamInfer"

IN_FLIGHT: Final = 64
"""Requests of one stream at a time; with so many unanswered nothing more is read from it."""

UNREAD_S: Final = 60.0
"""How long a client may leave one message unread."""

FINAL: Final = "triton_final_response"
STRICT: Final = ("triton_grpc_error", "true")
_RESPONSE_TAG: Final = bytes([pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | 2])
_LEFT: Final = (aio.AbortError, aio.UsageError, aio.InternalError, asyncio.InvalidStateError)
"""What writing to a client that is gone raises."""

Context = Any  # aio.ServicerContext[bytes, bytes]


@dataclass(frozen=True, slots=True)
class _Refused:
    """A message that is no valid request."""

    id: str
    error: TensorlineError


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request's place among those that are answered in the order in which they came."""

    before: asyncio.Future[None] | None = None
    done: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        if self.before is not None and not self.before.done():
            # Not awaited itself: with this request cancelled it would be, too, and the others still wait for it.
            await asyncio.wait([self.before])

    def end(self) -> None:
        if self.done is not None:
            self.done.set_result(None)


class InferStream:
    """One call of ModelStreamInfer.

    Requests run side by side. Those to models with one response for each request are answered in the order in which
    they came; responses of decoupled models leave as they are made. A failed request is answered in its place and ends
    nothing but itself, unless the client asked for otherwise.
    """

    def __init__(
        self,
        service: InferenceService,
        context: Context,
        max_message_bytes: int,
        forwarding: Forwarding = NO_FORWARDING,
    ) -> None:
        self._service = service
        self._forwarding = forwarding
        self._context = context
        self._max_message_bytes = max_message_bytes
        self._metadata = tuple(context.invocation_metadata() or ())
        left = context.time_remaining()
        self._deadline = math.inf if left is None else time.monotonic() + left
        self._is_strict = any((key, value) == STRICT for key, value in self._metadata)
        """The first error of a model's execution ends the stream with its status."""
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._writing = asyncio.Lock()
        self._last: asyncio.Future[None] | None = None
        """Done when the newest of the requests that keep their order has been answered."""

    async def run(self) -> None:
        """Until the client has half-closed and everything is answered.

        Raises:
            TensorlineError: the status that the stream ends with.
        """
        fatal: TensorlineError | None = None
        try:
            # Else it goes out with the first message, and again with a status that ends the stream in that moment: gRPC
            # refuses the two together, sends no status at all, and the client waits for ever.
            await self._context.send_initial_metadata(())
            async with asyncio.TaskGroup() as tasks:
                await self._read(tasks)
        except* TensorlineError as errors:
            fatal = next(error for error in errors.exceptions if isinstance(error, TensorlineError))
        except* _LEFT as errors:
            log.debug("a client left its stream", extra={"cause": repr(errors.exceptions[0])})
        if fatal is not None:
            raise fatal

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._slots.acquire()
            wire: object = await self._context.read()
            if not isinstance(wire, bytes):  # aio.EOF
                return
            started_ns = time.monotonic_ns()
            try:
                request = self._decoded(wire)
            except InternalError:
                async with self._writing:  # a message on its way goes first
                    raise
            tasks.create_task(self._serve(request, self._turn(request), started_ns))
            del wire, request  # while the next one is waited for

    def _decoded(self, wire: bytes) -> InferRequest | _Refused:
        """
        Raises:
            InternalError: what came is no message: there is nothing that could be answered.
        """
        try:
            request = decode_request_wire(wire)
            return self._forwarding.apply(request, self._metadata)
        except InternalError:
            raise
        except TensorlineError as error:
            return _Refused(pb.ModelInferRequest.FromString(wire).id, error)

    def _turn(self, request: InferRequest | _Refused) -> _Turn:
        if isinstance(request, InferRequest) and self._service.is_decoupled(request.model, request.version):
            return _Turn()
        turn = _Turn(self._last, asyncio.get_running_loop().create_future())
        self._last = turn.done
        return turn

    async def _serve(self, request: InferRequest | _Refused, turn: _Turn, started_ns: int) -> None:
        try:
            if isinstance(request, InferRequest):
                await self._answer(request, turn, started_ns)
            else:
                await turn.wait()
                await self._write(_failed(pb.ModelInferResponse(id=request.id), request.error))
        finally:
            turn.end()
            self._slots.release()

    async def _answer(self, request: InferRequest, turn: _Turn, started_ns: int) -> None:
        is_decoupled = turn.done is None
        responses = self._service.infer_stream(
            request,
            self._service.recorder.begin(self._metadata, request.model),
            None if self._deadline == math.inf else self._deadline - time.monotonic(),
            started_ns,
            RPC,
        )
        try:
            async with contextlib.aclosing(responses):
                async for response in responses:
                    is_bare = is_decoupled and response.is_final and not response.outputs
                    if is_bare and not request.options.empty_final_response:
                        continue
                    message = self._encoded(response, is_typed=request.is_typed)
                    await turn.wait()
                    await self._write(message)
        except _UnreadError:
            raise
        except TensorlineError as error:
            await turn.wait()
            head = pb.ModelInferResponse(id=request.id)
            if error.has_run:
                if self._is_strict:
                    async with self._writing:  # a message on its way goes first
                        raise
                head.model_name = request.model
                head.parameters[FINAL].bool_param = True
            await self._write(_failed(head, error))

    def _encoded(self, response: InferResponse, *, is_typed: bool) -> bytes:
        """
        Raises:
            ResourceExhaustedError: more than a message may have.
        """
        parameters = {**response.parameters, FINAL: response.is_final}
        body = encode_response_wire(dataclasses.replace(response, parameters=parameters), is_typed=is_typed)
        message = b"".join((_RESPONSE_TAG, varint(len(body)), body))
        if len(message) > self._max_message_bytes:  # gRPC would end the stream
            error = ResourceExhaustedError(
                f"the response has {len(message)} bytes, at most {self._max_message_bytes} can be sent"
            )
            error.has_run = True
            raise error
        return message

    async def _write(self, message: bytes) -> None:
        """
        Raises:
            DeadlineError: the client does not read; its stream ends.
        """
        async with self._writing:
            try:
                async with asyncio.timeout(UNREAD_S):
                    await self._context.write(message)
            except TimeoutError as error:
                raise _UnreadError(f"the client has read nothing for {UNREAD_S:g} s") from error


class _UnreadError(DeadlineError):
    """Ends the stream, not a request of it: there is no way to say anything in-band."""


def _failed(head: pb.ModelInferResponse, error: TensorlineError) -> bytes:
    return pb.ModelStreamInferResponse(error_message=str(error), infer_response=head).SerializeToString()
