"""What the examples need, fetched once; later runs find it there."""

import sys
from pathlib import Path

import pytest

# `pytest` alone, unlike `python -m pytest`, does not put the project's root on the path.
ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(scope="session")
def photos() -> list[Path]:
    """Four photos; the model and its labels are in the repository then, too."""
    from examples.prepare import prepare_labels, prepare_model, prepare_photos

    prepare_model()
    prepare_labels()
    return prepare_photos()
