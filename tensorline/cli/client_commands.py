"""The commands that ask a running mesh. Their flags; the work is imported when one is called."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from tensorline.cli import flags
from tensorline.cli.failure import UsageError
from tensorline.cli.flags import HTTP_URL, AsJson
from tensorline.cli.infer_command import infer
from tensorline.cli.model_commands import config, load, shm, stats, unload

__all__ = ["add_to"]

WHICH = ("last", "slowest", "list")
TRACE_ID = re.compile(r"[0-9a-fA-F]{32}")


def add_to(app: typer.Typer) -> None:
    for command in (infer, models, load, unload, config, stats, shm, instances, trace, health):
        app.command()(command)


def models(url: flags.HttpUrl = HTTP_URL, token_file: flags.TokenFile = None, as_json: AsJson = False) -> None:
    """List the models that the gateway knows of."""
    answer = _ask(url, "/api/models", token_file)
    if as_json:
        _print_json(answer)
        return
    from tensorline.cli.views import open_console, print_models

    print_models(open_console(), answer)


def instances(url: flags.HttpUrl = HTTP_URL, token_file: flags.TokenFile = None, as_json: AsJson = False) -> None:
    """List the services that the gateway has found."""
    answer = _ask(url, "/api/instances", token_file)
    if as_json:
        _print_json(answer)
        return
    from tensorline.cli.views import open_console, print_instances

    print_instances(open_console(), answer)


def trace(
    which: Annotated[str, typer.Argument(help="last, slowest, list, or the id of a trace.", metavar="WHICH")] = "last",
    model: Annotated[str | None, typer.Option(help="Only requests of this model.", metavar="NAME")] = None,
    limit: Annotated[int, typer.Option(help="How many `list` shows.", metavar="N", min=1, max=1000)] = 20,
    url: flags.HttpUrl = HTTP_URL,
    token_file: flags.TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a request went."""
    if which not in WHICH and not TRACE_ID.fullmatch(which):
        raise UsageError(f"{which!r} is no trace: {', '.join(WHICH)} or a trace id of 32 hex digits is wanted")
    is_list = which == "list"
    answer = _ask(url, "/api/traces", token_file, which=which, model=model, limit=limit if is_list else None)
    if as_json:
        _print_json(answer)
        return
    from tensorline.cli.views import open_console, print_trace_list, print_traces

    (print_trace_list if is_list else print_traces)(open_console(), answer)


def health(
    target: Annotated[
        str | None,
        typer.Argument(
            help="http://HOST:PORT of a gateway, HOST:PORT or unix:/PATH of a service; unless given, that of the "
            "process that has this environment.",
            metavar="TARGET",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="A model's health instead of the process's.", metavar="NAME")] = "",
    timeout: Annotated[float, typer.Option(help="How long to wait.", metavar="SECONDS", min=0.001)] = 3.0,
) -> None:
    """Exit with 0 when a process is ready, else with 1."""
    from tensorline.cli.health import check_health, own_target

    check_health(target or own_target(os.environ), model, timeout)


def _ask(url: str, path: str, token_file: Path | None, **query: object) -> Any:
    from tensorline.cli.api import get_json, read_token

    return get_json(url, path, read_token(token_file), **query)


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2, ensure_ascii=False))
