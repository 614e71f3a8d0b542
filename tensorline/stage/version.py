"""One loaded version of a model: its queue, its instances, and what runs on them."""

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable

from tensorline.config.model import ModelConfig
from tensorline.errors import (
    CancelledByPeerError,
    DeadlineError,
    InvalidTensorError,
    TensorlineError,
    UnavailableError,
)
from tensorline.rpc.frames import StageResult
from tensorline.stage.backend import Instance, StreamInstance
from tensorline.stage.batch import Plane
from tensorline.stage.execution import Executed, Execution, ModelView
from tensorline.stage.queue import BatchQueue
from tensorline.stage.request import StageRequest
from tensorline.stage.streaming import StreamExecution
from tensorline.stage.worker import InstanceWorker

__all__ = ["ModelVersion"]

log = logging.getLogger(__name__)

_batch_ids = itertools.count(1)
_load_ids = itertools.count(1)


MakeBatch = Callable[[Callable[[StageResult], None]], list[StageRequest]]


class ModelVersion:
    """Lives on the loop; instances live on their threads.

    Args:
        on_executed: Called on the loop for each request that ran, before its answer is sent.
    """

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        instances: list[tuple[str, Instance | StreamInstance]],
        plane: Plane,
        max_queue: int,
        on_executed: Callable[[Executed], None],
    ) -> None:
        self.config = config
        self.version = version
        self.load_id = next(_load_ids)
        """Another one for each load: gateways see by it that a version was loaded again."""
        self.load_ns = 0
        """How long it took; set by who loaded it."""
        self._plane = plane
        self._on_executed = on_executed
        self._loop = asyncio.get_running_loop()
        # Responses of one stream belong to one request: a decoupled model's requests run alone.
        batching = config.dynamic_batching if not config.decoupled else None
        self._queue = BatchQueue(
            config.max_queue_size or max_queue,
            max_rows=max(1, config.max_batch_size) if batching is not None else 1,
            delay_s=batching.max_queue_delay_us / 1e6 if batching is not None else 0.0,
        )
        self._stacks = batching is not None and config.max_batch_size > 1
        self._view = ModelView(
            str(version),
            config.max_batch_size > 0,
            {spec.name: (spec.dims, spec.reshape) for spec in config.inputs if spec.reshape is not None},
            {spec.name: (spec.reshape, spec.dims) for spec in config.outputs if spec.reshape is not None},
            {spec.name: spec.datatype for spec in config.outputs},
            keeps_rows=not config.decoupled,
        )
        self._workers = [worker for name, instance in instances for worker in self._started(name, instance)]
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[Execution] = set()
        self._is_closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    def _started(self, name: str, instance: Instance | StreamInstance) -> list[InstanceWorker]:
        count = max(1, getattr(instance, "max_streams", 1)) if self.config.decoupled else 1
        close = instance.close if count == 1 else _Last(count, instance.close)
        return [InstanceWorker(name, instance, self._loop, self._finished, close) for _ in range(count)]

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return sum(len(execution.requests) for execution in self._running)

    def submit(self, request: StageRequest) -> None:
        """Admit a request; its answer comes by `request.answer`.

        Raises:
            OverloadedError: the queue is full.
            UnavailableError: the version is being unloaded.
            InvalidTensorError: inputs with different numbers of rows, or more of them than a batch may have.
        """
        if self._is_closing:
            raise UnavailableError(f"model '{self.config.name}' version {self.version} is not at ready state")
        if self.config.max_batch_size > 0 and request.inputs:
            request.rows = self._rows(request)
        if self._stacks:
            request.signature = tuple((t.name, t.datatype, t.shape[1:]) for t in request.inputs)
        request.queued_ns = time.monotonic_ns()
        now = time.monotonic()
        for dropped in self._queue.add(request, now):
            self._drop(dropped)
        self._idle.clear()
        self._dispatch(now)

    def _rows(self, request: StageRequest) -> int:
        # The gateway has looked at a client's; a step before may have made others, and stacked they would shift the
        # rows of every neighbour.
        first = request.inputs[0]
        for tensor in request.inputs:
            if not tensor.shape or tensor.shape[0] != first.shape[0]:
                raise InvalidTensorError(
                    f"input '{tensor.name}' batch size does not match other inputs for '{self.config.name}': "
                    f"'{first.name}' has shape {list(first.shape)}, '{tensor.name}' has {list(tensor.shape)}"
                )
        rows, most = first.shape[0], self.config.max_batch_size
        if not 0 <= rows <= most:
            raise InvalidTensorError(
                f"inference request batch-size must be <= {most} for '{self.config.name}', got {rows}"
            )
        return rows

    def cancel(self, request: StageRequest) -> None:
        """Nobody waits for it: out of the queue, or told to the batch that runs it."""
        request.is_cancelled = True
        if request.window is not None:
            request.window.close()
        if self._queue.remove(request):
            self._drop(request)
            self._settle(time.monotonic())

    def _dispatch(self, now: float) -> None:
        for worker in self._workers:
            while worker.is_idle:
                batch, dropped = self._queue.take(now)
                for request in dropped:
                    self._drop(request)
                if not batch:
                    self._settle(now)
                    return
                batched_ns = time.monotonic_ns()
                for request in batch:
                    request.batched_ns = batched_ns
                execution = self._execution(batch, worker.name)
                if worker.instant_bytes and _input_bytes(batch) <= worker.instant_bytes:
                    worker.run_now(execution)
                    self._answer(execution)
                else:
                    self._running.add(execution)
                    worker.start(execution)

    def _execution(self, batch: list[StageRequest], instance: str) -> Execution:
        number = next(_batch_ids)
        if self.config.decoupled:
            return StreamExecution(batch[0], number, instance, self._view, self._plane, self._respond)
        return Execution(batch, number, instance, self._view, self._plane)

    async def run_on_each(self, make: MakeBatch) -> list[StageResult]:
        """Run a batch on every instance, past the queue: before the first request comes.

        Args:
            make: Makes the requests of one batch, with what is to be told of their results.
        Returns:
            The last result of each.
        """
        # One of an instance's streams stands for all: they share what is warm.
        first = {worker.name: worker for worker in reversed(self._workers)}
        each = [self._run_on(worker, make) for worker in first.values()]
        return [result for results in await asyncio.gather(*each) for result in results]

    async def _run_on(self, worker: InstanceWorker, make: MakeBatch) -> list[StageResult]:
        results: list[StageResult] = []
        came = asyncio.Event()

        def take(result: StageResult) -> None:
            if result.final:
                results.append(result)
                came.set()

        requests = make(take)
        for batch in [[request] for request in requests] if self.config.decoupled else [requests]:
            wanted = len(results) + len(batch)
            execution = self._execution(batch, worker.name)
            self._running.add(execution)
            self._idle.clear()
            worker.start(execution)
            while len(results) < wanted:
                came.clear()
                await came.wait()
        return results

    def _respond(self, executed: Executed) -> None:
        """Called on an instance's thread, for a response that is not its request's last."""
        try:
            self._loop.call_soon_threadsafe(self._tell, executed)
        except RuntimeError:  # the loop is closed: the process ends
            executed.request.is_cancelled = True

    def _settle(self, now: float) -> None:
        wake_at = self._queue.wake_at()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_at < math.inf:
            self._timer = self._loop.call_later(max(0.0, wake_at - now), self._wake)
        if not self._queue and not self._running:
            self._idle.set()

    def _wake(self) -> None:
        self._timer = None
        self._dispatch(time.monotonic())

    def _finished(self, worker: InstanceWorker, execution: Execution) -> None:
        worker.is_idle = True
        self._running.discard(execution)
        self._answer(execution)
        self._dispatch(time.monotonic())

    def _answer(self, execution: Execution) -> None:
        for executed in execution.done:
            self._tell(executed)

    def _tell(self, executed: Executed) -> None:
        try:
            self._on_executed(executed)
            executed.request.answer(executed.result)
        except Exception:  # one answer's trouble must not keep the others waiting, nor the queue
            log.exception("a request could not be answered", extra={"model": self.config.name})

    def _drop(self, request: StageRequest) -> None:
        error: TensorlineError = (
            CancelledByPeerError("cancelled while it waited")
            if request.is_cancelled
            else DeadlineError("the deadline passed while the request waited")
        )
        request.answer(StageResult(error.status.value[0], str(error), version=self._view.version, not_started=True))

    async def aclose(self, timeout_s: float | None) -> None:
        """Take no more, let what is here finish for at most `timeout_s`, answer the rest, close the instances.

        Args:
            timeout_s: None: as long as it takes. A second call, with a limit, ends that.
        """
        self._is_closing = True
        self._queue.hurry()
        self._dispatch(time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            for request in self._queue.clear():
                request.answer(
                    StageResult(UnavailableError.status.value[0], "the stage stopped before its turn", not_started=True)
                )
            for execution in self._running:
                for request in execution.requests:
                    if request.window is not None:
                        request.window.close()
        if self._timer is not None:
            self._timer.cancel()
        for worker in self._workers:
            worker.close()
        await asyncio.gather(*(asyncio.to_thread(worker.join, 2.0) for worker in self._workers))


class _Last:
    """Calls `close` when it was itself called by the last of `count` threads."""

    def __init__(self, count: int, close: Callable[[], None]) -> None:
        self._left = count
        self._close = close
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._close()


def _input_bytes(requests: list[StageRequest]) -> int:
    # A BYTES output may be far larger than its input; instant instances are told so in their contract.
    return sum(tensor.byte_size for request in requests for tensor in request.inputs)
