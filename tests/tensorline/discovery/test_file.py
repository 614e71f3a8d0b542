"""The embedded registry: locks instead of process ids, and what else may lie in its directory."""

import asyncio
import dataclasses
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tensorline.discovery import open_registry
from tensorline.discovery.file import FileRegistry
from tensorline.discovery.file_entries import close_entry, open_directory, write_entry
from tensorline.discovery.file_reader import EntryReader
from tensorline.discovery.instance import encode_instance
from tensorline.errors import ConfigError
from tests.tensorline.discovery.conftest import announced, announced_forking, until, watching
from tests.tensorline.discovery.test_contract import ONE, TWO


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "registry"
    path.mkdir(mode=0o700)
    return path


def plant(path: Path, content: bytes = b"", mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_files_are_for_their_user_alone(tmp_path: Path) -> None:
    async with open_registry(f"file://{tmp_path}/run/registry") as registry:
        await registry.register(ONE)
        (entry,) = (tmp_path / "run/registry").iterdir()
        assert entry.name == "model-1.json"
        assert (entry.stat().st_mode & 0o777, entry.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert entry.read_bytes() == encode_instance(ONE)
    assert listing(entry.parent) == []


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
async def test_a_directory_that_others_may_enter_is_refused(directory: Path, mode: int) -> None:
    os.chmod(directory, mode)
    with pytest.raises(ConfigError, match=rf"has mode {mode:04o}, owner \d+; wanted are 0700 and"):
        async with open_registry(f"file://{directory}"):
            pass


@pytest.mark.parametrize("kind", ["link", "file"])
async def test_a_link_or_a_file_is_no_directory(directory: Path, kind: str) -> None:
    path = directory / "registry"
    if kind == "link":
        path.symlink_to(directory)
    else:
        plant(path)
    with pytest.raises(ConfigError):
        async with open_registry(f"file://{path}"):
            pass


async def test_a_forked_child_does_not_keep_a_dead_owner_alive(directory: Path) -> None:
    async with open_registry(f"file://{directory}") as registry, watching(registry) as watcher:
        async with announced_forking(f"file://{directory}", "doomed", "fork") as (_, child):
            await watcher.wait_ids("doomed")
        try:
            os.kill(child, 0)  # it lives
            await watcher.wait_ids()
            await until(lambda: listing(directory) == [])
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_frozen_owner_is_alive(directory: Path) -> None:
    async with open_registry(f"file://{directory}") as registry, watching(registry) as watcher:
        await watcher.wait_ids()
        async with announced(f"file://{directory}", "frozen") as process:
            await watcher.wait_ids("frozen")
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.7)
            assert len(watcher.told) == 2


async def test_what_is_there_from_before_and_has_no_owner_is_removed(directory: Path) -> None:
    plant(directory / "model-1.json", encode_instance(ONE))
    async with open_registry(f"file://{directory}") as registry, watching(registry) as watcher:
        await watcher.wait_ids()
        assert listing(directory) == []


async def test_foreign_files_are_left_alone_and_said_once(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = encode_instance(ONE)
    plant(directory / "model-1.json", good, 0o644)
    plant(directory / "other-name.json", good)
    plant(directory / "broken.json", good[:-3])
    plant(directory / "huge.json", b" " * (2 << 20))
    plant(directory / "with space.json", good)
    plant(directory / "README", b"hello")
    plant(directory.parent / "outside.json", good)
    os.link(directory.parent / "outside.json", directory / "hard-link.json")
    (directory / "soft-link.json").symlink_to(directory.parent / "outside.json")
    (directory / "directory.json").mkdir()
    os.mkfifo(directory / "fifo.json", 0o600)
    there = listing(directory)
    with caplog.at_level(logging.WARNING):
        async with open_registry(f"file://{directory}") as registry, watching(registry) as watcher:
            await asyncio.sleep(0.7)
            assert watcher.told == [frozenset()]
            assert registry.is_fresh
    assert listing(directory) == there
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(there)
    assert all(any(repr(name) in message for message in said) for name in there)


async def test_a_file_that_somebody_mended_is_read_again(directory: Path) -> None:
    path = plant(directory / "model-1.json", b"{")
    async with open_registry(f"file://{directory}") as registry, watching(registry) as watcher:
        await watcher.wait_ids()
        with path.open("r+b") as mended:
            fcntl.flock(mended, fcntl.LOCK_EX)
            mended.write(encode_instance(ONE))
            mended.flush()
            await watcher.wait_ids("model-1")


async def test_an_entry_that_somebody_deleted_is_put_back_and_never_missed(directory: Path) -> None:
    async with open_registry(f"file://{directory}") as ours, open_registry(f"file://{directory}") as theirs:
        async with watching(theirs) as watcher:
            await watcher.wait_ids()
            await ours.register(ONE)
            await watcher.wait_ids("model-1")
            (directory / "model-1.json").unlink()
            await until((directory / "model-1.json").exists)
            await asyncio.sleep(0.5)
            assert watcher.told == [frozenset(), {ONE}]
            await ours.deregister("model-1")
            await watcher.wait_ids()


async def test_a_directory_that_is_away_changes_nothing_but_freshness(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_registry(f"file://{directory}") as registry, watching(registry) as watcher:
        await registry.register(ONE)
        await watcher.wait_ids("model-1")
        os.rename(directory, directory.with_name("moved"))
        plant(directory)
        await until(lambda: not registry.is_fresh)
        await registry.register(TWO)  # no error: it will be announced
        os.unlink(directory)
        await watcher.wait_ids("model-1", "pre-1", within_s=2)
        assert registry.is_fresh
    assert [seen for seen in watcher.told[1:] if ONE not in seen] == []
    assert sum("is away" in record.getMessage() for record in caplog.records) == 1


async def test_what_a_crashed_writer_left_is_swept_and_a_living_one_is_not(directory: Path) -> None:
    plant(directory / ".0123456789abcdef.tmp", b"{")
    with (directory / ".fedcba9876543210.tmp").open("wb") as living:
        os.fchmod(living.fileno(), 0o600)
        fcntl.flock(living, fcntl.LOCK_EX)
        async with open_registry(f"file://{directory}") as registry, watching(registry):
            await until(lambda: len(listing(directory)) == 1)
            await asyncio.sleep(0.5)
        assert listing(directory) == [".fedcba9876543210.tmp"]


async def test_two_processes_of_one_name_do_not_remove_each_other(directory: Path) -> None:
    async with open_registry(f"file://{directory}") as first, open_registry(f"file://{directory}") as second:
        await first.register(ONE)
        await second.register(dataclasses.replace(ONE, address="127.0.0.1:9002"))
        await first.deregister("model-1")
        assert (directory / "model-1.json").exists()


def test_the_cleaner_leaves_a_name_that_leads_to_another_file(directory: Path) -> None:
    reader = EntryReader(directory)
    with open_directory(directory) as descriptor:
        old = write_entry(descriptor, ONE)
        assert reader.look() == {ONE}
        new = write_entry(descriptor, TWO)
        os.rename(directory / "pre-1.json", directory / "model-1.json")
        close_entry(old)
        reader.look()
    assert (directory / "model-1.json").exists()
    close_entry(new)
    reader.close()


def test_writers_and_cleaners_in_many_processes(directory: Path) -> None:
    """Registered is registered: no cleaner takes the file of a writer between its creation and its lock."""
    script = (
        "import sys; from pathlib import Path; from tensorline.discovery.file_entries import *\n"
        "from tensorline.discovery.file_reader import EntryReader\n"
        "from tensorline.discovery import ServiceInstance\n"
        "path, name = Path(sys.argv[1]), sys.argv[2]; reader = EntryReader(path)\n"
        "for turn in range(300):\n"
        "    instance = ServiceInstance(id=f'{name}-{turn}', service='', address='h:1')\n"
        "    with open_directory(path) as directory: descriptor = write_entry(directory, instance)\n"
        "    assert instance in reader.look(), turn\n"
        "    if turn % 2:\n"
        "        with open_directory(path) as directory: remove_entry(directory, instance.id, descriptor)\n"
        "    close_entry(descriptor)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, directory, name]) for name in ("a", "b", "c")]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    reader = EntryReader(directory)
    assert (reader.look(), listing(directory)) == (frozenset(), [])


async def test_no_descriptor_is_left(directory: Path) -> None:
    before = open_descriptors()
    async with open_registry(f"file://{directory}") as registry, watching(registry) as watcher:
        for number in range(20):
            await registry.register(dataclasses.replace(ONE, id=f"many-{number}"))
        await watcher.wait_for(lambda seen: len(seen) == 20)
        for number in range(10):
            await registry.deregister(f"many-{number}")
        await watcher.wait_for(lambda seen: len(seen) == 10)
    assert open_descriptors() <= before


async def test_a_look_at_fifty_unchanged_entries_is_short_enough_for_the_loop(directory: Path) -> None:
    registry = FileRegistry(directory)
    for number in range(50):
        await registry.register(dataclasses.replace(ONE, id=f"many-{number}"))
    reader = EntryReader(directory)
    reader.look()
    taken: list[float] = []
    for _ in range(50):
        began = time.perf_counter()
        assert len(reader.look()) == 50
        taken.append(time.perf_counter() - began)
    reader.close()
    await registry.aclose()
    assert sorted(taken)[25] < 0.02  # measured: 0.2 ms


def test_the_default_brings_no_client_library_in() -> None:
    script = (
        "import asyncio, sys; from tensorline.discovery import open_registry\n"
        "async def main():\n"
        "    async with open_registry('file://' + sys.argv[1]): pass\n"
        "asyncio.run(main())\n"
        "print(sorted({'consul', 'aiohttp', 'pydantic'} & set(sys.modules)))\n"
    )
    directory = subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip()
    answered = subprocess.run([sys.executable, "-c", script, directory], capture_output=True, text=True, check=True)
    assert answered.stdout == "[]\n"


async def test_a_closed_registry_opens_nothing_again(directory: Path) -> None:
    async with open_registry(f"file://{directory}") as ours, open_registry(f"file://{directory}") as theirs:
        await ours.register(ONE)
        await theirs.aclose()
        before = open_descriptors()
        assert [seen async for seen in theirs.watch()] == []
        assert open_descriptors() <= before
