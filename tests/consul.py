"""A real Consul agent for tests: fetched once into .cache/consul, started empty in memory on free loopback ports."""

import asyncio
import json
import os
import random
import socket
import subprocess
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.debian import fetch_packages

__all__ = ["ConsulAgent", "consul_agent", "fetch_consul"]

INSTALLED = Path("/usr/bin/consul")
READY_S = 20.0


def fetch_consul() -> Path:
    """The `consul` program: the installed one, else Debian 11's package.

    Debian dropped the package after bullseye; the old one runs on Debian 12.

    Raises:
        subprocess.CalledProcessError, OSError: it cannot be fetched. Tests then fail; they never skip.
    """
    return INSTALLED if INSTALLED.exists() else fetch_packages("consul", "bullseye", ["consul"]) / "usr/bin/consul"


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different.

    Below the range that the system gives to clients: there, a client that dials while the agent is down could be given
    the very port it dials, and so keep the agent from coming back.
    """
    ports: set[int] = set()
    while len(ports) < count:
        with socket.socket() as candidate, suppress(OSError):
            candidate.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            ports.add(candidate.getsockname()[1])
    return list(ports)


class ConsulAgent:
    """A dev agent: a one-server cluster that keeps nothing, so that a restart is a loss of all data."""

    def __init__(self, program: Path, options: Sequence[str]) -> None:
        self._program = program
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="consul-")
        self.port, self._server_port, self._serf_port = free_ports(3)

    @property
    def url(self) -> str:
        return f"consul://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            self._program,
            "agent",
            "-dev",
            "-bind=127.0.0.1",
            "-client=127.0.0.1",
            f"-http-port={self.port}",
            f"-server-port={self._server_port}",
            f"-serf-lan-port={self._serf_port}",
            "-serf-wan-port=-1",
            "-grpc-port=-1",
            "-dns-port=-1",
            "-log-level=err",
            "-node=test",
            *self._options,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Without a data directory it reads, and would clean up, `services/` and `checks/` of where it stands.
            cwd=self._directory.name,
            env={"PATH": os.environ["PATH"], "HOME": self._directory.name},
        )
        async with asyncio.timeout(READY_S):
            while not await asyncio.to_thread(self._has_leader):
                if self._process.returncode is not None:
                    raise ChildProcessError(f"the Consul agent exited with {self._process.returncode}")
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        """SIGKILL; nothing of its data is left."""
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
            self._process = None

    async def aclose(self) -> None:
        await self.kill()
        self._directory.cleanup()

    async def restart_empty(self) -> None:
        """Killed and started again on the same port, with no data."""
        await self.kill()
        await self.start()

    def get(self, path: str) -> bytes:
        """A plain GET, blocking, beside any client under test."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2) as answer:
            body: bytes = answer.read()
            return body

    def put(self, path: str, body: object) -> None:
        """The same for a PUT of JSON."""
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data=json.dumps(body).encode(), method="PUT")
        with urllib.request.urlopen(request, timeout=2):
            pass

    def _has_leader(self) -> bool:
        try:
            return len(self.get("/v1/status/leader")) > len('""')
        except OSError:
            return False


@asynccontextmanager
async def consul_agent(*options: str) -> AsyncIterator[ConsulAgent]:
    """A running agent with a leader and further command-line `options`; killed at the end."""
    agent = ConsulAgent(await asyncio.to_thread(fetch_consul), options)
    try:
        await agent.start()
        yield agent
    finally:
        await agent.aclose()
