"""How durations spread: buckets that are summed over time, and quantiles of the last minute."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import Final

__all__ = ["Histogram", "Window"]

_WINDOW_NS: Final = 60 * 10**9
_SAMPLES: Final = 1024


class Histogram:
    """Counts by upper bound in microseconds (the last: above all of them), and the sum in nanoseconds."""

    __slots__ = ("_bounds_ns", "bounds_us", "counts", "sum_ns")

    def __init__(self, bounds_us: tuple[int, ...]) -> None:
        self.bounds_us = bounds_us
        self.counts = [0] * (len(bounds_us) + 1)
        self.sum_ns = 0
        self._bounds_ns = [bound * 1000 for bound in bounds_us]

    def observe(self, duration_ns: int) -> None:
        self.counts[bisect_left(self._bounds_ns, duration_ns)] += 1
        self.sum_ns += duration_ns

    @property
    def cumulative(self) -> list[int]:
        """Of each bound, how many were at most that."""
        return list(accumulate(self.counts))


class Window:
    """Quantiles of the durations of the last minute, exact over the 1024 newest of them; count and sum are of all."""

    __slots__ = ("_samples", "count", "sum_ns")

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=_SAMPLES)
        self.count = 0
        self.sum_ns = 0

    def observe(self, duration_ns: int, now_ns: int) -> None:
        self._samples.append((now_ns, duration_ns))
        self.count += 1
        self.sum_ns += duration_ns

    def quantiles_ns(self, quantiles: Iterable[float], now_ns: int) -> list[float]:
        """NaN for each while there is nothing in the window."""
        while self._samples and self._samples[0][0] < now_ns - _WINDOW_NS:
            self._samples.popleft()
        ordered = sorted(duration for _, duration in self._samples)
        if not ordered:
            return [math.nan for _ in quantiles]
        return [ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] for quantile in quantiles]
