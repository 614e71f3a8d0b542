"""`make demo`, after its virtual environment is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.mesh import ROOT

pytestmark = pytest.mark.slow


def test_a_photo_in_labels_out_and_nothing_left(photos: list[Path]) -> None:
    coffee = next(photo for photo in photos if photo.name == "coffee.png")
    ran = subprocess.run(
        [sys.executable, "-m", "examples.demo", coffee], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    told = ran.stdout
    assert (ran.returncode, ran.stderr) == (0, ""), told
    assert "espresso" in told
    for part in (
        "ModelInfer classify",
        "photo_decode",
        "efficientnet_lite0",
        "imagenet_labels",
        "queue",
        "compute_infer",
    ):
        assert re.search(rf"^ *{part} ", told, re.MULTILINE), told
    assert re.search(
        r"gRPC 127\.0\.0\.1:\d+  HTTP http://127\.0\.0\.1:\d+  metrics http://127\.0\.0\.1:\d+/metrics", told
    )
    assert "make up" in told
    assert "Nothing is left: no process, no open port, no socket, no shared-memory file." in told
