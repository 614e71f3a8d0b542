"""The settings that are flags, once for all commands: under Triton's names where Triton has them.

Which process has which setting stands in `environment.py`; a command has the flags of the settings that its processes
have. Each can also stand in the environment.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Final

import typer

from tensorline.cli.environment import GATEWAY_FIELDS, PREFIX, SINGLE_FIELDS, STAGE_FIELDS
from tensorline.cli.failure import UsageError
from tensorline.cli.triton import is_true

__all__ = [
    "COMMAND_FIELDS",
    "FLAGS",
    "GRPC_URL",
    "HTTP_URL",
    "REPOSITORIES",
    "AsJson",
    "Flag",
    "GrpcUrl",
    "Headers",
    "HttpUrl",
    "TokenFile",
    "in_flags",
    "log_level",
    "repositories",
]


@dataclass(frozen=True, slots=True)
class Flag:
    """How a setting is written on the command line."""

    name: str
    help: str
    metavar: str
    kind: Any = str
    default: object = None
    least: float | None = None
    most: float | None = None
    read: Callable[[str, Any], object] | None = None
    """From the flag's name and what was given to the setting's value; raises UsageError."""
    separator: str = ""
    """The flag may be repeated; the setting is one text with this between."""

    def option(self, field: str) -> Any:
        """What typer wants to know."""
        # Several values have no environment variable here: their one text is left for the processes to split.
        envvar = None if self.separator else f"{PREFIX}{field.upper()}"
        return typer.Option(
            self.name,
            help=self.help,
            metavar=self.metavar or None,
            min=self.least,
            max=self.most,
            envvar=envvar,
            show_envvar=False,
            show_default=self.default is not None,
        )

    @property
    def annotation(self) -> Any:
        kind = GenericAlias(list, (self.kind,)) if self.separator else self.kind
        return kind | None if self.default is None else kind

    def value(self, given: Any) -> str | None:
        """The setting's text, as it stands in the environment; None: nothing was given."""
        if given is None or given == []:
            return None
        values = given if isinstance(given, list) else [given]
        told = [self.read(self.name, value) if self.read is not None else value for value in values]
        return self.separator.join(str(value).lower() if isinstance(value, bool) else str(value) for value in told)


def _absolute(name: str, path: Path) -> Path:
    return path.absolute()  # the process may be started elsewhere


def _port(name: str, what: str, default: int) -> Flag:
    return Flag(name, f"Port of {what}; 0 takes a free one.", "PORT", int, default, least=0, most=65535)


REPOSITORIES: Final = ("--model-repository", "--model-store")

RESTRICTED: Final = "Only for who sends the header KEY with VALUE: model-repository, statistics, …; may be repeated."

FLAGS: Final[Mapping[str, Flag]] = {
    "model_control_mode": Flag(
        "--model-control-mode",
        "Look at the repositories again: never, now and then, or when asked.",
        "none|poll|explicit",
    ),
    "repository_poll_secs": Flag(
        "--repository-poll-secs", "How often, in mode poll; 15 unless given.", "SECONDS", float, least=0
    ),
    "load_model": Flag(
        "--load-model", "Load this at the start, in mode explicit; * is all; may be repeated.", "NAME", separator=","
    ),
    "mesh_directory": Flag(
        "--mesh-directory", "Arenas, sockets and registry of the mesh; on tmpfs.", "DIR", Path, read=_absolute
    ),
    "discovery": Flag("--discovery", "file:///dir, consul://host:port, static://a:1,b:2 or dns://name:port.", "URL"),
    "arena_bytes": Flag("--arena-bytes", "Limit of each process's arena.", "SIZE"),
    "drain_s": Flag(
        "--exit-timeout-secs",
        "How long work in flight may take after a stop is asked for.",
        "SECONDS",
        float,
        20.0,
        least=0,
    ),
    "grpc_address": Flag("--grpc-address", "Where gRPC listens.", "ADDRESS", default="127.0.0.1"),
    "grpc_port": _port("--grpc-port", "gRPC", 8001),
    "http_address": Flag("--http-address", "Where HTTP listens.", "ADDRESS", default="127.0.0.1"),
    "http_port": _port("--http-port", "HTTP", 8000),
    "metrics_address": Flag("--metrics-address", "Where metrics are served; where HTTP is unless given.", "ADDRESS"),
    "metrics_port": _port("--metrics-port", "metrics", 8002),
    "workers": Flag("--workers", "Gateway processes that share the gRPC port.", "N", int, least=1),
    "server_id": Flag("--id", "Name of the server in its metadata.", "NAME"),
    "strict_readiness": Flag(
        "--strict-readiness", "Ready means that every model is; on by default.", "true|false", read=is_true
    ),
    "admin_token_file": Flag(
        "--admin-token-file", "Token for traces and instances beyond loopback.", "FILE", Path, read=_absolute
    ),
    "allow_client_shm": Flag(
        "--allow-client-shm",
        "Let clients register shared memory; unless given, if gRPC and HTTP are on loopback.",
        "true|false",
        read=is_true,
    ),
    "max_client_regions": Flag(
        "--max-client-regions", "How much of it may be registered at a time.", "N", int, least=1
    ),
    "http_max_input_size": Flag(
        "--http-max-input-size", "Limit of a request's body; 64 MiB unless given.", "BYTES", int, least=1
    ),
    "http_restricted_api": Flag("--http-restricted-api", RESTRICTED, "API,API:KEY=VALUE", separator=";"),
    "grpc_restricted_protocol": Flag("--grpc-restricted-protocol", RESTRICTED, "API,API:KEY=VALUE", separator=";"),
    "http_header_forward_pattern": Flag(
        "--http-header-forward-pattern", "Headers that become parameters of the request.", "REGEX"
    ),
    "grpc_header_forward_pattern": Flag(
        "--grpc-header-forward-pattern", "Metadata that become parameters of the request.", "REGEX"
    ),
    "trace_config": Flag(
        "--trace-config",
        "level=, rate=, count=, mode=opentelemetry, opentelemetry,url=…; may be repeated.",
        "KEY=VALUE",
        separator=";",
    ),
    "metrics_config": Flag(
        "--metrics-config", "counter_latencies=, histogram_latencies=, …; may be repeated.", "KEY=VALUE", separator=";"
    ),
    "allow_cpu_metrics": Flag(
        "--allow-cpu-metrics", "Show the host's CPU and memory; on by default.", "true|false", read=is_true
    ),
    "log_format": Flag("--log-format", "How lines for people begin: the time, or date and time.", "default|ISO8601"),
    "listen": Flag("--listen", "TCP address besides the Unix socket; port 0 takes a free one.", "HOST:PORT"),
    "advertise": Flag("--advertise", "TCP address for gateways on other hosts; else --listen.", "HOST:PORT"),
    "max_in_flight": Flag("--max-in-flight", "Requests that this process may have at once.", "N", int, least=1),
    "load_threads": Flag("--model-load-thread-count", "Models that are loaded at once.", "N", int, least=1),
    "expose_model_errors": Flag(
        "--expose-model-errors", "Send the text of any exception of a model to the client.", "", bool, False
    ),
}
"""By field. `--model-repository` and Triton's four flags for the log level are besides."""

COMMAND_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    # What sets the same field of two kinds of process to one number is no flag of both.
    "up": (GATEWAY_FIELDS | STAGE_FIELDS) - SINGLE_FIELDS - {"max_in_flight", "expose_model_errors"},
    "gateway": GATEWAY_FIELDS,
    "serve": STAGE_FIELDS,
}

GRPC_URL: Final = "localhost:8001"
HTTP_URL: Final = "http://localhost:8000"
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]
GrpcUrl = Annotated[str, typer.Option("--url", help="The gateway's gRPC address.", metavar="HOST:PORT")]
Headers = Annotated[
    list[str] | None,
    typer.Option(
        "--header",
        help="Metadata of the call, as triton-grpc-protocol-KEY=VALUE for a restricted one; may be repeated.",
        metavar="NAME=VALUE",
    ),
]
HttpUrl = Annotated[str, typer.Option("--url", help="The gateway's HTTP address.", metavar="URL")]
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


def log_level(verbose: int, info: str, warning: str, error: str) -> str | None:
    """The one level that says what Triton's four flags say; None: they stand at their defaults."""
    is_true("--log-error", error)
    is_warning, is_info = is_true("--log-warning", warning), is_true("--log-info", info)
    if verbose > 0:
        return "debug"
    if is_info:
        return None
    return "warning" if is_warning else "error"


def repositories(given: list[str] | None, environ: Mapping[str, str]) -> str | None:
    """
    Returns:
        The setting: absolute paths with colons between; None when neither a flag nor the environment names one.
    Raises:
        UsageError: a directory that is not there, or whose name has a colon.
    """
    variable = f"{PREFIX}MODEL_REPOSITORY"
    named = given or [part for part in environ.get(variable, "").split(":") if part]
    source = "--model-repository" if given else variable
    for name in named:
        if "://" in name:
            raise UsageError(f"{source} {name}: only directories of this machine can be served; copy it to one first")
        if ":" in name:
            raise UsageError(f"{source} {name}: a path with a colon cannot be used")
        if not Path(name).is_dir():
            is_file = Path(name).exists()
            raise UsageError(f"{source} {name}: {'that is no directory' if is_file else 'there is no such directory'}")
    return ":".join(str(Path(name).absolute()) for name in named) or None


def in_flags(text: str) -> str:
    """What a process says of its environment, said of the command line."""
    names = {f"{PREFIX}{field.upper()}": flag.name for field, flag in FLAGS.items()}
    names[f"{PREFIX}MODEL_REPOSITORY"] = REPOSITORIES[0]
    text = text.replace("Value error, ", "")
    return re.sub(rf"{PREFIX}[A-Z_0-9]+", lambda found: names.get(found[0], found[0]), text)
