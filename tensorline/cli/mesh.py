"""A whole mesh on this machine: which processes with which settings, and when it is ready."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from tensorline.cli.api import read_token
from tensorline.cli.environment import GATEWAY_FIELDS, STAGE_FIELDS, environment_of
from tensorline.cli.failure import CommandError
from tensorline.cli.flags import in_flags
from tensorline.cli.leftovers import sweep_mesh
from tensorline.cli.lines import Output
from tensorline.cli.look import Seen, look
from tensorline.cli.ports import Listener, check_free, free_port
from tensorline.cli.supervisor import Program, Supervisor, open_supervisor

__all__ = ["PATIENCE_S", "SERVICES", "Mesh", "Plan", "State", "listeners_of", "open_mesh", "plan_mesh"]

SERVICES: Final = {name: f"services.{name}" for name in ("preprocess", "model", "postprocess")}
"""Module of each service that comes with Tensorline."""

POLL_S = 0.1
PATIENCE_S = 10.0
"""How long a mesh whose models are being loaded is waited for before it is told where it answers."""
SETTLED_S = 2.0
"""For so long nothing has been loading and nothing has changed: what is not ready now will not be by itself."""
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
    directory: Path
    """Of the mesh: its arenas, sockets and registry."""
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


def listeners_of(values: Mapping[str, str]) -> dict[str, Listener]:
    """The ports that `values` ask for, by the first word of their settings; 0 for any."""
    return {
        name: Listener(what, values[f"{name}_address"], int(values[f"{name}_port"]), f"--{name}")
        for name, what in (("grpc", "gRPC"), ("http", "HTTP"), ("metrics", "metrics"))
    }


def plan_mesh(values: Mapping[str, str], services: Mapping[str, str], environ: Mapping[str, str]) -> Plan:
    """
    Args:
        values: Settings by field, as text; with the addresses and ports of the gateway, 0 for any, `drain_s` and
            `mesh_directory`.
        services: Module or .py file of each service.
        environ: What the processes inherit.
    Raises:
        CommandError: an address is none of this machine's.
    """
    listeners = {
        name: listener if listener.port else replace(listener, port=free_port(listener))
        for name, listener in listeners_of(values).items()
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
        directory=Path(values["mesh_directory"]),
        token_file=Path(token) if token else None,
    )


@dataclass(frozen=True, slots=True)
class State:
    """How far a mesh has come."""

    models: tuple[str, ...]
    """Those that are served."""
    unready: tuple[tuple[str, str], ...]
    """Name of each model that is not, and why."""
    missing: tuple[str, ...]
    """Services that the gateway has not heard of."""
    is_ready: bool
    """Every model would be served now."""
    is_final: bool
    """Nothing is being loaded any more."""


class Mesh:
    """A mesh whose processes run. Made by `open_mesh`."""

    def __init__(self, plan: Plan, supervisor: Supervisor) -> None:
        self.plan = plan
        self.supervisor = supervisor
        self.started = time.monotonic()

    async def wait_ready(
        self, report: Callable[[str], None], *, must_start: bool = True, patience_s: float = PATIENCE_S
    ) -> State:
        """Until the gateway would serve every model now and has heard of every service, or that is not to be expected.

        Args:
            report: Called with what is waited for, whenever that changes.
            must_start: A process that ends by itself meanwhile is a failure; else it is started again and waited for.
            patience_s: Returns after so long in any case, as soon as the gateway answers and every service is there.
        Raises:
            CommandError: a process ended.
        """
        looking = asyncio.ensure_future(self._look_until_usable(report, patience_s))
        ended = asyncio.ensure_future(self.supervisor.wait_ended())
        try:
            await asyncio.wait({looking, ended} if must_start else {looking}, return_when=asyncio.FIRST_COMPLETED)
            if looking.done():
                return looking.result()
            raise CommandError(in_flags(str(ended.result())))
        finally:
            looking.cancel()
            ended.cancel()

    async def _look_until_usable(self, report: Callable[[str], None], patience_s: float) -> State:
        told, quiet = "", _Quiet()
        token = await asyncio.to_thread(read_token, self.plan.token_file, "--admin-token-file")
        while True:
            seen = await asyncio.to_thread(look, self.plan.http_url, token)
            known = frozenset(self.plan.services) if seen.is_live and seen.services is None else seen.services or ()
            missing = tuple(name for name in self.plan.services if name not in known)
            now = time.monotonic()
            quiet_s = quiet.lasts_s(seen, now)
            is_whole = seen.is_ready and not seen.unready
            # A service that is waited for in vain must not keep the others from being used.
            is_final = quiet_s > (REGISTER_S if missing else SETTLED_S) and not seen.is_loading
            is_late = now - self.started > patience_s and not missing
            if seen.is_live and ((is_whole and not missing) or is_final or is_late):
                return State(seen.models, seen.unready, missing, is_whole, is_final)
            text = _waiting(seen, missing, with_reasons=now - self.started > patience_s)
            if text != told:
                report(text)
                told = text
            await asyncio.sleep(POLL_S)


@dataclass(slots=True)
class _Quiet:
    """How long one look has been like the next."""

    seen: Seen | None = None
    since: float = 0.0

    def lasts_s(self, seen: Seen, now: float) -> float:
        if seen != self.seen:
            self.seen, self.since = seen, now
        return now - self.since


def _waiting(seen: Seen, missing: tuple[str, ...], *, with_reasons: bool) -> str:
    """What is not there yet; in one line."""
    processes = [*([] if seen.is_live else ["gateway"]), *missing]
    if processes:
        return f"waiting for {', '.join(processes)}"
    models = [f"{name} ({reason})" if with_reasons and reason else name for name, reason in seen.unready]
    return f"waiting for models: {', '.join(models)}" if models else "waiting for the gateway to be ready"


@contextlib.asynccontextmanager
async def open_mesh(plan: Plan, output: Output) -> AsyncIterator[Mesh]:
    """Run `plan` inside the block; leaving it stops the gateway, then the stages, and clears away what dead ones left.

    Raises:
        CommandError: a port is taken; nothing was started.
    """
    check_free(plan.listeners)
    try:
        async with open_supervisor(plan.programs, output, plan.drain_s) as supervisor:
            yield Mesh(plan, supervisor)
    finally:
        await asyncio.to_thread(sweep_mesh, plan.directory)
