from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tensorline.stage.pair import mesh_directory


@pytest.fixture
def path() -> Iterator[Path]:
    """A directory for sockets and arenas."""
    with mesh_directory() as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def _one_loop(one_loop: None) -> None:
    """See tests/conftest.py."""
