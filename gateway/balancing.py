"""Which instance runs a step, and whether a failed one is tried again: pure decisions, time enters as an argument."""

from collections.abc import Container, Sequence
from typing import Protocol, TypeVar

__all__ = ["Candidate", "RetryBudget", "choose"]


class Candidate(Protocol):
    @property
    def accepts(self) -> bool: ...
    @property
    def is_colocated(self) -> bool: ...
    @property
    def in_flight(self) -> int: ...


C = TypeVar("C", bound=Candidate)


def choose(candidates: Sequence[C], turn: int, exclude: Container[object] = ()) -> C | None:
    """One that can read the handles first, then the one with the least outstanding work; equals take turns.

    Args:
        turn: Counts up with each call, so that idle equals are not all served by the first of them.
    Returns:
        None when none accepts work.
    """
    best: C | None = None
    best_rank = (2, 0)
    count = len(candidates)
    for step in range(count):
        candidate = candidates[(turn + step) % count]
        if candidate.accepts and candidate not in exclude:
            rank = (0 if candidate.is_colocated else 1, candidate.in_flight)
            if rank < best_rank:
                best, best_rank = candidate, rank
    return best


class RetryBudget:
    """Retries are at most a share of the requests and a few a second besides: a failing mesh is not buried in them."""

    SHARE = 0.2
    PER_SECOND = 10.0
    BURST = 20.0

    def __init__(self) -> None:
        self._tokens = self.BURST
        self._seen = 0.0

    def note_request(self) -> None:
        self._tokens = min(self.BURST, self._tokens + self.SHARE)

    def take(self, now: float) -> bool:
        """May one more request be tried again?"""
        if self._seen:
            self._tokens = min(self.BURST, self._tokens + (now - self._seen) * self.PER_SECOND)
        self._seen = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
