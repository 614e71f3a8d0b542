"""What the tests of the whole mesh share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def photos() -> list[Path]:
    """Four photos; the example repository has its model and labels then, too."""
    from examples.prepare import prepare_labels, prepare_model, prepare_photos

    prepare_model()
    prepare_labels()
    return prepare_photos()
