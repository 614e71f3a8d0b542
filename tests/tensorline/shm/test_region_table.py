"""One table of regions for all workers: here several tables over one directory, as the workers have them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorline.errors import AlreadyExistsError, InvalidTensorError, NotFoundError, ResourceExhaustedError
from tensorline.shm import ArenaDirectory
from tensorline.shm.region_table import RegionTable, region_directory
from tensorline.shm.regions import RegionSpec
from tests.client_memory import SharedObject, shared_object

SIZE = 64


@pytest.fixture
def path(directory: ArenaDirectory) -> Iterator[Path]:
    with region_directory(directory) as path:
        yield path


@pytest.fixture
def tables(directory: ArenaDirectory, path: Path) -> Iterator[list[RegionTable]]:
    before = len(os.listdir("/proc/self/fd"))
    with RegionTable(path, directory.path, 4) as one, RegionTable(path, directory.path, 4) as two:
        yield [one, two]
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def shared() -> Iterator[SharedObject]:
    with shared_object(SIZE) as shared:
        yield shared


def spec(shared: SharedObject, name: str = "r", offset: int = 0, byte_size: int = SIZE) -> RegionSpec:
    return RegionSpec(name, shared.key, offset, byte_size)


def names(table: RegionTable) -> list[str]:
    return [each.name for each in table.status("")]


def put(table: RegionTable, text: bytes, name: str = "r") -> None:
    taken = table.take(name)
    try:
        taken.region.window(0, len(text)).write_from(text)
    finally:
        table.give(taken)


def test_what_one_worker_registers_all_can_use(tables: list[RegionTable], shared: SharedObject) -> None:
    one, two = tables
    one.register(spec(shared, offset=3, byte_size=40))
    assert two.status("r") == [RegionSpec("r", shared.key, 3, 40)]
    put(two, b"two")
    assert shared.read(3, 3) == b"two"
    two.unregister("r")
    for table in tables:
        assert names(table) == []
        with pytest.raises(NotFoundError, match=r"^Unable to find shared memory region: 'r'$"):
            table.take("r")
        with pytest.raises(NotFoundError, match=r"^Unable to find system shared memory region: 'r'$"):
            table.status("r")


def test_a_name_is_taken_until_it_is_given_up(tables: list[RegionTable], shared: SharedObject) -> None:
    one, two = tables
    one.register(spec(shared, byte_size=8))
    for table in tables:
        with pytest.raises(AlreadyExistsError, match=r"^shared memory region 'r' already in manager$"):
            table.register(spec(shared))
    assert two.status("r")[0].byte_size == 8
    one.unregister("r")
    two.register(spec(shared))
    assert one.status("r")[0].byte_size == SIZE
    put(one, b"one")  # which had the first one open


def test_two_names_over_one_object(tables: list[RegionTable], shared: SharedObject) -> None:
    tables[0].register(spec(shared, "a"))
    tables[0].register(spec(shared, "b", 2, 2))
    put(tables[1], b"xy", "b")
    put(tables[1], b"12", "a")
    assert shared.read(0, 4) == b"12xy"
    assert names(tables[1]) == ["a", "b"]


@pytest.mark.parametrize("name", ["", "../../etc", "a.b", "new", "owner", "ü" * 500, "\n"])
def test_any_name_is_a_name(tables: list[RegionTable], shared: SharedObject, name: str) -> None:
    tables[0].register(spec(shared, name))
    put(tables[1], b"1", name)
    assert names(tables[1]) == [name]
    tables[1].unregister(name)
    assert names(tables[0]) == []


def test_a_name_without_end(tables: list[RegionTable], shared: SharedObject) -> None:
    with pytest.raises(InvalidTensorError, match="has 1025 characters"):
        tables[0].register(spec(shared, "x" * 1025))


def test_unregistering_what_is_not_there_is_no_error(tables: list[RegionTable], shared: SharedObject) -> None:
    tables[0].unregister("nobody")
    tables[0].unregister("")
    tables[0].register(spec(shared, "a"))
    tables[1].register(spec(shared, "b"))
    tables[0].unregister("")
    assert names(tables[1]) == []


def test_an_unregistered_region_ends_with_its_last_use(tables: list[RegionTable], shared: SharedObject) -> None:
    one, two = tables
    one.register(spec(shared))
    users = [(one, one.take("r")), (one, one.take("r")), (two, two.take("r"))]
    one.unregister("r")
    for table, taken in users:
        assert names(one) == names(two) == ["r"]
        for each in tables:
            with pytest.raises(NotFoundError):
                each.take("r")
            with pytest.raises(AlreadyExistsError):
                each.register(spec(shared))
        taken.region.window(0, 3).write_from(b"end")
        table.give(taken)
    assert names(one) == names(two) == []
    one.register(spec(shared))
    assert shared.read(0, 3) == b"end"


def test_what_others_unregister_is_let_go(tables: list[RegionTable], shared: SharedObject) -> None:
    """A client's freed memory would stay in use as long as we had it open."""

    def links() -> int:
        found = 0
        for each in os.listdir("/proc/self/fd"):
            try:
                found += os.readlink(f"/proc/self/fd/{each}").startswith(str(shared.path))
            except FileNotFoundError:
                continue
        return found

    one, two = tables
    one.register(spec(shared))
    put(two, b"1")
    assert links() == 2
    one.unregister("r")
    assert links() == 1
    two.forget_unregistered()
    assert links() == 0


def test_an_object_without_a_name_is_there_for_all(tables: list[RegionTable], shared: SharedObject) -> None:
    """A client may remove its object at once, so that it is gone when the client dies."""
    tables[0].register(spec(shared))
    file = shared.path.open("rb")
    shared.path.unlink()
    put(tables[1], b"here")
    assert file.read(4) == b"here"
    file.close()


def test_another_object_of_that_name_is_not_the_regions(tables: list[RegionTable], shared: SharedObject) -> None:
    tables[0].register(spec(shared))
    shared.path.unlink()
    shared.path.write_bytes(bytes(SIZE))
    for table in tables:
        put(table, b"not for you")
    assert shared.read() == bytes(SIZE)


def test_so_many_and_no_more(tables: list[RegionTable], shared: SharedObject) -> None:
    for at in range(4):
        tables[at % 2].register(spec(shared, str(at)))
    text = "4 shared memory regions are registered at this gateway, at most 4 are allowed"
    with pytest.raises(ResourceExhaustedError, match=text):
        tables[0].register(spec(shared, "more"))
    tables[0].unregister("2")
    tables[0].register(spec(shared, "more"))


def test_what_cannot_be_registered_leaves_nothing(tables: list[RegionTable], shared: SharedObject) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidTensorError):
        tables[0].register(spec(shared, byte_size=SIZE + 1))
    assert len(os.listdir("/proc/self/fd")) <= before
    assert names(tables[0]) == []


USER = """
import sys
from pathlib import Path
from tensorline.shm.region_table import RegionTable
table = RegionTable(Path(sys.argv[1]), Path("/nonexistent"), 4)
taken = table.take("r")
print("in use", flush=True)
sys.stdin.read()
"""


def test_a_worker_that_dies_holds_nothing(path: Path, tables: list[RegionTable], shared: SharedObject) -> None:
    tables[0].register(spec(shared))
    user = subprocess.Popen([sys.executable, "-c", USER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert user.stdin is not None
    assert user.stdout is not None
    with user.stdin, user.stdout:
        assert user.stdout.readline() == b"in use\n"
        tables[0].unregister("r")
        assert names(tables[1]) == ["r"]
        user.send_signal(signal.SIGKILL)
        user.wait()
    assert names(tables[1]) == []
    tables[0].register(spec(shared))


def test_a_closed_table_lets_uses_end(directory: ArenaDirectory, path: Path, shared: SharedObject) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with RegionTable(path, directory.path, 4) as table:
        table.register(spec(shared))
        taken = table.take("r")
    taken.region.window(0, 2).write_from(b"ok")
    table.give(taken)
    assert shared.read(0, 2) == b"ok"
    assert len(os.listdir("/proc/self/fd")) <= before


def test_directories_of_killed_gateways_are_removed(directory: ArenaDirectory) -> None:
    with region_directory(directory) as alive:
        dead = directory.path / "regions" / "dead"
        dead.mkdir()
        (dead / "owner").touch()
        with region_directory(directory) as other:
            assert {path.name for path in alive.parent.iterdir()} == {alive.name, other.name}
            assert alive.stat().st_mode & 0o077 == 0
    assert [*alive.parent.iterdir()] == []
