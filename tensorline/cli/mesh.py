"""A whole mesh on this machine: which processes with which settings, and when it is ready."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from tensorline.cli.api import get_json, is_ready
from tensorline.cli.environment import GATEWAY_FIELDS, STAGE_FIELDS, environment_of
from tensorline.cli.failure import CommandError
from tensorline.cli.flags import in_flags
from tensorline.cli.lines import Output
from tensorline.cli.ports import Listener, check_free, free_port
from tensorline.cli.supervisor import Program, Supervisor, open_supervisor

__all__ = ["SERVICES", "Mesh", "Plan", "open_mesh", "plan_mesh"]

SERVICES: Final = {name: f"services.{name}" for name in ("preprocess", "model", "postprocess")}
"""Module of each service that comes with Tensorline."""

POLL_S = 0.1
REGISTER_S = 5.0
"""How long a ready gateway may not have heard of a service before it is told as missing."""


@dataclass(frozen=True)
class Plan:
    """The processes of a mesh and where it can be reached."""

    grpc: Listener
    http: Listener
    metrics: Listener
    programs: tuple[Program, ...]
    drain_s: float

    @property
    def listeners(self) -> tuple[Listener, ...]:
        return self.grpc, self.http, self.metrics

    @property
    def services(self) -> list[str]:
        return [program.name for program in self.programs if program.tier > 0]

    @cached_property
    def http_url(self) -> str:
        return f"http://{self.http.target}"


def plan_mesh(values: Mapping[str, str], services: Mapping[str, str], environ: Mapping[str, str]) -> Plan:
    """
    Args:
        values: Settings by field, as text; with the addresses and ports of the gateway, 0 for any, and `drain_s`.
        services: Module or .py file of each service.
        environ: What the processes inherit.
    """
    listeners = {
        name: Listener(
            what=what,
            address=values[f"{name}_address"],
            port=int(values[f"{name}_port"]) or free_port(values[f"{name}_address"]),
            flag=f"--{name}",
        )
        for name, what in (("grpc", "gRPC"), ("http", "HTTP"), ("metrics", "metrics"))
    }
    told = {**values, **{f"{name}_port": str(listener.port) for name, listener in listeners.items()}}
    # The gateway is stopped first: it takes nothing new and finishes what the stages are still there to compute.
    gateway = Program("gateway", "gateway", environment_of(GATEWAY_FIELDS, told, environ), tier=0)
    stage = environment_of(STAGE_FIELDS, told, environ)
    stages = [Program(name, module, stage, 1, module not in SERVICES.values()) for name, module in services.items()]
    return Plan(**listeners, programs=(gateway, *stages), drain_s=float(values["drain_s"]))


class Mesh:
    """A mesh whose processes run. Made by `open_mesh`."""

    def __init__(self, plan: Plan, supervisor: Supervisor) -> None:
        self.plan = plan
        self.supervisor = supervisor
        self.started = time.monotonic()
        self.models: tuple[str, ...] = ()
        """What the gateway serves; known once it is ready."""

    async def wait_ready(self, report: Callable[[str], None], *, must_start: bool = True) -> list[str]:
        """Until the gateway would serve every model now and has heard of every service.

        Args:
            report: Called with what is waited for, whenever that changes.
            must_start: A process that ends by itself meanwhile is a failure; else it is started again and waited for.
        Returns:
            Services that the gateway has not heard of.
        Raises:
            CommandError: a process ended.
        """
        looking = asyncio.ensure_future(self._look_until_ready(report))
        ended = asyncio.ensure_future(self.supervisor.wait_ended())
        try:
            await asyncio.wait({looking, ended} if must_start else {looking}, return_when=asyncio.FIRST_COMPLETED)
            if looking.done():
                return looking.result()
            raise CommandError(in_flags(str(ended.result())))
        finally:
            looking.cancel()
            ended.cancel()

    async def _look_until_ready(self, report: Callable[[str], None]) -> list[str]:
        told, patience_ends = "", 0.0
        while True:
            seen = await asyncio.to_thread(_look, self.plan.http_url)
            missing = [name for name in self.plan.services if name not in seen.services]
            if seen.is_ready:
                patience_ends = patience_ends or time.monotonic() + REGISTER_S
                if not missing or time.monotonic() > patience_ends:
                    self.models = seen.models
                    return missing
            waiting = [*([] if seen.is_live else ["gateway"]), *missing] or list(seen.unready) or ["models"]
            text = f"waiting for {', '.join(waiting)}"
            if text != told:
                report(text)
                told = text
            await asyncio.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class _Seen:
    """One look at the gateway."""

    is_live: bool = False
    is_ready: bool = False
    services: frozenset[str] = frozenset()
    models: tuple[str, ...] = ()
    unready: tuple[str, ...] = ()


def _look(url: str) -> _Seen:
    try:
        ready = is_ready(url)  # first: what is asked after it is at least as new
        services = frozenset(str(entry.get("service", "")) for entry in _entries(url, "instances"))
        models = _entries(url, "models")
    except CommandError:
        return _Seen()
    up = [str(entry["name"]) for entry in models if entry.get("name") and entry.get("state", "READY") == "READY"]
    down = [_told(entry) for entry in models if entry.get("name") and entry.get("state", "READY") != "READY"]
    return _Seen(True, ready, services, tuple(sorted(set(up))), tuple(down))


def _entries(url: str, what: str) -> list[dict[str, Any]]:
    """The objects that /api/<what> lists, as they are or under that name."""
    answer = get_json(url, f"/api/{what}")
    found = answer.get(what, []) if isinstance(answer, dict) else answer
    return [entry for entry in found if isinstance(entry, dict)]


def _told(model: Mapping[str, Any]) -> str:
    reason = model.get("reason")
    return f"{model['name']} ({reason})" if reason else str(model["name"])


@contextlib.asynccontextmanager
async def open_mesh(plan: Plan, output: Output) -> AsyncIterator[Mesh]:
    """Run `plan` inside the block; leaving it stops the gateway, then the stages.

    Raises:
        CommandError: a port is taken; nothing was started.
    """
    check_free(plan.listeners)
    async with open_supervisor(plan.programs, output, plan.drain_s) as supervisor:
        yield Mesh(plan, supervisor)
