"""Open-loop traffic whose every answer is checked: what failed, how fast, and whether anything was ever wrong."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from grpc import StatusCode
from grpc.aio import AioRpcError

__all__ = ["Load", "Sample", "running_load"]


@dataclass(frozen=True)
class Sample:
    began: float
    took_s: float
    code: StatusCode
    text: str
    is_right: bool


class Load:
    """Args:
    ask: Sends request number n; whether the answer was the right one.
    """

    def __init__(self, ask: Callable[[int], Awaitable[bool]], rate_per_s: float) -> None:
        self.samples: list[Sample] = []
        self._ask = ask
        self._rate_per_s = rate_per_s

    @property
    def failures(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.code is not StatusCode.OK]

    @property
    def wrong(self) -> int:
        return sum(sample.code is StatusCode.OK and not sample.is_right for sample in self.samples)

    def since(self, began: float) -> list[Sample]:
        return [sample for sample in self.samples if sample.began >= began]

    def failures_since(self, began: float) -> list[Sample]:
        return [sample for sample in self.failures if sample.began >= began]

    async def run(self) -> None:
        """Until cancelled; what is in flight then is awaited."""
        begin, number = time.monotonic(), 0
        async with asyncio.TaskGroup() as flying:
            try:
                while True:
                    await asyncio.sleep(max(0.0, begin + number / self._rate_per_s - time.monotonic()))
                    flying.create_task(self._one(number))
                    number += 1
            except asyncio.CancelledError:
                return

    async def _one(self, number: int) -> None:
        began = time.monotonic()
        code, text, is_right = StatusCode.OK, "", False
        try:
            is_right = await self._ask(number)
        except AioRpcError as error:
            code, text = error.code(), error.details() or ""
        self.samples.append(Sample(began, time.monotonic() - began, code, text, is_right))


@asynccontextmanager
async def running_load(ask: Callable[[int], Awaitable[bool]], rate_per_s: float) -> AsyncIterator[Load]:
    """Traffic for as long as the block lasts."""
    load = Load(ask, rate_per_s)
    task = asyncio.create_task(load.run())
    try:
        yield load
    finally:
        task.cancel()
        await task
