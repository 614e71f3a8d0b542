"""The commands about models, and what the gateway keeps of them. Their flags; the work is imported when needed."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tensorline.cli import flags
from tensorline.cli.flags import GRPC_URL, AsJson

__all__ = ["config", "load", "shm", "stats", "unload"]

Model = Annotated[str, typer.Argument(help="Name of the model.", metavar="MODEL")]
Versioned = Annotated[str, typer.Argument(help="NAME or NAME/VERSION.", metavar="MODEL")]
Timeout = Annotated[float, typer.Option(help="How long to wait.", metavar="SECONDS", min=0.001)]
LoadTimeout = Annotated[
    float, typer.Option(help="How long it may take until every version is ready.", metavar="SECONDS", min=0.001)
]


def load(
    model: Model,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="In place of the model's own config.pbtxt: .json or .pbtxt.", metavar="FILE"),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            help="PATH in the model's directory is LOCAL for this load, as 1/model.onnx=new.onnx; may be repeated. "
            "Needs --config.",
            metavar="PATH=LOCAL",
        ),
    ] = None,
    url: flags.GrpcUrl = GRPC_URL,
    header: flags.Headers = None,
    timeout: LoadTimeout = 600.0,
) -> None:
    """Load a model, or load it again; for a mesh with --model-control-mode explicit."""
    from tensorline.cli.client import open_client
    from tensorline.cli.overrides import read_config, read_files

    files = read_files(file or (), has_config=config is not None)
    told = read_config(config) if config is not None else None
    with open_client(url, timeout, header or ()) as client:
        client.load(model, told, files)
    print(f"{model} is loaded")


def unload(
    model: Model,
    unload_dependents: Annotated[
        bool, typer.Option("--unload-dependents", help="Also what a pipeline had loaded for itself alone.")
    ] = False,
    url: flags.GrpcUrl = GRPC_URL,
    header: flags.Headers = None,
    timeout: Timeout = 60.0,
) -> None:
    """Unload a model; what it runs now, it finishes."""
    from tensorline.cli.client import open_client

    with open_client(url, timeout, header or ()) as client:
        client.unload(model, dependents=unload_dependents)
    print(f"{model} is unloaded")


def config(
    model: Versioned,
    version: Annotated[str, typer.Option(help="A version; the newest unless given.", metavar="N")] = "",
    url: flags.GrpcUrl = GRPC_URL,
    header: flags.Headers = None,
    timeout: Timeout = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of config.pbtxt's form.")] = False,
) -> None:
    """Show a model's configuration as it is served: with all that was filled in."""
    from tensorline.cli.client import open_client
    from tensorline.cli.overrides import json_of_message, text_of_config

    name, _, number = model.partition("/")
    with open_client(url, timeout, header or ()) as client:
        found = client.config(name, version or number)
    print(
        json.dumps(json_of_message(found), indent=2) if as_json else text_of_config(found), end="\n" if as_json else ""
    )


def stats(
    model: Annotated[str, typer.Argument(help="NAME or NAME/VERSION; all unless given.", metavar="[MODEL]")] = "",
    url: flags.GrpcUrl = GRPC_URL,
    header: flags.Headers = None,
    timeout: Timeout = 10.0,
    as_json: AsJson = False,
) -> None:
    """Show how often each model ran, how it ended and where the time went, on average."""
    from tensorline.cli.client import open_client
    from tensorline.cli.overrides import json_of_message
    from tensorline.cli.statistics import print_statistics

    name, _, version = model.partition("/")
    with open_client(url, timeout, header or ()) as client:
        found = client.statistics(name, version)
    if as_json:
        print(json.dumps([json_of_message(one, with_defaults=True) for one in found], indent=2))
        return
    from tensorline.cli.views import open_console

    print_statistics(open_console(), found)


def shm(
    url: flags.GrpcUrl = GRPC_URL,
    header: flags.Headers = None,
    timeout: Timeout = 10.0,
    as_json: AsJson = False,
) -> None:
    """Show the shared-memory regions that clients have registered."""
    from tensorline.cli.client import open_client
    from tensorline.cli.statistics import print_regions, regions_of

    with open_client(url, timeout, header or ()) as client:
        regions = regions_of(client)
    if as_json:
        print(json.dumps(regions, indent=2))
        return
    from tensorline.cli.views import open_console

    print_regions(open_console(), regions)
