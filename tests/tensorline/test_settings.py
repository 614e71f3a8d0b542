from pathlib import Path

import pytest

from gateway.settings import GatewaySettings
from tensorline.directories import default_mesh_directory
from tensorline.errors import ConfigError
from tensorline.settings import MeshSettings, StageSettings, read_settings


def test_nothing_set_gives_the_defaults() -> None:
    settings = read_settings(StageSettings, {"HOME": "/root"})
    assert settings.mesh_directory == default_mesh_directory()
    assert settings.discovery_url == f"file://{default_mesh_directory()}/registry"
    assert (settings.listen, settings.max_queue, settings.model_repository) == ("", 256, [])


def test_every_kind_of_value_is_read_from_the_given_environment() -> None:
    settings = read_settings(
        StageSettings,
        {
            "TENSORLINE_MESH_DIRECTORY": "/run/mesh",
            "TENSORLINE_MODEL_REPOSITORY": "/a:/b::",
            "TENSORLINE_ARENA_BYTES": "64MiB",
            "TENSORLINE_DRAIN_S": "1.5",
            "TENSORLINE_LOG_JSON": "true",
            "TENSORLINE_EXPOSE_MODEL_ERRORS": "1",
            "TENSORLINE_MAX_IN_FLIGHT": "7",
        },
    )
    assert settings.mesh_directory == Path("/run/mesh")
    assert settings.model_repository == [Path("/a"), Path("/b")]
    assert (settings.arena_bytes, settings.drain_s, settings.max_in_flight) == (64 << 20, 1.5, 7)
    assert settings.is_logging_json
    assert settings.expose_model_errors


def test_the_given_environment_alone_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLINE_MAX_QUEUE", "3")
    assert read_settings(StageSettings, {}).max_queue == 256


@pytest.mark.parametrize("kind", [MeshSettings, StageSettings, GatewaySettings])
def test_a_misspelt_variable_is_refused_with_the_nearest_name(kind: type[MeshSettings]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(kind, {"TENSORLINE_ARENA_BYTE": "1"})
    wanted = "TENSORLINE_ARENA_BYTE is no setting of this process; did you mean TENSORLINE_ARENA_BYTES?"
    assert str(caught.value) == wanted


def test_a_variable_that_is_like_no_other_is_refused_without_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"^TENSORLINE_QQQQ is no setting of this process$"):
        read_settings(StageSettings, {"TENSORLINE_QQQQ": "1"})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ARENA_BYTES", "many", "TENSORLINE_ARENA_BYTES='many': could not parse value"),
        ("ARENA_BYTES", "", "TENSORLINE_ARENA_BYTES=''"),
        ("ARENA_BYTES", "-5", "TENSORLINE_ARENA_BYTES='-5'"),
        ("ARENA_BYTES", "0", "TENSORLINE_ARENA_BYTES='0'"),
        ("MAX_QUEUE", "0", "TENSORLINE_MAX_QUEUE='0': Input should be greater than 0"),
        ("DRAIN_S", "-1", "TENSORLINE_DRAIN_S='-1': Input should be greater than or equal to 0"),
        ("DRAIN_S", "nan", "TENSORLINE_DRAIN_S='nan'"),
        ("DRAIN_S", "inf", "TENSORLINE_DRAIN_S='inf'"),
        ("LOG_LEVEL", "loud", "TENSORLINE_LOG_LEVEL='loud'"),
        ("LOG_JSON", "perhaps", "TENSORLINE_LOG_JSON='perhaps'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_name(name: str, value: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(StageSettings, {f"TENSORLINE_{name}": value})
    assert str(caught.value).startswith(reason)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("level", ["debug", "INFO", "Warning", "error"])
def test_a_log_level_may_be_written_in_any_case(level: str) -> None:
    assert read_settings(StageSettings, {"TENSORLINE_LOG_LEVEL": level}).log_level.lower() == level.lower()


def test_settings_do_not_change() -> None:
    settings = read_settings(StageSettings, {})
    with pytest.raises(ValueError, match="frozen"):
        settings.max_queue = 1
