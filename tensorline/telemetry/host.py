"""How busy the host is, from /proc: the three CPU gauges that Triton has."""

import time
from pathlib import Path
from typing import Final

__all__ = ["Host"]

_LEAST_S: Final = 0.5
"""Below, there are too few clock ticks to divide by."""

_IDLE, _WAITING = 3, 4
_GUEST = 8
"""From this field of a line of /proc/stat on, time is counted that other fields hold too."""


class Host:
    """Args:
    proc: Another place than /proc, for tests.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._then = self._ticks()
        self._then_s = time.monotonic()
        self._utilization = 0.0

    def cpu_utilization(self) -> float:
        """Busy share of all cores since the last reading, 0 to 1; the last answer within half a second of it."""
        now_s = time.monotonic()
        if now_s - self._then_s >= _LEAST_S:
            busy, total = self._ticks()
            was_busy, was_total = self._then
            self._utilization = min(1.0, max(0.0, (busy - was_busy) / max(1, total - was_total)))
            self._then, self._then_s = (busy, total), now_s
        return self._utilization

    def memory_bytes(self) -> tuple[int, int]:
        """Of the host: all there is, and what is used of it."""
        lines = (line.split() for line in (self._proc / "meminfo").read_text().splitlines())
        kilobytes = {words[0]: int(words[1]) for words in lines if len(words) > 1}
        total = kilobytes["MemTotal:"]
        return total << 10, (total - kilobytes["MemAvailable:"]) << 10

    def _ticks(self) -> tuple[int, int]:
        first = (self._proc / "stat").read_text().partition("\n")[0]
        ticks = [int(word) for word in first.split()[1 : 1 + _GUEST]]
        return sum(ticks) - ticks[_IDLE] - ticks[_WAITING], sum(ticks)
