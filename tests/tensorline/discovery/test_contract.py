"""What every kind of registry promises, and what those promise that services register themselves in."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tensorline.discovery import Registry, ServiceInstance
from tensorline.errors import ConfigError, UnavailableError
from tests.consul import consul_agent
from tests.tensorline.discovery.conftest import Kind, announced, watching

ONE = ServiceInstance(
    id="model-1",
    service="model",
    address="127.0.0.1:9001",
    local_address="unix:/run/tensorline/model-1.sock",
    nonce="00ff" * 8,
    host="node-7",
    models=("efficientnet_lite0/1", "efficientnet_lite0/2"),
    release="0.1.0",
    metadata={"zone": "a", "gpu": "no"},
)
TWO = ServiceInstance(id="pre-1", service="preprocess", address="", local_address="unix:/run/tensorline/pre-1.sock")
LARGEST = ServiceInstance(
    id="i" * 128,
    service="s" * 128,
    address=f"{'h' * 253}:65535",
    local_address=f"unix:/{'p' * 106}",
    nonce="n" * 512,
    host="ö" * 256,
    models=tuple(f"{number}/{'m' * 200}" for number in range(1024)),
    release='"\\' * 256,
    metadata={f"{number}_{'k' * 90}": '"' * 512 for number in range(48)},
)

CONSUL = pytest.param("consul", marks=pytest.mark.consul)


@asynccontextmanager
async def kind_of(name: str, directory: Path) -> AsyncIterator[Kind]:
    match name:
        case "file":
            yield Kind(f"file://{directory}/registry")
        case "consul":
            async with consul_agent() as agent:
                yield Kind(f"{agent.url}?ttl_s=1&wait_s=30", ends_s=8.0)
        case "static":
            yield Kind("static://127.0.0.1:9001,unix:/run/a.sock")
        case "dns":
            yield Kind("dns://localhost:9001")


@pytest.fixture(params=["file", CONSUL, "static", "dns"])
async def kind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kind]:
    async with kind_of(request.param, tmp_path) as chosen:
        yield chosen


@pytest.fixture(params=["file", CONSUL])
async def written(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kind]:
    """The kinds that services register themselves in."""
    async with kind_of(request.param, tmp_path) as chosen:
        yield chosen


@pytest.fixture
async def registry(kind: Kind) -> AsyncIterator[Registry]:
    async with kind.open() as opened:
        yield opened


async def test_the_present_set_comes_first_and_then_nothing_while_nothing_changes(registry: Registry) -> None:
    async with watching(registry) as watcher:
        await watcher.wait_for(lambda _: True)
        await asyncio.sleep(0.5)
    assert len(watcher.told) == 1


async def test_a_registry_is_fresh_once_it_was_looked_at(registry: Registry) -> None:
    async with watching(registry) as watcher:
        await watcher.wait_for(lambda _: True)
        assert registry.is_fresh


async def test_each_watcher_gets_the_set(registry: Registry) -> None:
    async with watching(registry) as first, watching(registry) as second:
        assert await first.wait_for(lambda _: True) == await second.wait_for(lambda _: True)


async def test_deregistering_an_unknown_id_is_no_error(registry: Registry) -> None:
    await registry.deregister("never-there")


async def test_aclose_ends_the_watches_and_may_come_twice(kind: Kind) -> None:
    async with kind.open() as registry, watching(registry) as watcher:
        await watcher.wait_for(lambda _: True)
        await registry.aclose()
        await watcher.wait_over()
        assert [seen async for seen in registry.watch()] == []


async def test_what_the_body_raises_leaves_unchanged(kind: Kind) -> None:
    with pytest.raises(ZeroDivisionError):
        async with kind.open():
            raise ZeroDivisionError


async def test_what_is_registered_is_seen_whole_by_others(written: Kind) -> None:
    async with written.open() as ours, written.open() as theirs, watching(theirs) as watcher:
        await watcher.wait_ids()
        await ours.register(ONE)
        assert await watcher.wait_ids("model-1") == {ONE}
        await ours.register(TWO)
        assert await watcher.wait_ids("model-1", "pre-1") == {ONE, TWO}


async def test_the_largest_instance_fits(written: Kind) -> None:
    async with written.open() as registry, watching(registry) as watcher:
        await registry.register(LARGEST)
        assert await watcher.wait_ids(LARGEST.id, within_s=2) == {LARGEST}


async def test_registering_again_replaces_and_is_never_seen_as_a_gap(written: Kind) -> None:
    async with written.open() as registry, watching(registry) as watcher:
        await registry.register(ONE)
        await watcher.wait_ids("model-1")
        grown = dataclasses.replace(ONE, models=(*ONE.models, "other/1"))
        await registry.register(grown)
        assert await watcher.wait_for(lambda seen: seen == {grown}, within_s=1.5)
        told = watcher.told[watcher.told.index(frozenset({ONE})) :]
    assert told == [{ONE}, {grown}]


async def test_deregistered_is_gone_at_once_and_may_come_back(written: Kind) -> None:
    async with written.open() as registry, watching(registry) as watcher:
        await registry.register(ONE)
        await watcher.wait_ids("model-1")
        await registry.deregister("model-1")
        await watcher.wait_ids()
        await registry.register(ONE)
        await watcher.wait_ids("model-1", within_s=1.5)


async def test_aclose_deregisters(written: Kind) -> None:
    async with written.open() as theirs, watching(theirs) as watcher:
        async with written.open() as ours:
            await ours.register(ONE)
            await watcher.wait_ids("model-1")
        await watcher.wait_ids()


async def test_a_killed_process_is_gone(written: Kind) -> None:
    async with written.open() as registry, watching(registry) as watcher:
        async with announced(written.url, "doomed"):
            await watcher.wait_ids("doomed", within_s=1.5)
        await watcher.wait_ids(within_s=written.ends_s)


async def test_one_that_lives_stays_registered(written: Kind) -> None:
    async with written.open() as ours, written.open() as theirs, watching(theirs) as watcher:
        await ours.register(ONE)
        await watcher.wait_ids("model-1")
        await asyncio.sleep(2.5)  # more than two TTLs of the Consul under test
        assert watcher.told[-1] == {ONE}
        assert [seen for seen in watcher.told[1:] if not seen] == []


async def test_an_instance_that_does_not_fit_is_refused(written: Kind) -> None:
    async with written.open() as registry:
        with pytest.raises(ConfigError, match=r"id '\.\./x' must match"):
            await registry.register(dataclasses.replace(ONE, id="../x"))


async def test_a_closed_registry_takes_no_instance(written: Kind) -> None:
    async with written.open() as registry:
        await registry.aclose()
        with pytest.raises(UnavailableError, match="closed"):
            await registry.register(ONE)


async def test_many_instances(written: Kind) -> None:
    instances = [
        dataclasses.replace(ONE, id=f"many-{number}", address=f"127.0.0.1:{9000 + number}") for number in range(30)
    ]
    async with written.open() as ours, written.open() as theirs, watching(theirs) as watcher:
        await asyncio.gather(*map(ours.register, instances))
        await watcher.wait_for(lambda seen: seen == frozenset(instances), within_s=3)
