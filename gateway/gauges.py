"""What the gateway shows of itself at each scrape, beside the counters of its requests."""

from gateway.mesh import Mesh
from gateway.models import Models
from gateway.service import GatewayLimits
from tensorline.discovery import Registry
from tensorline.shm import Arena
from tensorline.telemetry.metrics import Metrics

__all__ = ["declare_rows", "watch_gauges"]


def watch_gauges(metrics: Metrics, arena: Arena, limits: GatewayLimits, mesh: Mesh, registry: Registry) -> None:
    """Read these at each scrape."""
    metrics.watch("tensorline_arena_bytes_capacity", lambda: arena.limit)
    metrics.watch("tensorline_arena_bytes_leased", lambda: arena.leased_bytes)
    metrics.watch("tensorline_in_flight", lambda: limits.in_flight)
    metrics.watch("tensorline_registry_is_fresh", lambda: float(registry.is_fresh))

    def instances() -> dict[tuple[str, ...], float]:
        counts: dict[tuple[str, ...], float] = {}
        for view in mesh.instances:
            counts[view.service, view.state] = counts.get((view.service, view.state), 0) + 1
        return counts

    metrics.watch("tensorline_instances", instances)


def declare_rows(metrics: Metrics, models: Models) -> None:
    """Give each model that became ready its counters: a refusal that comes before any success is counted too."""
    for name in models.names:
        for version in models.versions(name):
            if metrics.models.get(name, str(version)) is None:
                metrics.models.declare(name, str(version))
