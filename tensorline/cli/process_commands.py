"""The commands that are processes: `up`, `gateway`, `serve`. Their flags; the work is imported when one is called."""

import os
import sys
from typing import Annotated

import typer

from tensorline.cli.environment import GATEWAY_FIELDS, PREFIX, STAGE_FIELDS, check_environment, environment_of
from tensorline.cli.settings_flags import TritonCommand, warn, with_settings
from tensorline.cli.triton import is_true

__all__ = ["add_to"]

EPILOG = (
    "Triton's other flags are accepted, with a warning where one has no effect here. "
    "Each setting can also stand in the environment: --grpc-port is TENSORLINE_GRPC_PORT."
)


def add_to(app: typer.Typer) -> None:
    for command in (up, gateway, serve):
        app.command(cls=TritonCommand, epilog=EPILOG)(command)


@with_settings("up")
def up(
    settings: dict[str, str],
    services: Annotated[
        str, typer.Option("--services", help="Which of the services to start.", metavar="A,B")
    ] = "preprocess,model,postprocess",
    service: Annotated[
        list[str] | None,
        typer.Option("--service", help="A service of your own besides; may be repeated.", metavar="NAME=MODULE"),
    ] = None,
    exit_on_error: Annotated[
        str | None,
        typer.Option(
            "--exit-on-error",
            help="End when a process ends, or a model fails, before all is ready. Unless given: when a process ends.",
            metavar="true|false",
        ),
    ] = None,
) -> None:
    """Run a gateway and its services on this machine."""
    import uvloop

    from tensorline.cli.claim import claim_mesh
    from tensorline.cli.mesh import plan_mesh
    from tensorline.cli.precheck import check_settings
    from tensorline.cli.serve import chosen_services
    from tensorline.cli.up import run_up, screen_of_stderr
    from tensorline.directories import default_mesh_directory

    is_strict = exit_on_error is not None and is_true("--exit-on-error", exit_on_error)
    must_start = exit_on_error is None or is_strict
    check_environment(os.environ)
    if "model_repository" not in settings:
        warn(["no --model-repository is given: the mesh starts without a model"])
    directory = settings.get("mesh_directory") or os.environ.get(f"{PREFIX}MESH_DIRECTORY")
    settings |= {
        "mesh_directory": directory or str(default_mesh_directory()),
        # One machine, its owner in front of it: what a model raises may be told.
        "expose_model_errors": os.environ.get(f"{PREFIX}EXPOSE_MODEL_ERRORS", "true"),
        # A pipe is between the processes and the terminal, so they cannot see for themselves.
        "log_json": os.environ.get(f"{PREFIX}LOG_JSON", str(not sys.stderr.isatty()).lower()),
    }
    plan = plan_mesh(settings, chosen_services(services, service or []), os.environ)
    for program in plan.programs:
        check_settings(program.target, program.environment)
    with claim_mesh(plan.directory, may_join=bool(directory)) as is_alone:
        if not is_alone:
            warn([f"this joins the mesh that runs in {directory}: its gateways and services are shared"])
        screen = screen_of_stderr(max(len(program.name) for program in plan.programs))
        uvloop.run(run_up(plan, screen, must_start=must_start, must_load=is_strict))


@with_settings("gateway")
def gateway(settings: dict[str, str]) -> None:
    """Run one gateway: what clients talk to."""
    from tensorline.cli.mesh import listeners_of
    from tensorline.cli.ports import check_free
    from tensorline.cli.precheck import check_settings
    from tensorline.cli.serve import become

    environment = environment_of(GATEWAY_FIELDS, settings, os.environ, keep_unknown=True)
    check_settings("gateway", environment)
    check_free(listener for listener in listeners_of(settings).values() if listener.port)
    become("gateway", environment)


@with_settings("serve")
def serve(
    settings: dict[str, str],
    service: Annotated[
        str, typer.Argument(help="preprocess, model, postprocess, a Python module or a .py file.", metavar="SERVICE")
    ],
) -> None:
    """Run one service: the models whose backend it has."""
    from tensorline.cli.precheck import check_settings
    from tensorline.cli.serve import become, target_of

    target = target_of(service)
    environment = environment_of(STAGE_FIELDS, settings, os.environ, keep_unknown=True)
    check_settings(target, environment)
    become(target, environment)
