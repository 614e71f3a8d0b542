"""One `tensorline up` for each mesh directory, unless somebody wants it otherwise."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from tensorline.cli.failure import CommandError

__all__ = ["LOCK_NAME", "claim_mesh"]

LOCK_NAME = "up.lock"


@contextlib.contextmanager
def claim_mesh(directory: Path, *, may_join: bool) -> Iterator[bool]:
    """Hold `directory` while the block lasts; yields whether it is ours alone.

    Every gateway of a mesh directory routes to every stage there, so that two meshes in one directory answer for one
    another.

    Args:
        may_join: The directory was named by whoever started us: sharing it with a mesh that runs there is meant.
    Raises:
        CommandError: a mesh runs there already, or the directory cannot be used.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise CommandError(f"--mesh-directory {directory} cannot be used: {error.strerror}") from error
    try:
        is_alone = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_alone = False
            if not may_join:
                raise CommandError(
                    f"a mesh runs in {directory} already; --mesh-directory DIR gives this one a directory of its own "
                    "(naming the same one joins it)"
                ) from None
        try:
            yield is_alone
        finally:
            if is_alone:
                with contextlib.suppress(OSError):
                    os.unlink(directory / LOCK_NAME)
    finally:
        os.close(descriptor)
