"""Seeing what changes in a repository."""

import os
from pathlib import Path

import pytest

from tensorline.config import footprint
from tensorline.config.footprint import Footprint
from tensorline.config.watch import RepositoryWatch
from tensorline.errors import ConfigError


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_footprint_tells_its_parts_apart(tmp_path: Path) -> None:
    model = tmp_path / "m"
    assert footprint(model) == Footprint()
    config, one, two = write(model / "config.pbtxt"), write(model / "1" / "a" / "f"), write(model / "2" / "f")
    first = footprint(model)
    assert first == footprint(model)
    assert list(first.versions) == [1, 2]
    write(one, "x")
    changed = footprint(model)
    assert (changed.config, changed.versions[2], changed.rest) == (first.config, first.versions[2], "")
    assert changed.versions[1] != first.versions[1]
    write(model / "labels.txt")
    write(model / "01" / "f")  # no version
    assert footprint(model).rest
    assert footprint(model).versions == changed.versions
    write(config, "x")
    assert footprint(model).config != first.config
    write(two, "x")
    write(model / "1" / "__pycache__" / "x")
    assert footprint(model).versions[1] == changed.versions[1]


def test_a_file_that_was_renamed_into_place_is_another(tmp_path: Path) -> None:
    file, other = write(tmp_path / "m" / "1" / "f", "a"), write(tmp_path / "new", "b")
    os.utime(other, ns=(file.stat().st_mtime_ns, file.stat().st_mtime_ns))
    before = footprint(tmp_path / "m")
    other.rename(file)
    assert footprint(tmp_path / "m") != before


def test_links_are_followed_and_may_lead_nowhere(tmp_path: Path) -> None:
    target = write(tmp_path / "target")
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "link").symlink_to(target)
    (tmp_path / "m" / "1" / "nowhere").symlink_to(tmp_path / "m" / "1" / "nowhere")
    for name in ("up", "also_up"):
        (tmp_path / "m" / "1" / name).symlink_to(tmp_path / "m" / "1")
    before = footprint(tmp_path / "m")
    write(target, "x")
    assert footprint(tmp_path / "m") != before


async def test_each_change_is_told_once(tmp_path: Path) -> None:
    for name in "abc":
        write(tmp_path / name / "1" / "f")
    watch = RepositoryWatch([tmp_path], settle_s=0.01)
    await watch.begin()
    assert await watch.changed() == []
    write(tmp_path / "a" / "1" / "f", "x")
    write(tmp_path / "d" / "1" / "f")
    (tmp_path / "b" / "1" / "f").unlink()
    (tmp_path / "c").rename(tmp_path / ".c")
    assert await watch.changed() == ["a", "b", "c", "d"]
    assert await watch.changed() == []


async def test_a_repository_that_goes_is_no_change(tmp_path: Path) -> None:
    root = tmp_path / "r"
    write(root / "a" / "1" / "f")
    watch = RepositoryWatch([root], settle_s=0.01)
    await watch.begin()
    root.rename(tmp_path / "away")
    with pytest.raises(ConfigError):
        await watch.changed()
    (tmp_path / "away").rename(root)
    assert await watch.changed() == []
