import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest

from tensorline.discovery import DnsUrl, open_registry
from tensorline.discovery.dns import DnsRegistry
from tests.tensorline.discovery.conftest import until, watching

URL = DnsUrl("stages.mesh.svc", 8001, interval_s=0.02)


class Zone:
    """A resolver to order."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: tuple[str, ...] | OSError = addresses
        self.asked = 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def __call__(self, host: str, port: int) -> Iterable[str]:
        assert (host, port) == ("stages.mesh.svc", 8001)
        self.asked += 1
        await self.answers.wait()
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses


@asynccontextmanager
async def opened(zone: Zone) -> AsyncIterator[DnsRegistry]:
    registry = DnsRegistry(URL, resolve=zone)
    try:
        yield registry
    finally:
        await registry.aclose()


async def test_every_address_is_an_instance_and_a_change_is_seen() -> None:
    zone = Zone("10.0.0.1", "fd00::1", "10.0.0.1")
    async with opened(zone) as registry, watching(registry) as watcher:
        seen = await watcher.wait_for(lambda seen: len(seen) == 2)
        assert {each.address for each in seen} == {"10.0.0.1:8001", "[fd00::1]:8001"}
        assert {each.id for each in seen} == {""}
        zone.addresses = ("10.0.0.2",)
        await watcher.wait_for(lambda seen: {each.address for each in seen} == {"10.0.0.2:8001"})


@pytest.mark.parametrize("failure", [OSError("no such host"), ()])
async def test_the_last_good_set_stays_while_the_name_fails(failure: OSError | tuple[()]) -> None:
    zone = Zone("10.0.0.1")
    async with opened(zone) as registry, watching(registry) as watcher:
        await watcher.wait_for(lambda seen: len(seen) == 1)
        zone.addresses = failure
        await until(lambda: not registry.is_fresh)
        zone.addresses = ("10.0.0.1",)
        await until(lambda: registry.is_fresh)
    assert len(watcher.told) == 1


async def test_a_failure_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    zone = Zone()
    zone.addresses = OSError("no such host")
    async with opened(zone) as registry, watching(registry):
        await until(lambda: zone.asked >= 4)
    assert [record.getMessage() for record in caplog.records] == ["stages.mesh.svc cannot be resolved: no such host"]


async def test_lookups_that_hang_do_not_pile_up() -> None:
    zone = Zone("10.0.0.1")
    zone.answers.clear()
    async with opened(zone) as registry, watching(registry) as watcher:
        await asyncio.sleep(0.1)
        assert (zone.asked, registry.is_fresh, watcher.told) == (1, False, [])
        zone.answers.set()
        await watcher.wait_for(lambda seen: len(seen) == 1)


async def test_closing_does_not_wait_for_a_lookup() -> None:
    zone = Zone("10.0.0.1")
    zone.answers.clear()
    async with opened(zone) as registry, watching(registry) as watcher:
        await asyncio.sleep(0.05)
        async with asyncio.timeout(0.2):
            await registry.aclose()
            await watcher.wait_over()


async def test_a_real_name_is_resolved() -> None:
    async with open_registry("dns://localhost:8001") as registry, watching(registry) as watcher:
        seen = await watcher.wait_for(bool, within_s=5)
        assert {each.address for each in seen} & {"127.0.0.1:8001", "[::1]:8001"}


async def test_a_name_that_no_resolver_takes_is_a_failed_look() -> None:
    async with open_registry(f"dns://{'a' * 70}..x:8001") as registry, watching(registry) as watcher:
        await asyncio.sleep(0.3)
        assert (registry.is_fresh, watcher.told) == (False, [])
