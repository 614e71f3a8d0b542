"""From a model's directory to its configuration."""

import os
from collections.abc import Callable
from pathlib import Path

from tensorline.config.complete import complete, complete_groups
from tensorline.config.ensemble import check_graph
from tensorline.config.model import ModelConfig
from tensorline.config.parse import TEXT_LIMIT, parse_config, parse_config_json
from tensorline.config.validate import validate, validate_tensors
from tensorline.config.values import config_from_encoded, config_from_message
from tensorline.errors import ConfigError, UnloadableError
from tensorline.protocol.stubs.inference import model_config_pb2 as pb

__all__ = [
    "CONFIG_FILE",
    "OVERRIDE",
    "Completer",
    "config_from_encoded",
    "config_from_override",
    "config_from_text",
    "is_version_name",
    "load_config",
    "version_numbers",
]

CONFIG_FILE = "config.pbtxt"
OVERRIDE = "config override"
"""What errors call a configuration that came with a load request."""

Completer = Callable[[pb.ModelConfig, Path], None]
"""A backend's auto-completion: fills inputs, outputs, max_batch_size, scheduler from the model file in a version's
directory, in place."""


def load_config(model_path: Path, completer: Completer | None = None) -> ModelConfig:
    """Read, complete and validate `<model_path>/config.pbtxt`; a directory without one has an empty configuration.

    Args:
        completer: Called after the policies are validated, with the highest version's directory.
    Raises:
        ConfigError: names the model, the field, its value and what was wanted. No absolute path is in it. An
            UnloadableError for what stands in inputs, outputs and steps: as Triton, we find that only at the load.
    """
    model = model_path.name
    source = f"{model}/{CONFIG_FILE}"
    message = parse_config(_read(model_path / CONFIG_FILE, source), source)
    return _completed(message, model, model_path, completer)


def _read(path: Path, source: str) -> str:
    try:
        if path.exists() and not path.is_file():  # a pipe would hold the reader for ever
            raise ConfigError(f"{source} is no regular file")
        with open(path, encoding="utf-8") as file:
            return file.read(TEXT_LIMIT + 1)
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as err:
        raise ConfigError(f"{source} is not UTF-8 text: byte {err.start} is {err.object[err.start]:#04x}") from err
    except OSError as err:
        raise ConfigError(f"{source} cannot be read: {os.strerror(err.errno or 0)}") from err


def config_from_text(text: str, model: str) -> ModelConfig:
    """The configuration that `text` gives a model without a directory: examples, overrides, tests."""
    return _completed(parse_config(text, f"{model}/{CONFIG_FILE}"), model, None, None)


def config_from_override(text: str, model: str, model_path: Path | None) -> ModelConfig:
    """The configuration that a load request gives in place of the file: JSON of an inference.ModelConfig.

    Args:
        model_path: Of the directory that it is for; None: a model without one.
    Raises:
        ConfigError: as `load_config`; the text is called the "config override".
    """
    return _completed(parse_config_json(text, f"{model}: {OVERRIDE}"), model, model_path, None)


def _completed(message: pb.ModelConfig, model: str, path: Path | None, completer: Completer | None) -> ModelConfig:
    versions = [path / str(number) for number in version_numbers(path)] if path is not None else []
    complete(message, model, sorted(os.listdir(versions[0])) if versions else ())
    validate(message)
    if completer is not None and versions:
        completer(message, versions[-1])
    try:
        complete_groups(message)
        validate_tensors(message)
        config = config_from_message(message)
        if config.is_ensemble:
            check_graph(config)
    except ConfigError as err:
        raise UnloadableError(str(err)) from err
    return config


def version_numbers(model_path: Path) -> list[int]:
    """Version directories, ascending. Names with a leading zero or a non-digit are other things."""
    try:
        with os.scandir(model_path) as entries:
            found = [int(entry.name) for entry in entries if is_version_name(entry.name) and entry.is_dir()]
    except OSError:
        return []
    return sorted(found)


def is_version_name(name: str) -> bool:
    return name.isascii() and name.isdigit() and not name.startswith("0") and len(name) < 20
