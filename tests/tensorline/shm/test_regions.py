"""Clients' shared memory: no key leads anywhere else, no number leads out of it, and no client's doing harms us."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorline.errors import InternalError, InvalidTensorError, NotFoundError, ResourceExhaustedError, TensorlineError
from tensorline.shm import Arena, ArenaDirectory
from tensorline.shm.layout import arena_name
from tensorline.shm.regions import CLIENT_MEMORY, Region, RegionSpec, open_object, reopen_object
from tests.client_memory import SharedObject, shared_object

NOWHERE = Path("/nonexistent")
SIZE = 4096


@pytest.fixture
def shared() -> Iterator[SharedObject]:
    with shared_object(bytes(range(256)) * 16) as shared:
        yield shared


@pytest.fixture
def region(shared: SharedObject) -> Iterator[Region]:
    """Of 1000 bytes from offset 64."""
    region = opened(shared.key, 64, 1000)
    yield region
    region.close()


def opened(key: str, offset: int = 0, byte_size: int = SIZE) -> Region:
    spec = RegionSpec("r", key, offset, byte_size)
    return Region(spec, open_object(spec, NOWHERE))


def refused(kind: type[TensorlineError], text: str, key: str, offset: int = 0, byte_size: int = 1) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(kind, match=text):
        opened(key, offset, byte_size)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("slashes", ["", "/", "//"])
def test_slashes_before_a_key_mean_nothing(shared: SharedObject, slashes: str) -> None:
    region = opened(slashes + shared.key.lstrip("/"))
    target = bytearray(4)
    region.window(65, 4).read_into(memoryview(target))
    region.close()
    assert target == bytes([65, 66, 67, 68])


@pytest.mark.parametrize(
    "key", ["", "/", "///", ".", "..", "/..", "a/b", "/../etc/passwd", "x/../y", "a\0b", "k" * 256, "ü" * 128]
)
def test_a_key_is_the_name_of_one_object(key: str) -> None:
    refused(InvalidTensorError, "invalid shm key", key)


@pytest.mark.parametrize("slashes", ["", "/"])
def test_a_reserved_prefix(slashes: str) -> None:
    refused(InvalidTensorError, "contains the reserved prefix", slashes + "triton_python_backend_shm_region_7")


def test_an_unknown_key() -> None:
    refused(InternalError, "^Unable to open shared memory region: '/tl-nobody'$", "/tl-nobody")


def test_a_link_leads_nowhere(shared: SharedObject, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(SIZE))
    for target in (tmp_path / "secret", shared.path):
        with shared_object(1) as link:
            link.path.unlink()
            link.path.symlink_to(target)
            refused(InvalidTensorError, "no shared memory that can be used", link.key)


def test_only_plain_objects_with_one_name(shared: SharedObject) -> None:
    with shared_object(1) as other:
        other.path.unlink()
        os.link(shared.path, other.path)
        refused(InvalidTensorError, "no shared memory that can be used", other.key)
        refused(InvalidTensorError, "no shared memory that can be used", shared.key)
        other.path.unlink()
        os.mkfifo(other.path)
        refused(InvalidTensorError, "no shared memory that can be used", other.key)
        other.path.unlink()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(other.path))
            refused(InvalidTensorError, "no shared memory that can be used", other.key)


def test_an_object_of_another_user_must_be_open_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    with shared_object(8) as private, shared_object(8, mode=0o666) as public:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        refused(InvalidTensorError, "no shared memory that can be used", private.key)
        opened(public.key, 0, 8).close()


def test_the_meshs_directory_is_no_clients(directory: ArenaDirectory, arena: Arena) -> None:
    if directory.path.parent == CLIENT_MEMORY:
        refused(InvalidTensorError, "no shared memory that can be used", directory.path.name)
    refused(InvalidTensorError, "invalid shm key", f"/{directory.path.name}/{arena_name(arena.id)}")
    with shared_object(1) as link:  # the arena's own file under another name
        link.path.unlink()
        try:
            os.link(directory.path / arena_name(arena.id), link.path)
        except OSError:
            return  # another file system
        refused(InvalidTensorError, "no shared memory that can be used", link.key)


def test_a_mesh_in_the_very_place_has_no_clients_there(shared: SharedObject) -> None:
    with pytest.raises(InternalError, match="Unable to open"):
        open_object(RegionSpec("r", shared.key, 0, 1), CLIENT_MEMORY)


@pytest.mark.parametrize(
    ("offset", "byte_size"), [(0, SIZE), (SIZE - 1, 1), (1, SIZE - 1), (7, 13)], ids=["all", "end", "odd", "middle"]
)
def test_what_fits(shared: SharedObject, offset: int, byte_size: int) -> None:
    opened(shared.key, offset, byte_size).close()


@pytest.mark.parametrize(
    ("offset", "byte_size"),
    [(0, SIZE + 1), (1, SIZE), (SIZE, 1), (2**64 - 1, 2), (2**64 - SIZE, SIZE), (0, 2**64 - 1), (2**63, 2**63)],
)
def test_what_does_not_fit(shared: SharedObject, offset: int, byte_size: int) -> None:
    text = f"^failed to register shared memory region 'r': invalid args: offset {offset} and byte size {byte_size}"
    refused(InvalidTensorError, text, shared.key, offset, byte_size)


def test_a_region_of_nothing(shared: SharedObject) -> None:
    refused(InvalidTensorError, "failed to register shared memory region 'r': byte size", shared.key, 0, 0)


NEAR = st.one_of(*(st.integers(at - 3, at + 3) for at in (0, 64, 936, 1000, 1064, SIZE, 2**31, 2**63, 2**64)))


@given(offset=st.one_of(NEAR, NEAR.map(lambda value: -value), st.integers()), byte_size=st.one_of(NEAR, st.integers()))
def test_no_number_leads_out_of_a_region(offset: int, byte_size: int) -> None:
    spec = RegionSpec("r", "/k", 64, 1000)
    fits = 0 <= offset < 1000 and byte_size > 0 and offset + byte_size <= 1000
    region = Region(spec, -1)
    if fits:
        window = region.window(offset, byte_size)
        assert (window.offset, window.byte_size) == (64 + offset, byte_size)
        return
    what = "Invalid offset [+] byte size" if 0 <= offset < 1000 else "Invalid offset"
    with pytest.raises(InvalidTensorError, match=f"^{what} for shared memory region: 'r': got {offset}"):
        region.window(offset, byte_size)


def test_a_window_is_relative_to_the_region(region: Region) -> None:
    target = bytearray(1000)
    region.window(0, 1000).read_into(memoryview(target))
    assert target == (bytes(range(256)) * 16)[64:1064]
    region.window(999, 1).read_into(memoryview(target)[:1])
    assert target[0] == (64 + 999) % 256


def test_what_is_written_is_nowhere_else(shared: SharedObject, region: Region) -> None:
    before = shared.read()
    region.window(6, 5).write_from(b"abc")
    assert shared.read() == before[:70] + b"abc" + before[73:]


@pytest.mark.parametrize("left", [0, 64, 500, 1063])
def test_a_shrunk_object_is_an_error(shared: SharedObject, region: Region, left: int) -> None:
    shared.resize(left)
    window = region.window(0, 1000)
    with pytest.raises(InvalidTensorError, match=r"shared memory region 'r' .* has been made shorter since"):
        window.read_into(memoryview(bytearray(1000)))
    with pytest.raises(InvalidTensorError, match="has been made shorter since"):
        window.write_from(bytes(1000))
    assert shared.path.stat().st_size == left  # not made longer by us
    shared.resize(SIZE)
    window.read_into(memoryview(bytearray(1000)))


def test_a_removed_object_stays_usable_and_nobody_makes_it_again(shared: SharedObject, region: Region) -> None:
    shared.path.unlink()
    region.window(0, 3).write_from(b"abc")
    target = bytearray(3)
    region.window(0, 3).read_into(memoryview(target))
    assert target == b"abc"
    assert not shared.path.exists()


def test_a_second_descriptor(shared: SharedObject, region: Region) -> None:
    status = os.fstat(region.descriptor)
    identity, holder = (status.st_dev, status.st_ino), (os.getpid(), region.descriptor)
    os.close(reopen_object(region.spec, identity, holder))
    shared.path.unlink()
    second = reopen_object(region.spec, identity, holder)  # by whoever has it open
    assert os.fstat(second).st_ino == status.st_ino
    os.close(second)
    shared.path.write_bytes(bytes(SIZE))  # another object of that name
    second = reopen_object(region.spec, identity, holder)
    assert os.fstat(second).st_ino == status.st_ino
    os.close(second)
    with pytest.raises(NotFoundError, match=r"Unable to find shared memory region: 'r': its object '.*' is gone"):
        reopen_object(region.spec, identity, (os.getpid(), 0))


def test_no_descriptors_left(shared: SharedObject, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(ResourceExhaustedError, match="too many shared memory regions"):
        opened(shared.key)


@pytest.mark.parametrize(
    ("number", "kind"), [(28, ResourceExhaustedError), (12, ResourceExhaustedError), (1, InvalidTensorError)]
)
def test_what_the_host_refuses_is_told(
    region: Region, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[TensorlineError]
) -> None:
    """An object may have fewer pages than bytes, and the host none left when we write."""

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(kind, match=f"shared memory region 'r' cannot be written: {os.strerror(number)}"):
        region.window(0, 4).write_from(b"abcd")


def test_a_long_copy_goes_on_where_the_system_stopped(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """One system call moves 2 GiB at most."""
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:7]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write(fd, [views[0][:7]], at))
    data = bytes(range(100))
    region.window(3, 100).write_from(data)
    target = bytearray(100)
    region.window(3, 100).read_into(memoryview(target))
    assert target == data
