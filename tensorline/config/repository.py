"""The model repository on disk: which models there are, and which versions of each."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tensorline.config.complete import is_fileless
from tensorline.config.load import config_from_override, load_config, version_numbers
from tensorline.config.model import ModelConfig, VersionPolicy
from tensorline.errors import ConfigError, UnloadableError

__all__ = ["RepositoryEntry", "find_entry", "is_model_name", "model_paths", "scan", "served_versions"]

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
    for path, root in _directories(paths):
        if path.name in found:
            found[path.name] = replace(found[path.name], config=None, error=_duplicate(path.name), versions=())
        else:
            found[path.name] = _entry(path, root)
    return [found[name] for name in sorted(found)]


def find_entry(paths: Iterable[Path], name: str, override: str = "") -> RepositoryEntry | None:
    """One model of the repositories; None: no directory of that name. What is wrong with it is its `error`.

    Args:
        override: JSON of an inference.ModelConfig that is used in place of config.pbtxt; "": the file.
    Raises:
        ConfigError: a repository itself cannot be read.
    """
    if not is_model_name(name):
        return None
    found = [(path, root) for path, root in _directories(paths) if path.name == name]
    if len(found) > 1:
        return RepositoryEntry(name, found[0][0], None, _duplicate(name), ())
    return _entry(*found[0], override) if found else None


def model_paths(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """The directories of each model, by name; more than one for a name that is in several repositories.

    Raises:
        ConfigError: a repository itself cannot be read.
    """
    found: dict[str, list[Path]] = {}
    for path, _ in _directories(paths):
        found.setdefault(path.name, []).append(path)
    return {name: found[name] for name in sorted(found)}


def _directories(roots: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """Model directories, each with the real path of its repository."""
    for root in roots:
        try:
            real = root.resolve(strict=True)
            paths = sorted(path for path in real.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError as err:
            raise ConfigError(f"model repository '{root}' cannot be read: {err.strerror}") from err
        yield from ((path, real) for path in paths)


def _duplicate(name: str) -> ConfigError:
    return ConfigError(f"model '{name}' is in more than one repository; names must be unique")


def _entry(path: Path, root: Path, override: str = "") -> RepositoryEntry:
    try:
        if not is_model_name(path.name):
            raise ConfigError(
                f"model directory {path.name[:160]!r} has no valid name; use letters, digits, '.', '_', '-', at most "
                "128, first a letter or digit, no '..'"
            )
        if not path.resolve().is_relative_to(root):
            raise ConfigError(f"model '{path.name}': the directory is a link out of the repository")
        _refuse_links_out(path, root)
        config = config_from_override(override, path.name, path) if override else load_config(path)
        return RepositoryEntry(path.name, path, config, None, served_versions(config, version_numbers(path)))
    except ConfigError as err:
        return RepositoryEntry(path.name, path, None, err, ())
    except (OSError, RuntimeError) as err:  # RuntimeError: how pathlib tells of links that lead in a circle
        error = ConfigError(f"model '{path.name}': the directory cannot be read: {type(err).__name__}")
        return RepositoryEntry(path.name, path, None, error, ())


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
        UnloadableError: none is left.
    """
    if not present and is_fileless(config):
        present = (1,)
    served = _chosen(config.version_policy, sorted(present))
    if not served:
        raise UnloadableError(
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
