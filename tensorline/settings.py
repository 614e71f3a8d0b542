"""What every process of a mesh is told at its start; read once in a `main`, then handed down in parts."""

import difflib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from tensorline.directories import default_mesh_directory
from tensorline.errors import ConfigError

__all__ = ["EXPLICIT", "PREFIX", "MeshSettings", "StageSettings", "read_settings"]

PREFIX = "TENSORLINE_"
EXPLICIT: Final = "explicit"
"""The control mode in which clients load and unload."""


class MeshSettings(BaseModel):
    """Shared by gateways and stages. Environment variables carry the prefix TENSORLINE_."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mesh_directory: Path = Field(default_factory=default_mesh_directory)
    """tmpfs directory of the mesh: arenas, sockets and the embedded registry. Made with mode 0700."""
    discovery: str = ""
    """file:///dir, consul://host:port, static://a:1,b:2 or dns://name:port; empty: files in the mesh directory."""
    model_repository: list[Path] = Field(default_factory=list)
    """Model repositories; in the environment separated by colons."""
    model_control_mode: Literal["none", "poll", "explicit"] = "none"
    """When the repositories are looked at after the start: never, every `repository_poll_secs`, or when a client loads
    a model."""
    repository_poll_secs: PositiveFloat = 15.0
    load_model: list[str] = Field(default_factory=list)
    """Models to load at the start in mode explicit; "*" is all of them. In the environment separated by commas."""
    arena_bytes: Annotated[ByteSize, Field(ge=1 << 20)] = ByteSize(256 << 20)
    """Limit of this process's arena. It grows on demand and never shrinks."""
    inline_bytes: ByteSize = ByteSize(4 << 10)
    """Tensors up to this size travel in the frame; bigger ones as handles."""
    drain_s: NonNegativeFloat = 20.0
    """How long work in flight may take to finish after SIGTERM."""
    log_level: str = "info"
    log_json: bool | None = None
    """None: JSON unless standard error is a terminal."""
    log_format: Literal["default", "ISO8601"] = "default"
    """How a line for people begins: with the time of day, or with date and time. JSON lines have both in either."""
    expose_model_errors: bool = False
    """Send the text of any exception of a model to the client, not only that of the model interface's own errors."""

    @field_validator("model_repository", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return [part for part in value.split(":") if part] if isinstance(value, str) else value

    @field_validator("load_model", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value

    @field_validator("load_model")
    @classmethod
    def _check_mode(cls, value: list[str], info: ValidationInfo) -> list[str]:
        mode = info.data.get("model_control_mode", "explicit")
        if value and mode != "explicit":
            raise ValueError(f"needs model_control_mode 'explicit', which is '{mode}'")
        if "*" in value and len(value) > 1:
            raise ValueError("'*' stands alone")
        return value

    @field_validator("log_level")
    @classmethod
    def _check_level(cls, value: str) -> str:
        levels = logging.getLevelNamesMapping()
        if value.upper() not in levels:
            raise ValueError(f"must be one of {', '.join(levels).lower()}")
        return value

    @property
    def is_logging_json(self) -> bool:
        return not sys.stderr.isatty() if self.log_json is None else self.log_json

    @property
    def discovery_url(self) -> str:
        return self.discovery or f"file://{self.mesh_directory}/registry"


class StageSettings(MeshSettings):
    """Of one stage service."""

    listen: str = ""
    """TCP address "host:port" besides the Unix socket; empty: the socket alone. Port 0 takes a free one."""
    advertise: str = ""
    """TCP address under which gateways on other hosts reach `listen`; empty: the same, by host name for any."""
    max_in_flight: PositiveInt = 320
    """Requests that one gateway may have here at once: a full queue and what runs besides."""
    max_queue: PositiveInt = 256
    """Requests that may wait for one model."""
    load_threads: PositiveInt = 4


Settings = TypeVar("Settings", bound=MeshSettings)


def read_settings(kind: type[Settings], environ: Mapping[str, str]) -> Settings:
    """Settings from the environment.

    Raises:
        ConfigError: a value that cannot be, or a variable with our prefix that is no setting (with the nearest name).
    """
    values: dict[str, str] = {}
    for name, value in environ.items():
        if not name.startswith(PREFIX):
            continue
        field = name.removeprefix(PREFIX).lower()
        values[field] = value
        if field not in kind.model_fields:
            near = difflib.get_close_matches(field, kind.model_fields, n=1)
            hint = f"; did you mean {PREFIX}{near[0].upper()}?" if near else ""
            raise ConfigError(f"{name} is no setting of this process{hint}")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        told = [f"{PREFIX}{'.'.join(map(str, e['loc'])).upper()}={e['input']!r}: {e['msg']}" for e in error.errors()]
        raise ConfigError("; ".join(told)) from error
