"""An instance on its own thread: takes one batch at a time, hands it back to the loop when it is done."""

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from tensorline.stage.backend import Instance, StreamInstance
from tensorline.stage.execution import Execution

__all__ = ["InstanceWorker"]

log = logging.getLogger(__name__)


class InstanceWorker:
    """Args:
    instance: Loaded; it is called on this worker's thread alone, unless it said how many streams it runs at once.
    on_done: Called on the loop after each execution.
    close: Ends the instance; called on the thread when it has nothing left.
    """

    def __init__(
        self,
        name: str,
        instance: Instance | StreamInstance,
        loop: asyncio.AbstractEventLoop,
        on_done: "Callable[[InstanceWorker, Execution], None]",
        close: Callable[[], None],
    ) -> None:
        self.name = name
        self.is_idle = True
        self.instant_bytes: int = getattr(instance, "instant_bytes", 0)
        """Batches with at most so many input bytes run on the loop: the instance says that it takes microseconds for
        them, less than waking a thread costs."""
        self._instance = instance
        self._loop = loop
        self._on_done = on_done
        self._close = close
        self._work: SimpleQueue[Execution | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"instance-{name}", daemon=True)
        self._thread.start()

    def start(self, execution: Execution) -> None:
        """Run it on the thread; `on_done` tells when. The worker must be idle."""
        self.is_idle = False
        self._work.put(execution)

    def run_now(self, execution: Execution) -> None:
        """Run it here, on the loop."""
        execution.run(self._instance, on_loop=True)

    def close(self) -> None:
        """Let the thread finish what it has, close the instance and end. Does not wait."""
        self._work.put(None)

    def join(self, timeout_s: float) -> bool:
        """Blocks, at most `timeout_s`; False if a running batch outlasted it."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (execution := self._work.get()) is not None:
            execution.run(self._instance)
            try:
                self._loop.call_soon_threadsafe(self._on_done, self, execution)
            except RuntimeError:  # the loop is closed: the process ends
                return
            del execution  # and with it the tensors that came inline, for as long as nothing new comes
        try:
            self._close()
        except BaseException:  # its code may exit: the thread is over anyway
            log.exception("instance did not close", extra={"model_instance": self.name})
