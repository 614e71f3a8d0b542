"""The stage's end of one stage stream: frames in, frames out, and what the gateway at the other end holds here."""

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol, cast

from google.protobuf.message import DecodeError
from grpc import aio

from tensorline.errors import InternalError, ResourceExhaustedError, TensorlineError
from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.rpc.connection import BEAT_S, BEATS_MISSED
from tensorline.rpc.frames import (
    ChunkStore,
    StageResult,
    decode_order,
    decode_parameters,
    decode_tensors,
    encode_parameters,
    encode_timing,
)
from tensorline.rpc.hosted import HostedModel
from tensorline.rpc.lane import Lane
from tensorline.rpc.outbox import Outbox, TensorList
from tensorline.stage.backend import ParameterValue
from tensorline.stage.changes import ModelChanger, ModelChanges
from tensorline.stage.request import StageRequest
from tensorline.stage.window import ResponseWindow
from tensorline.telemetry.logs import one_line

__all__ = ["Session", "SessionOwner"]

log = logging.getLogger(__name__)

MODELS_BYTES: Final = 2 << 20
"""Of all models' configurations: they travel in one frame."""

ERROR_LIMIT: Final = 1024
"""Characters of an error text."""

OUTCOME_LIMIT: Final = 16 << 10
"""Characters of what is told of a load: of each version why."""

_NO_PARAMETERS: Final[Mapping[str, ParameterValue]] = {}


class SessionOwner(ModelChanger, Protocol):
    """What a session asks of the stage behind it."""

    def submit(self, session: "Session", request: StageRequest) -> Callable[[StageRequest], None]:
        """Admit; returns how to cancel it. Raises a TensorlineError to refuse."""

    def release(self, session: "Session", blocks: Iterable[tuple[int, int]]) -> None:
        """(block, generation) pairs that the gateway holds no longer."""

    def load(self) -> tuple[int, int]:
        """Requests waiting, arena bytes leased."""

    def queues(self) -> Iterable[tuple[str, str, int]]:
        """Model, version and requests waiting, of the queues that are not empty."""


class Session:
    """Args:
    gateway: The peer's instance id, for logs.
    inline_limit: Bytes of unfinished inline tensors that the gateway may have here, and of answers that wait for it.
    """

    def __init__(self, owner: SessionOwner, gateway: str, inline_limit: int) -> None:
        self.gateway = gateway
        self.is_open = True
        self.unknown_frames = 0
        self._owner = owner
        self._outbox = Outbox()
        self._inline_limit = inline_limit
        self._chunks = ChunkStore(inline_limit)
        self._heard = time.monotonic()
        self._lane: Lane | None = None
        self._chosen = asyncio.Event()
        self._lost = asyncio.Event()
        self._changes = ModelChanges(owner, self._tell_outcome, gateway)
        self._requests: dict[int, tuple[StageRequest, Callable[[StageRequest], None]]] = {}

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    async def run(self, context: "aio.ServicerContext[pb.Frames, pb.Frames]") -> None:
        """Until the gateway ends the stream, falls silent, or `end` was called and everything is written.

        Nothing is sent before the gateway's first word, which comes by the carrier that it chose: the stream, or the
        lane that was offered to it.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                move = tasks.create_task(self._move(context))
                read = tasks.create_task(self._read(context))
                beat = tasks.create_task(self._beat())
                lost = tasks.create_task(self._lost.wait())
                await asyncio.wait([move, read, beat, lost], return_when=asyncio.FIRST_COMPLETED)
                for task in (move, read, beat, lost):
                    task.cancel()
        except* (aio.AbortError, aio.UsageError, aio.InternalError, asyncio.InvalidStateError, DecodeError) as errors:
            log.warning("gateway stream broke", extra={"gateway": self.gateway, "cause": repr(errors.exceptions[0])})
        except* TimeoutError:
            log.warning("gateway fell silent", extra={"gateway": self.gateway})
        finally:
            self.is_open = False
            if self._lane is not None:
                self._lane.close()
            for request, cancel in list(self._requests.values()):
                cancel(request)
            self._requests.clear()
            self._changes.end()

    def attach(self, lane: Lane) -> None:
        """The gateway has opened the lane that it was offered."""
        self._lane = lane
        lane.on_message = self._take_message
        lane.on_lost = self._lost.set
        lane.on_room = lambda: self._outbox.flush_to(lane)
        self._chosen.set()

    async def _move(self, context: "aio.ServicerContext[pb.Frames, pb.Frames]") -> None:
        await self._chosen.wait()
        if self._lane is None:
            await self._outbox.pump(context.write)
        else:
            self._outbox.flush_to(self._lane)
            await self._lost.wait()

    def end(self) -> None:
        """Close the stream from our side once what is queued for it is written."""
        self._outbox.end()

    def send_models(self, models: list[HostedModel]) -> None:
        sizes = [len(model.config) + len(model.reason) + len(model.name) for model in models]
        while sum(sizes) > MODELS_BYTES:
            log.error("a model more than one message can tell of", extra={"model": models[len(sizes) - 1].name})
            sizes.pop()
        frame = self._outbox.frame(sum(sizes)).models
        frame.SetInParent()  # no models are news, too
        for model in models[: len(sizes)]:
            frame.models.add(
                name=model.name,
                version=model.version,
                state=model.state,
                reason=model.reason,
                config=model.config,
                load=model.load,
                load_ns=model.load_ns,
                override=model.override,
            )

    def send_drain(self, reason: str) -> None:
        self._outbox.frame().drain.reason = reason

    async def _read(self, context: "aio.ServicerContext[pb.Frames, pb.Frames]") -> None:
        while True:
            message: object = await context.read()
            if message is aio.EOF:
                return
            self._chosen.set()
            self._take_message(cast(pb.Frames, message))

    def _take_message(self, message: pb.Frames) -> None:
        self._heard = time.monotonic()
        received_ns = time.monotonic_ns()
        for frame in message.frames:
            self._take(frame, received_ns)

    def _take(self, frame: pb.Frame, received_ns: int) -> None:
        kind = frame.WhichOneof("kind")
        if kind == "submit":
            self._take_submit(frame.submit, received_ns)
        elif kind == "release":
            self._owner.release(self, [(block.block, block.generation) for block in frame.release.blocks])
        elif kind == "cancel":
            known = self._requests.get(frame.cancel.id)
            if known is not None:
                request, cancel = known
                cancel(request)
        elif kind == "taken":
            known = self._requests.get(frame.taken.id)
            if known is not None and known[0].window is not None:
                known[0].window.take(frame.taken.responses)
        elif kind == "beat":
            self._take_beat(frame.beat)
        elif kind == "chunk":
            try:
                self._chunks.add(frame.chunk)
            except TensorlineError as error:
                # The Submit that refers to these chunks will be refused by name; the stream lives on.
                log.warning("chunk refused", extra={"gateway": self.gateway, "cause": str(error)})
        elif kind == "load":
            self._take_load(frame.load)
        elif kind == "unload":
            self._changes.unload(frame.unload.id, frame.unload.model)
        else:
            self.unknown_frames += 1

    def _take_load(self, wire: pb.Load) -> None:
        try:
            order = decode_order(wire, self._chunks)  # now: the chunks of the next one may be coming
        except TensorlineError as error:
            self._tell_outcome(wire.id, error)
        else:
            self._changes.load(wire.id, order)

    def _tell_outcome(self, number: int, error: TensorlineError | None, is_mine: bool = True) -> None:
        outcome = self._outbox.frame().outcome
        outcome.id = number
        outcome.not_mine = not is_mine
        if error is not None:
            outcome.status, outcome.error = error.status.value[0], str(error)[:OUTCOME_LIMIT]

    def _take_submit(self, wire: pb.Submit, received_ns: int) -> None:
        number = wire.id
        if number in self._requests:  # there is one end for each number, and the first has it
            log.error("a request's number is in use", extra={"gateway": self.gateway})
            return
        timeout_us = wire.timeout_us
        request = StageRequest(
            wire.model,
            wire.version,
            [],
            tuple(wire.outputs),
            wire.request_id,
            received_ns * 1e-9 + timeout_us * 1e-6 if timeout_us else math.inf,
            functools.partial(self._answer, number),
            self,
            decode_parameters(wire.parameters) if wire.parameters else _NO_PARAMETERS,
            wire.priority,
            wire.inline_only,
            wire.trace_id,
            wire.span_id,
            wire.trace_flags,
            wire.tracestate,
            received_ns=received_ns,
        )
        if wire.window:
            request.window = ResponseWindow(wire.window)
        # Known before it is admitted: an instant model answers before `submit` returns.
        self._requests[number] = (request, _ignore)
        try:
            request.inputs = decode_tensors(wire.inputs, self._chunks)
            cancel = self._owner.submit(self, request)
            if number in self._requests:
                self._requests[number] = (request, cancel)
        except Exception as error:
            if not isinstance(error, TensorlineError):
                log.exception("submission failed", extra={"gateway": self.gateway})
                error = InternalError("internal error")
            self._answer(number, StageResult(error.status.value[0], str(error), not_started=True))

    def _answer(self, number: int, result: StageResult) -> None:
        known = self._requests.pop(number, None) if result.final else self._requests.get(number)
        if known is None and self.is_open:
            log.error("a request was answered twice", extra={"gateway": self.gateway})
            return
        if not self.is_open:
            return
        waiting = self._outbox.waiting_bytes
        if waiting > self._inline_limit:
            unread = self._unread(result, waiting)
            if unread is not result and not result.final and known is not None:
                # The end for the gateway; for us when the model has noticed. What it sends till then is ignored there.
                request, cancel = known
                cancel(request)
            result = unread

        def room() -> TensorList:
            wire = self._outbox.frame().result
            wire.id = number
            wire.status = result.status
            if result.error:
                wire.error = one_line(result.error, ERROR_LIMIT)
            if result.version:
                wire.version = result.version
            wire.final = result.final
            if result.not_started:
                wire.not_started = True
            if result.parameters:
                encode_parameters(wire.parameters, result.parameters)
            if result.timing is not None:
                encode_timing(wire.timing, result.timing, time.monotonic_ns())
            return wire.outputs

        self._outbox.put_tensors(result.outputs, room)

    def _unread(self, result: StageResult, waiting: int) -> StageResult:
        """What to answer instead to a gateway that does not read its answers."""
        if waiting > 2 * self._inline_limit and not self._lost.is_set():
            log.warning("gateway does not read its answers", extra={"gateway": self.gateway})
            self._lost.set()
        if not result.outputs or any(tensor.handle is not None for tensor in result.outputs):
            return result
        return StageResult(
            ResourceExhaustedError.status.value[0],
            f"answers of {waiting} bytes wait for the gateway, at most {self._inline_limit} are kept",
            version=result.version,
            timing=result.timing,
        )

    def _take_beat(self, beat: pb.Beat) -> None:
        if beat.echo_ns:
            return
        answer = self._outbox.frame().beat
        answer.sent_ns = time.monotonic_ns()
        answer.echo_ns = beat.sent_ns
        answer.queued, answer.arena_bytes = self._owner.load()
        for model, version, requests in self._owner.queues():
            answer.queues.add(model=model, version=version, requests=requests)

    async def _beat(self) -> None:
        # The gateway beats; we listen. Only silence that our own loop was awake for counts.
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(BEAT_S)
            overslept = time.monotonic() - asleep - BEAT_S
            if overslept > BEAT_S:
                self._heard += overslept
            if time.monotonic() - self._heard > BEATS_MISSED * BEAT_S:
                raise TimeoutError


def _ignore(request: StageRequest) -> None:
    request.is_cancelled = True
