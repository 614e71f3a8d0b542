"""The registry over one Consul agent: a beat that keeps our instances registered, a watch that follows all of them."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tensorline.discovery.consul.agent import Agent
from tensorline.discovery.consul.entry import decode_entries, encode_registration
from tensorline.discovery.consul.view import TokenBucket, View
from tensorline.discovery.registry import Registry, ServiceInstance
from tensorline.discovery.url import ConsulUrl
from tensorline.discovery.watching import Background, Watched, forever
from tensorline.errors import UnavailableError

__all__ = ["ConsulRegistry", "open_consul_registry"]

BEATS_PER_TTL = 10 / 3
"""A TTL of 10 s, a beat of 3 s: two beats may be lost."""
HOLD_BEATS = 5
"""15 s at a beat of 3 s: what registering again after a loss may take."""
BURST = 2
CALLS_PER_S = 1.0
BACKOFF_S = 0.5
BACKOFF_MOST_S = 5.0
DEREGISTER_S = 1.0

log = logging.getLogger(__name__)


class ConsulRegistry:
    """Beats only while something is registered, asks only while somebody watches."""

    def __init__(self, url: ConsulUrl, agent: Agent) -> None:
        self._url = url
        self._agent = agent
        self._beat_s = url.ttl_s / BEATS_PER_TTL
        # For beats, which do not wait, and queries, which do; however short the beat, two thirds are left for queries.
        self._bucket = TokenBucket(max(CALLS_PER_S, 3 / self._beat_s), BURST)
        self._watched = Watched()
        self._background = Background()
        self._is_closed = False
        self._succeeded: dict[str, bool] = {}
        self._wanted: dict[str, ServiceInstance] = {}
        self._announced: dict[str, ServiceInstance] = {}
        self._announcing = asyncio.Lock()
        self._view = View(HOLD_BEATS * self._beat_s)
        self._index = 0
        self._failures = 0
        self._bad: dict[str, str] = {}

    async def register(self, instance: ServiceInstance) -> None:
        encode_registration(instance)  # raises now, not in a beat
        if self._is_closed:
            raise UnavailableError("the registry is closed")
        self._wanted[instance.id] = instance
        self._background.start("beat", lambda: forever("beat", self._beat))
        await self._keep_announced(instance.id)

    async def deregister(self, instance_id: str) -> None:
        if self._wanted.pop(instance_id, None) is not None:
            await self._take_away(instance_id)
        if not self._wanted:
            self._succeeded.pop("beat", None)  # nothing beats any more, so nothing could mend it

    async def watch(self) -> AsyncIterator[frozenset[ServiceInstance]]:
        self._background.start("watch", lambda: forever("watch", self._query))
        async for seen in self._watched.watch():
            yield seen

    @property
    def is_fresh(self) -> bool:
        return bool(self._succeeded) and all(self._succeeded.values())

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self._background.aclose()
            self._watched.close()
            leaving, self._wanted = list(self._wanted), {}
            await asyncio.gather(*map(self._take_away, leaving))
        finally:
            await self._agent.aclose()

    async def _beat(self) -> None:
        await asyncio.sleep(self._beat_s)
        for instance_id in list(self._wanted):
            await self._keep_announced(instance_id)

    async def _keep_announced(self, instance_id: str) -> None:
        async with self._announcing:
            instance = self._wanted.get(instance_id)
            if instance is None:
                return
            try:
                if self._announced.get(instance_id) is instance:
                    self._bucket.spend(time.monotonic())
                    if await self._agent.beat(instance_id):
                        self._succeed("beat")
                        return
                    log.warning("the Consul agent lost the registration of %s, making it again", instance_id)
                    del self._announced[instance_id]
                await self._agent.register(encode_registration(instance))
                self._announced[instance_id] = instance
                self._succeed("beat")
                if instance_id not in self._wanted:  # deregistered meanwhile, perhaps before the agent had it
                    await self._agent.deregister(instance_id)
            except UnavailableError as err:
                self._fail("beat", err)

    async def _take_away(self, instance_id: str) -> None:
        self._announced.pop(instance_id, None)
        try:
            async with asyncio.timeout(DEREGISTER_S), self._announcing:
                await self._agent.deregister(instance_id)
        except (TimeoutError, UnavailableError) as err:
            log.warning("%s not deregistered, its TTL will end it: %r", instance_id, err)

    async def _query(self) -> None:
        await asyncio.sleep(self._bucket.spend(time.monotonic()))
        hold_left_s = self._view.hold_left_s(time.monotonic())
        wait_s = self._url.wait_s if hold_left_s is None else min(self._url.wait_s, hold_left_s)
        try:
            index, answer = await self._agent.instances(self._index, wait_s)
        except UnavailableError as err:
            self._fail("watch", err)
            # A restarted agent counts from the beginning: an index from before would wait for nothing.
            self._index = 0
            self._view.doubt()
            self._failures = min(self._failures + 1, 10)
            await asyncio.sleep(random.uniform(0, min(BACKOFF_MOST_S, BACKOFF_S * 2**self._failures)))  # noqa: S311
            return
        if index < self._index:
            self._view.doubt()
            index = 0
        self._index = index
        self._failures = 0
        self._succeed("watch")
        self._believe(answer)

    def _believe(self, answer: list[object]) -> None:
        entries, bad = decode_entries(answer)
        for key in bad.keys() - self._bad.keys():
            log.warning("instance %s in Consul ignored: %s", key, bad[key])
        self._bad = bad
        self._watched.publish(self._view.answered(entries, time.monotonic()))

    def _succeed(self, part: str) -> None:
        if self._succeeded.get(part) is False:
            log.info("the Consul agent answers again (%s)", part)
        self._succeeded[part] = True

    def _fail(self, part: str, err: UnavailableError) -> None:
        if self._succeeded.get(part, True):
            log.warning("Consul is away (%s): %s", part, err)
        self._succeeded[part] = False


@asynccontextmanager
async def open_consul_registry(url: ConsulUrl) -> AsyncIterator[Registry]:
    registry = ConsulRegistry(url, Agent(url))
    try:
        yield registry
    finally:
        await registry.aclose()
