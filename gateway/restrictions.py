"""Which calls need a secret header, as Triton's `--grpc-restricted-protocol` and `--http-restricted-api` say it.

Source: protocol.md §1, errors.md §2.
"""

import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tensorline.errors import ConfigError, UnavailableError

__all__ = ["CATEGORIES", "GRPC_PREFIX", "NO_RESTRICTIONS", "RestrictedError", "Restrictions", "category_of"]

GRPC_PREFIX: Final = "triton-grpc-protocol-"
"""Before the key of a restriction in gRPC metadata."""

_SHARED_MEMORY: Final = [
    f"{kind}SharedMemory{call}" for kind in ("System", "Cuda") for call in ("Status", "Register", "Unregister")
]
CATEGORIES: Final[Mapping[str, Sequence[str]]] = {
    "health": ("ServerLive", "ServerReady", "ModelReady", "Check", "Watch"),
    "metadata": ("ServerMetadata", "ModelMetadata"),
    "inference": ("ModelInfer", "ModelStreamInfer"),
    "shared-memory": _SHARED_MEMORY,
    "model-config": ("ModelConfig",),
    "model-repository": ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    "statistics": ("ModelStatistics",),
    "trace": ("TraceSetting",),
    "logging": ("LogSettings",),
}
"""RPCs by the name of their category; Check and Watch are those of grpc.health.v1."""

_CATEGORY_OF: Final = {rpc: category for category, rpcs in CATEGORIES.items() for rpc in rpcs}


class RestrictedError(UnavailableError):
    """The header is missing or has another value. HTTP tells it as 403."""


def category_of(rpc: str) -> str:
    """Category of an RPC, given without its service; "" for one that has none: it cannot be restricted."""
    return _CATEGORY_OF.get(rpc, "")


class Restrictions:
    """Args:
        entries: Each "category,category:key=value".
        prefix: Of the header's name, before the key.
        what: How an error calls the restricted thing.
    Raises:
        ConfigError: an entry of another form, an unknown category, or one in two entries. No value is shown in it.
    """

    def __init__(self, entries: Sequence[str] = (), *, prefix: str = "", what: str = "API") -> None:
        self._what = what
        self._headers: dict[str, tuple[str, bytes]] = {}
        for entry in entries:
            names, colon, header = entry.partition(":")
            key, equals, value = header.partition("=")
            if not (colon and equals and key.strip() and value):
                begins = names.partition("=")[0]  # what may be the secret comes behind it
                raise ConfigError(
                    f"a restriction has the form 'category,category:key=value'; one begins with '{begins}'"
                )
            for category in names.split(","):
                self._restrict(category.strip(), (prefix + key.strip()).lower(), value)

    def _restrict(self, category: str, header: str, value: str) -> None:
        if category not in CATEGORIES:
            raise ConfigError(f"'{category}' is no category that can be restricted; use {', '.join(CATEGORIES)}")
        if category in self._headers:
            raise ConfigError(f"category '{category}' is restricted twice; give it one key and value")
        self._headers[category] = header, value.encode()

    @property
    def is_active(self) -> bool:
        return bool(self._headers)

    def check(self, category: str, header: Callable[[str], str | bytes | None]) -> None:
        """
        Args:
            header: The value of a header by its name in lower case; None: it was not sent.
        Raises:
            RestrictedError: the category is restricted, and the header is not as it must be.
        """
        wanted = self._headers.get(category)
        if wanted is None:
            return
        given = header(wanted[0]) or b""
        if not hmac.compare_digest(given if isinstance(given, bytes) else given.encode(), wanted[1]):
            raise RestrictedError(f"This {self._what} is restricted, expecting header '{wanted[0]}'")


NO_RESTRICTIONS: Final = Restrictions()
