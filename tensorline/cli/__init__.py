"""The `tensorline` command. What a command needs is imported inside it, so that `--help` answers at once."""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and end the process with its exit code: 0, 1 for a failure, 2 for a wrong command line."""
    try:
        from tensorline.cli.app import run

        sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))
    except KeyboardInterrupt:  # while the imports still run
        sys.exit(130)
