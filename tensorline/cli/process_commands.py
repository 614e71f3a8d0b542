"""The commands that are processes: `up`, `gateway`, `serve`. Their flags; the work is imported when one is called."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tensorline.cli import flags
from tensorline.cli.environment import GATEWAY_FIELDS, PREFIX, STAGE_FIELDS, check_environment, environment_of
from tensorline.cli.failure import UsageError
from tensorline.cli.triton import is_true, sort_out

__all__ = ["add_to"]

EPILOG = (
    "Triton's other flags are accepted, with a warning where one has no effect here. "
    "Each setting can also stand in the environment: --grpc-port is TENSORLINE_GRPC_PORT."
)


def add_to(app: typer.Typer) -> None:
    app.command(context_settings=flags.PASS_ON, epilog=EPILOG)(up)
    app.command()(gateway)
    app.command()(serve)


def up(
    context: typer.Context,
    model_repository: flags.Repositories = None,
    services: Annotated[
        str, typer.Option("--services", help="Which of the services to start.", metavar="A,B")
    ] = "preprocess,model,postprocess",
    service: Annotated[
        list[str] | None,
        typer.Option("--service", help="A service of your own besides; may be repeated.", metavar="NAME=MODULE"),
    ] = None,
    grpc_address: flags.GrpcAddress = "127.0.0.1",
    grpc_port: flags.GrpcPort = 8001,
    http_address: flags.HttpAddress = "127.0.0.1",
    http_port: flags.HttpPort = 8000,
    metrics_address: flags.MetricsAddress = "127.0.0.1",
    metrics_port: flags.MetricsPort = 8002,
    workers: flags.Workers = None,
    server_id: flags.ServerId = None,
    strict_readiness: flags.StrictReadiness = None,
    admin_token_file: flags.AdminToken = None,
    discovery: flags.Discovery = None,
    mesh_directory: flags.MeshDirectory = None,
    arena_bytes: flags.ArenaBytes = None,
    load_threads: flags.LoadThreads = None,
    drain_s: flags.ExitTimeout = 20.0,
    exit_on_error: Annotated[
        str,
        typer.Option("--exit-on-error", help="End when a process ends before all is ready.", metavar="true|false"),
    ] = "true",
    log_verbose: flags.LogVerbose = 0,
    log_info: flags.LogInfo = "true",
    log_warning: flags.LogWarning = "true",
    log_error: flags.LogError = "true",
) -> None:
    """Run a gateway and its services on this machine."""
    import uvloop

    from tensorline.cli.claim import claim_mesh
    from tensorline.cli.mesh import plan_mesh
    from tensorline.cli.serve import chosen_services
    from tensorline.cli.up import run_up, screen_of_stderr
    from tensorline.directories import default_mesh_directory
    from tensorline.discovery import parse_discovery_url
    from tensorline.errors import ConfigError

    try:  # told here once, and not by each process
        parse_discovery_url(discovery or os.environ.get(f"{PREFIX}DISCOVERY") or "file:///any")
    except ConfigError as error:
        raise UsageError(f"--discovery: {error}") from error
    _warn(sort_out(context.args, flags.names_of(context)))
    check_environment(os.environ)
    must_start = is_true("--exit-on-error", exit_on_error)
    repositories = flags.repositories(model_repository, os.environ)
    if repositories is None:
        _warn(["no --model-repository is given: the mesh starts without a model"])
    values = flags.collect(
        model_repository=repositories,
        grpc_address=grpc_address,
        grpc_port=grpc_port,
        http_address=http_address,
        http_port=http_port,
        metrics_address=metrics_address,
        metrics_port=metrics_port,
        workers=workers,
        server_id=server_id,
        strict_readiness=strict_readiness and is_true("--strict-readiness", strict_readiness),
        admin_token_file=admin_token_file and admin_token_file.absolute(),
        discovery=discovery,
        mesh_directory=mesh_directory and mesh_directory.absolute(),
        arena_bytes=arena_bytes,
        load_threads=load_threads,
        drain_s=drain_s,
        log_level=flags.log_level(log_verbose, log_info, log_warning, log_error),
        # One machine, its owner in front of it: what a model raises may be told.
        expose_model_errors=os.environ.get(f"{PREFIX}EXPOSE_MODEL_ERRORS", True),
        # A pipe is between the processes and the terminal, so they cannot see for themselves.
        log_json=os.environ.get(f"{PREFIX}LOG_JSON", not sys.stderr.isatty()),
    )
    plan = plan_mesh(values, chosen_services(services, service or []), os.environ)
    named = mesh_directory or os.environ.get(f"{PREFIX}MESH_DIRECTORY")
    with claim_mesh(Path(named or default_mesh_directory()), may_join=bool(named)) as is_alone:
        if not is_alone:
            _warn([f"this joins the mesh that runs in {named}: its gateways and services are shared"])
        screen = screen_of_stderr(max(len(program.name) for program in plan.programs))
        uvloop.run(run_up(plan, screen, must_start=must_start))


def gateway(
    model_repository: flags.Repositories = None,
    grpc_address: flags.GrpcAddress = "127.0.0.1",
    grpc_port: flags.GrpcPort = 8001,
    http_address: flags.HttpAddress = "127.0.0.1",
    http_port: flags.HttpPort = 8000,
    metrics_address: flags.MetricsAddress = "127.0.0.1",
    metrics_port: flags.MetricsPort = 8002,
    workers: flags.Workers = None,
    server_id: flags.ServerId = None,
    strict_readiness: flags.StrictReadiness = None,
    admin_token_file: flags.AdminToken = None,
    discovery: flags.Discovery = None,
    mesh_directory: flags.MeshDirectory = None,
    arena_bytes: flags.ArenaBytes = None,
    drain_s: flags.ExitTimeout = 20.0,
    expose_model_errors: flags.ExposeErrors = False,
    log_verbose: flags.LogVerbose = 0,
    log_info: flags.LogInfo = "true",
    log_warning: flags.LogWarning = "true",
    log_error: flags.LogError = "true",
) -> None:
    """Run one gateway: what clients talk to."""
    from tensorline.cli.serve import become

    values = flags.collect(
        model_repository=flags.repositories(model_repository, os.environ),
        grpc_address=grpc_address,
        grpc_port=grpc_port,
        http_address=http_address,
        http_port=http_port,
        metrics_address=metrics_address,
        metrics_port=metrics_port,
        workers=workers,
        server_id=server_id,
        strict_readiness=strict_readiness and is_true("--strict-readiness", strict_readiness),
        admin_token_file=admin_token_file and admin_token_file.absolute(),
        discovery=discovery,
        mesh_directory=mesh_directory,
        arena_bytes=arena_bytes,
        drain_s=drain_s,
        expose_model_errors=expose_model_errors,
        log_level=flags.log_level(log_verbose, log_info, log_warning, log_error),
    )
    become("gateway", environment_of(GATEWAY_FIELDS, values, os.environ, keep_unknown=True))


def serve(
    service: Annotated[
        str, typer.Argument(help="preprocess, model, postprocess, a Python module or a .py file.", metavar="SERVICE")
    ],
    model_repository: flags.Repositories = None,
    listen: flags.Listen = None,
    advertise: flags.Advertise = None,
    discovery: flags.Discovery = None,
    mesh_directory: flags.MeshDirectory = None,
    arena_bytes: flags.ArenaBytes = None,
    max_in_flight: flags.MaxInFlight = None,
    load_threads: flags.LoadThreads = None,
    drain_s: flags.ExitTimeout = 20.0,
    expose_model_errors: flags.ExposeErrors = False,
    log_verbose: flags.LogVerbose = 0,
    log_info: flags.LogInfo = "true",
    log_warning: flags.LogWarning = "true",
    log_error: flags.LogError = "true",
) -> None:
    """Run one service: the models whose backend it has."""
    from tensorline.cli.serve import become, target_of

    values = flags.collect(
        model_repository=flags.repositories(model_repository, os.environ),
        listen=listen,
        advertise=advertise,
        discovery=discovery,
        mesh_directory=mesh_directory,
        arena_bytes=arena_bytes,
        max_in_flight=max_in_flight,
        load_threads=load_threads,
        drain_s=drain_s,
        expose_model_errors=expose_model_errors,
        log_level=flags.log_level(log_verbose, log_info, log_warning, log_error),
    )
    become(target_of(service), environment_of(STAGE_FIELDS, values, os.environ, keep_unknown=True))


def _warn(lines: list[str]) -> None:
    for line in lines:
        print(f"tensorline: {line}", file=sys.stderr)
