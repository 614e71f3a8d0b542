"""For all tests: async ones run on the loop that the processes run on."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

# Here: tests/compat imports them before tests/e2e is looked at.
pytest.register_assert_rewrite("tests.e2e.client", "tests.e2e.mesh")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in a script's background: what we start would ignore it, too, and tests stop it that way.
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # tests that make models import ONNX Runtime themselves


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module", autouse=True)
async def one_loop(anyio_backend: object) -> AsyncIterator[None]:
    """All tests of a module share a loop.

    gRPC polls once for the whole process. What it still has for a loop that was closed meanwhile is raised in the next
    one, as that one's failure.
    """
    yield
    await asyncio.sleep(0.05)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here and not in tests/compat: options are known to pytest only from where it starts to look for tests."""
    group = parser.getgroup("compat", "tests/compat against a server that runs already")
    group.addoption("--server-grpc", metavar="HOST:PORT", help="gRPC address of a Triton on tests/compat's models")
    group.addoption("--server-http", metavar="HOST:PORT", help="HTTP address of the same server")
    group.addoption("--server-metrics", metavar="HOST:PORT", help="its metrics; else port 8002 of that host")
