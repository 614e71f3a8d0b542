"""Becoming one process of a mesh: `tensorline gateway` and `tensorline serve` end in its module."""

import difflib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorline.cli.failure import CommandError, UsageError
from tensorline.cli.mesh import SERVICES

__all__ = ["become", "chosen_services", "target_of"]


def target_of(service: str) -> str:
    """Module or .py file of a service: one of ours by name, a team's own by module or path.

    Raises:
        UsageError: there is no such file or module.
    """
    if service in SERVICES:
        return SERVICES[service]
    if service.endswith(".py"):
        if not Path(service).is_file():
            raise UsageError(f"there is no file {service}")
        return service
    _check_module(service)
    return service


def chosen_services(names: str, own: Sequence[str]) -> dict[str, str]:
    """Module or file of each service that `up` is to start.

    Args:
        names: Those of ours, "preprocess,model".
        own: "name=python.module" or "name=path/to/stage.py"; one with a name of ours stands in for it.
    Raises:
        UsageError: another form, or there is no such service or module.
    """
    chosen = {}
    for name in filter(None, names.split(",")):
        if name not in SERVICES:
            near = difflib.get_close_matches(name, SERVICES, n=1)
            hint = f"did you mean {near[0]}?" if near else "one of your own is --service NAME=python.module"
            raise UsageError(f"--services: there is no service {name!r}; {hint}")
        chosen[name] = SERVICES[name]
    for text in own:
        name, _, target = text.partition("=")
        if not name or not target or name == "gateway":
            raise UsageError(f"--service {text}: write NAME=python.module or NAME=path/to/stage.py")
        chosen[name] = target_of(target)
    return chosen


def become(target: str, environment: Mapping[str, str]) -> None:
    """Replace this process by the module or file `target`. Does not return.

    Raises:
        CommandError: it cannot be started.
    """
    is_ours = target == "gateway" or target in SERVICES.values()  # -P: whatever lies in the working directory
    options = [target] if target.endswith(".py") else [*(["-P"] if is_ours else []), "-m", target]
    command = [sys.executable, *options]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(sys.executable, command, dict(environment))  # noqa: S606 - no shell is meant
    except OSError as error:
        raise CommandError(f"cannot start {target}: {error.strerror}") from None


def _check_module(name: str) -> None:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` will have it
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        ours = ", ".join(SERVICES)
        raise UsageError(f"there is no service {name!r}: one of {ours}, a Python module or a .py file is wanted")
