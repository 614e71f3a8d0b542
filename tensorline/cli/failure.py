"""The failure of a command: one sentence for the person at the terminal."""

__all__ = ["CommandError", "UsageError"]


class CommandError(Exception):
    """What was asked for could not be done. Its text is all that is shown."""

    exit_code = 1


class UsageError(CommandError):
    """The command line itself is wrong."""

    exit_code = 2
