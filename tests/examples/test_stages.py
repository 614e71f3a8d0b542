"""The stages as processes: each loads its entries of a repository, and ends when told to."""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.prepare import EXAMPLES
from tensorline.config.load import load_config
from tensorline.stage.backend import ModelDirectory
from tests.services.heap_batch import CPU, HeapBatch, bytes_array

SHOUT = EXAMPLES / "stages" / "shout.py"
SHOUT_MODELS = EXAMPLES / "stages" / "models"


@pytest.fixture
def mesh() -> Iterator[str]:
    """A short path: pytest's own is too long for the name of a Unix socket in it."""
    with tempfile.TemporaryDirectory(prefix="tl-") as folder:
        yield f"{folder}/mesh"


@pytest.mark.parametrize(
    ("command", "models", "ready"),
    [
        (["-m", "services.preprocess"], EXAMPLES / "models", "photo_decode/1 READY"),
        (["-m", "services.model"], EXAMPLES / "models", "efficientnet_lite0/1 READY"),
        (["-m", "services.postprocess"], EXAMPLES / "models", "imagenet_labels/1 READY"),
        ([str(SHOUT)], SHOUT_MODELS, "shout/1 READY"),
    ],
    ids=["preprocess", "model", "postprocess", "shout"],
)
def test_a_stage_loads_its_models_and_ends_cleanly(
    photos: list[Path], mesh: str, command: list[str], models: Path, ready: str
) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TENSORLINE_")},
        "TENSORLINE_MESH_DIRECTORY": mesh,
        "TENSORLINE_MODEL_REPOSITORY": str(models),
        "TENSORLINE_LOG_JSON": "true",
    }
    process = subprocess.Popen([sys.executable, *command], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = next((line for line in process.stderr if "stage is ready" in line or '"error"' in line), "it ended")
        assert ready in said
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_the_example_stage_shouts() -> None:
    spec = importlib.util.spec_from_file_location("shout", SHOUT)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = SHOUT_MODELS / "shout"
    stage = module.Shout(ModelDirectory(load_config(folder), 1, folder, folder / "1"), CPU)
    batch = HeapBatch({"text": bytes_array(b"hello", b"mesh")}, 2)
    assert stage.execute(batch)["loud"].tolist() == [[b"HELLO!"], [b"MESH!"]]


def test_it_is_ten_lines() -> None:
    text = SHOUT.read_text()
    body = text[text.index("class Shout:") : text.index("if __name__")]
    assert len([line for line in body.splitlines() if line.strip()]) <= 10
