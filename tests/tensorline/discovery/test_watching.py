import asyncio
import logging

import pytest

from tensorline.discovery import ServiceInstance
from tensorline.discovery.watching import Background, Watched, forever
from tests.tensorline.discovery.conftest import until

A, B = (frozenset({ServiceInstance(id=name, service="", address="h:1")}) for name in "ab")


async def test_a_slow_watcher_skips_to_the_newest_set() -> None:
    watched = Watched()
    watched.publish(A)
    watch = watched.watch()
    assert await anext(watch) == A
    watched.publish(frozenset())
    watched.publish(B)
    assert await anext(watch) == B


async def test_a_set_that_came_back_before_a_watcher_looked_is_no_change() -> None:
    watched = Watched()
    watched.publish(A)
    watch = watched.watch()
    await anext(watch)
    watched.publish(B)
    watched.publish(A)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(watch)


async def test_nothing_is_told_before_anything_was_seen() -> None:
    watched = Watched()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(watched.watch())


async def test_a_bug_is_logged_whole_and_does_not_end_the_task(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    async def step() -> None:
        nonlocal calls
        calls += 1
        raise ZeroDivisionError

    background = Background()
    background.start("x", lambda: forever("x", step, pause_s=0.0))
    with caplog.at_level(logging.ERROR):
        await until(lambda: calls >= 3)
    await background.aclose()
    assert "ZeroDivisionError" in caplog.text


async def test_closed_background_starts_nothing() -> None:
    background = Background()
    await background.aclose()
    background.start("x", lambda: pytest.fail("started"))
