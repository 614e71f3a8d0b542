import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorline.cli.lines import KeptOutput

MakeScript = Callable[[str, str], str]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def output() -> KeptOutput:
    return KeptOutput()


@pytest.fixture
def script(tmp_path: Path) -> MakeScript:
    """Write a program for a child process: its path."""

    def make(name: str, body: str) -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(body))
        return str(path)

    return make
