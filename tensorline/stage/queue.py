"""Which waiting requests run together, and when: a pure decision over the requests of one model version.

No clock, no task: the host adds, asks, and obeys. This is the room of the full scheduler (priorities, queue policies,
preferred sizes, sequences); today: first in first out, stacking neighbours of one shape.
"""

import math
from collections import deque

from tensorline.errors import OverloadedError
from tensorline.stage.request import StageRequest

__all__ = ["BatchQueue"]


class BatchQueue:
    """Bounded queue of one model version.

    Args:
        limit: Requests that may wait.
        max_rows: Rows of one batch; 1: requests run alone.
        delay_s: How long the oldest request may wait for others to fill its batch.
    """

    def __init__(self, limit: int, max_rows: int = 1, delay_s: float = 0.0) -> None:
        self._limit = limit
        self._max_rows = max_rows
        self._delay_s = delay_s
        self._waiting: deque[tuple[float, StageRequest]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: StageRequest, now: float) -> list[StageRequest]:
        """Put `request` at the end; what had to leave because it is cancelled or expired comes back.

        Raises:
            OverloadedError: the queue is full of live requests.
        """
        dropped: list[StageRequest] = []
        if len(self._waiting) >= self._limit:
            dropped = self._purge(now)
            if len(self._waiting) >= self._limit:
                raise OverloadedError(f"Exceeds maximum queue size ({self._limit}) of model '{request.model}'")
        self._waiting.append((now, request))
        return dropped

    def take(self, now: float) -> tuple[list[StageRequest], list[StageRequest]]:
        """The batch to run now (empty: wait), and the cancelled or expired requests met on the way."""
        dropped: list[StageRequest] = []
        waiting = self._waiting
        while waiting and _is_over(waiting[0][1], now):
            dropped.append(waiting.popleft()[1])
        if not waiting:
            return [], dropped
        if self._max_rows <= 1:
            return [waiting.popleft()[1]], dropped
        size, rows, is_closed = self._reach(now)
        if not is_closed and rows < self._max_rows and now < waiting[0][0] + self._delay_s:
            return [], dropped
        batch: list[StageRequest] = []
        for _ in range(size):
            request = waiting.popleft()[1]
            (dropped if _is_over(request, now) else batch).append(request)
        return batch, dropped

    def _reach(self, now: float) -> tuple[int, int, bool]:
        """How many from the front fit one batch, their rows, and whether the next one could never join them."""
        first = self._waiting[0][1]
        size = rows = 0
        for _, request in self._waiting:
            if not _is_over(request, now):
                if request.signature != first.signature or (size and rows + request.rows > self._max_rows):
                    return size, rows, True
                rows += request.rows
            size += 1
        return size, rows, False

    def wake_at(self) -> float:
        """When `take` may have something although nothing new came: monotonic seconds, infinity for never."""
        if not self._waiting or self._delay_s <= 0:
            return math.inf
        return self._waiting[0][0] + self._delay_s

    def hurry(self) -> None:
        """Let nobody wait for company any more: none will come."""
        self._delay_s = 0.0

    def remove(self, request: StageRequest) -> bool:
        """Take out a request that waits; False if it does not (any more)."""
        for entry in self._waiting:
            if entry[1] is request:
                self._waiting.remove(entry)
                return True
        return False

    def clear(self) -> list[StageRequest]:
        """Everything that waits, in order."""
        requests = [request for _, request in self._waiting]
        self._waiting.clear()
        return requests

    def _purge(self, now: float) -> list[StageRequest]:
        dropped = [request for _, request in self._waiting if _is_over(request, now)]
        if dropped:
            self._waiting = deque(entry for entry in self._waiting if not _is_over(entry[1], now))
        return dropped


def _is_over(request: StageRequest, now: float) -> bool:
    return request.is_cancelled or request.deadline <= now
