"""What a process would say of its settings, in the words of the command line and before it starts."""

import importlib
from collections.abc import Mapping
from typing import Final

from tensorline.cli.failure import CommandError, UsageError
from tensorline.cli.flags import in_flags
from tensorline.discovery import parse_discovery_url
from tensorline.errors import ConfigError
from tensorline.settings import MeshSettings, StageSettings, read_settings

__all__ = ["check_settings"]

GATEWAY_SETTINGS: Final = ("gateway.settings", "GatewaySettings")
"""By name: the gateway is a program that the command starts, not a part of it."""


def check_settings(target: str, environment: Mapping[str, str]) -> None:
    """
    Args:
        target: The module or file that is to run; whatever is not the gateway is a stage.
    Raises:
        UsageError: a setting that it would refuse.
        CommandError: the file with the operators' token is not there.
    """
    kind: type[MeshSettings] = StageSettings
    if target == "gateway":
        kind = getattr(importlib.import_module(GATEWAY_SETTINGS[0]), GATEWAY_SETTINGS[1])
    try:
        settings = read_settings(kind, environment)
    except ConfigError as error:
        raise UsageError(in_flags(str(error))) from None
    try:
        parse_discovery_url(settings.discovery_url)
    except ConfigError as error:
        raise UsageError(f"--discovery: {error}") from None
    token = getattr(settings, "admin_token_file", None)
    if token is not None and not token.is_file():
        raise CommandError(f"--admin-token-file {token}: there is no such file")
