"""Which shared-memory blocks one request holds, and when each goes back to its owner."""

from collections.abc import Callable, Iterable

from tensorline.tensor import Handle, Tensor

__all__ = ["Ledger"]

_Key = tuple[bytes, int, int]


class Ledger:
    """Counts, for each block, the tensors of one request that lie in it and the leases that the request has of it.

    A stage that passes a tensor on gives the next tensor the same block, and several outputs can share one: then there
    are many tensors and one lease. Two steps whose rows went into one batch each get a lease of that batch's block.

    Args:
        give_back: Called once for each lease, when the last tensor in its block is dropped.
    """

    __slots__ = ("_counts", "_give_back")

    def __init__(self, give_back: Callable[[Handle], None]) -> None:
        self._counts: dict[_Key, tuple[int, int]] = {}
        self._give_back = give_back

    def hold(self, tensors: Iterable[Tensor], inputs: Iterable[Tensor] = ()) -> None:
        """Take the tensors of one answer. Each of their blocks came with a lease, unless it is one of `inputs`, the
        tensors that the step was given."""
        leased: set[_Key] = set()
        known = {_key(tensor.handle) for tensor in inputs if tensor.handle is not None}
        for tensor in tensors:
            if tensor.handle is not None:
                key = _key(tensor.handle)
                count, leases = self._counts.get(key, (0, 0))
                if key not in known and key not in leased:
                    leased.add(key)
                    leases += 1
                self._counts[key] = (count + 1, leases)

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Nobody in this request reads these any more."""
        for tensor in tensors:
            if tensor.handle is not None:
                key = _key(tensor.handle)
                count, leases = self._counts.pop(key, (0, 0))
                if count > 1:
                    self._counts[key] = (count - 1, leases)
                else:
                    self._return(key, leases)

    def close(self) -> None:
        """The request has ended: everything that is left goes back."""
        counts, self._counts = self._counts, {}
        for key, (_, leases) in counts.items():
            self._return(key, leases)

    def _return(self, key: _Key, leases: int) -> None:
        arena, block, generation = key
        for _ in range(leases):
            self._give_back(Handle(arena, block, 0, 0, generation))


def _key(handle: Handle) -> _Key:
    return handle.arena, handle.block, handle.generation
