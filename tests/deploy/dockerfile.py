"""A Dockerfile as its stages, as far as the tests look at it."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Stage", "read_stages"]


@dataclass
class Stage:
    """One FROM and what follows it; what it inherits from the stage that it begins from is in it already."""

    name: str
    base: str
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    single: dict[str, str] = field(default_factory=dict)
    """USER, HEALTHCHECK, STOPSIGNAL, ENTRYPOINT, WORKDIR: the last one counts."""
    commands: list[str] = field(default_factory=list)
    copies: list[list[str]] = field(default_factory=list)

    def exec_form(self, instruction: str) -> list[str]:
        """The words of an instruction that must be in exec form."""
        found = re.search(r"\[.*\]$", self.single[instruction])
        assert found, f"{instruction} of {self.name} is no exec form"
        return [str(word) for word in json.loads(found[0])]


def read_stages(path: Path) -> dict[str, Stage]:
    stages: dict[str, Stage] = {}
    current = Stage("", "")
    for instruction, rest in _instructions(path.read_text()):
        match instruction:
            case "FROM":
                base, _, name = rest.partition(" AS ")
                above = stages.get(base, Stage("", ""))
                current = Stage(name, base, dict(above.environment), dict(above.arguments), dict(above.single))
                stages[name] = current
            case "ENV":
                current.environment |= dict(word.split("=", 1) for word in shlex.split(rest))
            case "ARG":
                name, _, value = rest.partition("=")
                current.arguments[name] = value
            case "RUN":
                current.commands.append(rest)
            case "COPY":
                current.copies.append(rest.split())
            case _:
                current.single[instruction] = rest
    return stages


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        if line.strip():
            instruction, _, rest = line.strip().partition(" ")
            yield instruction, rest.strip()
