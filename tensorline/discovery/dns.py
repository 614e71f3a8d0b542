"""A name that is resolved again and again: dns://name:port. Every address is one instance.

For a headless Kubernetes service, say. Who an instance is (its id, models, arena) is learned from its `Hello`; a name
that leads to one server by IPv4 and IPv6 gives two entries of one id there.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from tensorline.discovery.instance import join_address
from tensorline.discovery.registry import Registry, ServiceInstance
from tensorline.discovery.url import DnsUrl
from tensorline.discovery.watching import Background, Watched, forever

__all__ = ["DnsRegistry", "Resolve", "open_dns_registry", "resolve_addresses"]

Resolve = Callable[[str, int], Awaitable[Iterable[str]]]
"""Host and port to IP addresses; raises OSError when there is no answer."""

log = logging.getLogger(__name__)


async def resolve_addresses(host: str, port: int) -> Iterable[str]:
    """The A and AAAA addresses, by the system's resolver in a thread."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class DnsRegistry:
    """Registering changes nothing: who is meant stands in DNS. An answer without addresses is a failed look."""

    def __init__(self, url: DnsUrl, *, resolve: Resolve = resolve_addresses) -> None:
        self._url = url
        self._resolve = resolve
        self._watched = Watched()
        self._background = Background()
        self._lookup: asyncio.Future[Iterable[str]] | None = None
        self._is_fresh = False
        self._is_failing = False

    async def register(self, instance: ServiceInstance) -> None:
        """Nothing to do."""

    async def deregister(self, instance_id: str) -> None:
        """Nothing to do."""

    async def watch(self) -> AsyncIterator[frozenset[ServiceInstance]]:
        self._background.start("dns", lambda: forever("dns", self._look))
        async for seen in self._watched.watch():
            yield seen

    @property
    def is_fresh(self) -> bool:
        return self._is_fresh

    async def aclose(self) -> None:
        await self._background.aclose()
        self._watched.close()
        if self._lookup is not None:
            self._lookup.cancel()
            await asyncio.gather(self._lookup, return_exceptions=True)

    async def _look(self) -> None:
        # A lookup in a thread cannot be stopped. One that hangs is waited for further: a second would only join it.
        if self._lookup is None:
            self._lookup = asyncio.ensure_future(self._resolve(self._url.name, self._url.port))
        done, _ = await asyncio.wait([self._lookup], timeout=self._url.interval_s)
        if not done:
            self._failed("no answer in time")
            return
        lookup, self._lookup = self._lookup, None
        try:
            addresses = set(lookup.result())
        except (OSError, UnicodeError) as err:  # UnicodeError: a label that is too long or empty
            self._failed(str(err))
        else:
            self._answered(addresses)
        await asyncio.sleep(self._url.interval_s)

    def _answered(self, addresses: set[str]) -> None:
        if not addresses:
            self._failed("no addresses")
            return
        self._is_fresh, self._is_failing = True, False
        self._watched.publish(
            frozenset(
                ServiceInstance(id="", service="", address=join_address(address, self._url.port))
                for address in addresses
            )
        )

    def _failed(self, reason: str) -> None:
        if not self._is_failing:
            log.warning("%s cannot be resolved: %s", self._url.name, reason)
        self._is_fresh, self._is_failing = False, True


@asynccontextmanager
async def open_dns_registry(url: DnsUrl) -> AsyncIterator[Registry]:
    registry = DnsRegistry(url)
    try:
        yield registry
    finally:
        await registry.aclose()
