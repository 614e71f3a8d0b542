import os
import re
import threading
from pathlib import Path

import pytest

from tensorline.directories import default_mesh_directory
from tensorline.errors import ConfigError
from tensorline.shm import ArenaDirectory, open_directory
from tensorline.shm.directory import memory_limit


def test_it_is_made_private_with_one_nonce(directory: ArenaDirectory) -> None:
    made = open_directory(directory.path / "a" / "b")
    assert made.path.stat().st_mode & 0o777 == 0o700
    assert (made.path / "nonce").stat().st_mode & 0o777 == 0o600
    assert os.listdir(made.path) == ["nonce"]
    assert len(made.nonce) == 16
    assert open_directory(made.path) == made


def test_processes_with_the_same_directory_can_read_each_other(directory: ArenaDirectory) -> None:
    same, other = open_directory(directory.path), open_directory(directory.path / "other")
    assert directory.can_read(same.nonce)
    assert not directory.can_read(other.nonce)
    assert not directory.can_read(b"")


def test_many_that_start_at_once_agree(directory: ArenaDirectory) -> None:
    path = directory.path / "new"
    opened: list[ArenaDirectory] = []
    threads = [threading.Thread(target=lambda: opened.append(open_directory(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.nonce for each in opened}) == 1
    assert len(opened) == 8
    assert os.listdir(path) == ["nonce"]


def test_a_link_a_file_and_an_open_directory_are_refused(directory: ArenaDirectory) -> None:
    (directory.path / "link").symlink_to(directory.path)
    (directory.path / "file").touch()
    (directory.path / "open").mkdir()
    (directory.path / "open").chmod(0o750)
    for name, text in (("link", "cannot be used"), ("file", "cannot be used"), ("open", "mode 0750, it must be 0700")):
        with pytest.raises(ConfigError, match=text):
            open_directory(directory.path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(directory: ArenaDirectory) -> None:
    path = directory.path / "other"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345, not to 0"):
        open_directory(path)


def test_a_damaged_nonce_is_said(directory: ArenaDirectory) -> None:
    (directory.path / "nonce").write_bytes(b"short")
    with pytest.raises(ConfigError, match="has 5 bytes, not 16"):
        open_directory(directory.path)


def test_an_arena_larger_than_the_file_system_is_refused_with_both_numbers(directory: ArenaDirectory) -> None:
    directory.check_space(4096)
    with pytest.raises(ConfigError, match=re.escape(f"{1 << 60} bytes (1099511627776.0 MiB)")) as caught:
        directory.check_space(1 << 60)
    assert len(re.findall(r"\d+ bytes \([\d.]+ MiB\)", str(caught.value))) == 2


def test_an_arena_larger_than_the_containers_memory_is_refused(
    directory: ArenaDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorline.shm.directory.memory_limit", lambda: 1 << 20)
    directory.check_space(1 << 20)
    with pytest.raises(ConfigError, match=r"2097152 bytes .* 1048576 bytes"):
        directory.check_space(2 << 20)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_memory_limit_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    write(tmp_path / "cgroup", "0::/a/b\n")
    assert memory_limit(tmp_path / "cgroup", tmp_path) is None
    write(tmp_path / "a/b/memory.max", "max\n")
    write(tmp_path / "a/memory.max", "1000\n")
    write(tmp_path / "memory.max", "2000\n")
    assert memory_limit(tmp_path / "cgroup", tmp_path) == 1000


def test_the_memory_limit_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "cgroup", "4:cpu,memory:/docker/1234\n1:name=systemd:/\n")
    write(tmp_path / "memory/memory.limit_in_bytes", "5000\n")  # inside a container the path is the host's
    assert memory_limit(tmp_path / "cgroup", tmp_path) == 5000
    write(tmp_path / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert memory_limit(tmp_path / "cgroup", tmp_path) is None
    assert memory_limit(tmp_path / "absent", tmp_path) is None


def test_the_default_is_of_this_user() -> None:
    assert default_mesh_directory() == Path(f"/dev/shm/tensorline-{os.geteuid()}")
