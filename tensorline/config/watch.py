"""Which models of the repositories have changed since the last look."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tensorline.config.footprint import Footprint, footprint
from tensorline.config.repository import model_paths

__all__ = ["RepositoryWatch"]

SETTLE_S: Final = 0.5
"""How long a model's directory must have looked the same: one that is being copied is not loaded half."""


class RepositoryWatch:
    """Looks at names, sizes and times alone, in a thread. To be begun before the models are read for the first time."""

    def __init__(self, paths: Iterable[Path], settle_s: float = SETTLE_S) -> None:
        self._paths = list(paths)
        self._settle_s = settle_s
        self._seen: dict[str, list[Footprint]] = {}

    async def begin(self) -> None:
        """
        Raises:
            ConfigError: a repository cannot be read.
        """
        self._seen = await asyncio.to_thread(self._look)

    async def changed(self) -> list[str]:
        """Names of models that came, went or changed, and stand still. Each change is told once.

        Raises:
            ConfigError: a repository cannot be read.
        """
        first = await asyncio.to_thread(self._look)
        if first == self._seen:
            return []
        await asyncio.sleep(self._settle_s)
        now = await asyncio.to_thread(self._look)
        names = {name for name in {*now, *self._seen} if now.get(name) != self._seen.get(name)}
        settled = sorted(name for name in names if now.get(name) == first.get(name))
        for name in settled:
            if name in now:
                self._seen[name] = now[name]
            else:
                del self._seen[name]
        return settled

    def _look(self) -> dict[str, list[Footprint]]:
        return {name: [footprint(path) for path in paths] for name, paths in model_paths(self._paths).items()}
