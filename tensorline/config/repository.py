"""The model repository on disk: which models there are, and which versions of each."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tensorline.config.complete import is_fileless
from tensorline.config.load import load_config, version_numbers
from tensorline.config.model import ModelConfig, VersionPolicy
from tensorline.errors import ConfigError

__all__ = ["RepositoryEntry", "is_model_name", "scan", "served_versions"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class RepositoryEntry:
    """One directory of a repository: its configuration, or why it has none."""

    name: str
    path: Path
    config: ModelConfig | None
    error: ConfigError | None
    versions: tuple[int, ...]
    """Those that the version policy serves, ascending; empty exactly when `error` is set."""


def is_model_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and ".." not in name


def scan(paths: Iterable[Path]) -> list[RepositoryEntry]:
    """Every model of the repositories, by name. What is wrong with one model is that entry's `error`, never raised.

    A name in two repositories gives one entry, with an error. Files and hidden directories beside the models are
    passed over.

    Raises:
        ConfigError: a repository itself cannot be read.
    """
    found: dict[str, RepositoryEntry] = {}
    for root in paths:
        for entry in _scan_one(root):
            if entry.name in found:
                error = ConfigError(f"model '{entry.name}' is in more than one repository; names must be unique")
                found[entry.name] = replace(found[entry.name], config=None, error=error, versions=())
            else:
                found[entry.name] = entry
    return [found[name] for name in sorted(found)]


def _scan_one(root: Path) -> list[RepositoryEntry]:
    try:
        real = root.resolve(strict=True)
        paths = sorted(path for path in real.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as err:
        raise ConfigError(f"model repository '{root}' cannot be read: {err.strerror}") from err
    return [_entry(path, real) for path in paths]


def _entry(path: Path, root: Path) -> RepositoryEntry:
    try:
        if not is_model_name(path.name):
            raise ConfigError(
                f"model directory {path.name[:160]!r} has no valid name; use letters, digits, '.', '_', '-', at most "
                "128, first a letter or digit, no '..'"
            )
        if not path.resolve().is_relative_to(root):
            raise ConfigError(f"model '{path.name}': the directory is a link out of the repository")
        _refuse_links_out(path, root)
        config = load_config(path)
        return RepositoryEntry(path.name, path, config, None, served_versions(config, version_numbers(path)))
    except ConfigError as err:
        return RepositoryEntry(path.name, path, None, err, ())


def _refuse_links_out(path: Path, root: Path) -> None:
    """Links are fine as long as they stay in the repository: configuration, versions, model files, labels."""
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            child = Path(folder, name)
            if child.is_symlink() and not child.resolve().is_relative_to(root):
                raise ConfigError(f"model '{path.name}': '{child.relative_to(path)}' is a link out of the repository")


def served_versions(config: ModelConfig, present: Sequence[int]) -> tuple[int, ...]:
    """Versions that the policy serves, ascending, of the version directories that are present.

    A pipeline, or a model of a backend without model files, needs no version directory and then has version 1.

    Raises:
        ConfigError: none is left.
    """
    if not present and is_fileless(config):
        present = (1,)
    served = _chosen(config.version_policy, sorted(present))
    if not served:
        raise ConfigError(
            f"at least one version must be available under the version policy of model '{config.name}'; "
            f"present are {list(present)}"
        )
    return served


def _chosen(policy: VersionPolicy, present: Sequence[int]) -> tuple[int, ...]:
    if policy.all:
        return tuple(present)
    if policy.latest is None:
        return tuple(version for version in present if version in policy.specific)
    return tuple(present[-policy.latest :]) if policy.latest > 0 else ()
