"""The commands that ask a mesh, against small servers that answer as a gateway does."""

import json
from pathlib import Path

import pytest

from tensorline.cli.app import run
from tensorline.cli.ports import free_port
from tests.tensorline.cli.standins import MODELS, TRACE, Api, Inference

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["infer", "measure"], 2, "nothing to send: give a FILE, --input NAME=VALUE, --data JSON or --random"),
        (["infer", "nope", "--input", "a=1"], 1, "NOT_FOUND: Request for unknown model: 'nope' is not found"),
        (["infer", "measure", "--input", "date=1"], 2, "--input date: the model takes data"),
        (["infer", "measure", "/nowhere.jpg"], 2, "/nowhere.jpg: No such file or directory"),
        (["infer", "measure", "--timeout", "x"], 2, "Invalid value for '--timeout'"),
    ],
)
def test_a_failing_request_is_one_sentence(
    inference: tuple[str, Inference], arguments: list[str], code: int, told: str, capsys: Capture
) -> None:
    assert run([*arguments, "--url", inference[0]]) == code
    assert_one_sentence(capsys, told)


def test_nobody_there_is_one_sentence(capsys: Capture) -> None:
    port = free_port()
    assert run(["infer", "m", "--input", "a=1", "--url", f"127.0.0.1:{port}"]) == 1
    assert_one_sentence(capsys, f"no gateway answers at 127.0.0.1:{port}; is the mesh up?")
    assert run(["models", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert_one_sentence(capsys, f"no gateway answers at http://127.0.0.1:{port} (Connection refused); is the mesh up?")
    assert run(["models", "--url", "ftp://x"]) == 2
    assert_one_sentence(capsys, "--url 'ftp://x' is no HTTP address: http://HOST:PORT is wanted")


def test_the_other_protocols_port_is_told_as_such(
    inference: tuple[str, Inference], api: Api, capfd: pytest.CaptureFixture[str]
) -> None:
    http = api.url.removeprefix("http://")
    for arguments, told in [
        (["infer", "m", "--input", "a=1", "--url", http], f"what answers at {http} does not speak gRPC"),
        (["health", http], f"what answers at {http} does not speak gRPC"),
        (["models", "--url", inference[0]], f"what answers at {inference[0]} does not speak HTTP"),
        (["health", f"http://{inference[0]}"], "does not speak HTTP"),
    ]:
        assert run(arguments) == 1
        err = capfd.readouterr().err
        assert told in err
        assert len(err.splitlines()) == 1, "and no line of gRPC's own"


@pytest.mark.parametrize("url", ["", "localhost", "http://localhost:8000", "a:b:c", "localhost:99999", "no such:1"])
def test_an_address_that_cannot_be_is_told_with_its_flag(url: str, capsys: Capture) -> None:
    assert run(["stats", "--url", url]) == 2
    assert_one_sentence(capsys, f"--url {url!r} is no gRPC address: HOST:PORT is wanted")


def test_models_and_instances_are_listed(api: Api, capsys: Capture) -> None:
    assert run(["models", "--url", api.url]) == 0
    out = capsys.readouterr().out
    assert "a → b" in out
    assert "1 instance" in out
    assert "no instance serves it" in out
    assert run(["instances", "--url", api.url]) == 0
    out = capsys.readouterr().out
    assert "model-1" in out
    assert "8.0" in out
    assert "a/1" in out
    assert "b/1" not in out
    assert run(["models", "--url", api.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == MODELS


def test_traces_are_shown(api: Api, capsys: Capture) -> None:
    assert run(["trace", "slowest", "--model", "classify", "--url", api.url]) == 0
    assert "ModelInfer classify" in capsys.readouterr().out
    assert run(["trace", "list", "--limit", "5", "--url", api.url]) == 0
    assert "ab" * 16 in capsys.readouterr().out
    assert api.asked == [
        ("/api/traces", {"which": ["slowest"], "model": ["classify"]}),
        ("/api/traces", {"which": ["list"], "limit": ["5"]}),
    ]
    assert run(["trace", "--url", api.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [TRACE]
    api.answers["/api/traces"] = None
    assert run(["trace", "last", "--url", api.url]) == 1
    assert_one_sentence(capsys, "no such trace is kept")
    assert run(["trace", "abcdef", "--url", api.url]) == 2
    assert_one_sentence(capsys, "'abcdef' is no trace: last, slowest, list or a trace id of 32 hex digits is wanted")


def test_the_operators_token_is_sent(api: Api, tmp_path: Path, capsys: Capture) -> None:
    api.token = "secret"
    assert run(["models", "--url", api.url]) == 1
    assert_one_sentence(capsys, "to its operators alone: --token-file FILE names their token")
    (tmp_path / "wrong").write_text("guess")
    assert run(["models", "--url", api.url, "--token-file", f"{tmp_path}/wrong"]) == 1
    assert_one_sentence(capsys, "refuses the operators' token of --token-file")
    (tmp_path / "token").write_text("secret\n")
    assert run(["models", "--url", api.url, "--token-file", f"{tmp_path}/token"]) == 0
    capsys.readouterr()
    assert run(["models", "--url", api.url, "--token-file", f"{tmp_path}/nothing"]) == 1
    assert_one_sentence(capsys, "nothing: No such file or directory")


def test_a_stranger_on_the_port_is_told_as_such(api: Api, capsys: Capture) -> None:
    api.answers["/api/models"] = b"<html>"
    assert run(["models", "--url", api.url]) == 1
    assert_one_sentence(capsys, "answered with status 200 and no JSON: is it a Tensorline gateway?")


def test_health_of_gateways_and_services(inference: tuple[str, Inference], api: Api, capsys: Capture) -> None:
    assert run(["health", inference[0]]) == 0
    assert run(["health", inference[0], "--model", "asleep"]) == 1
    assert_one_sentence(capsys, f"model 'asleep' at {inference[0]} is NOT_SERVING")
    assert run(["health", inference[0], "--model", "nix"]) == 1
    assert_one_sentence(capsys, f"{inference[0]} knows of no model 'nix'")
    assert run(["health", api.url]) == 0
    api.answers["/v2/health/ready"] = 400
    assert run(["health", api.url]) == 1
    assert_one_sentence(capsys, f"{api.url} is not ready")
    api.answers["/v2/models/a/ready"] = ""
    assert run(["health", api.url, "--model", "a"]) == 0
    assert run(["health", api.url, "--model", "c"]) == 1
    assert_one_sentence(capsys, f"model 'c' at {api.url} is not ready")
    assert run(["health", f"127.0.0.1:{free_port()}", "--timeout", "1"]) == 1
    assert_one_sentence(capsys, "no gateway answers at")


def test_health_of_the_process_that_the_environment_describes(
    inference: tuple[str, Inference], api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORLINE_HTTP_PORT", api.url.rpartition(":")[2])
    monkeypatch.setenv("TENSORLINE_HTTP_ADDRESS", "0.0.0.0")
    assert run(["health"]) == 0
    monkeypatch.setenv("TENSORLINE_LISTEN", f"0.0.0.0:{inference[0].rpartition(':')[2]}")
    assert run(["health"]) == 0
    assert len(api.asked) == 1


def assert_one_sentence(capsys: Capture, told: str) -> None:
    err = capsys.readouterr().err
    assert told in err
    assert err.startswith("tensorline: ")
    assert len(err.splitlines()) == 1
