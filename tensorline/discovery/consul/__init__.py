"""Discovery through a Consul agent: consul://host:port. Needs py-consul (the `consul` extra)."""

from tensorline.discovery.consul.registry import ConsulRegistry, open_consul_registry

__all__ = ["ConsulRegistry", "open_consul_registry"]
