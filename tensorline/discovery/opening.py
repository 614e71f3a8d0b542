"""From a discovery URL to a registry: the one place that knows all kinds."""

from contextlib import AbstractAsyncContextManager

from tensorline.discovery.registry import Registry
from tensorline.discovery.url import ConsulUrl, DiscoveryUrl, DnsUrl, FileUrl, StaticUrl, parse_discovery_url
from tensorline.errors import ConfigError

__all__ = ["open_registry"]


def open_registry(url: str | DiscoveryUrl) -> AbstractAsyncContextManager[Registry]:
    """The registry behind `url`; leaving the block is `Registry.aclose`.

    A registry that is away does not stop the opening: what is registered is announced once it is back.

    Raises:
        ConfigError: `url` is none of the four forms, or its client library is not installed (both at the call); its
            directory cannot be used (on entering).
    """
    # Each kind is imported where it is chosen: the default must not pay for a Consul client.
    match parse_discovery_url(url) if isinstance(url, str) else url:
        case FileUrl() as place:
            from tensorline.discovery.file import open_file_registry

            return open_file_registry(place)
        case StaticUrl() as place:
            from tensorline.discovery.static import open_static_registry

            return open_static_registry(place)
        case DnsUrl() as place:
            from tensorline.discovery.dns import open_dns_registry

            return open_dns_registry(place)
        case ConsulUrl() as place:
            try:
                from tensorline.discovery.consul import open_consul_registry
            except ImportError as err:
                raise ConfigError(f'consul:// needs the "consul" extra of tensorline: {err}') from err
            return open_consul_registry(place)
