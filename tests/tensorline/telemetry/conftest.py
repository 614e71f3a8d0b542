from collections.abc import AsyncIterator

import pytest

from tests.tensorline.telemetry.collector import Collector, open_collector


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def collector(anyio_backend: object) -> AsyncIterator[Collector]:
    async with open_collector() as opened:
        yield opened
