"""What clients had loaded and unloaded: remembered for instances that join later, the same in every worker."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Final

import orjson

from gateway.registers import NEVER, Entry, Registers, entries_of

__all__ = ["WISHES_PATH", "Wish", "Wishes"]

WISHES_PATH: Final = "/internal/repository"
"""Where a worker is told what was loaded or unloaded through another one, and says what it knows."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Of one model."""

    is_loaded: bool
    is_by_name: bool = False
    """A client asked for it; else it came with a pipeline that needs it."""
    override: str = ""
    """Digest of the configuration and files that the client gave; "" for the repository's."""
    has_files: bool = False
    pipeline: str = ""
    """The completed configuration of a pipeline, in hex; "" for a model."""
    versions: tuple[int, ...] = ()
    """Of a pipeline."""


class Wishes:
    """By model name. Of two wishes for one model the later one holds, whatever worker it came by.

    Args:
        worker: This one's number.
    """

    def __init__(self, worker: int = 0) -> None:
        self._registers = Registers(worker)
        self._wishes: dict[str, Wish] = {}

    def get(self, name: str) -> Wish | None:
        return self._wishes.get(name)

    def __iter__(self) -> Iterator[tuple[str, Wish]]:
        return iter(sorted(self._wishes.items()))

    @property
    def loaded(self) -> dict[str, Wish]:
        return {name: wish for name, wish in self if wish.is_loaded}

    def load(self, name: str, wish: Wish) -> bytes:
        """What the other workers should be told."""
        known = self._wishes.get(name)
        if (
            known is not None and known.is_loaded and known.is_by_name
        ):  # a pipeline that needs it, too, takes nothing away
            wish = replace(wish, is_by_name=True)
        return self._set(name, wish)

    def learn(self, name: str, wish: Wish) -> None:
        """What the stages show. Every worker sees that itself; told anew is what contradicts an earlier wish."""
        if self._registers.stamp((name,)) != NEVER:
            self._set(name, wish)
        else:
            self._wishes[name] = wish

    def unload(self, name: str) -> bytes:
        return self._set(name, Wish(is_loaded=False))

    def _set(self, name: str, wish: Wish) -> bytes:
        self._wishes[name] = wish
        return _encoded(self._registers.set({(name,): asdict(wish)}))

    def merge(self, body: bytes) -> list[str]:
        """Take what another worker tells; names whose wish is another now."""
        changed = self._registers.merge(entries_of(orjson.loads(body))) if body else {}
        for (name,), value in changed.items():
            self._wishes[name] = Wish(**{**value, "versions": tuple(value["versions"])})
        return sorted(name for (name,) in changed)

    def everything(self) -> bytes:
        """For a worker that has just begun."""
        return _encoded(self._registers.entries)


def _encoded(entries: Iterable[Entry]) -> bytes:
    return orjson.dumps(list(entries))
