"""Who serves what, and where: one interface over the embedded files, Consul, a fixed list and DNS."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Registry", "ServiceInstance"]


@dataclass(frozen=True, slots=True)
class ServiceInstance:
    """One running stage service, as it registers itself."""

    id: str
    """Unique for each start of a process; "" where the registry cannot know it (static, DNS): learned at Hello."""
    service: str
    """"preprocess", "model", "postprocess" or a team's own name; "" where unknown."""
    address: str
    """TCP gRPC target "host:port"; "" when it listens on a Unix socket alone."""
    local_address: str = ""
    """gRPC target "unix:/path" for peers on the same host; "" when there is none."""
    nonce: str = ""
    """Hex nonce of its arena directory: equal nonces can read each other's handles."""
    host: str = ""
    models: tuple[str, ...] = ()
    """"name/version" of what it serves, for people and for tools; routing believes the stage stream."""
    release: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Compared, but no part of the hash: a mapping has none, and instances live in sets."""


class Registry(Protocol):
    """One connection to where services are found."""

    async def register(self, instance: ServiceInstance) -> None:
        """Announce `instance`, and keep it announced until `deregister` or `aclose`, whatever befalls the registry.

        Called again with the same id: the entry is replaced (its models changed). A registry that is away is no error:
        it is announced once the registry is back.

        Raises:
            ConfigError: a field does not fit into every registry (`check_instance`).
            UnavailableError: after `aclose`.
        """

    async def deregister(self, instance_id: str) -> None:
        """Take it away at once. An unknown id is no error."""

    def watch(self) -> AsyncIterator[frozenset[ServiceInstance]]:
        """The healthy instances: the present set first, then the whole set after each change.

        While the registry is away the last good set stays (nothing is yielded); `is_fresh` says so. The iterator ends
        at `aclose`. A slow reader skips to the newest set.
        """

    @property
    def is_fresh(self) -> bool:
        """The last look at the registry succeeded."""

    async def aclose(self) -> None:
        """End the watches and deregister what was registered here."""
