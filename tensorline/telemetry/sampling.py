"""Which traces are exported: decided at the end, when it is known what became of the request. Time is an argument.

The caller's flag is law: 01 is kept, 00 is not. Of the rest errors are kept, the slowest of each model and minute, and
a fair share by trace id up to a rate. `head` takes the share beforehand, so that a stage's own spans go along.
"""

import heapq
from enum import StrEnum
from typing import Final

from tensorline.telemetry.record import RequestRecord
from tensorline.telemetry.tree import is_failure

__all__ = ["Kept", "Sampler", "TokenBucket"]

_MODELS_LIMIT: Final = 1024
_IDS: Final = 1 << 64


class Kept(StrEnum):
    """Why a trace is exported."""

    CALLER = "caller"
    HEAD = "head"
    ERROR = "error"
    SLOW = "slow"
    SHARE = "share"


class TokenBucket:
    """At most `rate_per_s` on average, and one second's worth at once (but at least one)."""

    def __init__(self, rate_per_s: float) -> None:
        self._rate = rate_per_s
        self._burst = max(rate_per_s, 1.0) if rate_per_s > 0 else 0.0
        self._tokens = self._burst
        self._then_s: float | None = None

    def take(self, now_s: float) -> bool:
        if self._then_s is not None and now_s > self._then_s:
            self._tokens = min(self._burst, self._tokens + (now_s - self._then_s) * self._rate)
        self._then_s = now_s
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class Sampler:
    """Head and tail decision of one gateway.

    Args:
        ratio: Of the requests that nobody decided about, by their trace id: all gateways choose the same ones.
        rate_per_s: Upper limit of that share; None: no limit.
        keeps_notable: Errors and slow requests are kept whatever the ratio.
        errors_per_s: So that a flood of failures is not a flood of exports too.
        slow_per_minute: For each model. Decided as requests end, so about this number times the logarithm of their
            count is kept, the slowest surely among them.
    """

    def __init__(
        self,
        ratio: float = 1.0,
        rate_per_s: float | None = 100.0,
        *,
        keeps_notable: bool = True,
        errors_per_s: float = 100.0,
        slow_per_minute: int = 1,
    ) -> None:
        self._bound = round(ratio * _IDS)  # as the SDK's TraceIdRatioBased: on the low 64 bits
        self._share = TokenBucket(rate_per_s) if rate_per_s is not None else None
        self._keeps_notable = keeps_notable
        self._errors = TokenBucket(errors_per_s)
        self._slow_per_minute = slow_per_minute
        self._slowest: dict[str, tuple[int, list[int]]] = {}

    def head(self, trace_id: bytes, now_s: float) -> bool:
        """Whether a trace that begins here is sampled from the start (flag 01 to the stages)."""
        if int.from_bytes(trace_id[8:], "big") >= self._bound:
            return False
        return self._share is None or self._share.take(now_s)

    def decide(self, record: RequestRecord, now_s: float) -> Kept | None:
        """Why the finished request is exported; None: it is not."""
        context = record.context
        if context.is_from_caller:
            return Kept.CALLER if context.is_sampled else None
        is_slow = self._keeps_notable and record.status == 0 and self._is_slow(record, now_s)
        if context.is_sampled:
            return Kept.HEAD
        if self._keeps_notable and is_failure(record.status) and self._errors.take(now_s):
            return Kept.ERROR
        if is_slow:
            return Kept.SLOW
        return Kept.SHARE if self.head(context.trace_id, now_s) else None

    def _is_slow(self, record: RequestRecord, now_s: float) -> bool:
        """Among the slowest of its model since the minute began."""
        minute = int(now_s // 60)
        then, durations = self._slowest.get(record.model, (-1, []))
        if then != minute:
            if len(self._slowest) >= _MODELS_LIMIT:
                self._slowest.clear()
            durations = []
            self._slowest[record.model] = (minute, durations)
        duration = record.ended - record.started
        if len(durations) < self._slow_per_minute:
            heapq.heappush(durations, duration)
            return True
        if not durations or duration <= durations[0]:
            return False
        heapq.heapreplace(durations, duration)
        return True
