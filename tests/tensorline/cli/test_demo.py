"""The demo's own decisions; that it runs as a whole is an end-to-end test."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from examples import demo
from tensorline.cli.ports import free_port


def test_a_taken_port_is_told_and_another_one_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken, http, metrics = holder.getsockname()[1], free_port(), free_port()
        monkeypatch.setattr(demo, "PORTS", {"grpc": taken, "http": http, "metrics": metrics})
        plan = demo.plan_demo(tmp_path)
    assert (plan.http.port, plan.metrics.port) == (http, metrics)
    assert plan.grpc.port not in (taken, http, metrics)
    assert f"Port {taken} is taken: gRPC is on {plan.grpc.port} this time." in capsys.readouterr().out


def test_the_demo_is_not_led_astray_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLINE_MODEL_REPOSITORY", "/elsewhere")
    monkeypatch.setenv("TENSORLINE_LISTN", "misspelt")
    for program in demo.plan_demo(tmp_path).programs:
        assert program.environment["TENSORLINE_MODEL_REPOSITORY"].endswith("examples/models")
        assert "TENSORLINE_LISTN" not in program.environment


def test_whatever_is_left_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PORTS", {name: free_port() for name in demo.PORTS})
    plan = demo.plan_demo(tmp_path)
    (tmp_path / "nonce").write_bytes(b"x" * 16)
    (tmp_path / "sockets").mkdir()
    assert demo.leftovers(plan, tmp_path) == []
    (tmp_path / "sockets" / "model.lock").touch()
    environment = {**os.environ, "TENSORLINE_MESH_DIRECTORY": str(tmp_path)}
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as process,
        socket.create_server(("127.0.0.1", plan.http.port)),
    ):
        left = demo.leftovers(plan, tmp_path)
    assert [words.split()[0] for words in left] == ["process", "port", "file"]
    assert str(process.pid) in left[0]
