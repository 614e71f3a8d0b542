"""Two meshes in one directory would answer for one another."""

from pathlib import Path

import pytest

from tensorline.cli.claim import LOCK_NAME, claim_mesh
from tensorline.cli.failure import CommandError


def test_a_second_mesh_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    with claim_mesh(tmp_path / "mesh", may_join=False) as is_alone:
        assert is_alone
        with pytest.raises(CommandError, match=r"a mesh runs in .* already; --mesh-directory DIR"):
            with claim_mesh(tmp_path / "mesh", may_join=False):
                pass
    assert not (tmp_path / "mesh" / LOCK_NAME).exists()


def test_whoever_names_the_directory_joins(tmp_path: Path) -> None:
    with claim_mesh(tmp_path, may_join=True) as first, claim_mesh(tmp_path, may_join=True) as second:
        assert (first, second) == (True, False)
    with claim_mesh(tmp_path, may_join=False) as is_alone:
        assert is_alone


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match=r"--mesh-directory .*file/mesh cannot be used"):
        with claim_mesh(tmp_path / "file" / "mesh", may_join=False):
            pass
