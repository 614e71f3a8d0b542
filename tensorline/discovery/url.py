"""The discovery URL, parsed into one value per kind of registry."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tensorline.discovery.instance import check_local_address, split_address
from tensorline.errors import ConfigError

__all__ = ["ConsulUrl", "DiscoveryUrl", "DnsUrl", "FileUrl", "StaticUrl", "parse_discovery_url"]

FORMS = (
    "file:///directory, consul://host:port[?service=…&token_file=…&dc=…&ttl_s=…&wait_s=…], "
    "static://host:port,unix:/path or dns://name:port[?interval_s=…]"
)

CONSUL_SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")  # a DNS label: Consul answers DNS for it


@dataclass(frozen=True, slots=True)
class FileUrl:
    """One host's registry: a directory."""

    directory: Path


@dataclass(frozen=True, slots=True)
class ConsulUrl:
    """A Consul agent."""

    host: str
    port: int
    service: str = "tensorline-stage"
    """The one Consul service name under which all stages stand."""
    token_file: Path | None = None
    dc: str = ""
    """Datacenter to watch; "": the agent's own. Registering always goes to the agent's own."""
    ttl_s: float = 10.0
    """An instance that has not beaten for so long is critical; it beats every 0.3 of it."""
    wait_s: float = 300.0
    """How long one blocking query may wait for a change; Consul allows 10 minutes at most."""


@dataclass(frozen=True, slots=True)
class StaticUrl:
    """A fixed list of gRPC targets, "host:port" or "unix:/path"."""

    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DnsUrl:
    """A name whose every address is one instance."""

    name: str
    port: int
    interval_s: float = 5.0


DiscoveryUrl = FileUrl | ConsulUrl | StaticUrl | DnsUrl


def parse_discovery_url(text: str) -> DiscoveryUrl:
    """Parse one of the four forms.

    Raises:
        ConfigError: with what came (never its options' values: one may be a secret put there by mistake) and the forms.
    """
    kind, separator, rest = text.partition("://")
    parse = _PARSERS.get(kind)
    try:
        if not separator or parse is None:
            raise ValueError(f"{kind[:32]!r} is no kind of registry")
        return parse(rest)
    except (ValueError, ConfigError) as err:
        shown = text.split("?")[0].split("@")[-1][:200]
        raise ConfigError(f"discovery URL {shown!r} cannot be used: {err}; the forms are {FORMS}") from None


def _parse_file(rest: str) -> FileUrl:
    directory = unquote(rest)
    if not rest.startswith("/") or "?" in rest or "#" in rest or not directory.isprintable():
        raise ValueError("the directory must be an absolute path without options")
    return FileUrl(Path(directory))


def _parse_static(rest: str) -> StaticUrl:
    targets = tuple(dict.fromkeys(rest.split(",")))
    for target in targets:
        if not target:
            raise ValueError("a target is empty")
        (check_local_address if target.startswith("unix:") else split_address)(target)
    return StaticUrl(targets)


def _parse_dns(rest: str) -> DnsUrl:
    host, port, options = _host_port_options(rest, {"interval_s": _seconds(0.1, 86_400)})
    return DnsUrl(host, port, **options)


def _parse_consul(rest: str) -> ConsulUrl:
    known: _Options = {
        "service": _consul_service,
        "token_file": Path,
        "dc": str,
        "ttl_s": _seconds(0.1, 3_600),
        "wait_s": _seconds(0.1, 600),
    }
    host, port, options = _host_port_options(rest, known)
    return ConsulUrl(host, port, **options)


_PARSERS: Mapping[str, Callable[[str], DiscoveryUrl]] = {
    "file": _parse_file,
    "consul": _parse_consul,
    "static": _parse_static,
    "dns": _parse_dns,
}

_Options = Mapping[str, Callable[[str], Any]]


def _host_port_options(rest: str, known: _Options) -> tuple[str, int, dict[str, Any]]:
    parts = urlsplit(f"//{rest}")
    if "@" in parts.netloc or parts.path or parts.fragment:
        raise ValueError("it may hold a host, a port and options, nothing else")
    host, port = split_address(parts.netloc)
    options: dict[str, Any] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known or name in options:
            raise ValueError(f"option {name[:32]!r} is unknown or given twice; known: {', '.join(known)}")
        try:
            options[name] = known[name](value)
        except ValueError as err:
            raise ValueError(f"option {name}: {err}") from None
    return host, port, options


def _seconds(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        number = float(text)
        if not least <= number <= most:
            raise ValueError(f"must be {least:g} to {most:g} seconds")
        return number

    return parse


def _consul_service(text: str) -> str:
    if not CONSUL_SERVICE.fullmatch(text):
        raise ValueError("must be letters, digits and dashes, at most 63")
    return text
