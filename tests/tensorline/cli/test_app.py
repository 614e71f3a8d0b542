import subprocess
import sys
import time
from pathlib import Path

import pytest

from tensorline import __version__
from tensorline.cli.app import run

HEAVY = ("numpy", "grpc", "pydantic", "rich", "uvloop", "starlette", "opentelemetry")


def test_help_needs_none_of_the_heavy_packages() -> None:
    code = f"""
import sys
from tensorline.cli.app import run
run(["--help"])
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_answers_at_once() -> None:
    """0.15 s on an idle machine, of which Python takes 0.05; the best of several, so that a busy one passes too."""
    took = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "tensorline.cli", "--help"], check=True, capture_output=True)
        took.append(time.perf_counter() - started)
    assert min(took) < 0.6


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["udp"], "No such command 'udp'. Did you mean 'up'?"),
        (["models", "--utl", "x"], "No such option: --utl"),
        (["infer"], "Missing argument"),
        (["serve", "modl"], "there is no service 'modl': one of preprocess, model, postprocess"),
        (["serve", "/nowhere/stage.py"], "there is no file /nowhere/stage.py"),
        (["gateway", "--workers", "0"], "Invalid value for '--workers'"),
        (["serve", "model", "--model-repository", "/nowhere"], "/nowhere: there is no such directory"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "Commands:" in capsys.readouterr().out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"tensorline {__version__}\n"


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorline.cli import api

    def broken(*arguments: object, **more: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(api, "get_json", broken)
    with pytest.raises(ZeroDivisionError):
        run(["models"])


def serve(fake: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tensorline.cli", *arguments]
    return subprocess.run(command, env=fake, capture_output=True, text=True, timeout=20)


def test_serve_becomes_the_module_with_its_settings(fake_mesh: dict[str, str], tmp_path: Path) -> None:
    stage = tmp_path / "stage.py"
    stage.write_text(
        "import os\nprint(*(f'{name}={value}' for name, value in os.environ.items() if name.startswith('TENSORLINE_')))"
    )
    flags = ["--listen=127.0.0.1:0", "--max-in-flight=5", "--log-info=false", "--exit-timeout-secs=1.5"]
    done = serve({**fake_mesh, "TENSORLINE_MAX_QUEUE": "3"}, "serve", str(stage), *flags)
    assert done.returncode == 0, done.stderr
    told = done.stdout.split()
    assert {
        "TENSORLINE_LISTEN=127.0.0.1:0",
        "TENSORLINE_MAX_IN_FLIGHT=5",
        "TENSORLINE_MAX_QUEUE=3",
        "TENSORLINE_LOG_LEVEL=warning",
        "TENSORLINE_DRAIN_S=1.5",
    } <= set(told)
    assert not [setting for setting in told if "GRPC" in setting]


def test_serve_takes_a_module_of_ones_own(fake_mesh: dict[str, str], tmp_path: Path) -> None:
    package = Path(fake_mesh["PYTHONPATH"])
    (package / "teamstage.py").write_text("print(__name__, 'serves')")
    done = serve(fake_mesh, "serve", "teamstage")
    assert (done.stdout, done.returncode) == ("__main__ serves\n", 0)


def test_what_a_process_ends_with_is_the_commands_end(fake_mesh: dict[str, str]) -> None:
    done = serve({**fake_mesh, "FAKE_BROKEN": "model"}, "serve", "model")
    assert done.returncode == 2
    assert "not a size" in done.stderr
