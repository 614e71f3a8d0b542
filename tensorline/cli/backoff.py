"""How long to wait before a process that ended is started again."""

from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass(slots=True)
class Backoff:
    """Doubles with each end, starts anew after a run that was long enough to count as healthy."""

    first_s: float = 0.5
    most_s: float = 30.0
    healthy_s: float = 60.0
    ends: int = 0
    """Ends in a row, none of them after a healthy run."""

    def ended(self, ran_s: float) -> float:
        """The process ended after `ran_s`: how many seconds to wait before the next start."""
        if ran_s >= self.healthy_s:
            self.ends = 0
        # 2**30 times any first delay is past every limit; without the bound a process that fails for weeks overflows.
        delay_s = min(self.first_s * 2.0 ** min(self.ends, 30), self.most_s)
        self.ends += 1
        return delay_s
