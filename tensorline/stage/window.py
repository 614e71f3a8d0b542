"""How far a stream of responses may be ahead of whoever reads it."""

import threading
from collections import deque
from typing import Final

__all__ = ["AHEAD_BYTES", "ResponseWindow"]

AHEAD_BYTES: Final = 1 << 20
"""Of responses on their way; one alone may be larger."""


class ResponseWindow:
    """Bounds what one request's responses hold between the model and the client.

    The instance's thread waits for room and adds; the loop takes away what was passed on, and closes.

    Args:
        responses: That may be on their way at once; 0: any number.
    """

    def __init__(self, responses: int, byte_size: int = AHEAD_BYTES) -> None:
        self._limit = responses
        self._max_bytes = byte_size
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def add(self, byte_size: int) -> None:
        """A response was sent."""
        with self._changed:
            if self._limit:
                self._sizes.append(byte_size)
                self._bytes += byte_size

    def take(self, responses: int) -> None:
        """So many, the oldest first, were passed on."""
        with self._changed:
            for _ in range(min(responses, len(self._sizes))):
                self._bytes -= self._sizes.popleft()
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody reads on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait_room(self, timeout_s: float | None) -> bool:
        """Block until another response may be made; False: nobody reads on, or it took too long."""
        with self._changed:
            return self._changed.wait_for(self._has_room_or_end, timeout_s) and not self._is_closed

    def _has_room_or_end(self) -> bool:
        sizes = self._sizes
        return self._is_closed or not sizes or (len(sizes) < self._limit and self._bytes < self._max_bytes)
