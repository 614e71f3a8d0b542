"""Which shared-memory blocks one request holds, and when each goes back to its owner."""

from collections.abc import Callable, Iterable

from tensorline.tensor import Handle, Tensor

__all__ = ["Ledger"]

_Key = tuple[bytes, int, int]


class Ledger:
    """Counts the tensors of one request that lie in each block: a stage that passes a tensor on gives the next tensor
    the same block, and several outputs can share one.

    Args:
        give_back: Called once for each block, when the last tensor in it is dropped.
    """

    __slots__ = ("_counts", "_give_back")

    def __init__(self, give_back: Callable[[Handle], None]) -> None:
        self._counts: dict[_Key, int] = {}
        self._give_back = give_back

    def hold(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            handle = tensor.handle
            if handle is not None:
                key = (handle.arena, handle.block, handle.generation)
                self._counts[key] = self._counts.get(key, 0) + 1

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Nobody in this request reads these any more."""
        for tensor in tensors:
            handle = tensor.handle
            if handle is not None:
                key = (handle.arena, handle.block, handle.generation)
                count = self._counts.pop(key, 0)
                if count > 1:
                    self._counts[key] = count - 1
                elif count:
                    self._give_back(handle)

    def close(self) -> None:
        """The request has ended: everything that is left goes back."""
        counts, self._counts = self._counts, {}
        for arena, block, generation in counts:
            self._give_back(Handle(arena, block, 0, 0, generation))
