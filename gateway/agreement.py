"""Settings that operators change while the gateway runs: the same in every worker behind its port."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import orjson

from gateway.registers import Entry, Registers, entries_of
from gateway.siblings import Siblings
from tensorline.telemetry.logs import LogLines, LogSwitches
from tensorline.telemetry.trace_rules import TraceRules, TraceValue

__all__ = ["SETTINGS_PATH", "Agreement"]

log = logging.getLogger(__name__)

SETTINGS_PATH: Final = "/internal/settings"
"""Where a worker is told what another one has set, and says what it knows."""

TRACE, LOG = "trace", "log"
COUNT = "trace_count"
TELL_S = 0.05
"""How long samples of a limited trace setting are gathered before the other workers hear of them."""

IDLE_S = 1.0
"""The same while nothing is set or nobody is there to tell."""


class Agreement:
    """What is set here acts here at once and is told to the other workers; what they tell acts here, too. Of two values
    for one setting the later holds in all of them.

    Args:
        rules: The trace settings that act.
        lines: The logging that acts.
        worker: This one's number.
    """

    def __init__(self, rules: TraceRules, lines: LogLines, siblings: Siblings, worker: int = 0) -> None:
        self.rules = rules
        self._lines = lines
        self._siblings = siblings
        self._worker = worker
        self._registers = Registers(worker)
        self._told: dict[str, int] = {}
        self._elsewhere: dict[tuple[str, int], tuple[Any, int]] = {}

    @property
    def switches(self) -> LogSwitches:
        return self._lines.switches

    async def set_trace(self, model: str, changes: Mapping[str, TraceValue | None]) -> None:
        """
        Args:
            changes: Checked; None clears.
        """
        entries = self._registers.set({(TRACE, model, key): value for key, value in changes.items()})
        self.rules.change(model, changes)
        await self._tell(entries)

    async def set_log(self, **changes: int | str) -> None:
        """
        Args:
            changes: Checked values by the fields of `LogSwitches`.
        """
        entries = self._registers.set({(LOG, key): value for key, value in changes.items()})
        self._switch(changes)
        await self._tell(entries)

    def merge(self, body: bytes) -> bytes:
        """Take what another worker tells; everything that is known here, for a worker that asks."""
        if body:
            told = orjson.loads(body)
            self._apply(self._registers.merge(entries_of(told["entries"])))
            for model, stamp, taken in told["taken"]:
                self._elsewhere[model, told["worker"]] = (tuple(stamp), taken)
                self._note_elsewhere(model)
        return self._said(self._registers.entries)

    async def catch_up(self) -> None:
        """At the start: what the others have agreed about before. Our own socket has to be open by then, so that what
        they set from now on reaches us."""
        for body in await self._siblings.ask(SETTINGS_PATH):
            self.merge(body)

    async def share_samples(self) -> None:
        """Until cancelled: tell the others how many requests were chosen of settings that have a limit, so that the
        limit holds for all workers together, but for what is chosen before they hear of it."""
        while True:
            await asyncio.sleep(TELL_S if self.rules.is_active and not self._siblings.are_none else IDLE_S)
            taken = self.rules.taken
            if taken != self._told:
                self._told = taken
                await self._tell([])

    async def _tell(self, entries: list[Entry]) -> None:
        await self._siblings.tell(SETTINGS_PATH, self._said(entries))

    def _said(self, entries: list[Entry]) -> bytes:
        taken = [
            (model, self._registers.stamp((TRACE, model, COUNT)), number) for model, number in self.rules.taken.items()
        ]
        return orjson.dumps({"worker": self._worker, "entries": entries, "taken": taken})

    def _apply(self, changed: Mapping[tuple[str, ...], Any]) -> None:
        trace: dict[str, dict[str, TraceValue | None]] = {}
        switches: dict[str, Any] = {}
        for key, value in changed.items():
            if key[0] == TRACE:
                trace.setdefault(key[1], {})[key[2]] = tuple(value) if isinstance(value, list) else value
            else:
                switches[key[1]] = value
        for model, changes in trace.items():
            self.rules.change(model, changes)
        if switches:
            self._switch(switches)

    def _switch(self, changes: Mapping[str, Any]) -> None:
        self._lines.switch(replace(self._lines.switches, **changes))

    def _note_elsewhere(self, model: str) -> None:
        """Only of the limit that holds now: what was chosen of one before does not count."""
        stamp = self._registers.stamp((TRACE, model, COUNT))
        found = [taken for (name, _), (of, taken) in self._elsewhere.items() if name == model and of == stamp]
        self.rules.note_elsewhere(model, sum(found))
