"""Where a mesh lives on this host."""

import os
import tempfile
from pathlib import Path

__all__ = ["default_mesh_directory"]


def default_mesh_directory() -> Path:
    """Of the current user, in memory where the system has a tmpfs for that."""
    shared = Path("/dev/shm")  # noqa: S108 - the directory made in it is 0700 and its owner is checked
    parent = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return parent / f"tensorline-{os.geteuid()}"
