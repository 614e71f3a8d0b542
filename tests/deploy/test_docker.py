import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tensorline.cli.health import own_target
from tests.deploy.dockerfile import Stage
from tests.deploy.images import DOCKERFILE, EXTRAS, MODULES, ROOT, STAGES, read_target_settings


@pytest.fixture(params=EXTRAS)
def target(request: pytest.FixtureRequest) -> Stage:
    return STAGES[request.param]


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_it_begins_from_any_base() -> None:
    assert DOCKERFILE.read_text().count("FROM ${BASE}") == 2
    assert not re.findall(r"^FROM (?!\$\{BASE\}|build|runtime)", DOCKERFILE.read_text(), re.MULTILINE)


def test_a_target_installs_its_own_extras_and_no_more(target: Stage) -> None:
    build = STAGES[f"build-{target.name}"]
    install = build.commands[-1].replace("${ENGINES}", build.arguments.get("ENGINES", ""))
    extras = re.search(r"\.\[([\w,]+)\]", install)
    assert extras is not None
    assert set(extras[1].split(",")) == EXTRAS[target.name]
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert EXTRAS[target.name] <= known.keys()
    assert {"--no-cache-dir", "constraints.txt"} <= set(install.split())
    assert target.copies == [[f"--from=build-{target.name}", "/opt/tensorline", "/opt/tensorline"]]


def test_a_target_runs_its_module_as_a_user_without_rights(target: Stage) -> None:
    assert target.single["USER"] == "10001:10001"
    assert target.exec_form("ENTRYPOINT") == ["python3", "-m", MODULES[target.name]]
    assert target.single["STOPSIGNAL"] == "SIGTERM"
    assert target.exec_form("HEALTHCHECK") == ["tensorline", "health"]


def test_the_environment_of_a_target_is_its_settings(target: Stage) -> None:
    settings = read_target_settings(target.name, target.environment)
    assert settings.mesh_directory == Path("/run/tensorline")
    assert settings.model_repository == [Path("/models")]
    assert own_target(target.environment) == ("http://127.0.0.1:8000" if target.name == "gateway" else "127.0.0.1:8101")


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignore = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split()
    assert "*" in ignore
    for words in STAGES["build"].copies:
        for source in words[:-1]:
            assert (ROOT / source).exists()
            assert f"!{source.removeprefix('./')}" in ignore
