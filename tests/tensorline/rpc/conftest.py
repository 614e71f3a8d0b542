from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tensorline.stage.pair import mesh_directory


@pytest.fixture
def path() -> Iterator[Path]:
    """A directory for sockets and arenas."""
    with mesh_directory() as path:
        yield path
