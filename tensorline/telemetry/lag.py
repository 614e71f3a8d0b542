"""How late the event loop is, and what blocks it."""

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from tensorline.telemetry.metrics import Metrics

__all__ = ["LoopLag", "open_lag_monitor"]

log = logging.getLogger(__name__)

_INTERVAL_S: Final = 0.1
_BLOCKED_S: Final = 0.25
_SAMPLES: Final = 600  # a minute's


class LoopLag:
    """Delays of the last minute, in seconds: how much later than asked a timer ran."""

    def __init__(self) -> None:
        self._delays: deque[float] = deque(maxlen=_SAMPLES)
        self.beat_s = time.monotonic()
        """When the loop last ran our timer."""

    def max_s(self) -> float:
        return max(self._delays, default=0.0)

    def p99_s(self) -> float:
        delays = sorted(self._delays)
        return delays[int(len(delays) * 0.99)] if delays else 0.0

    async def run(self) -> None:
        while True:
            self.beat_s = time.monotonic()
            await asyncio.sleep(_INTERVAL_S)
            self._delays.append(max(0.0, time.monotonic() - self.beat_s - _INTERVAL_S))


@contextlib.asynccontextmanager
async def open_lag_monitor(metrics: Metrics | None = None, *, has_watchdog: bool = True) -> AsyncIterator[LoopLag]:
    """Measure the running loop until the block ends.

    Args:
        metrics: Where the two gauges are shown.
        has_watchdog: A thread logs the loop's stack when it has been blocked for 250 ms, once for each time.
    """
    lag = LoopLag()
    if metrics is not None:
        metrics.watch("tensorline_event_loop_lag_max_seconds", lag.max_s)
        metrics.watch("tensorline_event_loop_lag_p99_seconds", lag.p99_s)
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(lag, threading.get_ident(), stop), name="loop-watchdog", daemon=True)
    task = asyncio.create_task(lag.run(), name="loop-lag")
    if has_watchdog:
        thread.start()
    try:
        yield lag
    finally:
        stop.set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if has_watchdog:
            await asyncio.to_thread(thread.join, 1.0)


def _watch(lag: LoopLag, loop_thread: int, stop: threading.Event) -> None:
    told_s = 0.0
    while not stop.wait(_INTERVAL_S / 2):
        beat_s = lag.beat_s
        blocked_s = time.monotonic() - beat_s - _INTERVAL_S
        if blocked_s < _BLOCKED_S or beat_s == told_s:
            continue
        told_s = beat_s
        frame = sys._current_frames().get(loop_thread)
        if frame is not None:
            stack = "".join(traceback.format_stack(frame)).rstrip()
            log.warning("the event loop has been blocked for %.0f ms", blocked_s * 1e3, extra={"stack": stack})
