"""Discovery through a real Consul agent, what its restarts and absences do, and what it is asked."""

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tensorline.discovery import ServiceInstance, open_registry
from tests.consul import ConsulAgent, consul_agent
from tests.tensorline.discovery.conftest import announced, until, watching
from tests.tensorline.discovery.proxy import proxied
from tests.tensorline.discovery.test_contract import ONE, TWO

pytestmark = pytest.mark.consul

QUICK = "?ttl_s=1&wait_s=60"
"""Beats every 0.3 s, holds for 1.5 s after a break. The wait is long, so that nothing is seen by its end."""
HEALTH = "GET /v1/health/service/tensorline-stage"


@pytest.fixture
async def agent() -> AsyncIterator[ConsulAgent]:
    async with consul_agent() as running:
        yield running


def registered(agent: ConsulAgent) -> list[str]:
    """The ids in the catalog, as anybody else sees them."""
    return sorted(entry["ServiceID"] for entry in json.loads(agent.get("/v1/catalog/service/tensorline-stage")))


async def test_people_find_the_stage_its_models_and_its_address_in_consul(agent: ConsulAgent) -> None:
    async with open_registry(agent.url) as registry:
        await registry.register(ONE)
        (entry,) = json.loads(agent.get("/v1/health/service/tensorline-stage?tag=model"))
    service = entry["Service"]
    assert (service["ID"], service["Address"], service["Port"]) == ("model-1", "127.0.0.1", 9001)
    assert service["Tags"] == ["model", "model=efficientnet_lite0/1", "model=efficientnet_lite0/2"]
    assert service["Meta"]["x-zone"] == "a"
    checks = {check["CheckID"]: check["Status"] for check in entry["Checks"]}
    assert checks["service:model-1"] == "passing"


async def test_another_service_name_is_another_mesh(agent: ConsulAgent) -> None:
    async with open_registry(agent.url) as one, open_registry(f"{agent.url}?service=other") as other:
        async with watching(other) as watcher:
            await one.register(ONE)
            await other.register(TWO)
            await watcher.wait_ids("pre-1", within_s=3)  # the third query within a second waits
            assert registered(agent) == ["model-1"]


async def test_an_instance_that_stops_beating_is_gone_at_its_ttl_and_back_with_the_next_beat(
    agent: ConsulAgent,
) -> None:
    async with proxied(agent.port) as proxy, open_registry(f"consul://127.0.0.1:{proxy.port}{QUICK}") as ours:
        async with open_registry(agent.url + QUICK) as theirs, watching(theirs) as watcher:
            await ours.register(ONE)
            await watcher.wait_ids("model-1")
            await proxy.cut()
            stopped_at = time.monotonic()
            await watcher.wait_ids(within_s=8)  # an agent that is new writes checks to its catalog up to 3 s late
            assert time.monotonic() - stopped_at > 0.5
            assert not ours.is_fresh
            await proxy.start()
            await watcher.wait_ids("model-1")
            assert ours.is_fresh


async def test_an_agent_that_restarts_empty_is_told_again_and_nobody_is_missed(agent: ConsulAgent) -> None:
    url = agent.url + QUICK
    async with open_registry(url) as first, open_registry(url) as second, open_registry(url) as theirs:
        async with watching(theirs) as watcher:
            await first.register(ONE)
            await second.register(TWO)
            both = await watcher.wait_ids("model-1", "pre-1", within_s=2)
            told = len(watcher.told)
            await agent.restart_empty()
            restarted_at = time.monotonic()
            await until(lambda: registered(agent) == ["model-1", "pre-1"])
            print(f"registered again after {time.monotonic() - restarted_at:.2f} s")
            await until(lambda: theirs.is_fresh)
            await asyncio.sleep(2)  # the hold is over
            assert watcher.told[told:] == []
            assert watcher.told[-1] == both
            assert registered(agent) == ["model-1", "pre-1"]
            # It watches the new agent, and not for an index of the old one.
            await first.deregister("model-1")
            await watcher.wait_ids("pre-1")


async def test_an_agent_that_is_replaced_without_a_gap_is_not_asked_for_the_index_of_the_old_one(
    agent: ConsulAgent,
) -> None:
    """The connection breaks, the next one reaches an empty agent: aiohttp alone would repeat the query in silence."""
    async with proxied(agent.port) as proxy, consul_agent() as successor:
        url = f"consul://127.0.0.1:{proxy.port}{QUICK}"
        async with open_registry(url) as ours, open_registry(url) as theirs, watching(theirs) as watcher:
            for turn in range(20):
                await ours.register(dataclasses.replace(ONE, release=str(turn)))
            await watcher.wait_for(lambda seen: {each.release for each in seen} == {"19"}, within_s=2)
            told = len(watcher.told)
            proxy.target_port = successor.port
            proxy.reset()
            await until(lambda: registered(successor) == ["model-1"])
            await until(lambda: proxy.requests[-1].startswith(f"{HEALTH}?index="))
            await asyncio.sleep(1)
            assert watcher.told[told:] == []
            await ours.deregister("model-1")
            await watcher.wait_ids(within_s=2)


async def test_who_does_not_come_back_to_an_empty_agent_is_gone_after_the_hold(agent: ConsulAgent) -> None:
    url = agent.url + QUICK
    async with open_registry(url) as ours, open_registry(url) as theirs, watching(theirs) as watcher:
        await ours.register(ONE)
        async with announced(url, "doomed"):
            await watcher.wait_ids("doomed", "model-1", within_s=2)
            await agent.kill()
        await agent.start()
        await until(lambda: theirs.is_fresh)
        assert len(watcher.told[-1]) == 2
        await watcher.wait_ids("model-1", within_s=3)


async def test_the_last_good_set_stays_while_the_agent_is_away(agent: ConsulAgent) -> None:
    async with proxied(agent.port) as proxy, open_registry(agent.url + QUICK) as ours:
        async with open_registry(f"consul://127.0.0.1:{proxy.port}{QUICK}") as theirs, watching(theirs) as watcher:
            await ours.register(ONE)
            await watcher.wait_ids("model-1")
            told = len(watcher.told)
            assert theirs.is_fresh
            await proxy.cut()
            await until(lambda: not theirs.is_fresh)
            await asyncio.sleep(2)
            assert watcher.told[told:] == []
            await proxy.start()
            await until(lambda: theirs.is_fresh, within_s=8)
            assert watcher.told[told:] == []
            # What happened meanwhile is seen.
            await ours.register(TWO)
            await watcher.wait_ids("model-1", "pre-1", within_s=2)


async def test_a_stage_that_starts_before_the_agent_is_registered_once_it_is_there(agent: ConsulAgent) -> None:
    await agent.kill()
    async with open_registry(agent.url + QUICK) as registry, watching(registry) as watcher:
        await registry.register(ONE)
        assert (registry.is_fresh, watcher.told) == (False, [])
        await agent.start()
        await watcher.wait_ids("model-1", within_s=8)
        await until(lambda: registry.is_fresh)


async def test_a_stuck_agent_does_not_hold_the_exit(agent: ConsulAgent) -> None:
    async with proxied(agent.port) as proxy:
        async with open_registry(f"consul://127.0.0.1:{proxy.port}{QUICK}") as registry, watching(registry) as watcher:
            await registry.register(ONE)
            await registry.register(TWO)
            await watcher.wait_ids("model-1", "pre-1", within_s=2)
            proxy.is_silent = True
            await asyncio.sleep(0.5)  # a beat is under way
            began = time.monotonic()
            await registry.aclose()
            assert time.monotonic() - began < 4.8
            await watcher.wait_over()


async def test_an_idle_process_asks_only_when_a_wait_ends_and_beats(agent: ConsulAgent) -> None:
    async with proxied(agent.port) as proxy:
        async with (
            open_registry(f"consul://127.0.0.1:{proxy.port}?wait_s=4") as registry,
            watching(registry) as watcher,
        ):
            await registry.register(ONE)
            await watcher.wait_ids("model-1")
            await asyncio.sleep(2)  # a new agent writes to its catalog for a moment
            before = len(proxy.requests)
            await asyncio.sleep(9)
            asked = [request.split("?")[0] for request in proxy.requests[before:]]
            assert 2 <= asked.count(HEALTH) <= 3  # two or three waits; of 5 minutes each in 10 minutes
            assert asked.count("PUT /v1/agent/check/pass/service:model-1") == 3
            assert len(asked) <= 6


async def test_a_storm_of_changes_is_asked_for_about_once_a_second(agent: ConsulAgent) -> None:
    async with proxied(agent.port) as proxy, open_registry(agent.url) as ours:
        async with open_registry(f"consul://127.0.0.1:{proxy.port}") as theirs, watching(theirs) as watcher:
            await watcher.wait_ids()
            began = time.monotonic()
            for number in range(40):
                await ours.register(dataclasses.replace(ONE, release=str(number)))
                await asyncio.sleep(0.1)
            await watcher.wait_for(lambda seen: {each.release for each in seen} == {"39"}, within_s=2)
            assert proxy.count(HEALTH) <= 3 + (time.monotonic() - began)


async def test_the_token_is_read_anew_from_its_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    acl = 'acl { enabled = true, default_policy = "deny", tokens { master = "4a7c3d5e-0000-4000-8000-000000000001" } }'
    token = tmp_path / "token"
    async with consul_agent("-hcl", acl) as agent:
        async with open_registry(f"{agent.url}{QUICK}&token_file={token}") as registry, watching(registry) as watcher:
            await registry.register(ONE)
            await until(lambda: "token file cannot be read" in caplog.text)
            token.write_text("4a7c3d5e-0000-4000-8000-00000000dead\n")
            await asyncio.sleep(1)
            assert (registry.is_fresh, watcher.told) == (False, [])
            token.write_text("4a7c3d5e-0000-4000-8000-000000000001\n")
            await watcher.wait_ids("model-1", within_s=8)
    assert "4a7c3d5e" not in caplog.text


async def test_what_answers_but_is_not_consul_is_an_agent_that_is_away() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nX-Consul-Index: 7\r\nContent-Length: 13\r\n\r\n<html>\xff</html")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, open_registry(f"consul://127.0.0.1:{port}{QUICK}") as registry, watching(registry) as watcher:
        await asyncio.sleep(0.5)
        assert (registry.is_fresh, watcher.told) == (False, [])


async def test_an_instance_made_by_hand_is_seen_by_its_address(agent: ConsulAgent) -> None:
    agent.put("/v1/agent/service/register", {"Name": "tensorline-stage", "ID": "mine", "Port": 9009})
    async with open_registry(agent.url) as registry, watching(registry) as watcher:
        seen = await watcher.wait_for(bool)
        assert seen == {ServiceInstance(id="", service="", address="127.0.0.1:9009")}


async def test_a_process_that_no_longer_registers_is_as_fresh_as_its_watch(agent: ConsulAgent) -> None:
    async with proxied(agent.port) as proxy:
        async with open_registry(f"consul://127.0.0.1:{proxy.port}{QUICK}") as registry, watching(registry):
            await registry.register(ONE)
            await proxy.cut()
            await registry.deregister("model-1")
            await proxy.start()
            await until(lambda: registry.is_fresh, within_s=8)
