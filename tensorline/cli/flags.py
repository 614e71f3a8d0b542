"""The flags that commands share, under Triton's names where Triton has them; each can also stand in the environment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tensorline.cli.environment import PREFIX
from tensorline.cli.failure import UsageError
from tensorline.cli.triton import is_true

__all__ = [
    "FLAGS",
    "PASS_ON",
    "AdminToken",
    "Advertise",
    "ArenaBytes",
    "Discovery",
    "ExitTimeout",
    "ExposeErrors",
    "GrpcAddress",
    "GrpcPort",
    "GrpcUrl",
    "HttpAddress",
    "HttpPort",
    "HttpUrl",
    "Listen",
    "LoadThreads",
    "LogError",
    "LogInfo",
    "LogVerbose",
    "LogWarning",
    "MaxInFlight",
    "MeshDirectory",
    "MetricsAddress",
    "MetricsPort",
    "Repositories",
    "ServerId",
    "StrictReadiness",
    "TokenFile",
    "Workers",
    "collect",
    "in_flags",
    "log_level",
    "names_of",
    "repositories",
]

PASS_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of commands that take Triton's other flags too."""

FLAGS: Final[dict[str, str]] = {}
"""Flag of each setting that has one."""


def _flag(name: str, field: str, help_: str, metavar: str, **more: Any) -> Any:
    FLAGS[field] = name
    env = f"{PREFIX}{field.upper()}"
    return typer.Option(name, help=help_, metavar=metavar, envvar=env, show_envvar=False, **more)


def _port(name: str, field: str, what: str) -> Any:
    return _flag(name, field, f"Port of {what}; 0 takes a free one.", "PORT", min=0, max=65535)


Repositories = Annotated[
    list[str] | None,
    # Without an environment variable: there its form is one text with colons, which the processes split themselves.
    typer.Option("--model-repository", "--model-store", help="Model repository; may be repeated.", metavar="DIR"),
]
FLAGS["model_repository"] = "--model-repository"
MeshDirectory = Annotated[
    Path | None,
    _flag("--mesh-directory", "mesh_directory", "Arenas, sockets and registry of the mesh; on tmpfs.", "DIR"),
]
Discovery = Annotated[
    str | None,
    _flag("--discovery", "discovery", "file:///dir, consul://host:port, static://a:1,b:2 or dns://name:port.", "URL"),
]
ArenaBytes = Annotated[str | None, _flag("--arena-bytes", "arena_bytes", "Limit of each process's arena.", "SIZE")]
ExitTimeout = Annotated[
    float,
    _flag(
        "--exit-timeout-secs",
        "drain_s",
        "How long work in flight may take after a stop is asked for.",
        "SECONDS",
        min=0,
    ),
]
ExposeErrors = Annotated[
    bool,
    _flag(
        "--expose-model-errors", "expose_model_errors", "Send the text of any exception of a model to the client.", ""
    ),
]

GrpcAddress = Annotated[str, _flag("--grpc-address", "grpc_address", "Where gRPC listens.", "ADDRESS")]
GrpcPort = Annotated[int, _port("--grpc-port", "grpc_port", "gRPC")]
HttpAddress = Annotated[str, _flag("--http-address", "http_address", "Where HTTP listens.", "ADDRESS")]
HttpPort = Annotated[int, _port("--http-port", "http_port", "HTTP")]
MetricsAddress = Annotated[str, _flag("--metrics-address", "metrics_address", "Where metrics are served.", "ADDRESS")]
MetricsPort = Annotated[int, _port("--metrics-port", "metrics_port", "metrics")]
Workers = Annotated[
    int | None, _flag("--workers", "workers", "Gateway processes that share the gRPC port.", "N", min=1)
]
ServerId = Annotated[str | None, _flag("--id", "server_id", "Name of the server in its metadata.", "NAME")]

StrictReadiness = Annotated[
    str | None,
    _flag("--strict-readiness", "strict_readiness", "Ready means that every model is; on by default.", "true|false"),
]
AdminToken = Annotated[
    Path | None,
    _flag("--admin-token-file", "admin_token_file", "Token for traces and instances beyond loopback.", "FILE"),
]

Listen = Annotated[
    str | None,
    _flag("--listen", "listen", "TCP address besides the Unix socket; port 0 takes a free one.", "HOST:PORT"),
]
Advertise = Annotated[
    str | None,
    _flag("--advertise", "advertise", "TCP address for gateways on other hosts; else --listen.", "HOST:PORT"),
]
MaxInFlight = Annotated[
    int | None,
    _flag("--max-in-flight", "max_in_flight", "Requests that one gateway may have here at once.", "N", min=1),
]
LoadThreads = Annotated[
    int | None, _flag("--model-load-thread-count", "load_threads", "Models that are loaded at once.", "N", min=1)
]

LogVerbose = Annotated[int, typer.Option("--log-verbose", help="1 and more: everything.", metavar="LEVEL", min=0)]
LogInfo = Annotated[str, typer.Option("--log-info", help="Log information.", metavar="true|false")]
LogWarning = Annotated[str, typer.Option("--log-warning", help="Log warnings.", metavar="true|false")]
LogError = Annotated[str, typer.Option("--log-error", help="Log errors; they always are.", metavar="true|false")]

GrpcUrl = Annotated[str, typer.Option("--url", help="The gateway's gRPC address.", metavar="HOST:PORT")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="Holds the operators' token, which a gateway beyond loopback wants.",
        metavar="FILE",
        envvar=f"{PREFIX}ADMIN_TOKEN_FILE",
        show_envvar=False,
    ),
]
HttpUrl = Annotated[str, typer.Option("--url", help="The gateway's HTTP address.", metavar="URL")]


def collect(**values: object) -> dict[str, str]:
    """Settings as they stand in the environment; those that were not given (None) are left out."""
    return {field: _text(value) for field, value in values.items() if value is not None}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def names_of(context: typer.Context) -> list[str]:
    """The flags of the command that was called."""
    return [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]


def log_level(verbose: int, info: str, warning: str, error: str) -> str | None:
    """The one level that says what Triton's four flags say; None: they stand at their defaults."""
    is_true("--log-error", error)
    if verbose > 0:
        return "debug"
    if is_true("--log-info", info):
        return None
    return "warning" if is_true("--log-warning", warning) else "error"


def repositories(given: list[str] | None, environ: Mapping[str, str]) -> str | None:
    """
    Returns:
        The setting: absolute paths with colons between; None when neither a flag nor the environment names one.
    Raises:
        UsageError: a directory that is not there, or whose name has a colon.
    """
    named = given or [part for part in environ.get(f"{PREFIX}MODEL_REPOSITORY", "").split(":") if part]
    for name in named:
        if ":" in name:
            raise UsageError(f"--model-repository {name}: a path with a colon cannot be used")
        if not Path(name).is_dir():
            raise UsageError(f"--model-repository {name}: there is no such directory")
    return ":".join(str(Path(name).absolute()) for name in named) or None


def in_flags(text: str) -> str:
    """What a process says of its environment, said of the command line."""
    for field, flag in sorted(FLAGS.items(), key=lambda item: -len(item[0])):
        text = text.replace(f"{PREFIX}{field.upper()}", flag)
    return text
