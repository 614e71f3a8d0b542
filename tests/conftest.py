"""For all tests: async ones run on the loop that the processes run on."""

import asyncio
from collections.abc import AsyncIterator

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def one_loop(anyio_backend: object) -> AsyncIterator[None]:
    """For modules that open gRPC servers and channels: all their tests share a loop.

    gRPC polls once for the whole process. What it still has for a loop that was closed meanwhile is raised in the next
    one, as that one's failure.
    """
    yield
    await asyncio.sleep(0.05)
