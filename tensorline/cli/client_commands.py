"""The commands that ask a running mesh. Their flags; the work is imported when one is called."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from tensorline.cli import flags
from tensorline.cli.failure import UsageError

__all__ = ["add_to"]

GRPC_URL = "localhost:8001"
HTTP_URL = "http://localhost:8000"

AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]


def add_to(app: typer.Typer) -> None:
    for command in (infer, models, instances, trace, health):
        app.command()(command)


def infer(
    model: Annotated[str, typer.Argument(help="NAME or NAME/VERSION.", metavar="MODEL")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Each goes into the model's BYTES input, in a request of its own.", metavar="FILE"),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", help="NAME=VALUE, NAME=@FILE or NAME=@ARRAY.npy; may be repeated.", metavar="NAME=VALUE"
        ),
    ] = None,
    outputs: Annotated[
        list[str] | None, typer.Option("--output", help="An output to ask for; all unless given.", metavar="NAME")
    ] = None,
    url: flags.GrpcUrl = GRPC_URL,
    timeout: Annotated[float, typer.Option(help="Deadline of each request.", metavar="SECONDS", min=0.001)] = 60.0,
    trace: Annotated[bool, typer.Option("--trace", help="Show where the time of the request went.")] = False,
    http_url: Annotated[str, typer.Option(help="Where --trace asks for it.", metavar="URL")] = HTTP_URL,
    token_file: flags.TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Send a request to a model and show its answer."""
    from tensorline.cli.api import read_token, wait_trace
    from tensorline.cli.infer import Question, ask

    if not files and not inputs:
        raise UsageError("nothing to send: give a file, or --input NAME=VALUE")
    question = Question(model, files or (), inputs or (), outputs or (), url, timeout, trace)
    token = read_token(token_file)
    told = [
        (file, answer, wait_trace(http_url, answer.trace_id, token) if trace else []) for file, answer in ask(question)
    ]
    if as_json:
        from tensorline.cli.outputs import json_of_answer

        found = [json_of_answer(*one) for one in told]
        _print_json(found if len(found) > 1 else found[0])
        return
    from tensorline.cli.outputs import print_answer
    from tensorline.cli.views import open_console, print_traces

    console = open_console()
    for file, answer, traces in told:
        print_answer(console, file, answer)
        print_traces(console, traces)


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
    model: Annotated[
        str, typer.Option(help="A model's health instead of the process's; gRPC only.", metavar="NAME")
    ] = "",
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
