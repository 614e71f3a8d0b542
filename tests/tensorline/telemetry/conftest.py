from collections.abc import AsyncIterator

import pytest

from tests.tensorline.telemetry.collector import Collector, open_collector


@pytest.fixture
async def collector(anyio_backend: object) -> AsyncIterator[Collector]:
    async with open_collector() as opened:
        yield opened
