"""Triton's trace settings, for all models and for single ones: which requests they choose. No clock, no task.

Source: protocol.md §12, observability.md §4. As long as neither a rate nor a count is set for a model, its requests are
not chosen here but by `sampling.Sampler`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["GLOBAL", "OFF", "TRACE_KEYS", "TraceRules", "TraceValue"]

GLOBAL: Final = ""
"""Instead of a model's name: what holds where a model has nothing of its own."""

OFF: Final = "OFF"
TRACE_KEYS: Final = ("trace_level", "trace_rate", "trace_count", "log_frequency")

TraceValue = int | tuple[str, ...]
"""A number, or the levels of `trace_level`."""

_OURS: Final[Mapping[str, TraceValue]] = {
    "trace_level": ("TIMESTAMPS",),
    "trace_rate": 1,
    "trace_count": -1,
    "log_frequency": 0,
}
"""What is told while nothing is set: every request is recorded, and the sampler chooses what is exported."""


@dataclass(slots=True)
class _Scope:
    """What one setting has come to: that of a model, or the one for all others."""

    reached: int = 0
    taken: int = 0
    taken_elsewhere: int = 0
    """By the other workers of this gateway."""


class TraceRules:
    """Args:
    start: Values that hold until others are set, and again when these are cleared; none: the sampler chooses.
    """

    def __init__(self, start: Mapping[str, TraceValue] | None = None) -> None:
        self._start = dict(start or {})
        self._own: dict[str, dict[str, TraceValue]] = {}
        self._scopes: dict[str, _Scope] = {}
        self.is_active = bool(self._start)
        """Something is set: without, a request need not be looked at."""

    def change(self, model: str, changes: Mapping[str, TraceValue | None]) -> None:
        """Set values of a model's own, or with `GLOBAL` everybody's; None clears one. Later requests go by them.

        Args:
            changes: Checked, by names of `TRACE_KEYS`.
        """
        own = self._own.setdefault(model, {})
        for key, value in changes.items():
            if value is None:
                own.pop(key, None)
            else:
                own[key] = value
        if not own:
            del self._own[model]
        self.is_active = bool(self._start or self._own)
        for scope, state in list(self._scopes.items()):
            if model in (scope, GLOBAL):
                state.reached = 0
                if "trace_count" in changes and (scope == model or "trace_count" not in self._own.get(scope, {})):
                    state.taken = state.taken_elsewhere = 0
        for scope in self._scopes.keys() - {*self._own, GLOBAL}:
            del self._scopes[scope]

    def value(self, model: str, key: str) -> TraceValue:
        """The model's own, else everybody's, else that of the start."""
        found = self._set(model, key)
        return _OURS[key] if found is None else found

    def shown_count(self, model: str) -> int:
        """What is left of `trace_count`; -1: no limit."""
        count, state = self.value(model, "trace_count"), self._state(model)
        if not isinstance(count, int) or count < 0:
            return -1
        return max(0, count - state.taken - state.taken_elsewhere)

    def is_off(self, model: str) -> bool:
        return self.value(model, "trace_level") == (OFF,)

    def decides(self, model: str) -> bool:
        """A rate or a count is set: the sampler is not asked."""
        return self._set(model, "trace_rate") is not None or self._set(model, "trace_count") is not None

    def sample(self, model: str) -> bool:
        """Whether this request, the next one that reached its setting, is one of every `trace_rate`, while
        `trace_count` lasts. For models that `decides` is true of."""
        rate, left = self.value(model, "trace_rate"), self.shown_count(model)
        if not rate or left == 0 or not isinstance(rate, int):
            return False
        state = self._state(model)
        state.reached += 1
        if state.reached % rate:
            return False
        state.taken += left > 0
        return True

    @property
    def taken(self) -> dict[str, int]:
        """Of limited settings, how many requests were chosen here, by the model that the setting belongs to."""
        return {scope: state.taken for scope, state in self._scopes.items() if state.taken}

    def note_elsewhere(self, model: str, taken: int) -> None:
        """How many the other workers have chosen of a setting."""
        self._state(model).taken_elsewhere = taken

    def _set(self, model: str, key: str) -> TraceValue | None:
        for values in (self._own.get(model), self._own.get(GLOBAL), self._start):
            if values is not None and key in values:
                return values[key]
        return None

    def _state(self, model: str) -> _Scope:
        scope = model if model in self._own else GLOBAL
        return self._scopes.setdefault(scope, _Scope())
