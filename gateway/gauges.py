"""What the gateway shows of itself and of its stages at each scrape, beside the counters of its requests."""

from collections import Counter
from collections.abc import Callable

from gateway.mesh import Mesh
from gateway.service import GatewayLimits
from tensorline.discovery import Registry
from tensorline.rpc.connection import StageConnection
from tensorline.rpc.hosted import READY
from tensorline.shm import Arena
from tensorline.telemetry.host import Host
from tensorline.telemetry.logs import LogLines
from tensorline.telemetry.metrics import Metrics

__all__ = ["watch_gauges", "watch_process"]

Readings = dict[tuple[str, ...], float]


def watch_gauges(metrics: Metrics, arena: Arena, limits: GatewayLimits, mesh: Mesh, registry: Registry) -> None:
    """Read these at each scrape."""
    metrics.watch("tensorline_arena_bytes_capacity", lambda: arena.limit)
    metrics.watch("tensorline_arena_bytes_leased", lambda: arena.leased_bytes)
    metrics.watch("tensorline_in_flight", lambda: limits.in_flight)
    metrics.watch("tensorline_registry_is_fresh", lambda: float(registry.is_fresh))
    metrics.watch("tensorline_instances", lambda: _instances(mesh))
    metrics.watch("tensorline_queue_depth", lambda: _queues(mesh))
    metrics.watch("tensorline_stage_arena_bytes_leased", lambda: _by_stage(mesh, lambda stage: stage.arena_bytes))
    metrics.watch("tensorline_stage_in_flight", lambda: _by_stage(mesh, lambda stage: stage.in_flight))
    metrics.watch("nv_model_load_duration_secs", lambda: _load_durations(mesh))

    def pending() -> Readings:
        waiting: Readings = {(model, version): 0 for model, version, _ in metrics.models}
        for (model, version, _), requests in _queues(mesh).items():
            if (model, version) in waiting:
                waiting[model, version] += requests
        return waiting

    metrics.watch("nv_inference_pending_request_count", pending)


def watch_process(metrics: Metrics, lines: LogLines, *, has_cpu: bool) -> None:
    """Read these, too: the process's log, and with `has_cpu` the host."""
    metrics.watch("tensorline_log_lines_dropped_total", lambda: lines.dropped)
    if has_cpu:
        host = Host()
        metrics.watch("nv_cpu_utilization", host.cpu_utilization)
        metrics.watch("nv_cpu_memory_total_bytes", lambda: host.memory_bytes()[0])
        metrics.watch("nv_cpu_memory_used_bytes", lambda: host.memory_bytes()[1])


def _instances(mesh: Mesh) -> Readings:
    return {key: float(count) for key, count in Counter((view.service, view.state) for view in mesh.instances).items()}


def _queues(mesh: Mesh) -> Readings:
    """As the stages' last beats said, at most a second ago."""
    return {
        (hosted.name, hosted.version, connection.instance_id): connection.queues.get((hosted.name, hosted.version), 0)
        for connection, models in mesh.hosted
        for hosted in models
        if hosted.state == READY
    }


def _by_stage(mesh: Mesh, value: Callable[[StageConnection], int]) -> Readings:
    return {(stage.service, stage.instance_id): value(stage) for stage in mesh.connections}


def _load_durations(mesh: Mesh) -> Readings:
    """Of the instance that took longest: the version was not to be had everywhere before."""
    longest: Readings = {}
    for _, models in mesh.hosted:
        for hosted in models:
            if hosted.load:
                key = hosted.name, hosted.version
                longest[key] = max(longest.get(key, 0.0), hosted.load_ns / 1e9)
    return longest
