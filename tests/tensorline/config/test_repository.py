"""A repository on a real disk."""

import os
from pathlib import Path

import pytest

from tensorline.config import RepositoryEntry, is_model_name, load_config, read_labels, read_model_labels, scan
from tensorline.errors import ConfigError


def make(root: Path, name: str, text: str = 'backend: "python"', versions: tuple[str, ...] = ("1",)) -> Path:
    for version in versions:
        (root / name / version).mkdir(parents=True)
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "config.pbtxt").write_text(text)
    return root / name


def only(entries: list[RepositoryEntry]) -> RepositoryEntry:
    assert len(entries) == 1
    return entries[0]


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", (12,)),
        ("version_policy { latest { num_versions: 2 } }", (3, 12)),
        ("version_policy { all { } }", (1, 3, 12)),
        ("version_policy { specific { versions: [ 12, 1, 99 ] } }", (1, 12)),
    ],
)
def test_versions_that_the_policy_serves(tmp_path: Path, policy: str, served: tuple[int, ...]) -> None:
    make(tmp_path, "m", f'backend: "python" {policy}', ("12", "1", "3", "007", "0", "1a", "-1", "²", "9" * 30))
    (tmp_path / "m" / "4").touch()  # a file is no version
    entry = only(scan([tmp_path]))
    assert entry.error is None
    assert (entry.name, entry.path, entry.versions) == ("m", tmp_path / "m", served)


@pytest.mark.parametrize(
    "policy", ["version_policy { latest { num_versions: 0 } }", "version_policy { specific { versions: [ 7 ] } }"]
)
def test_no_version_is_an_error(tmp_path: Path, policy: str) -> None:
    make(tmp_path, "m", f'backend: "python" {policy}')
    entry = only(scan([tmp_path]))
    assert "at least one version must be available under the version policy of model 'm'" in str(entry.error)
    assert (entry.config, entry.versions) == (None, ())


def test_what_has_no_model_file_needs_no_version_directory(tmp_path: Path) -> None:
    make(tmp_path, "labels", 'backend: "classification"', ())
    make(tmp_path, "net", 'backend: "python"', ())
    chain = """
    platform: "ensemble" input [ { name: "x" data_type: TYPE_FP32 dims: 1 } ]
    output [ { name: "y" data_type: TYPE_FP32 dims: 1 } ]
    ensemble_scheduling {
      step { model_name: "net" input_map { key: "i" value: "x" } output_map { key: "o" value: "y" } }
    }
    """
    make(tmp_path, "chain", chain, ())
    make(tmp_path, "chain5", chain, ("5",))
    assert {entry.name: entry.versions for entry in scan([tmp_path])} == {
        "chain": (1,),
        "chain5": (5,),
        "labels": (1,),
        "net": (),
    }


def test_one_bad_model_does_not_hide_the_others(tmp_path: Path) -> None:
    make(tmp_path, "good")
    make(tmp_path, "bad", "max_batch_size: many")
    make(tmp_path, "sp ace")
    make(tmp_path, "a..b")
    make(tmp_path, ".hidden")
    (tmp_path / "README.md").touch()
    entries = {entry.name: entry for entry in scan([tmp_path])}
    assert sorted(entries) == ["a..b", "bad", "good", "sp ace"]
    assert entries["good"].error is None
    assert "bad/config.pbtxt line 1" in str(entries["bad"].error)
    for name in ("sp ace", "a..b"):
        assert "has no valid name" in str(entries[name].error)


def test_a_name_in_two_repositories_is_an_error(tmp_path: Path) -> None:
    for root in ("one", "two", "three"):
        make(tmp_path / root, "m")
    make(tmp_path / "two", "other")
    entries = scan([tmp_path / "one", tmp_path / "two", tmp_path / "three"])
    assert [entry.name for entry in entries] == ["m", "other"]
    assert "model 'm' is in more than one repository" in str(entries[0].error)
    assert entries[0].config is None
    assert entries[1].error is None


def test_a_repository_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        scan([tmp_path / "nowhere"])


def test_links_may_not_leave_the_repository(tmp_path: Path) -> None:
    outside = make(tmp_path / "outside", "secret")
    root = tmp_path / "root"
    make(root, "inside")
    (root / "linked").symlink_to(outside)
    (root / "within").symlink_to(root / "inside")
    make(root, "file")
    (root / "file" / "1" / "model.py").symlink_to(outside / "config.pbtxt")
    make(root, "shared")
    (root / "shared" / "1" / "model.py").symlink_to(root / "inside" / "config.pbtxt")
    errors = {entry.name: str(entry.error) for entry in scan([root]) if entry.error}
    assert errors == {
        "linked": "model 'linked': the directory is a link out of the repository",
        "file": "model 'file': '1/model.py' is a link out of the repository",
    }


def test_the_repository_itself_may_be_a_link(tmp_path: Path) -> None:
    make(tmp_path / "root", "m")
    (tmp_path / "link").symlink_to(tmp_path / "root")
    assert only(scan([tmp_path / "link"])).error is None


def test_a_pipe_in_place_of_the_configuration_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    os.mkfifo(tmp_path / "m" / "config.pbtxt")
    assert "is no regular file" in str(only(scan([tmp_path])).error)


@pytest.mark.parametrize(
    ("name", "is_good"),
    [
        ("resnet50", True),
        ("a.b-c_D", True),
        ("0", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("", False),
        (".a", False),
        ("-a", False),
        ("a..b", False),
        ("a/b", False),
        ("a b", False),
        ("é", False),
        ("a\n", False),
    ],
)
def test_model_names(name: str, is_good: bool) -> None:
    assert is_model_name(name) is is_good


def test_labels_by_line(tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_bytes("cat\r\ndog\n\nNational\u2028Park\n".encode())
    assert read_labels(tmp_path, "l.txt") == ("cat", "dog", "", "National\u2028Park")
    (tmp_path / "empty.txt").touch()
    assert read_labels(tmp_path, "empty.txt") == ()


@pytest.mark.parametrize("filename", ["../l.txt", "sub/../../l.txt", "/etc/passwd", "link.txt"])
def test_labels_stay_in_the_model(tmp_path: Path, filename: str) -> None:
    (tmp_path / "l.txt").write_text("secret")
    (tmp_path / "m" / "sub").mkdir(parents=True)
    (tmp_path / "m" / "link.txt").symlink_to(tmp_path / "l.txt")
    with pytest.raises(ConfigError, match="is outside the model's directory"):
        read_labels(tmp_path / "m", filename)


def test_labels_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"label file 'none\.txt' does not exist"):
        read_labels(tmp_path, "none.txt")
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    with pytest.raises(ConfigError, match=r"label file 'bad\.txt' is not UTF-8 text: byte 1"):
        read_labels(tmp_path, "bad.txt")


def test_labels_of_a_model(tmp_path: Path) -> None:
    text = """
    backend: "python"
    output { name: "a" data_type: TYPE_FP32 dims: 2 label_filename: "l.txt" }
    output { name: "b" data_type: TYPE_FP32 dims: 2 }
    """
    path = make(tmp_path, "m", text)
    (path / "l.txt").write_text("cat\ndog")
    assert read_model_labels(path, load_config(path)) == {"a": ("cat", "dog")}
