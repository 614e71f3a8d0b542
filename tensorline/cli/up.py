"""`tensorline up`: a mesh in the foreground, until it is told to stop."""

import asyncio
import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Protocol

from tensorline.cli.failure import CommandError
from tensorline.cli.lines import JsonOutput, Output, TerminalOutput
from tensorline.cli.mesh import PATIENCE_S, Mesh, Plan, State, open_mesh

__all__ = ["Screen", "run_up", "screen_of_stderr"]


AGAIN_S = 1.0
"""Between two looks at a mesh that is used already."""


class Screen(Protocol):
    """What the person in front sees besides the log lines."""

    output: Output

    def report(self, text: str) -> None:
        """What is waited for now."""

    def settle(self) -> None:
        """Nothing is waited for any more."""


class TerminalScreen:
    """A spinner under the log lines."""

    def __init__(self, width: int) -> None:
        from rich.console import Console
        from rich.text import Text

        console = Console(stderr=True, highlight=False)

        def write(lines: bytes) -> None:
            console.print(Text.from_ansi(lines.decode().rstrip("\n")), soft_wrap=True)

        self.output: Output = TerminalOutput(write, width)
        self._status = console.status("starting", spinner="dots")
        self._status.start()

    def report(self, text: str) -> None:
        from rich.markup import escape

        self._status.update(escape(text))

    def settle(self) -> None:
        self._status.stop()


class PlainScreen:
    """Plain lines on stdout; stderr is left to the log."""

    def __init__(self) -> None:
        self.output: Output = JsonOutput(sys.stderr.buffer)

    def report(self, text: str) -> None:
        print(text, flush=True)

    def settle(self) -> None:
        return


def screen_of_stderr(width: int) -> Screen:
    return TerminalScreen(width) if sys.stderr.isatty() else PlainScreen()


async def run_up(plan: Plan, screen: Screen, *, must_start: bool = True, must_load: bool = False) -> None:
    """Returns when SIGINT, SIGTERM or SIGHUP has stopped everything.

    Args:
        must_start: A process that ends before the mesh is ready is a failure.
        must_load: So is a model that cannot be loaded.
    Raises:
        CommandError: a port is taken, or one of these failures. Nothing is left.
    """
    try:
        async with open_mesh(plan, screen.output) as mesh:
            with _stop_signals(mesh.supervisor.kill) as stop:
                try:
                    await _until(stop, _serve(mesh, screen, must_start=must_start, must_load=must_load))
                finally:
                    screen.settle()
                print("stopping: the gateway finishes what is in flight, then the services end", flush=True)
                started = time.monotonic()
                await mesh.supervisor.stop()
                print(f"stopped in {time.monotonic() - started:.1f} s", flush=True)
    finally:
        screen.settle()
        screen.output.close()


async def _until(stop: asyncio.Event, work: Coroutine[object, object, None]) -> None:
    """Run `work`, which never ends by itself unless it fails, until the stop is asked for."""
    stopping, working = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(work)
    try:
        await asyncio.wait({stopping, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        stopping.cancel()
        working.cancel()


async def _serve(mesh: Mesh, screen: Screen, *, must_start: bool, must_load: bool) -> None:
    patience_s = math.inf if must_load else PATIENCE_S
    state = await mesh.wait_ready(screen.report, must_start=must_start, patience_s=patience_s)
    if must_load and state.unready:
        raise CommandError(f"{_told(state.unready)}; --exit-on-error=false serves the others")
    screen.settle()
    _tell_endpoints(mesh, state)
    for name in state.missing:
        screen.output.event(name, "runs, but the gateway has not heard of a service of this name", is_bad=True)
    while not state.is_ready:
        await asyncio.sleep(AGAIN_S)
        state = await mesh.wait_ready(lambda text: None, must_start=False)
        if state.is_ready:
            print(
                f"all is ready now, after {time.monotonic() - mesh.started:.1f} s: {_named(state.models)}", flush=True
            )
    await asyncio.Event().wait()


def _tell_endpoints(mesh: Mesh, state: State) -> None:
    plan = mesh.plan
    after = f"after {time.monotonic() - mesh.started:.1f} s"
    print(f"{'ready' if state.is_ready else 'serving'} {after}: {_named(state.models)}")
    for name, why in state.unready:
        print(f"  NOT READY  {name}{f': {why}' if why else ''}")
    if not state.is_ready and not state.unready:
        print("  the gateway is not ready; it tells why to whoever has the token of --admin-token-file")
    print(f"  gRPC     {plan.grpc.target}")
    print(f"  HTTP     {plan.http_url}")
    print(f"  metrics  http://{plan.metrics.target}/metrics")
    print("  Ctrl-C stops it", flush=True)


def _named(models: Sequence[str]) -> str:
    return ", ".join(models) or "no model"


def _told(unready: Sequence[tuple[str, str]]) -> str:
    models = "; ".join(f"{name}{f' ({why})' if why else ''}" for name, why in unready)
    return f"not every model could be loaded: {models}"


@contextlib.contextmanager
def _stop_signals(kill: Callable[[], None]) -> Iterator[asyncio.Event]:
    """Set at the first of the signals that ask for an end; a second one kills."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask() -> None:
        if stop.is_set():
            kill()
        stop.set()

    # One that was ignored from the start stays so: that is how nohup and a script's `&` keep a process.
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, ask)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
