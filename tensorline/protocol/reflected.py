"""Both descriptor pools behind one face, for server reflection."""

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf import descriptor_pool

from tensorline.protocol.pool import POOL

__all__ = ["BothPools"]

T = TypeVar("T")


class BothPools:
    """What reflection asks of a pool: ours of package `inference` first, then the default one.

    Raises KeyError, as a pool does, for what neither has.
    """

    def __init__(self) -> None:
        self._pools: tuple[Any, ...] = (POOL, descriptor_pool.Default())

    def _first(self, find: Callable[[Any], T]) -> T:
        for pool in self._pools[:-1]:
            try:
                return find(pool)
            except KeyError:
                continue
        return find(self._pools[-1])

    def FindFileByName(self, name: str) -> Any:  # noqa: N802 - the pool's own name
        return self._first(lambda pool: pool.FindFileByName(name))

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802
        return self._first(lambda pool: pool.FindFileContainingSymbol(symbol))

    def FindMessageTypeByName(self, name: str) -> Any:  # noqa: N802
        return self._first(lambda pool: pool.FindMessageTypeByName(name))

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:  # noqa: N802
        return self._first(lambda pool: pool.FindExtensionByNumber(message, number))

    def FindAllExtensions(self, message: Any) -> list[Any]:  # noqa: N802
        return [extension for pool in self._pools for extension in pool.FindAllExtensions(message)]
