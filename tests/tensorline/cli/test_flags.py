from pathlib import Path

import pytest
import typer.main

from gateway.settings import GatewaySettings
from tensorline.cli.app import app
from tensorline.cli.environment import GATEWAY_FIELDS, STAGE_FIELDS, check_environment, environment_of
from tensorline.cli.failure import UsageError
from tensorline.cli.flags import FLAGS, in_flags, log_level, repositories
from tensorline.cli.mesh import SERVICES, plan_mesh
from tensorline.cli.triton import TRITON_FLAGS, is_true, sort_out
from tensorline.settings import MeshSettings, StageSettings, read_settings


def options_of(command: str) -> dict[str, object]:
    """Default of each flag of a command."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {name: option.default for option in commands[command].params for name in option.opts}


@pytest.mark.parametrize(("fields", "settings"), [(STAGE_FIELDS, StageSettings), (GATEWAY_FIELDS, GatewaySettings)])
def test_the_fields_are_those_of_the_settings(fields: frozenset[str], settings: type[MeshSettings]) -> None:
    assert fields == set(settings.model_fields)


def test_every_flag_is_a_setting() -> None:
    assert set(FLAGS) <= STAGE_FIELDS | GATEWAY_FIELDS


def test_defaults_that_stand_twice_are_the_same() -> None:
    defaults = {name: field.default for name, field in GatewaySettings.model_fields.items()}
    for command in ("up", "gateway"):
        options = options_of(command)
        for field in FLAGS.keys() & defaults.keys():
            given = options.get(FLAGS[field])
            assert given is None or given == defaults[field], f"{command} {FLAGS[field]}"


def test_no_flag_is_ours_and_without_meaning_at_once() -> None:
    assert not options_of("up").keys() & TRITON_FLAGS.keys()


def test_what_up_plans_is_read_by_each_process() -> None:
    values = {
        **{f"{name}_address": "127.0.0.1" for name in ("grpc", "http", "metrics")},
        **{f"{name}_port": "0" for name in ("grpc", "http", "metrics")},
        "drain_s": "3.5",
        "workers": "2",
        "load_threads": "5",
    }
    plan = plan_mesh(values, SERVICES, {"PATH": "/bin", "TENSORLINE_MAX_QUEUE": "9", "TENSORLINE_MAX_IN_FLIGHT": "8"})
    gateway, *stages = plan.programs
    assert [program.name for program in plan.programs] == ["gateway", "preprocess", "model", "postprocess"]
    assert (gateway.tier, {stage.tier for stage in stages}) == (0, {1})
    told = dict(gateway.environment)
    assert told["TENSORLINE_GRPC_PORT"] == str(plan.grpc.port) != "0"
    assert told.keys() & {"TENSORLINE_MAX_QUEUE", "TENSORLINE_LOAD_THREADS"} == set()
    assert (told["PATH"], told["TENSORLINE_MAX_IN_FLIGHT"], told["TENSORLINE_WORKERS"]) == ("/bin", "8", "2")
    told = dict(stages[0].environment)
    assert told["TENSORLINE_MAX_QUEUE"] == "9"
    assert told["TENSORLINE_LOAD_THREADS"] == "5"
    assert "TENSORLINE_GRPC_PORT" not in told


def test_settings_read_what_up_writes() -> None:
    values = {"drain_s": "3.5", "expose_model_errors": "true", "model_repository": "/a:/b", "arena_bytes": "64MiB"}
    settings = read_settings(StageSettings, environment_of(STAGE_FIELDS, values, {}))
    assert settings.model_repository == [Path("/a"), Path("/b")]
    assert (settings.drain_s, settings.expose_model_errors, settings.arena_bytes) == (3.5, True, 64 << 20)


def test_what_serve_starts_refuses_a_misspelt_variable_itself() -> None:
    base = {"TENSORLINE_LISTN": "x", "HOME": "/root"}
    assert environment_of(STAGE_FIELDS, {}, base, keep_unknown=True) == base
    assert environment_of(STAGE_FIELDS, {}, base) == {"HOME": "/root"}


def test_the_environment_of_a_mesh_is_checked() -> None:
    check_environment({"TENSORLINE_GRPC_PORT": "1", "TENSORLINE_MAX_QUEUE": "1", "HOME": "/root"})
    with pytest.raises(UsageError, match="TENSORLINE_MAX_QUEU is no setting; did you mean TENSORLINE_MAX_QUEUE"):
        check_environment({"TENSORLINE_MAX_QUEU": "1"})


@pytest.mark.parametrize(
    ("arguments", "warnings"),
    [
        (["--allow-http=true", "--allow-metrics", "1", "--model-control-mode=none"], []),
        (["--allow-http", "false"], ["--allow-http=false has no effect here"]),
        (["--disable-auto-complete-config"], ["--disable-auto-complete-config has no effect here"]),
        (
            ["--http-thread-count=8", "--log-file", "x.log"],
            [
                "--http-thread-count=8 has no effect here; --workers",
                "--log-file=x.log has no effect here; redirect stderr",
            ],
        ),
        (
            ["--load-model=a", "--load-model=b"],
            ["--load-model=a has no effect here", "--load-model=b has no effect here"],
        ),
        (
            ["--backend-config=python,x=1"],
            ["--backend-config=python,x=1 has no effect here; set it in the model's config.pbtxt"],
        ),
    ],
)
def test_flags_of_triton_are_taken(arguments: list[str], warnings: list[str]) -> None:
    assert sort_out(arguments, []) == warnings


@pytest.mark.parametrize("flag", TRITON_FLAGS)
def test_each_flag_of_triton_is_taken_by_the_command_line(flag: str) -> None:
    arguments = [f"{flag}=1"] if TRITON_FLAGS[flag].takes_value else [flag]
    sort_out(arguments, [])


@pytest.mark.parametrize(
    ("value", "is_on"), [("true", True), ("ON", True), ("1", True), ("False", False), ("off", False), ("0", False)]
)
def test_switches_have_values_as_in_triton(value: str, is_on: bool) -> None:
    assert is_true("--x", value) is is_on


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ((0, "true", "true", "true"), None),
        ((1, "false", "false", "false"), "debug"),
        ((0, "false", "true", "true"), "warning"),
        ((0, "off", "off", "on"), "error"),
    ],
)
def test_four_flags_make_one_level(flags: tuple[int, str, str, str], level: str | None) -> None:
    assert log_level(*flags) == level


def test_repositories_come_from_flags_or_else_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c:d"):
        (tmp_path / name).mkdir()
    environ = {"TENSORLINE_MODEL_REPOSITORY": f"{tmp_path}/b"}
    assert repositories(["a", "b"], environ) == f"{tmp_path}/a:{tmp_path}/b"
    assert repositories(None, environ) == f"{tmp_path}/b"
    assert repositories(None, {}) is None
    with pytest.raises(UsageError, match="colon"):
        repositories(["c:d"], {})


def test_a_processs_words_become_those_of_the_command_line() -> None:
    assert in_flags("TENSORLINE_MODEL_REPOSITORY and TENSORLINE_GRPC_PORT=1") == "--model-repository and --grpc-port=1"
