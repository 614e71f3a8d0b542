"""The flags of `tensorline infer`; the work is imported when it is called."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tensorline.cli import flags
from tensorline.cli.failure import UsageError

if TYPE_CHECKING:
    from tensorline.cli.infer import Reply

__all__ = ["infer"]

SEVERAL = "may be repeated"


def infer(
    model: Annotated[str, typer.Argument(help="NAME or NAME/VERSION.", metavar="MODEL")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A request of each: .npy and .npz are arrays, .json is a request in JSON, any other file (an image, "
            "a text) goes as it is into the model's BYTES input.",
            metavar="FILE",
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help=f"NAME=VALUE, NAME=@FILE or NAME=@ARRAY.npy; {SEVERAL}.", metavar="NAME=VALUE"),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help=f'A request in JSON: the REST protocol\'s body, or {{"NAME": data}}; {SEVERAL}.',
            metavar="JSON|@FILE",
        ),
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Make up the inputs that are not given.")] = False,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", help=f"Make up this input, in this shape; {SEVERAL}.", metavar="NAME:N,N"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Make up the same each time.", metavar="N", min=0)] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameter", help=f"A parameter of the request; {SEVERAL}.", metavar="NAME=VALUE"),
    ] = None,
    outputs: Annotated[
        list[str] | None, typer.Option("--output", help="An output to ask for; all unless given.", metavar="NAME")
    ] = None,
    output_npz: Annotated[
        Path | None,
        typer.Option(
            "--output-npz",
            help="Write the outputs there; of a second answer beside it, with -2 in the name.",
            metavar="FILE",
        ),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Over ModelStreamInfer: for models that answer several times.")
    ] = False,
    url: flags.GrpcUrl = flags.GRPC_URL,
    header: flags.Headers = None,
    timeout: Annotated[float, typer.Option(help="Deadline of each request.", metavar="SECONDS", min=0.001)] = 60.0,
    trace: Annotated[bool, typer.Option("--trace", help="Show where the time of the request went.")] = False,
    http_url: Annotated[str, typer.Option(help="Where --trace asks for it.", metavar="URL")] = flags.HTTP_URL,
    token_file: flags.TokenFile = None,
    as_json: flags.AsJson = False,
) -> None:
    """Send requests to a model and show its answers."""
    from tensorline.cli.api import read_token
    from tensorline.cli.client import open_client
    from tensorline.cli.infer import ask, ask_streaming
    from tensorline.cli.questions import Question
    from tensorline.cli.replies import NpzReplies, Traces, json_replies, print_replies

    if not (files or inputs or data or random or shapes):
        raise UsageError("nothing to send: give a FILE, --input NAME=VALUE, --data JSON or --random")
    question = Question(
        files or (), inputs or (), data or (), outputs or (), parameters or (), shapes or (), random, seed
    )
    traces = Traces(http_url, read_token(token_file)) if trace else None
    with open_client(url, timeout, header or ()) as client:
        replies: Iterator[Reply] = (ask_streaming if stream else ask)(client, model, question, is_traced=trace)
        if output_npz is not None:
            replies = NpzReplies(output_npz).keep(replies)
        failed = (json_replies if as_json else print_replies)(replies, traces)
    if failed is not None:
        raise failed
