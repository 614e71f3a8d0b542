"""Statistics of models and regions of clients, as tables and as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from tensorline.cli.client import Client, RequestFailedError
from tensorline.cli.views import make_table, show

__all__ = ["print_regions", "print_statistics", "regions_of"]

US = 1000


PARTS: Final[Mapping[str, str]] = {
    "queue": "queue",
    "input": "compute_input",
    "infer": "compute_infer",
    "output": "compute_output",
}
"""Column of each part of a request's time."""


def print_statistics(console: Console, rows: Sequence[Any]) -> None:
    """In 80 columns, unless a model's name is long."""
    table = make_table("model", "version", numbers=("count", "runs", "errors", *PARTS))
    table.caption = "count: elements of all batches; runs: executions; queue to output: µs, on average"
    table.caption_justify = "left"
    for one in rows:
        stats = one.inference_stats
        table.add_row(
            Text(one.name),
            one.version,
            str(one.inference_count),
            str(one.execution_count),
            str(stats.fail.count),
            *(_average_us(getattr(stats, field)) for field in PARTS.values()),
        )
    show(console, table, "no model has statistics: none is ready")


def _average_us(duration: Any) -> str:
    return f"{duration.ns / duration.count / US:.0f}" if duration.count else "-"


def regions_of(client: Client) -> list[dict[str, Any]]:
    """System regions, then CUDA's; a gateway without the latter has none.

    Raises: as `Client`.
    """
    regions = [
        {"kind": "system", "name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.byte_size}
        for one in client.system_regions()
    ]
    try:
        found = client.cuda_regions()
    except RequestFailedError:
        return regions
    return regions + [
        {"kind": "cuda", "name": one.name, "device_id": one.device_id, "byte_size": one.byte_size} for one in found
    ]


def print_regions(console: Console, regions: Sequence[Mapping[str, Any]]) -> None:
    table = make_table("region", "kind", numbers=("offset", "bytes"))
    table.add_column("key", overflow="fold")
    for one in regions:
        key = one.get("key", f"device {one.get('device_id')}")
        table.add_row(Text(one["name"]), one["kind"], str(one.get("offset", "")), str(one["byte_size"]), Text(key))
    show(console, table, "no client has registered a region")
