"""The demo's own decisions; that it runs as a whole is an end-to-end test."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from examples import demo
from tensorline.cli.lines import KeptOutput
from tensorline.cli.mesh import Plan
from tensorline.cli.ports import check_free


def test_two_demos_at_once_have_nothing_in_common(tmp_path: Path) -> None:
    first, second = demo.plan_demo(tmp_path / "a"), demo.plan_demo(tmp_path / "b")
    ports = {listener.port for plan in (first, second) for listener in plan.listeners}
    assert not ports & {8000, 8001, 8002}
    assert first.directory != second.directory


async def test_a_port_that_is_lost_to_another_program_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = []

    async def run(plan: Plan, *arguments: object) -> list[str]:
        plans.append(plan)
        if len(plans) == 1:
            with socket.create_server(("127.0.0.1", plan.http.port)):
                check_free(plan.listeners)
        return []

    monkeypatch.setattr(demo, "_run", run)
    monkeypatch.setattr(demo, "_is_free", lambda listener: len(plans) > 1)
    await demo._demo("photo", b"", KeptOutput())
    assert len({plan.directory for plan in plans}) == 2
    assert not [plan.directory for plan in plans if plan.directory.exists()]
    assert "once more" in capsys.readouterr().out


def test_the_demo_is_not_led_astray_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLINE_MODEL_REPOSITORY", "/elsewhere")
    monkeypatch.setenv("TENSORLINE_LISTN", "misspelt")
    for program in demo.plan_demo(tmp_path).programs:
        assert program.environment["TENSORLINE_MODEL_REPOSITORY"].endswith("examples/models")
        assert "TENSORLINE_LISTN" not in program.environment


def test_whatever_is_left_is_found(tmp_path: Path) -> None:
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
