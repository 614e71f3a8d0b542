from pathlib import Path

import pytest
import typer.main

from gateway.settings import GatewaySettings
from tensorline.cli.app import app
from tensorline.cli.environment import GATEWAY_FIELDS, STAGE_FIELDS, check_environment, environment_of
from tensorline.cli.failure import UsageError
from tensorline.cli.flags import COMMAND_FIELDS, FLAGS, in_flags, log_level, repositories
from tensorline.cli.mesh import SERVICES, plan_mesh
from tensorline.cli.triton import TRACE_FLAGS, TRITON_FLAGS, is_true, sort_out, with_trace_config
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
            given = options.get(FLAGS[field].name)
            assert given is None or given == defaults[field], f"{command} {FLAGS[field].name}"


def test_no_flag_is_ours_and_without_meaning_at_once() -> None:
    assert not options_of("up").keys() & TRITON_FLAGS.keys()


def test_what_up_plans_is_read_by_each_process() -> None:
    values = {
        **{f"{name}_address": "127.0.0.1" for name in ("grpc", "http", "metrics")},
        **{f"{name}_port": "0" for name in ("grpc", "http", "metrics")},
        "drain_s": "3.5",
        "mesh_directory": "/run/mesh",
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
    quiet = {"GRPC_VERBOSITY": "NONE"}
    assert environment_of(STAGE_FIELDS, {}, base, keep_unknown=True) == base | quiet
    assert environment_of(STAGE_FIELDS, {}, base) == {"HOME": "/root"} | quiet
    assert environment_of(STAGE_FIELDS, {}, {"GRPC_VERBOSITY": "debug"}) == {"GRPC_VERBOSITY": "debug"}


def test_the_environment_of_a_mesh_is_checked() -> None:
    check_environment({"TENSORLINE_GRPC_PORT": "1", "TENSORLINE_MAX_QUEUE": "1", "HOME": "/root"})
    with pytest.raises(UsageError, match="TENSORLINE_MAX_QUEU is no setting; did you mean TENSORLINE_MAX_QUEUE"):
        check_environment({"TENSORLINE_MAX_QUEU": "1"})


@pytest.mark.parametrize(
    ("arguments", "warnings"),
    [
        (["--allow-http=true", "--allow-metrics", "1", "--rate-limit=off"], []),
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
            ["--host-policy=a", "--host-policy", "b"],
            ["--host-policy=a, --host-policy=b has no effect here"],
        ),
        (
            ["--backend-config=python,x=1"],
            ["--backend-config=python,x=1 has no effect here; set it in the model's config.pbtxt"],
        ),
    ],
)
def test_flags_of_triton_are_taken(arguments: list[str], warnings: list[str]) -> None:
    assert sort_out(["--own", "x", *arguments], {"--own": True}) == (["--own", "x"], warnings)


@pytest.mark.parametrize("flag", TRITON_FLAGS)
def test_each_flag_of_triton_is_taken_by_the_command_line(flag: str) -> None:
    value = "false" if TRITON_FLAGS[flag].is_needed else "1"
    arguments = [f"{flag}={value}"] if TRITON_FLAGS[flag].takes_value else [flag]
    assert sort_out(arguments, {})[0] == []


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


TRITON_ALL = """
model-repository model-control-mode load-model repository-poll-secs model-config-name
disable-auto-complete-config strict-readiness exit-on-error exit-timeout-secs model-load-thread-count
model-load-retry-count model-namespacing id allow-http allow-grpc allow-metrics http-port grpc-port
metrics-port http-address grpc-address metrics-address http-thread-count http-max-input-size
http-header-forward-pattern grpc-header-forward-pattern http-restricted-api grpc-restricted-protocol
grpc-use-ssl grpc-use-ssl-mutual grpc-server-cert grpc-server-key grpc-root-cert
grpc-infer-response-compression-level grpc-keepalive-time grpc-max-connection-age
grpc-max-connection-age-grace log-verbose log-info log-warning log-error log-format log-file trace-config
metrics-config metrics-interval-ms allow-gpu-metrics allow-cpu-metrics cache-config rate-limit
rate-limit-resource backend-config pinned-memory-pool-byte-size cuda-memory-pool-byte-size allow-client-shm
host-policy
""".split()  # noqa: SIM905 - one a line would be three screens
"""Source: model-config.md §15."""


@pytest.mark.parametrize("name", TRITON_ALL)
def test_every_flag_of_a_start_script_is_known(name: str) -> None:
    assert f"--{name}" in {*options_of("up"), *TRITON_FLAGS}


def test_a_command_has_the_flags_of_its_settings() -> None:
    for command, fields in COMMAND_FIELDS.items():
        options = options_of(command)
        assert {flag.name for field, flag in FLAGS.items() if field in fields} <= options.keys()
    assert not {"--grpc-port", "--id"} & options_of("serve").keys()
    assert not {"--listen", "--max-in-flight"} & options_of("up").keys()


@pytest.mark.parametrize(
    ("field", "given", "text"),
    [
        ("load_model", ["a", "b"], "a,b"),
        ("load_model", [], None),
        ("trace_config", ["level=OFF", "rate=3"], "level=OFF;rate=3"),
        ("strict_readiness", "off", "false"),
        ("strict_readiness", None, None),
        ("grpc_port", 0, "0"),
        ("mesh_directory", Path("mesh"), str(Path.cwd() / "mesh")),
    ],
)
def test_what_is_given_becomes_the_settings_text(field: str, given: object, text: str | None) -> None:
    assert FLAGS[field].value(given) == text


def test_triton_own_words_between_ours() -> None:
    own, warnings = sort_out(["model", "--cache-config", "local,size=1", "--own=1", "--", "--x"], {"--own": True})
    assert own == ["model", "--own=1", "--", "--x"]
    assert warnings == ["--cache-config=local,size=1 has no effect here"]


@pytest.mark.parametrize("flag", ["--grpc-use-ssl", "--grpc-use-ssl-mutual"])
def test_encryption_that_is_asked_for_is_not_passed_over(flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag}=true cannot be had; there is no TLS yet"):
        sort_out([flag, "true"], {})


def test_a_flag_of_another_command_is_told_as_such() -> None:
    with pytest.raises(UsageError, match="--grpc-port is a flag of `tensorline gateway`, not of this command"):
        sort_out(["--grpc-port=1"], {}, {"--grpc-port": "gateway"})


def test_older_trace_flags_are_taken_as_the_newer_one() -> None:
    arguments = ["--trace-level=TIMESTAMPS", "--trace-rate", "10", "--own"]
    assert with_trace_config(arguments) == ["--trace-config", "level=TIMESTAMPS", "--trace-config", "rate=10", "--own"]
    for flag in TRACE_FLAGS:
        with pytest.raises(UsageError, match="needs a value"):
            with_trace_config([flag])


@pytest.mark.parametrize(
    ("given", "told"),
    [("/nowhere", "there is no such directory"), ("s3://bucket", "only directories of this machine")],
)
def test_a_repository_that_cannot_be_is_told_with_its_source(given: str, told: str) -> None:
    with pytest.raises(UsageError, match=f"--model-repository {given}: {told}"):
        repositories([given], {})
    if "//" not in given:
        with pytest.raises(UsageError, match=f"TENSORLINE_MODEL_REPOSITORY {given}: {told}"):
            repositories(None, {"TENSORLINE_MODEL_REPOSITORY": given})
