import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tensorline.discovery import ConsulUrl, parse_discovery_url
from tensorline.telemetry.settings import telemetry_settings
from tests.deploy.images import EXTRAS, ROOT, STAGES, read_target_settings

COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
PROCESSES = list(EXTRAS)
KNOWN_OTEL = {"OTEL_EXPORTER_OTLP_ENDPOINT"}


def render(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    compose = Path(sys.executable).with_name("docker-compose")
    command = [str(compose), "-f", str(COMPOSE), "config", *arguments]
    plain = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environment}
    return subprocess.run(command, env=plain, capture_output=True, text=True)


@pytest.fixture(scope="module")
def rendered() -> dict[str, Any]:
    done = render("--format", "json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def environment_in(rendered: dict[str, Any], name: str) -> dict[str, str]:
    """What a process is given: the image's environment and over it the file's."""
    return {**STAGES[name].environment, **rendered["services"][name]["environment"]}


def test_it_renders_without_a_word() -> None:
    done = render("-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_unknown_key_would_be_found(tmp_path: Path) -> None:
    """The check above checks something."""
    broken = tmp_path / "compose.yaml"
    broken.write_text(COMPOSE.read_text().replace("cap_drop:", "cap_dropp:"))
    compose = Path(sys.executable).with_name("docker-compose")
    assert subprocess.run([compose, "-f", broken, "config", "-q"], capture_output=True).returncode != 0


def test_the_parts_are_there(rendered: dict[str, Any]) -> None:
    assert set(rendered["services"]) == {*PROCESSES, "consul", "collector", "jaeger"}
    for name in PROCESSES:
        assert rendered["services"][name]["build"]["target"] == name
        assert Path(rendered["services"][name]["build"]["context"]) == ROOT


def test_every_container_is_hardened(rendered: dict[str, Any]) -> None:
    for name, service in rendered["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        assert int(service["mem_limit"]) > 0, name
        assert service["stop_grace_period"] == "30s", name


def test_ports_are_published_on_loopback_alone(rendered: dict[str, Any]) -> None:
    ports = {port["published"]: port for service in rendered["services"].values() for port in service.get("ports", [])}
    assert set(ports) == {"8000", "8001", "8002", "8500", "16686"}
    assert {port["host_ip"] for port in ports.values()} == {"127.0.0.1"}


@pytest.mark.parametrize("name", PROCESSES)
def test_what_a_process_is_told_are_its_settings(rendered: dict[str, Any], name: str) -> None:
    environment = environment_in(rendered, name)
    settings = read_target_settings(name, environment)
    assert parse_discovery_url(settings.discovery_url) == ConsulUrl("consul", 8500)
    ours = {variable for variable in environment if variable.startswith("TENSORLINE_")}
    assert environment.keys() - ours - KNOWN_OTEL <= {
        "PATH",
        "PYTHONUNBUFFERED",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONSAFEPATH",
    }
    assert telemetry_settings(environment).target == "collector:4317"
    assert settings.drain_s + 5 < 30, "it has ended by itself before it is killed"
    if name != "gateway":
        assert environment["TENSORLINE_ADVERTISE"] == f"{name}:{environment['TENSORLINE_LISTEN'].rpartition(':')[2]}"


def test_all_processes_share_one_directory_that_their_user_owns(rendered: dict[str, Any]) -> None:
    options = dict(word.partition("=")[::2] for word in rendered["volumes"]["mesh"]["driver_opts"]["o"].split(","))
    assert rendered["volumes"]["mesh"]["driver_opts"]["type"] == "tmpfs"
    assert options["mode"] == "0700"
    arenas = 0
    for name in PROCESSES:
        service = rendered["services"][name]
        settings = read_target_settings(name, environment_in(rendered, name))
        shared = {volume["source"]: volume["target"] for volume in service["volumes"] if volume["type"] == "volume"}
        assert shared == {"mesh": str(settings.mesh_directory)}
        assert "user" not in service, "the image's user is the same in all"
        assert STAGES[name].single["USER"] == f"{options['uid']}:{options['gid']}"
        assert int(service["mem_limit"]) > settings.arena_bytes
        arenas += settings.arena_bytes
    assert int(options["size"].removesuffix("m")) << 20 >= arenas
    assert len(f"{settings.mesh_directory}/sockets/postprocess-{'0' * 12}-lane.sock") < 100


def test_files_that_are_mounted_exist(rendered: dict[str, Any]) -> None:
    for service in rendered["services"].values():
        for volume in service.get("volumes", []):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists()
                assert volume["read_only"] is True


def test_what_can_be_chosen_is_passed_on() -> None:
    done = render("--format", "json", GRPC_PORT="9001", ENGINES="onnx,torch", MODEL_REPOSITORY="/srv/models")
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    assert "9001" in [port["published"] for port in services["gateway"]["ports"]]
    assert services["model"]["build"]["args"] == {"ENGINES": "onnx,torch"}
    assert "/srv/models" in [volume["source"] for volume in services["model"]["volumes"]]


def test_every_yaml_file_parses() -> None:
    files = [*(ROOT / "deploy").rglob("*.yaml"), *(ROOT / "deploy").rglob("*.yml")]
    assert len(files) >= 2
    for file in files:
        assert isinstance(yaml.safe_load(file.read_text()), dict), file
