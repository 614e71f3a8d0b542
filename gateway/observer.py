"""What becomes of a finished request's record: counted, kept, exported."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from gateway.mesh import Mesh
from gateway.service import GatewayLimits
from gateway.settings import GatewaySettings
from tensorline.discovery import Registry
from tensorline.shm import Arena
from tensorline.telemetry.metrics import Metrics
from tensorline.telemetry.record import Process, RequestRecord
from tensorline.telemetry.store import TraceStore

__all__ = ["Observer"]


class Observer:
    def __init__(self, process: Process, settings: GatewaySettings) -> None:
        self.metrics = Metrics()
        self.store = TraceStore(process, recent=settings.trace_store)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, process: Process, settings: GatewaySettings, environ: Mapping[str, str]
    ) -> AsyncIterator["Observer"]:
        yield cls(process, settings)

    def finished(self, record: RequestRecord) -> None:
        self.metrics.record(record)
        self.store.add(record)

    def watch(self, arena: Arena, limits: GatewayLimits, mesh: Mesh, registry: Registry) -> None:
        """Read these at each scrape."""
        metrics = self.metrics
        metrics.watch("tensorline_arena_bytes_capacity", lambda: arena.limit)
        metrics.watch("tensorline_arena_bytes_leased", lambda: arena.leased_bytes)
        metrics.watch("tensorline_in_flight", lambda: limits.in_flight)
        metrics.watch("tensorline_registry_is_fresh", lambda: float(registry.is_fresh))
        metrics.watch("tensorline_traces_held", lambda: len(self.store))

        def instances() -> dict[tuple[str, ...], float]:
            counts: dict[tuple[str, ...], float] = {}
            for view in mesh.instances:
                counts[view.service, view.state] = counts.get((view.service, view.state), 0) + 1
            return counts

        metrics.watch("tensorline_instances", instances)
