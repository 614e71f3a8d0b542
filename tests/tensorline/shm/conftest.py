import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensorline.directories import default_mesh_directory
from tensorline.shm import Arena, ArenaDirectory, ArenaReader, open_directory

Spawn = Callable[..., "subprocess.Popen[str]"]

MIB = 1 << 20


@pytest.fixture
def directory() -> Iterator[ArenaDirectory]:
    path = Path(tempfile.mkdtemp(prefix="tensorline-test-", dir=default_mesh_directory().parent))
    try:
        yield open_directory(path)
    finally:
        shutil.rmtree(path)


@pytest.fixture
def arena(directory: ArenaDirectory) -> Iterator[Arena]:
    with Arena(directory, 4 * MIB, first_segment_bytes=MIB) as arena:
        yield arena


@pytest.fixture
def reader(directory: ArenaDirectory) -> Iterator[ArenaReader]:
    reader = ArenaReader(directory)
    yield reader
    reader.close()


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a Python process with piped text streams; it is gone after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: str | Path) -> "subprocess.Popen[str]":
        command = [sys.executable, *map(str, args)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
