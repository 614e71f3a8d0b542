"""The gateway's models, instances and traces as tables in the terminal."""

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorline.cli.look import short_reason
from tensorline.telemetry.waterfall import waterfall

__all__ = ["make_table", "open_console", "print_instances", "print_models", "print_trace_list", "print_traces", "show"]

MIB = 1 << 20
FILE_WIDTH = 120
NUMBERS = ("batch", "busy", "queue", "MiB", "ms")


def open_console() -> Console:
    """Of stdout; as wide as the terminal, and wide enough for a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_WIDTH)


def print_models(console: Console, models: Sequence[Mapping[str, Any]]) -> None:
    table = make_table("model", "version", "state", "backend", "batch")
    table.add_column("served by", overflow="fold")
    for model in models:
        is_ready = model["state"] == "READY"
        count = len(model.get("instances", ()))
        served_by = " → ".join(model.get("steps", ())) or f"{count} instance{'s' * (count != 1)}"
        table.add_row(
            Text(model["name"]),
            str(model["version"]),
            _state(model["state"]),
            Text(str(model.get("backend", ""))),
            str(model.get("max_batch_size", "")),
            Text(served_by if is_ready else short_reason(model["name"], str(model.get("reason", "")))),
        )
    show(console, table, "the gateway knows of no model")


def print_instances(console: Console, instances: Sequence[Mapping[str, Any]]) -> None:
    table = make_table("instance", "state", "host", "tensors", "busy", "queue", "MiB")
    table.add_column("models", overflow="fold")
    for one in instances:
        models = [name for name, _, state in (model.partition(" ") for model in one["models"]) if state == "READY"]
        table.add_row(
            Text(one["id"]),
            _state(one["state"]),
            Text(one["host"]),
            "shared" if one["is_colocated"] else "inline",
            str(one["in_flight"]),
            str(one["queued"]),
            f"{one['arena_bytes'] / MIB:.1f}",
            Text(", ".join(models)),
        )
    show(console, table, "the gateway has heard of no service")


def print_traces(console: Console, traces: Iterable[Any]) -> None:
    for trace in traces:
        console.print(waterfall(trace, console.width), soft_wrap=True)


def print_trace_list(console: Console, traces: Sequence[Mapping[str, Any]]) -> None:
    table = make_table("trace", "started", "status", "ms")
    table.add_column("model", overflow="fold")
    for trace in traces:
        table.add_row(
            trace["trace_id"],
            time.strftime("%H:%M:%S", time.localtime(trace["start_ns"] // 10**9)),
            _state(trace["status"]),
            f"{trace['duration_ns'] / 1e6:.2f}",
            Text(f"{trace['model']} {trace['version']}"),
        )
    show(console, table, "no request is kept yet")


def make_table(*columns: str, numbers: Iterable[str] = ()) -> Table:
    """Columns that are never broken, those with numbers behind the others; one that may be broken comes after them."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in (*columns, *numbers):
        table.add_column(column, justify="right" if column in (*NUMBERS, *numbers) else "left", no_wrap=True)
    return table


def _state(state: str) -> Text:
    return Text(state, style="green" if state in ("READY", "OK") else "yellow" if state == "LOADING" else "red")


def show(console: Console, table: Table, when_empty: str) -> None:
    console.print(table if table.row_count else when_empty)
