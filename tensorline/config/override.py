"""What a load request may bring in place of the repository, and what it is told of a configuration that is no use."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from tensorline.errors import ConfigError, InternalError, InvalidTensorError, TensorlineError, UnloadableError

__all__ = ["check_file_path", "check_files", "load_error", "override_digest", "refused", "write_files"]

PATH_BYTES: Final = 1024
NAME_BYTES: Final = 255
FILES_LIMIT: Final = 1024


def check_file_path(path: str) -> None:
    """
    Raises:
        InvalidTensorError: `path` is absolute, leads out of the model's directory, or is none of a file.
    """
    parts = PurePosixPath(path).parts
    if (
        not parts
        or path.startswith("/")
        or path.endswith("/")
        or "\\" in path
        or any(part == ".." for part in parts)
        or not path.isprintable()
        or str(PurePosixPath(path)) != path
    ):
        raise InvalidTensorError(f"file override {path[:128]!r} is no path of a file inside the model's directory")
    longest = max(len(part.encode()) for part in parts)
    if len(path.encode()) > PATH_BYTES or longest > NAME_BYTES:
        raise InvalidTensorError(
            f"file override '{path[:128]}...' has a path of {len(path.encode())} bytes with a name of {longest}, at "
            f"most {PATH_BYTES} and {NAME_BYTES} are allowed"
        )


def check_files(files: Mapping[str, object]) -> None:
    """
    Raises:
        InvalidTensorError: a path that cannot be, one that is both a file and a directory, or too many of them.
    """
    if len(files) > FILES_LIMIT:
        raise InvalidTensorError(f"{len(files)} file overrides, at most {FILES_LIMIT} are allowed")
    for path in files:
        check_file_path(path)
    for path in files:
        for parent in PurePosixPath(path).parents:
            if str(parent) in files:
                raise InvalidTensorError(f"file override '{parent}' is a file and the directory of '{path}'")


def write_files(directory: Path, files: Mapping[str, bytes | memoryview]) -> None:
    """Make `directory` with these files, by their paths in it. It must not exist: so there are no links in it.

    Raises:
        InvalidTensorError: as `check_files`.
        OSError: the disk is full, or the like.
    """
    check_files(files)
    directory.mkdir(mode=0o700)
    for path, data in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            file.write(data)


def override_digest(config: str, files: Mapping[str, bytes | memoryview]) -> str:
    """Equal for equal overrides; "" for none."""
    if not config and not files:
        return ""
    about = [config, *((path, hashlib.blake2b(data).hexdigest()) for path, data in sorted(files.items()))]
    return hashlib.blake2b(json.dumps(about).encode(), digest_size=16).hexdigest()


def refused(model: str) -> str:
    """How Triton begins, and ends, its answer when a model's configuration cannot be used."""
    return f"failed to load '{model}', failed to poll from model repository"


def load_error(model: str, error: ConfigError) -> TensorlineError:
    """What a load request is answered that found this error in the repository, or in its override."""
    if isinstance(error, UnloadableError):
        return UnloadableError(f"load failed for model '{model}': {error}")
    return InternalError(f"{refused(model)}: {error}")
