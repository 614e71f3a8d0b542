"""A whole mesh on this machine: which processes with which settings, and when it is ready."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from tensorline.cli.api import get_json, is_ready, read_token
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
PATIENCE_S = 10.0
"""After which it is also told why a model is not ready."""
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
    token_file: Path | None = None

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
    token = values.get("admin_token_file")
    return Plan(
        **listeners,
        programs=(gateway, *stages),
        drain_s=float(values["drain_s"]),
        token_file=Path(token) if token else None,
    )


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
        token = read_token(self.plan.token_file)
        while True:
            seen = await asyncio.to_thread(_look, self.plan.http_url, token)
            known = frozenset(self.plan.services) if seen.is_live and seen.services is None else seen.services or ()
            missing = [name for name in self.plan.services if name not in known]
            if seen.is_ready:
                patience_ends = patience_ends or time.monotonic() + REGISTER_S
                if not missing or time.monotonic() > patience_ends:
                    self.models = seen.models
                    return missing
            text = _waiting(seen, missing, with_reasons=time.monotonic() - self.started > PATIENCE_S)
            if text != told:
                report(text)
                told = text
            await asyncio.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class _Seen:
    """One look at the gateway."""

    is_live: bool = False
    is_ready: bool = False
    services: frozenset[str] | None = None
    """Those that it has heard of; None: it does not tell us."""
    models: tuple[str, ...] = ()
    unready: tuple[tuple[str, str], ...] = ()
    """Name of each model that is not, and why."""


def _look(url: str, token: str) -> _Seen:
    try:
        ready = is_ready(url)  # first: what is asked after it is at least as new
    except CommandError:
        return _Seen()
    try:
        services = frozenset(str(entry.get("service", "")) for entry in get_json(url, "/api/instances", token))
        models = get_json(url, "/api/models", token)
    except CommandError:  # beyond loopback it wants a token
        return _Seen(True, ready)
    up = {str(entry["name"]) for entry in models if entry["state"] == "READY"}
    down = {(str(entry["name"]), str(entry["reason"])) for entry in models if entry["state"] != "READY"}
    return _Seen(True, ready, services, tuple(sorted(up)), tuple(sorted(down)))


def _waiting(seen: _Seen, missing: list[str], *, with_reasons: bool) -> str:
    """What is not there yet; in one line."""
    processes = [*([] if seen.is_live else ["gateway"]), *missing]
    if processes:
        return f"waiting for {', '.join(processes)}"
    models = [f"{name} ({reason})" if with_reasons and reason else name for name, reason in seen.unready]
    return f"waiting for models: {', '.join(models)}" if models else "waiting for the gateway to be ready"


@contextlib.asynccontextmanager
async def open_mesh(plan: Plan, output: Output) -> AsyncIterator[Mesh]:
    """Run `plan` inside the block; leaving it stops the gateway, then the stages.

    Raises:
        CommandError: a port is taken; nothing was started.
    """
    check_free(plan.listeners)
    async with open_supervisor(plan.programs, output, plan.drain_s) as supervisor:
        yield Mesh(plan, supervisor)
