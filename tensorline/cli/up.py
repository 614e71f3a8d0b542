"""`tensorline up`: a mesh in the foreground, until it is told to stop."""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from tensorline.cli.lines import JsonOutput, Output, TerminalOutput
from tensorline.cli.mesh import Mesh, Plan, open_mesh

__all__ = ["Screen", "run_up", "screen_of_stderr"]


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


async def run_up(plan: Plan, screen: Screen, *, must_start: bool = True) -> None:
    """Returns when SIGINT, SIGTERM or SIGHUP has stopped everything.

    Raises:
        CommandError: a port is taken, or a process ended before the mesh was ready. Nothing is left.
    """
    try:
        async with open_mesh(plan, screen.output) as mesh:
            with _stop_signals(mesh.supervisor.kill) as stop:
                try:
                    await _serve(mesh, screen, stop, must_start=must_start)
                finally:
                    screen.settle()
                print("stopping: the gateway finishes what is in flight, then the services end", flush=True)
                started = time.monotonic()
                await mesh.supervisor.stop()
                print(f"stopped in {time.monotonic() - started:.1f} s", flush=True)
    finally:
        screen.settle()
        screen.output.close()


async def _serve(mesh: Mesh, screen: Screen, stop: asyncio.Event, *, must_start: bool) -> None:
    stopping = asyncio.ensure_future(stop.wait())
    ready = asyncio.ensure_future(mesh.wait_ready(screen.report, must_start=must_start))
    try:
        await asyncio.wait({stopping, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            return
        missing = ready.result()
        screen.settle()
        for name in missing:
            screen.output.event(name, "runs, but the gateway has not heard of a service of this name", is_bad=True)
        _tell_endpoints(mesh)
        await stopping
    finally:
        stopping.cancel()
        ready.cancel()


def _tell_endpoints(mesh: Mesh) -> None:
    plan = mesh.plan
    models = ", ".join(mesh.models) or "no model"
    print(f"ready after {time.monotonic() - mesh.started:.1f} s: {models}")
    print(f"  gRPC     {plan.grpc.target}")
    print(f"  HTTP     {plan.http_url}")
    print(f"  metrics  http://{plan.metrics.target}/metrics")
    print("  Ctrl-C stops it", flush=True)


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
