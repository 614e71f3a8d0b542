"""KServe's own client, gRPC and REST, binary and typed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compat.kserve_packages import fetch_kserve
from tests.compat.server import Server

SCRIPT = Path(__file__).with_name("kserve_script.py")
ANSWER = {
    "id": "k1",
    "model": "simple",
    "outputs": {"SUM": [2 * value for value in range(16)], "DIFF": [0] * 16},
}


@pytest.fixture(scope="module")
def answers(server: Server) -> Any:
    done = subprocess.run(
        # -P: this folder's modules are not for that process.
        [sys.executable, "-P", "-W", "ignore", SCRIPT, server.grpc, server.http],
        env={**os.environ, "PYTHONPATH": str(fetch_kserve())},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("front", ["grpc", "rest"])
def test_infer(answers: Any, front: str) -> None:
    for form in ("raw", "typed"):
        assert answers[front][form] == ANSWER, form


def test_ready(answers: Any, server: Server) -> None:
    """The REST client wants JSON where Triton answers without a body."""
    found = {front: [answers[front][key] for key in ("live", "ready", "model")] for front in answers}
    rest = server.either(ours=[True, True, True], triton=[None, None, True])
    assert found == {"grpc": [True] * 3, "rest": rest}


def test_errors(answers: Any) -> None:
    assert answers["rest"]["unknown"] == 404
