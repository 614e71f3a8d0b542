"""Giving a command the flags of its settings, and taking Triton's others out of its command line."""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from tensorline.cli import flags
from tensorline.cli.triton import sort_out, with_trace_config

__all__ = ["TritonCommand", "warn", "with_settings"]

_LOG: Final[dict[str, tuple[Any, object]]] = {
    "log_verbose": (
        Annotated[int, typer.Option("--log-verbose", help="1 and more: everything.", metavar="LEVEL", min=0)],
        0,
    ),
    "log_info": (Annotated[str, typer.Option("--log-info", help="Log information.", metavar="true|false")], "true"),
    "log_warning": (Annotated[str, typer.Option("--log-warning", help="Log warnings.", metavar="true|false")], "true"),
    "log_error": (
        Annotated[str, typer.Option("--log-error", help="Log errors; they always are.", metavar="true|false")],
        "true",
    ),
}
_REPOSITORIES = Annotated[
    list[str] | None,
    typer.Option(*flags.REPOSITORIES, help="Model repository; may be repeated.", metavar="DIR"),
]


class TritonCommand(TyperCommand):
    """Takes Triton's flags that have no meaning here, with one warning for each that would have changed something."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.params
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name.startswith("-")
        }
        takes_value |= dict.fromkeys(ctx.help_option_names, False)
        elsewhere = {
            flags.FLAGS[field].name: command
            for command, fields in flags.COMMAND_FIELDS.items()
            for field in fields & flags.FLAGS.keys()
        }
        if "--trace-config" in takes_value:
            args = with_trace_config(args)
        own, warnings = sort_out(args, takes_value, elsewhere)
        warn(warnings)
        return super().parse_args(ctx, own)


def with_settings(command: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the decorated function's parameter `settings` by the flags of `command`.

    It is called with what they say: the text of each setting that was given, by field.
    """
    fields = [field for field in flags.FLAGS if field in flags.COMMAND_FIELDS[command]]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [each for each in inspect.signature(function).parameters.values() if each.name != "settings"]
        added: list[tuple[str, Any, object]] = [("model_repository", _REPOSITORIES, None)]
        added += [(name, _annotated(name), flags.FLAGS[name].default) for name in fields]
        added += [(name, annotation, default) for name, (annotation, default) in _LOG.items()]

        @functools.wraps(function)
        def called(**given: Any) -> None:
            settings = {"model_repository": flags.repositories(given.pop("model_repository"), os.environ)}
            settings |= {field: flags.FLAGS[field].value(given.pop(field)) for field in fields}
            settings["log_level"] = flags.log_level(*(given.pop(name) for name in _LOG))
            if "metrics_address" in settings:  # as in Triton
                settings["metrics_address"] = settings["metrics_address"] or settings["http_address"]
            function(**given, settings={field: value for field, value in settings.items() if value is not None})

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [each.replace(kind=keyword) for each in own]
        parameters += [
            inspect.Parameter(name, keyword, default=default, annotation=annotation)
            for name, annotation, default in added
        ]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # PEP 362; in no stub
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return decorate


def _annotated(field: str) -> Any:
    flag = flags.FLAGS[field]
    return Annotated[flag.annotation, flag.option(field)]


def warn(lines: list[str]) -> None:
    for line in lines:
        print(f"tensorline: {line}", file=sys.stderr)
