"""What a model's directory looks like: enough to see whether something in it has changed, without reading any file."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tensorline.config.load import CONFIG_FILE, is_version_name

__all__ = ["Footprint", "footprint"]

CACHES: Final = frozenset(("__pycache__",))
"""Written by who loads a model, not by who changes it."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Equal for a directory in which nothing was added, removed, replaced or written; "" is what is not there."""

    config: str = ""
    versions: Mapping[int, str] = field(default_factory=dict)
    rest: str = ""
    """Labels, warm-up data and whatever else is beside configuration and versions."""


def footprint(path: Path) -> Footprint:
    """Of a model's directory; one that is away, or cannot be read, has an empty one."""
    config, rest, versions = "", [], {}
    for entry in _entries(path):
        if entry.name == CONFIG_FILE:
            config = _hashed(_seen(entry))
        elif is_version_name(entry.name) and entry.is_dir():
            versions[int(entry.name)] = _hashed(_seen(entry))
        else:
            rest += _seen(entry)
    return Footprint(config, versions, _hashed(rest) if rest else "")


def _entries(path: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return sorted((entry for entry in found if entry.name not in CACHES), key=lambda entry: entry.name)
    except OSError:
        return []


def _seen(entry: os.DirEntry[str], above: frozenset[int] = frozenset()) -> list[str]:
    """Files by name, size, time and inode: a file that was renamed into place may be older than what it replaces.

    Directories by what is in them. Links are followed: what they lead to may change, too.

    Args:
        above: Inodes of the directories that this one is in: a link may lead back to them.
    """
    try:
        about = entry.stat()
        if entry.is_dir():
            inside = [] if about.st_ino in above else _entries(entry.path)
            lines = (line for child in inside for line in _seen(child, above | {about.st_ino}))
            return [f"{entry.path}/", *lines]
    except OSError:
        return [f"{entry.path} ?"]
    return [f"{entry.path} {about.st_size} {about.st_mtime_ns} {about.st_ino}"]


def _hashed(lines: list[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(errors="surrogateescape"), digest_size=16).hexdigest()
