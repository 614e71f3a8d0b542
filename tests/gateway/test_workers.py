"""The parent of several gateway processes, with small stand-ins for them: real processes, real signals."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway import workers
from gateway.settings import GatewaySettings
from gateway.workers import run_workers
from tensorline.cli.backoff import Backoff
from tensorline.errors import ConfigError
from tests.tensorline.stage.pair import mesh_directory

READY = "import sys; print('up', flush=True);"
WAITS = f"{READY} import time; time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITS}"
REFUSES = "import sys; sys.exit(2)"
FAILS = "import sys; sys.exit(1)"


class Started:
    """Processes in place of workers; `scripts` has the program of each start of a worker, the last one for the rest."""

    def __init__(self, scripts: dict[int, list[str]]) -> None:
        self.all: list[tuple[int, int, subprocess.Popen[bytes]]] = []
        self.times: list[float] = []
        self._scripts = scripts

    def start(self, index: int, port: int, regions: Path | None) -> "subprocess.Popen[bytes]":
        assert regions is not None
        assert regions.is_dir()  # as long as there is a worker
        scripts = self._scripts.get(index, [WAITS])
        nth = sum(1 for known, _, _ in self.all if known == index)
        script = scripts[min(nth, len(scripts) - 1)]
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # a signal that came sooner would meet a Python that is being built
        process.stdout.close()
        self.all.append((index, port, process))
        self.times.append(time.monotonic())
        return process

    def of(self, index: int) -> "list[subprocess.Popen[bytes]]":
        return [process for known, _, process in self.all if known == index]

    def still_running(self) -> list[int]:
        return [index for index, _, process in self.all if process.poll() is None]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workers, "LOOK_S", 0.01)
    monkeypatch.setattr(workers, "KILL_S", 0.3)
    monkeypatch.setattr(workers, "Backoff", lambda: Backoff(first_s=0.02, most_s=0.1))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(
    monkeypatch: pytest.MonkeyPatch,
    scripts: dict[int, list[str]],
    meanwhile: Callable[[Started], object],
    count: int = 2,
) -> tuple[int, Started]:
    """The parent's status. `meanwhile` runs in a thread beside it; what it returns is awaited, then SIGTERM is sent."""
    started = Started(scripts)
    monkeypatch.setattr(workers, "_start", started.start)
    is_over = threading.Event()

    def beside() -> None:
        until = time.monotonic() + 10
        while not is_over.is_set() and time.monotonic() < until:
            if meanwhile(started):
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=beside)
    thread.start()
    try:
        with mesh_directory() as path:
            settings = GatewaySettings(grpc_port=0, workers=count, drain_s=0.0, mesh_directory=path)
            status = run_workers(settings)
            assert [*(path / "regions").iterdir()] == []
            return status, started
    finally:
        is_over.set()
        thread.join()
        for _, _, process in started.all:
            process.kill()
            process.wait()


def test_sigterm_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    status, started = run(monkeypatch, {}, lambda started: len(started.all) == 3, count=3)
    assert status == 0
    assert [index for index, _, _ in started.all] == [1, 2, 3]
    assert [process.returncode for _, _, process in started.all] == [-signal.SIGTERM] * 3
    (port,) = {port for _, port, _ in started.all}
    assert port > 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", port))


def test_a_killed_worker_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill_once(started: Started) -> bool:
        if len(started.all) == 2:
            started.of(1)[0].kill()
        return len(started.of(1)) == 2

    status, started = run(monkeypatch, {}, kill_once)
    assert (status, len(started.of(1)), len(started.of(2))) == (0, 2, 1)


def test_a_worker_that_keeps_failing_is_started_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_dies_too(started: Started) -> bool:
        if len(started.of(1)) == 4 and len(started.of(2)) == 1:
            started.of(2)[0].kill()
        return len(started.of(1)) == 5 and len(started.of(2)) == 2

    _, started = run(monkeypatch, {1: [FAILS]}, one_dies_too)
    first = [at for (index, _, _), at in zip(started.all, started.times, strict=True) if index == 1]
    between = [later - sooner for sooner, later in itertools.pairwise(first)]
    assert between[0] >= 0.02
    assert between[1] >= 0.04
    assert between[2] >= 0.08


def test_a_wrong_configuration_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    status, started = run(monkeypatch, {2: [REFUSES]}, lambda started: False)
    assert status == 2
    assert len(started.all) == 2
    assert started.of(1)[0].returncode == -signal.SIGTERM


def test_a_wrong_configuration_counts_at_a_restart_too(monkeypatch: pytest.MonkeyPatch) -> None:
    status, started = run(monkeypatch, {2: [FAILS, REFUSES]}, lambda started: False)
    assert (status, started.still_running()) == (2, [])


def test_a_worker_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    status, started = run(monkeypatch, {1: [STUBBORN]}, lambda started: len(started.all) == 2)
    assert status == 0
    assert [process.returncode for _, _, process in started.all] == [-signal.SIGKILL, -signal.SIGTERM]
    assert time.monotonic() - began < 20


def test_a_taken_port_starts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started({})
    monkeypatch.setattr(workers, "_start", started.start)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = GatewaySettings(grpc_port=port, workers=2)
        with pytest.raises(ConfigError, match=f"gRPC port {port} on 127.0.0.1 cannot be used: Address already in use"):
            run_workers(settings)
    assert started.all == []
