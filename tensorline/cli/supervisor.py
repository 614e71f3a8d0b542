"""Keeps processes running: starts them, hands on what they say, starts them again, stops them in order.

What it decides is small (`Backoff`); this is the shell around it: one task for each process, no lock, nothing that a
cancelled task could leave half done.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import IO

from tensorline.cli.backoff import Backoff
from tensorline.cli.lines import LineSplitter, Output, last_words

__all__ = ["Ended", "Program", "Supervisor", "open_supervisor"]

KILL_AFTER_S = 5.0
"""How long after its drain time a process is killed."""
PIPE_S = 1.0
"""How long a pipe is read after its process has gone: one that left the group may hold it for ever."""


@dataclass(frozen=True, slots=True)
class Program:
    """A process that should run."""

    name: str
    target: str
    """The module, or the .py file, that it runs."""
    environment: Mapping[str, str]
    tier: int = 0
    """Lower ones are stopped first; those of one tier together."""
    uses_directory: bool = False
    """The working directory is on its module path, as with `python -m`: a team's own module may stand there."""

    def command(self, parent: int) -> list[str]:
        flags = [] if self.uses_directory else ["-P"]
        return [sys.executable, *flags, "-m", "tensorline.cli.child", str(parent), self.target]


@dataclass(frozen=True, slots=True)
class Ended:
    """A process ended without having been asked to."""

    name: str
    code: int
    """Exit code; negative: the signal that ended it."""
    ran_s: float
    said: str
    """Why, in its own words: see `last_words`."""

    def __str__(self) -> str:
        how = f"exit code {self.code}" if self.code >= 0 else f"signal {signal.Signals(-self.code).name}"
        return f"{self.name} ended with {how} after {self.ran_s:.1f} s" + (f": {self.said}" if self.said else "")


@dataclass(slots=True)
class _Child:
    program: Program
    backoff: Backoff
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    process: subprocess.Popen[bytes] | None = None
    said: deque[bytes] = field(default_factory=lambda: deque(maxlen=50))
    task: asyncio.Task[None] | None = None

    def signal(self, number: int, *, group: bool = False) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self.process.pid, number)


class Supervisor:
    """The processes of one mesh on this machine. Made by `open_supervisor`."""

    def __init__(
        self, programs: Sequence[Program], output: Output, drain_s: float, backoff: Callable[[], Backoff] = Backoff
    ) -> None:
        self._children = [_Child(program, backoff()) for program in programs]
        self._output = output
        self._patience_s = drain_s + KILL_AFTER_S
        self._first_end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> dict[str, int]:
        """Of the processes that run now."""
        return {child.program.name: child.process.pid for child in self._children if child.process is not None}

    async def wait_ended(self) -> Ended:
        """Until the first process ends by itself. It is started again all the same, unless everything is stopped."""
        return await asyncio.shield(self._first_end)

    def start(self) -> None:
        for child in self._children:
            child.task = asyncio.create_task(self._keep(child), name=f"keep {child.program.name}")

    async def stop(self) -> None:
        """SIGTERM tier by tier. What still runs five seconds after its drain time is killed."""
        for _, tier in groupby(sorted(self._children, key=_tier), key=_tier):
            await asyncio.gather(*(self._stop(child) for child in tier))

    def kill(self) -> None:
        """End everything now."""
        for child in self._children:
            child.stop.set()
            child.signal(signal.SIGKILL, group=True)

    async def _stop(self, child: _Child) -> None:
        child.stop.set()
        child.signal(signal.SIGTERM)
        if child.task is None:
            return
        done, _ = await asyncio.wait([child.task], timeout=self._patience_s)
        if not done:
            self._output.event(child.program.name, f"did not stop in {self._patience_s:g} s: killed", is_bad=True)
            child.signal(signal.SIGKILL, group=True)
            await child.task

    async def _keep(self, child: _Child) -> None:
        name = child.program.name
        while not child.stop.is_set():
            started = time.monotonic()
            code = await self._run(child)
            ran_s = time.monotonic() - started
            if child.stop.is_set():
                if code not in (0, -signal.SIGTERM, -signal.SIGKILL):  # those two: asked for, or told already
                    self._output.event(name, f"stopped with exit code {code}", is_bad=True)
                break
            ended = Ended(name, code, ran_s, last_words(child.said))
            if not self._first_end.done():
                self._first_end.set_result(ended)
            delay_s = child.backoff.ended(ran_s)
            self._output.event(name, f"{ended}; starts again in {delay_s:g} s", is_bad=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.stop.wait(), delay_s)

    async def _run(self, child: _Child) -> int:
        """One life of the process: its exit code."""
        child.said.clear()
        try:
            # A session of its own: the terminal's Ctrl-C goes to this process alone, which orders the stop; and its
            # whole group can be killed. No preexec_fn, so this is a vfork without Python code between fork and exec.
            process = subprocess.Popen(  # noqa: ASYNC220, S603 - brief; must be done by the thread that the child ends with
                child.program.command(os.getpid()),
                env=child.program.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            child.said.append(str(error).encode())
            return 127
        pump = asyncio.create_task(self._pump(child, process.stdout))
        exited = _exit_of(process)
        child.process = process
        code = await exited
        # What it started itself goes with it, and with that the last writers of the pipe.
        child.signal(signal.SIGKILL, group=True)
        child.process = None
        await asyncio.wait([pump], timeout=PIPE_S)
        pump.cancel()
        return code

    async def _pump(self, child: _Child, pipe: IO[bytes] | None) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        lines = LineSplitter()
        with contextlib.closing(transport):
            while chunk := await reader.read(1 << 16):
                self._say(child, lines.feed(chunk))
        self._say(child, lines.end())

    def _say(self, child: _Child, lines: list[bytes]) -> None:
        for line in lines:
            child.said.append(line)
            self._output.line(child.program.name, line)


def _tier(child: _Child) -> int:
    return child.program.tier


def _exit_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """Its exit code, from a thread: asyncio's own wait for a process may also wait for its grandchildren's pipes."""
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[int] = loop.create_future()

    def tell(code: int) -> None:
        if not exited.done():
            exited.set_result(code)

    def wait() -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(tell, code)

    threading.Thread(target=wait, name=f"wait {process.pid}", daemon=True).start()
    return exited


@contextlib.asynccontextmanager
async def open_supervisor(
    programs: Sequence[Program], output: Output, drain_s: float, backoff: Callable[[], Backoff] = Backoff
) -> AsyncIterator[Supervisor]:
    """Run `programs` inside the block. Leaving it stops them in order; none is left, however it is left."""
    supervisor = Supervisor(programs, output, drain_s, backoff)
    supervisor.start()
    try:
        yield supervisor
    finally:
        try:
            await supervisor.stop()
        except BaseException:
            supervisor.kill()
            raise
