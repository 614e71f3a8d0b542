"""`tensorline up` as a process, with stand-ins for the gateway and the services."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tensorline.cli.ports import free_port

COMMAND = [sys.executable, "-m", "tensorline.cli"]


@contextmanager
def running_up(environment: dict[str, str], *flags: str) -> Iterator[subprocess.Popen[str]]:
    ports = [f"--{name}-port={free_port()}" for name in ("grpc", "http", "metrics")]
    process = subprocess.Popen(
        [*COMMAND, "up", *ports, *flags], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if text in line:
            return lines
    raise AssertionError(f"ended without {text!r}: {lines}")


def run_up(environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, "up", *flags], env=environment, capture_output=True, text=True, timeout=30)


def test_it_tells_where_it_is_and_ends_with_nothing_left(fake_mesh: dict[str, str]) -> None:
    with running_up(fake_mesh) as process:
        lines = read_until(process, "Ctrl-C")
        children = psutil.Process(process.pid).children()
        assert len(children) == 4
        process.send_signal(signal.SIGTERM)
        out, log = process.communicate(timeout=20)
    assert process.returncode == 0
    assert lines[0].startswith("waiting for ")
    assert "ready after" in lines[-5]
    assert "classify" in lines[-5]
    assert re.search(r"gRPC +127\.0\.0\.1:\d+", lines[-4])
    assert "stopping" in out
    assert "stopped in" in out
    assert '{"event": "model is ready", "level": "info"}' in log.splitlines(), "JSON passes as it is"
    assert "gateway drains" in log
    assert not [child for child in children if psutil.pid_exists(child.pid)]
    assert not list(Path(fake_mesh["TENSORLINE_MESH_DIRECTORY"]).iterdir())


def test_each_process_is_told_its_own_settings_and_no_other(fake_mesh: dict[str, str]) -> None:
    environment = {**fake_mesh, "TENSORLINE_MAX_QUEUE": "7", "TENSORLINE_TRACE_RATE": "5"}
    with running_up(environment, "--arena-bytes=64MiB", "--id=mine", "--log-verbose=1") as process:
        read_until(process, "Ctrl-C")
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=20)
    told = json.loads(next(line for line in log.splitlines() if "gateway is told" in line).partition("told ")[2])
    assert told["TENSORLINE_ARENA_BYTES"] == "64MiB"
    assert told["TENSORLINE_SERVER_ID"] == "mine"
    assert told["TENSORLINE_TRACE_RATE"] == "5"
    assert told["TENSORLINE_LOG_LEVEL"] == "debug"
    assert told["TENSORLINE_LOG_JSON"] == "true"
    assert told["TENSORLINE_EXPOSE_MODEL_ERRORS"] == "true"
    assert "TENSORLINE_MAX_QUEUE" not in told


def test_a_killed_service_comes_back(fake_mesh: dict[str, str]) -> None:
    with running_up(fake_mesh) as process:
        read_until(process, "Ctrl-C")
        model = next(c for c in psutil.Process(process.pid).children() if c.cmdline()[-1] == "services.model")
        mark = Path(fake_mesh["TENSORLINE_MESH_DIRECTORY"], "model")
        mark.unlink()
        model.kill()
        deadline = time.monotonic() + 10
        while not mark.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    assert process.returncode == 0
    events = [json.loads(line) for line in log.splitlines() if '"service": "up"' in line]
    assert [(event["process"], event["level"]) for event in events] == [("model", "warning")]
    assert "signal SIGKILL" in events[0]["event"]
    assert "starts again in 0.5 s" in events[0]["event"]


def test_a_process_that_cannot_start_ends_it_all_with_its_own_words(fake_mesh: dict[str, str]) -> None:
    done = run_up({**fake_mesh, "FAKE_BROKEN": "model"}, *(f"--{name}-port=0" for name in ("grpc", "http", "metrics")))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tensorline: model ended with exit code 2 after")
    assert last.endswith("model: --arena-bytes='x': not a size"), "in the words of the command line"
    assert "Traceback" not in done.stderr
    assert not list(Path(fake_mesh["TENSORLINE_MESH_DIRECTORY"]).iterdir())


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--arena-bytes=x", "--arena-bytes='x': could not parse value and unit"),
        ("--discovery=nix://", "--discovery: discovery URL 'nix://' cannot be used"),
        ("--load-model=a", "--load-model='a': needs model_control_mode 'explicit'"),
        ("--model-control-mode=often", "--model-control-mode='often': Input should be 'none', 'poll' or 'explicit'"),
        ("--admin-token-file=/nowhere", "--admin-token-file /nowhere: there is no such file"),
    ],
)
def test_a_wrong_setting_is_told_once_and_nothing_starts(fake_mesh: dict[str, str], flag: str, told: str) -> None:
    done = run_up({**fake_mesh, "TENSORLINE_MODEL_REPOSITORY": "."}, flag)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith(f"tensorline: {told}")
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_a_model_that_never_is_ready_keeps_no_address_back(fake_mesh: dict[str, str]) -> None:
    with running_up({**fake_mesh, "FAKE_UNREADY": "1"}) as process:
        lines = read_until(process, "Ctrl-C")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 0
    assert re.search(r"serving after [\d.]+ s: classify", lines[-6])
    assert lines[-5] == "  NOT READY  broken: its file is cut short"
    assert re.search(r"gRPC +127\.0\.0\.1:\d+", lines[-4])


def test_with_exit_on_error_such_a_model_ends_it(fake_mesh: dict[str, str]) -> None:
    ports = [f"--{name}-port=0" for name in ("grpc", "http", "metrics")]
    done = run_up({**fake_mesh, "FAKE_UNREADY": "1"}, "--exit-on-error=true", *ports)
    assert done.returncode == 1
    told = "not every model could be loaded: broken (its file is cut short); --exit-on-error=false serves the others"
    assert done.stderr.splitlines()[-1] == f"tensorline: {told}"


def test_a_second_signal_kills(fake_mesh: dict[str, str]) -> None:
    with running_up({**fake_mesh, "FAKE_STUBBORN": "model"}) as process:
        read_until(process, "Ctrl-C")
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert any("model goes on" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
    assert process.returncode == 0
    assert not [child for child in children if psutil.pid_exists(child.pid)]


def test_without_exit_on_error_it_is_tried_again(fake_mesh: dict[str, str]) -> None:
    with running_up({**fake_mesh, "FAKE_BROKEN": "model"}, "--exit-on-error=false") as process:
        assert process.stderr is not None
        ends = 0
        for line in process.stderr:
            ends += "starts again" in line
            if ends == 2:
                break
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 0


def test_a_service_of_ones_own_is_started_besides(fake_mesh: dict[str, str], script: Callable[[str, str], str]) -> None:
    stage = script("stage", "import time; print('here I am', flush=True); time.sleep(60)")
    with running_up(fake_mesh, f"--service=embed={stage}", "--services=model,preprocess,postprocess") as process:
        assert process.stderr is not None
        assert any("here I am" in line for line in process.stderr)


@pytest.mark.parametrize("name", ["grpc", "http", "metrics"])
def test_a_taken_port_is_told_with_its_flag_and_nothing_starts(fake_mesh: dict[str, str], name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        flags = [f"--{other}-port={port if other == name else 0}" for other in ("grpc", "http", "metrics")]
        started = time.monotonic()
        done = run_up(fake_mesh, *flags)
    assert time.monotonic() - started < 8
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in done.stderr
    assert done.stderr.rstrip().endswith(f"--{name}-port")
    assert "gateway is told" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--grpc-prot=1"], "there is no flag --grpc-prot; did you mean --grpc-port?"),
        (["--strict-readines=true"], "there is no flag --strict-readines; did you mean --strict-readiness?"),
        (["--grpc-port=seven"], "Invalid value for '--grpc-port'"),
        (["--model-repository=/nowhere"], "--model-repository /nowhere: there is no such directory"),
        (["--services=modle"], "--services: there is no service 'modle'; did you mean model?"),
        (["--service=embed"], "--service embed: write NAME=python.module"),
        (["--service=embed=no.such.thing"], "there is no service 'no.such.thing'"),
        (["--exit-on-error=perhaps"], "--exit-on-error is true or false, not 'perhaps'"),
        (["--cache-config"], "--cache-config needs a value"),
        (["--listen=:1"], "--listen is a flag of `tensorline serve`, not of this command"),
        (["--trace-rate=1", "--trace-config=rate=1"], "--trace-rate and --trace-config say the same in two ways"),
        (["photo.jpg"], "Got unexpected extra argument(s) (photo.jpg)"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(fake_mesh: dict[str, str], flags: list[str], told: str) -> None:
    done = run_up(fake_mesh, *flags)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("TENSORLINE_ARENA_BYTE", "TENSORLINE_ARENA_BYTE is no setting; did you mean TENSORLINE_ARENA_BYTES?"),
        ("TENSORLINE_LISTEN", "TENSORLINE_LISTEN belongs to one process"),
    ],
)
def test_a_wrong_variable_is_refused(fake_mesh: dict[str, str], name: str, told: str) -> None:
    done = run_up({**fake_mesh, name: "1"})
    assert done.returncode == 2
    assert told in done.stderr


def test_on_a_terminal_lines_carry_their_process_in_colour(fake_mesh: dict[str, str]) -> None:
    master, slave = pty.openpty()
    flags = [f"--{name}-port=0" for name in ("grpc", "http", "metrics")]
    environment = {**fake_mesh, "TERM": "xterm-256color", "COLUMNS": "120"}
    process = subprocess.Popen([*COMMAND, "up", *flags], env=environment, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    try:
        while b"Ctrl-C" not in shown:
            shown += os.read(master, 4096)
        process.send_signal(signal.SIGINT)
        while chunk := _read(master):
            shown += chunk
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert re.search(rb"\x1b\[\d+mmodel *\x1b\[0m *model is ready", shown), shown
    assert b"waiting for" in shown


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # how Linux tells that the other end of a terminal is closed
        return b""
