"""The gateway's end of one stage stream."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import grpc
from grpc import aio

from tensorline.errors import (
    ResourceExhaustedError,
    TensorlineError,
    UnavailableError,
    error_for_status,
)
from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.rpc.clock import ClockOffset
from tensorline.rpc.frames import (
    ChunkStore,
    LoadOrder,
    StageResult,
    Submission,
    decode_handle_tensor,
    decode_result,
    encode_parameters,
    text_bytes,
)
from tensorline.rpc.hosted import HostedModel
from tensorline.rpc.lane import Lane
from tensorline.rpc.outbox import Outbox, TensorList
from tensorline.telemetry.record import Process
from tensorline.tensor import Handle, Tensor

__all__ = ["BEATS_MISSED", "BEAT_S", "LocalPeer", "StageConnection"]

log = logging.getLogger(__name__)

BEAT_S = 1.0
BEATS_MISSED = 4
LANE_END_S = 1.0
"""After the end of the stream, for what the stage has sent by the lane before."""
OnResult = Callable[[StageResult], None]


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """Who we are on the streams that we open: goes into Hello."""

    instance_id: str
    nonce: bytes
    arena: bytes
    inline_limit: int
    """Bytes of unfinished inline tensors that one stream may hold."""


class StageConnection:
    """A live stream to one stage instance: submit work, get each answer by callback, in the loop's thread.

    Every submission ends in exactly one final call of its `on_result`, at the latest when the stream breaks. That of a
    decoupled model is called before for each response, too.
    """

    def __init__(
        self,
        hello: pb.Hello,
        local: LocalPeer,
        call: "aio.StreamStreamCall[pb.Frames, pb.Frames]",
        on_models: Callable[["StageConnection", list[HostedModel]], None],
    ) -> None:
        self.instance_id: str = hello.instance_id
        self.service: str = hello.service
        self.nonce: bytes = hello.nonce
        self.arena: bytes = hello.arena
        self.process = Process(hello.service, hello.instance_id, hello.host, hello.pid, hello.release)
        self.backends = frozenset(hello.backends)
        """What the stage can run; empty where it does not say."""
        self.is_colocated = bool(hello.nonce) and hello.nonce == local.nonce
        self.max_in_flight: int = hello.max_in_flight
        self.is_draining = False
        self.is_open = True
        self.queued = 0
        """Requests that wait at the stage, as its last beat said."""
        self.queues: dict[tuple[str, str], int] = {}
        """The same by model and version; empty queues are left out."""
        self.arena_bytes = 0
        self.clock = ClockOffset()
        self._lane_token = hello.lane_token
        self._call = call
        self._on_models = on_models
        self._models: list[HostedModel] = []
        self._outbox = Outbox()
        self._chunks = ChunkStore(local.inline_limit)
        self._pending: dict[int, OnResult | None] = {}
        self._given_back: dict[int, set[tuple[int, int]]] = {}
        self._changes: dict[int, asyncio.Future[bool]] = {}
        self._next_id = 0
        self._heard = time.monotonic()
        self.unknown_frames = 0

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    @property
    def accepts(self) -> bool:
        return self.is_open and not self.is_draining and len(self._pending) < self.max_in_flight

    def submit(self, work: Submission, on_result: OnResult) -> int:
        """Send one request; its number on this stream, for `cancel`.

        Raises:
            UnavailableError: the stream is broken.
            InvalidTensorError: more text than a frame can hold.
        """
        if not self.is_open:
            raise UnavailableError("the stage is gone")
        # Text is counted only where there may be much of it.
        is_long = work.parameters or len(work.request_id) > 128 or len(work.outputs) > 32
        long_text = text_bytes(work) if is_long else 0
        self._next_id += 1
        number = self._next_id

        def room() -> TensorList:
            wire = self._outbox.frame(long_text).submit
            wire.id = number
            wire.model = work.model
            if work.version:
                wire.version = work.version
            if work.timeout_s is not None:
                wire.timeout_us = max(1, int(work.timeout_s * 1e6))
            if work.request_id:
                wire.request_id = work.request_id
            if work.outputs:
                wire.outputs.extend(work.outputs)
            if work.parameters:
                encode_parameters(wire.parameters, work.parameters)
            if work.priority:
                wire.priority = work.priority
            if not self.is_colocated:
                wire.inline_only = True
            wire.trace_id = work.trace_id
            wire.span_id = work.span_id
            wire.trace_flags = work.trace_flags
            if work.tracestate:
                wire.tracestate = work.tracestate
            if work.window:
                wire.window = work.window
            return wire.inputs

        self._outbox.put_tensors(work.inputs, room)
        self._pending[number] = on_result
        return number

    def cancel(self, number: int, inputs: Iterable[Tensor] = ()) -> None:
        """Nobody wants the answer any more. The slot is free again when the stage has said so.

        Args:
            inputs: Of the request. The caller gives their blocks back itself, also those that a late answer passes on.
        """
        if number in self._pending and self.is_open:
            self._pending[number] = None
            self._outbox.frame().cancel.id = number
            handles = [tensor.handle for tensor in inputs if tensor.handle is not None]
            if handles:
                self._given_back[number] = {_block(handle) for handle in handles if handle.arena == self.arena}

    def take(self, number: int) -> None:
        """One more response of a submission with a window has been passed on."""
        if number in self._pending and self.is_open:
            taken = self._outbox.frame().taken
            taken.id = number
            taken.responses = 1

    def release(self, handles: Iterable[Handle]) -> None:
        """Blocks of this instance's arena that nobody reads any more."""
        if not self.is_open:
            return
        release = self._outbox.frame().release
        for handle in handles:
            block = release.blocks.add()
            block.block = handle.block
            block.generation = handle.generation

    async def load(self, order: LoadOrder) -> bool:
        """Have the stage load a model; whether it is one of this stage.

        Raises:
            TensorlineError: the stage's answer; it could not be loaded.
            UnavailableError: the stream broke first.
        """
        files = [Tensor(path, "UINT8", (len(data),), data) for path, data in order.files.items()]

        def send(number: int) -> None:
            order_text = len(order.config) + sum(map(len, order.files))

            def room() -> TensorList:
                wire = self._outbox.frame(order_text).load
                wire.id, wire.model, wire.config, wire.override = number, order.model, order.config, order.override
                return wire.files

            self._outbox.put_tensors(files, room)

        return await self._change(send)

    async def unload(self, model: str) -> None:
        """Have the stage take no more requests for a model; it finishes those that it has.

        Raises:
            TensorlineError: as `load`.
        """

        def send(number: int) -> None:
            wire = self._outbox.frame().unload
            wire.id, wire.model = number, model

        await self._change(send)

    async def _change(self, send: Callable[[int], None]) -> bool:
        if not self.is_open:
            raise UnavailableError("the stage is gone")
        self._next_id += 1
        number = self._next_id
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._changes[number] = outcome
        try:
            send(number)
            return await outcome
        finally:
            self._changes.pop(number, None)

    def _take_outcome(self, wire: pb.Outcome) -> None:
        outcome = self._changes.get(wire.id)
        if outcome is None or outcome.done():
            return
        if wire.status:
            outcome.set_exception(error_for_status(wire.status, wire.error))
        else:
            outcome.set_result(not wire.not_mine)

    async def run(self, lane: Lane | None = None) -> None:
        """Move frames until the stream ends, which this coroutine's end makes known to every pending request.

        Args:
            lane: Where the peers agreed on one: the frames' way in place of the stream, which tells only of its end.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                if lane is None:
                    move = tasks.create_task(self._outbox.pump(self._call.write))
                else:
                    move = tasks.create_task(self._move_by_lane(lane))
                beat = tasks.create_task(self._beat())
                read = tasks.create_task(self._read())
                await asyncio.wait([read, move, beat], return_when=asyncio.FIRST_COMPLETED)
                if lane is not None and not move.done() and not beat.done():
                    await asyncio.wait([move], timeout=LANE_END_S)
                for task in (read, move, beat):
                    task.cancel()
        except* (aio.AioRpcError, asyncio.InvalidStateError, TensorlineError, TimeoutError, aio.UsageError) as errors:
            log.warning("stage stream ended", extra={"stage": self.instance_id, "cause": _first_cause(errors)})
        finally:
            if lane is not None:
                lane.close()
            self._fail_pending()

    async def _move_by_lane(self, lane: Lane) -> None:
        lost = asyncio.Event()
        lane.on_message = self._take_message
        lane.on_lost = lost.set
        lane.on_room = lambda: self._outbox.flush_to(lane)
        if not lane.is_open:  # lost before anybody listened
            return
        lane.write_token(self._lane_token)
        self._outbox.flush_to(lane)
        await lost.wait()

    def _fail_pending(self) -> None:
        self.is_open = False
        pending, self._pending = self._pending, {}
        for on_result in pending.values():
            if on_result is not None:
                result = StageResult(grpc.StatusCode.UNAVAILABLE.value[0], "the stage that ran it is gone")
                self._tell(on_result, result)
        for outcome in self._changes.values():
            if not outcome.done():
                outcome.set_exception(UnavailableError("the stage was gone before it had loaded or unloaded"))

    def _tell(self, on_result: OnResult, result: StageResult) -> None:
        try:
            on_result(result)
        except Exception:  # one request's trouble is not that of the others on this stream
            log.exception("a result's taker failed", extra={"stage": self.instance_id})

    async def _read(self) -> None:
        while True:
            message = await self._call.read()
            if message is aio.EOF:
                return
            if message is None:  # how grpc.aio hands over bytes that are no message
                raise UnavailableError("the stage sent what is no message")
            self._take_message(cast(pb.Frames, message))

    def _take_message(self, message: pb.Frames) -> None:
        self._heard = time.monotonic()
        for frame in message.frames:
            self._take(frame)

    def _take(self, frame: pb.Frame) -> None:
        kind = frame.WhichOneof("kind")
        if kind == "result":
            self._take_result(frame.result)
        elif kind == "chunk":
            try:
                self._chunks.add(frame.chunk)
            except TensorlineError as error:
                # The Result that refers to these chunks will be refused; the stream lives on.
                log.warning("chunk refused", extra={"stage": self.instance_id, "cause": str(error)})
        elif kind == "beat":
            self._take_beat(frame.beat)
        elif kind == "models":
            self._models = [
                HostedModel(m.name, m.version, m.state, m.reason, m.config, m.load, m.load_ns, m.override)
                for m in frame.models.models
            ]
            self._on_models(self, self._models)
        elif kind == "outcome":
            self._take_outcome(frame.outcome)
        elif kind == "credit":
            self.max_in_flight = frame.credit.max_in_flight
        elif kind == "drain":
            self.is_draining = True
            log.info("stage drains", extra={"stage": self.instance_id})
            self._on_models(self, self._models)  # none of them is to be had here any more
        else:
            self.unknown_frames += 1

    def _take_result(self, wire: pb.Result) -> None:
        number = wire.id
        on_result = self._pending.pop(number, None) if wire.final else self._pending.get(number)
        try:
            result = decode_result(wire, self._chunks)
        except TensorlineError as error:
            kind = error if isinstance(error, ResourceExhaustedError) else TensorlineError
            result = StageResult(kind.status.value[0], str(error), final=wire.final)
            handles = [decode_handle_tensor(each) for each in wire.outputs if each.HasField("handle")]
            self._give_back(number, handles, is_last=wire.final)
        if on_result is not None:
            self._tell(on_result, result)
        else:  # cancelled meanwhile: what it holds for us goes back at once
            self._give_back(number, result.outputs, is_last=result.final)

    def _give_back(self, number: int, outputs: Iterable[Tensor], *, is_last: bool) -> None:
        own = [t.handle for t in outputs if t.handle is not None and t.handle.arena == self.arena]
        given_back = self._given_back.pop(number, ()) if is_last else self._given_back.get(number, ())
        # Once for each block: one release too many would end the lease of another request in the same block.
        held = {_block(handle): handle for handle in own if _block(handle) not in given_back}
        if held:
            self.release(held.values())

    def _take_beat(self, beat: pb.Beat) -> None:
        self.queued = beat.queued
        self.queues = {(queue.model, queue.version): queue.requests for queue in beat.queues}
        self.arena_bytes = beat.arena_bytes
        if beat.echo_ns:
            self.clock.add(sent=beat.echo_ns, peer=beat.sent_ns, received=time.monotonic_ns())
        else:
            answer = self._outbox.frame().beat
            answer.sent_ns = time.monotonic_ns()
            answer.echo_ns = beat.sent_ns

    async def _beat(self) -> None:
        # A silent peer is out, whatever HTTP/2 says: pings are answered by C threads while its loop is blocked.
        while True:
            self._outbox.frame().beat.sent_ns = time.monotonic_ns()
            asked = time.monotonic()
            await asyncio.sleep(BEAT_S)
            # Our own loop may have been the one that stood still: only silence that we were awake for counts.
            overslept = time.monotonic() - asked - BEAT_S
            if overslept > BEAT_S:
                self._heard += overslept
            if time.monotonic() - self._heard > BEATS_MISSED * BEAT_S:
                raise TimeoutError(f"no frame for {BEATS_MISSED * BEAT_S:.0f} s")

    @property
    def is_responsive(self) -> bool:
        """Heard of within the last two and a half beats."""
        return time.monotonic() - self._heard < 2.5 * BEAT_S


def _block(handle: Handle) -> tuple[int, int]:
    return handle.block, handle.generation


def _first_cause(group: BaseExceptionGroup[BaseException]) -> str:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error.code().name if isinstance(error, aio.AioRpcError) else f"{type(error).__name__}: {error}"
