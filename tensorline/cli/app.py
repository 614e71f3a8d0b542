"""The commands together, and how each of them fails."""

import sys
from typing import Annotated

import typer

from tensorline import __version__
from tensorline.cli import client_commands, process_commands
from tensorline.cli.failure import CommandError

__all__ = ["app", "run"]

app = typer.Typer(
    name="tensorline",
    help="An inference mesh: pipelines of models as gRPC services that pass shared-memory handles.",
    rich_markup_mode=None,  # rich's help is another 0.15 s
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(arguments: list[str]) -> int:
    """Run one command: its exit code. What went wrong is told in one sentence on stderr."""
    try:
        return int(app(arguments, standalone_mode=False) or 0)
    except CommandError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stdout = None  # its reader is gone: no second complaint at exit
        return 1
    except Exception as error:
        told = _expected(error)
        if told is None:
            raise
        return told


def _expected(error: Exception) -> int | None:
    """Exit code of a failure that typer or the library has a sentence for; None: it is a bug."""
    format_message = getattr(error, "format_message", None)
    if format_message is not None:  # typer's own, whatever module of it they live in
        text = format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            print(text)
            return 2
        return _fail(text, getattr(error, "exit_code", 2))
    errors = sys.modules.get("tensorline.errors")  # imported by whoever raised one of them
    if errors is not None and isinstance(error, errors.TensorlineError):
        return _fail(str(error), 1)
    return None


def _fail(text: str, code: int) -> int:
    print(f"tensorline: {text}", file=sys.stderr)
    return code


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"tensorline {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    return


process_commands.add_to(app)
client_commands.add_to(app)
