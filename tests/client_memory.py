"""A client's shared-memory object, made as any client makes one: a file under /dev/shm that is gone after the block."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SharedObject", "shared_object"]


@dataclass(frozen=True)
class SharedObject:
    key: str
    path: Path

    def write(self, data: bytes, offset: int = 0) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def read(self, offset: int = 0, byte_size: int = -1) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(byte_size)

    def resize(self, byte_size: int) -> None:
        os.truncate(self.path, byte_size)


@contextlib.contextmanager
def shared_object(content: bytes | int, *, mode: int = 0o600) -> Iterator[SharedObject]:
    """
    Args:
        content: Its bytes, or how many zeros.
    """
    name = f"tl-client-{uuid.uuid4().hex}"
    shared = SharedObject(f"/{name}", Path("/dev/shm") / name)
    shared.path.write_bytes(content if isinstance(content, bytes) else bytes(content))
    shared.path.chmod(mode)
    try:
        yield shared
    finally:
        shared.path.unlink(missing_ok=True)
