"""How far a peer's monotonic clock is from ours."""

__all__ = ["ClockOffset"]


class ClockOffset:
    """Estimated from beats: the sample with the shortest round trip of the last ones is the truest.

    On one host both processes read the same clock and the estimate is noise of some microseconds around zero: anything
    within half a round trip of zero is taken as zero.
    """

    SAMPLES = 16

    def __init__(self) -> None:
        self._samples: list[tuple[int, int]] = []
        self.offset_ns = 0
        """Add to the peer's time to get ours."""
        self.error_ns = 0
        """Half the round trip of the sample in use: the estimate is no better."""

    def add(self, *, sent: int, peer: int, received: int) -> None:
        """One beat: sent and answer received on our clock, answered at `peer` on theirs; all in ns."""
        if received < sent:
            return  # an answer to a question that we did not ask
        self._samples.append((received - sent, (sent + received) // 2 - peer))
        del self._samples[: -self.SAMPLES]
        round_trip, offset = min(self._samples)
        self.error_ns = round_trip // 2
        self.offset_ns = 0 if abs(offset) <= self.error_ns else offset
