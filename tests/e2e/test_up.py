"""`tensorline up` with the real gateway and services: from the start to nothing left."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.consul import free_ports
from tests.e2e.mesh import ROOT

COMMAND = (sys.executable, "-m", "tensorline.cli")
ECHO = """
backend: "identity"
input {{ name: "x" data_type: TYPE_FP32 dims: -1 }}
output {{ name: "x" data_type: TYPE_FP32 dims: -1 }}
"""
BROKEN = ECHO.replace("identity", "onnxruntime")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, config in (("echo", ECHO), ("broken", BROKEN)):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config.format())
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    return tmp_path


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tl", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Up:
    def __init__(self, directory: Path, *flags: str) -> None:
        self.grpc, self.http, self.metrics = free_ports(3)
        self.directory = directory / "mesh"
        self.is_stopping = False
        ports = [f"--grpc-port={self.grpc}", f"--http-port={self.http}", f"--metrics-port={self.metrics}"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TENSORLINE_")}
        self.log = directory / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "up", f"--mesh-directory={self.directory}", *ports, *flags],
                cwd=ROOT,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def read_until(self, text: str) -> list[str]:
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line.rstrip())
            if text in line:
                return lines
        raise AssertionError(f"ended without {text!r}: {lines}\n{self.log.read_text()[-3000:]}")

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """A command that asks it."""
        url = f"http://localhost:{self.http}" if arguments[0] == "models" else f"localhost:{self.grpc}"
        return subprocess.run(
            [*COMMAND, *arguments, "--url", url], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def left(self) -> set[str]:
        return {str(path.relative_to(self.directory)) for path in self.directory.rglob("*") if not path.is_dir()}


@contextmanager
def running(directory: Path, *flags: str) -> Iterator[Up]:
    up = Up(directory, *flags)
    try:
        yield up
    finally:
        if not up.is_stopping:
            up.process.send_signal(signal.SIGTERM)
        try:
            up.process.communicate(timeout=30)
        finally:
            up.process.kill()
            up.process.wait()


def test_from_the_start_to_nothing_left(repository: Path, directory: Path) -> None:
    with running(directory, f"--model-repository={repository}", "--metrics-config=counter_latencies=true") as up:
        lines = up.read_until("Ctrl-C")
        assert any(line.startswith("  NOT READY  broken: ") for line in lines), lines
        assert any(line.endswith(": echo") for line in lines), lines
        family = up.family()
        assert len(family) == 4
        done = up.run("infer", "echo", "--input", "x=1,2,3", "--json")
        assert done.returncode == 0, done.stderr
        assert '"data": [\n        1.0,\n        2.0,\n        3.0\n      ]' in done.stdout
        done = up.run("models")
        assert "UNAVAILABLE" in done.stdout
        assert "Request for unknown model" not in done.stdout
        done = up.run("infer", "echo", "--data", '{"x": "no"}')
        assert (done.returncode, done.stderr) == (2, "tensorline: --data: x: 'no' is no FP32 value\n")
    assert up.process.returncode == 0
    assert not [process for process in family if process.is_running()]
    assert up.left() == {"nonce"}


def test_killed_by_a_second_signal_it_leaves_nothing_either(repository: Path, directory: Path) -> None:
    with running(directory, f"--model-repository={repository}", "--services=model") as up:
        up.read_until("Ctrl-C")
        family = up.family()
        for process in family:
            process.suspend()  # none of them can clear up after itself
        up.process.send_signal(signal.SIGTERM)
        up.is_stopping = True
        up.read_until("stopping")
        up.process.send_signal(signal.SIGTERM)
        up.read_until("stopped")
    assert up.process.returncode == 0
    assert not [process for process in family if process.is_running()]
    assert up.left() == {"nonce"}


def test_explicit_mode_loads_what_is_named_and_what_is_asked_for(repository: Path, directory: Path) -> None:
    flags = ["--model-control-mode=explicit", "--load-model=echo"]
    with running(directory, f"--model-repository={repository}", *flags) as up:
        assert any(line.startswith("ready after ") for line in up.read_until("Ctrl-C"))
        assert up.run("unload", "echo").stdout == "echo is unloaded\n"
        done = up.run("infer", "echo", "--input", "x=1")
        assert done.returncode == 1
        assert "echo" in done.stderr
        done = up.run("load", "echo")
        assert (done.returncode, done.stdout) == (0, "echo is loaded\n"), done.stderr
        assert up.run("infer", "echo", "--input", "x=1").returncode == 0
        done = up.run("load", "broken")
        assert done.returncode == 1
        assert "broken" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert '"name": "echo"' in up.run("config", "echo", "--json").stdout
        assert "echo" in up.run("stats").stdout
        assert up.run("shm").returncode == 0
