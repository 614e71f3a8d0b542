"""A fixed list of targets: static://host:port,unix:/path."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tensorline.discovery.registry import Registry, ServiceInstance
from tensorline.discovery.url import StaticUrl
from tensorline.discovery.watching import Watched

__all__ = ["StaticRegistry", "open_static_registry"]


class StaticRegistry:
    """What the list says holds: registering changes nothing, and all of it is healthy."""

    def __init__(self, url: StaticUrl) -> None:
        self._watched = Watched()
        self._watched.publish(frozenset(map(_instance, url.targets)))

    async def register(self, instance: ServiceInstance) -> None:
        """Nothing to do: who is meant stands in the list."""

    async def deregister(self, instance_id: str) -> None:
        """Nothing to do."""

    def watch(self) -> AsyncIterator[frozenset[ServiceInstance]]:
        return self._watched.watch()

    @property
    def is_fresh(self) -> bool:
        return True

    async def aclose(self) -> None:
        self._watched.close()


def _instance(target: str) -> ServiceInstance:
    if target.startswith("unix:"):
        return ServiceInstance(id="", service="", address="", local_address=target)
    return ServiceInstance(id="", service="", address=target)


@asynccontextmanager
async def open_static_registry(url: StaticUrl) -> AsyncIterator[Registry]:
    registry = StaticRegistry(url)
    try:
        yield registry
    finally:
        await registry.aclose()
