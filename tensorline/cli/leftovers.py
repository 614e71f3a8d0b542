"""What processes that were killed could not take with them: sockets, arenas, tables of regions, registry entries."""

import contextlib
from pathlib import Path

from tensorline.discovery.file_reader import EntryReader
from tensorline.errors import TensorlineError
from tensorline.rpc.sockets import sweep_sockets
from tensorline.shm import open_directory, sweep
from tensorline.shm.directory import NONCE_NAME
from tensorline.shm.region_table import region_directory

__all__ = ["sweep_mesh"]


def sweep_mesh(directory: Path) -> None:
    """Remove from a mesh's directory what belongs to no living process. Other meshes' processes there keep theirs."""
    sweep_sockets(directory / "sockets")
    # What cannot be swept now is by the next mesh that starts there; a stop does not fail for it.
    with contextlib.suppress(OSError, TensorlineError):
        if (directory / NONCE_NAME).exists():
            arenas = open_directory(directory)
            sweep(arenas)
            if (directory / "regions").is_dir():
                with region_directory(arenas):  # opening one clears away those of killed gateways
                    pass
    registry = directory / "registry"
    with contextlib.suppress(OSError, TensorlineError):
        if registry.is_dir():
            with contextlib.closing(EntryReader(registry)) as reader:
                reader.look()
                reader.look()  # what a writer left half done is told by being there twice
