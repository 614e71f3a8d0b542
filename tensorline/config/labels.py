"""Label files: one label on each line, line k for class k."""

import os
from pathlib import Path
from typing import Final

from tensorline.config.model import ModelConfig
from tensorline.errors import ConfigError

__all__ = ["LABEL_FILE_LIMIT", "read_labels", "read_model_labels"]

LABEL_FILE_LIMIT: Final = 64 << 20
"""Bytes of one label file."""


def read_labels(model_path: Path, filename: str) -> tuple[str, ...]:
    """The labels of `<model_path>/<filename>`, without line ends.

    Raises:
        ConfigError: no such file, too large, not UTF-8, or outside the model's directory, also through a link.
    """
    where = f"model '{model_path.name}': label file '{filename}'"
    root = model_path.resolve()
    path = (root / filename).resolve()
    if not path.is_relative_to(root):
        raise ConfigError(f"{where} is outside the model's directory")
    if not path.is_file():
        raise ConfigError(f"{where} does not exist")
    try:
        if path.stat().st_size > LABEL_FILE_LIMIT:
            raise ConfigError(f"{where} has {path.stat().st_size} bytes, at most {LABEL_FILE_LIMIT} are read")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise ConfigError(f"{where} is not UTF-8 text: byte {err.start}") from err
    except OSError as err:
        raise ConfigError(f"{where} cannot be read: {os.strerror(err.errno or 0)}") from err
    # Not splitlines(): a label may hold U+2028 or a form feed.
    lines = text.removesuffix("\n").split("\n") if text else []
    return tuple(line.removesuffix("\r") for line in lines)


def read_model_labels(model_path: Path, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Labels of every output that names a file, by output name."""
    return {
        output.name: read_labels(model_path, output.label_filename)
        for output in config.outputs
        if output.label_filename
    }
