import fcntl
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tensorline.errors import ConfigError
from tensorline.rpc.sockets import claim_socket, sweep_sockets
from tests.tensorline.stage.pair import until

HOLDER = """
import os, socket, sys
from pathlib import Path
from tensorline.rpc.sockets import claim_socket
with claim_socket(Path(sys.argv[1]), "peer") as path:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    if sys.argv[2] == "fork" and os.fork() == 0:
        print("ready", flush=True)
        os.close(1)
        sys.stdin.read()
        os._exit(0)
    if sys.argv[2] == "alone":
        print("ready", flush=True)
    sys.stdin.read()
"""


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


@pytest.fixture
def holder(path: Path, request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[str]"]:
    """Another process that serves at peer.sock; with "fork" it has a child that does nothing."""
    command = [sys.executable, "-c", HOLDER, str(path), request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
            assert process.stdin is not None
            process.stdin.close()


def test_a_path_is_ours_while_the_block_lasts_and_then_gone(path: Path) -> None:
    with claim_socket(path / "sockets", "model-1") as claimed:
        assert claimed == path / "sockets" / "model-1.sock"
        bind(claimed)
        assert names(path / "sockets") == ["model-1.lock", "model-1.sock"]
    assert names(path / "sockets") == []


def test_a_socket_that_a_dead_process_left_is_no_obstacle(path: Path) -> None:
    bind(path / "a.sock")
    (path / "a.lock").touch()
    with claim_socket(path, "a") as claimed:
        bind(claimed)


def test_the_second_one_is_kept_off_and_disturbs_nothing(path: Path) -> None:
    with claim_socket(path, "a") as claimed:
        bind(claimed)
        with pytest.raises(ConfigError, match=f"another process serves at {claimed}"), claim_socket(path, "a"):
            pass
        assert names(path) == ["a.lock", "a.sock"]


@pytest.mark.parametrize("holder", ["alone"], indirect=True)
async def test_another_processes_socket_is_swept_once_it_is_dead(holder: "subprocess.Popen[str]", path: Path) -> None:
    assert sweep_sockets(path) == []
    with pytest.raises(ConfigError), claim_socket(path, "peer"):
        pass
    holder.kill()
    holder.wait()
    assert sweep_sockets(path) == ["peer.sock"]
    assert names(path) == []


@pytest.mark.parametrize("holder", ["fork"], indirect=True)
async def test_a_forked_child_keeps_no_lock(holder: "subprocess.Popen[str]", path: Path) -> None:
    assert sweep_sockets(path) == []
    holder.kill()
    holder.wait()
    assert sweep_sockets(path) == ["peer.sock"]


def test_a_path_too_long_for_a_socket_is_refused_with_both_numbers(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the socket path has 1\d\d bytes, at most 107 can be bound"):
        with claim_socket(path / ("d" * 90), "a"):
            pass


def test_a_claimed_path_may_be_as_long_as_a_socket_can_be(path: Path) -> None:
    room = 107 - len(str(path)) - len("/.sock")
    with claim_socket(path, "s" * room) as claimed:
        bind(claimed)


def test_only_sockets_of_the_dead_are_swept(path: Path, tmp_path: Path) -> None:
    bind(path / "dead.sock")
    (path / "file.sock").touch()
    (path / "link.sock").symlink_to(tmp_path)
    (path / "folder.sock").mkdir()
    bind(path / "other.socket")
    bind(path / "strange name.sock")
    with claim_socket(path, "alive") as alive:
        bind(alive)
        kept = set(names(path)) - {"dead.sock"}
        assert sweep_sockets(path) == ["dead.sock"]
        assert set(names(path)) == kept


def test_the_lock_of_a_process_that_died_before_it_bound_is_swept(path: Path) -> None:
    (path / "young.lock").touch()
    for name in ("early", "link"):
        (path / f"{name}.lock").touch()
        os.utime(path / f"{name}.lock", (1, 1))
    (path / "link.lock").rename(path / "target")
    (path / "link.lock").symlink_to(path / "target")
    with claim_socket(path, "alive"):
        os.utime(path / "alive.lock", (1, 1))
        assert sweep_sockets(path) == ["early.sock"]
        assert names(path) == ["alive.lock", "link.lock", "target", "young.lock"]


def test_a_lock_that_was_swept_as_it_was_claimed_is_claimed_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the lock file and locking it, somebody else took it for a dead one's."""
    really, calls = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (path / "a.lock").unlink()
        really(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with claim_socket(path, "a"):
        assert names(path) == ["a.lock"]
        monkeypatch.undo()
        with pytest.raises(ConfigError), claim_socket(path, "a"):
            pass
    assert names(path) == []


def test_a_directory_that_is_gone_is_no_failure(path: Path) -> None:
    assert sweep_sockets(path / "gone") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_socket_is_not_touched(path: Path) -> None:
    bind(path / "a.sock")
    os.chown(path / "a.sock", 12345, 12345)
    assert sweep_sockets(path) == []


def test_sweepers_and_claimers_side_by_side_lose_no_socket(path: Path) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def sweeper() -> None:
        try:
            while not stop.is_set():
                sweep_sockets(path)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=sweeper) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(100):
        with ExitStack() as stack:
            for name in ("a", "b"):
                claimed = stack.enter_context(claim_socket(path, f"{name}{turn}"))
                bind(claimed)
                assert claimed.exists()
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert names(path) == []


async def test_until_is_bounded() -> None:
    with pytest.raises(TimeoutError):
        await until(lambda: False, 0.01)
