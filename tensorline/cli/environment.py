"""What the processes of a mesh are told: which setting is a field of which process, and each one's environment.

The names stand here a second time because reading them from their classes would cost each start of the command half a
second, and the gateway's class is not ours to import. A test holds both together.
"""

import difflib
from collections.abc import Mapping
from typing import Final

from tensorline.cli.failure import UsageError

__all__ = ["GATEWAY_FIELDS", "PREFIX", "STAGE_FIELDS", "check_environment", "environment_of"]

PREFIX: Final = "TENSORLINE_"

MESH_FIELDS: Final = frozenset(
    {
        "mesh_directory",
        "discovery",
        "model_repository",
        "model_control_mode",
        "repository_poll_secs",
        "load_model",
        "arena_bytes",
        "inline_bytes",
        "drain_s",
        "log_level",
        "log_json",
        "log_format",
        "expose_model_errors",
    }
)
STAGE_FIELDS: Final = MESH_FIELDS | {"listen", "advertise", "max_in_flight", "max_queue", "load_threads"}
GATEWAY_FIELDS: Final = MESH_FIELDS | {
    "grpc_address",
    "grpc_port",
    "http_address",
    "http_port",
    "metrics_address",
    "metrics_port",
    "workers",
    "worker",
    "server_id",
    "max_in_flight",
    "max_message_bytes",
    "max_bytes_in_flight",
    "default_timeout_s",
    "strict_readiness",
    "admin_token_file",
    "trace_rate",
    "trace_store",
    "allow_client_shm",
    "max_client_regions",
    "client_regions",
    "http_max_input_size",
    "http_restricted_api",
    "http_header_forward_pattern",
    "grpc_restricted_protocol",
    "grpc_header_forward_pattern",
    "trace_config",
    "metrics_config",
    "allow_cpu_metrics",
}
SINGLE_FIELDS: Final = frozenset({"listen", "advertise", "worker", "client_regions"})
"""Of one process: they make no sense for all that a mesh starts."""


def check_environment(environ: Mapping[str, str]) -> None:
    """
    Raises:
        UsageError: a TENSORLINE_ variable that no process of a mesh takes, or that belongs to a single one.
    """
    fields = STAGE_FIELDS | GATEWAY_FIELDS
    for name in environ:
        field = name.removeprefix(PREFIX).lower()
        if field == name.lower():
            continue
        if field in SINGLE_FIELDS:
            raise UsageError(f"{name} belongs to one process: set it for `tensorline serve`, not for `tensorline up`")
        if field not in fields:
            near = difflib.get_close_matches(field, fields, n=1)
            raise UsageError(f"{name} is no setting" + (f"; did you mean {PREFIX}{near[0].upper()}?" if near else ""))


def environment_of(
    fields: frozenset[str], values: Mapping[str, str], base: Mapping[str, str], *, keep_unknown: bool = False
) -> dict[str, str]:
    """The environment of a process whose settings are `fields`: `base`, and over it what of `values` it takes.

    `keep_unknown`: variables of ours that are no field of it stay in, so that the process itself refuses them.
    """
    kept = {
        name: value
        for name, value in base.items()
        if not name.startswith(PREFIX) or keep_unknown or name.removeprefix(PREFIX).lower() in fields
    }
    told = {f"{PREFIX}{field.upper()}": value for field, value in values.items() if field in fields}
    # gRPC's own lines about a port that is taken come before ours, in a form that no log reader knows.
    return {"GRPC_VERBOSITY": "NONE"} | kept | told
