"""Service discovery: who hosts what, and where."""

from tensorline.discovery.opening import open_registry
from tensorline.discovery.registry import Registry, ServiceInstance
from tensorline.discovery.url import ConsulUrl, DiscoveryUrl, DnsUrl, FileUrl, StaticUrl, parse_discovery_url

__all__ = [
    "ConsulUrl",
    "DiscoveryUrl",
    "DnsUrl",
    "FileUrl",
    "Registry",
    "ServiceInstance",
    "StaticUrl",
    "open_registry",
    "parse_discovery_url",
]
