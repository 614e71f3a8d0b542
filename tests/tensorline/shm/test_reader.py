import ctypes
import mmap
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np
import pytest

from tensorline.errors import InvalidTensorError, StaleHandleError
from tensorline.shm import Arena, ArenaDirectory, ArenaReader, Block
from tensorline.shm.layout import populate
from tensorline.tensor import Handle, Tensor
from tests.leaks import opened_in

MIB = 1 << 20
SENTENCE = "a tensor in shared memory is no longer there"


def written(arena: Arena, data: bytes) -> Block:
    block = arena.allocate(len(data))
    block.view[:] = data
    return block


def test_the_bytes_of_a_block_and_of_its_rows(arena: Arena, reader: ArenaReader) -> None:
    block = written(arena, bytes(range(100)))
    assert reader.view(block.handle) == bytes(range(100))
    assert reader.view(block.slice(10, 5)) == bytes(range(10, 15))
    assert bytes(reader.view(block.slice(100, 0))) == b""
    reader.check(block.handle)


def test_an_own_arena_is_read_through_its_owners_mapping(arena: Arena, reader: ArenaReader) -> None:
    reader.attach(arena)
    maps = Path("/proc/self/maps").read_text().count(arena.id.hex())
    block = written(arena, b"x" * (2 * MIB))  # after growth
    assert reader.view(block.handle) == b"x" * (2 * MIB)
    assert reader.view(block.handle).readonly
    assert Path("/proc/self/maps").read_text().count(arena.id.hex()) == maps
    block.release()
    with pytest.raises(StaleHandleError):
        reader.view(block.handle)


EDGES = [0, 1, 63, 64, 128, 1 << 12, 1 << 20, 4 << 20, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 80]


def mutated(handle: Handle, others: list[Handle], chance: random.Random) -> Handle:
    """One field changed: by little, by a bit, to an edge, or to what another handle has there."""
    field, other = chance.choice(("arena", "block", "offset", "length", "generation")), chance.choice(others)
    if field == "arena":
        flipped = bytearray(handle.arena or bytes(16))
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        wrong = (bytes(flipped), other.arena, os.urandom(16), b"", handle.arena[:15], handle.arena + b"\0")
        return handle._replace(arena=chance.choice(wrong))
    value: int = getattr(handle, field)
    near = value + chance.choice((-1, 1)) * chance.choice((1, 8, 64, 4096, value))
    edge = chance.choice((-1, 1)) * chance.choice(EDGES)
    changed: dict[str, Any] = {
        field: chance.choice((near, value ^ 1 << chance.randrange(64), edge, getattr(other, field)))
    }
    return handle._replace(**changed)


def is_in(handle: Handle, whole: Handle) -> bool:
    """A handle of rows of the block that `whole` is the handle of."""
    end = whole.offset + whole.length
    same = handle._replace(offset=whole.offset, length=whole.length) == whole
    return same and handle.length >= 0 and whole.offset <= handle.offset <= end - handle.length


@pytest.mark.parametrize("own", [False, True])
def test_ten_thousand_mutated_handles_are_refused(
    arena: Arena, directory: ArenaDirectory, reader: ArenaReader, own: bool
) -> None:
    if own:
        reader.attach(arena)
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    with Arena(directory, MIB) as other:
        sizes = (1, 64, 1000, 70_000)
        live = [written(where, os.urandom(chance.choice(sizes))).handle for where in (arena, other) * 8]
        blocks = [written(arena, os.urandom(chance.choice(sizes))) for _ in range(8)]
        freed = [block.handle for block in blocks if block.release()]
        rows = [whole._replace(offset=whole.offset + 8, length=whole.length - 8) for whole in live if whole.length > 8]
        refused = 0
        while refused < 10_000:
            handle = chance.choice(live + freed + rows)
            for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
                handle = mutated(handle, live + freed, chance)
            if any(is_in(handle, whole) for whole in live):
                assert len(reader.view(handle)) == handle.length
                continue
            with pytest.raises(StaleHandleError) as caught:
                reader.view(handle)
            assert str(caught.value) == SENTENCE
            refused += 1


def test_a_freed_header_is_not_a_block_of_generation_zero(arena: Arena, reader: ArenaReader) -> None:
    block = written(arena, b"secret")
    block.release()
    with pytest.raises(StaleHandleError):
        reader.view(block.handle._replace(generation=0))


def test_a_block_used_again_under_a_reader_is_noticed(arena: Arena, reader: ArenaReader) -> None:
    block = written(arena, b"first")
    view = reader.view(block.handle)
    block.release()
    written(arena, b"other")
    assert bytes(view) == b"other"  # which is why there is a check
    with pytest.raises(StaleHandleError):
        reader.check(block.handle)


def test_a_damaged_header_or_length_is_refused(arena: Arena, reader: ArenaReader) -> None:
    for at, value in ((0, 0), (1, 1), (2, 3)):
        block = written(arena, b"1234")
        memoryview(arena.memory).cast("Q")[block.offset // 8 + at] = value
        with pytest.raises(StaleHandleError):
            reader.view(block.handle)


def test_bytes_that_changed_under_the_decoder_are_stale_not_malformed(arena: Arena, reader: ArenaReader) -> None:
    block = written(arena, b"\xff\xff\xff\xff")
    tensor = Tensor("x", "BYTES", (1,), handle=block.handle)
    with pytest.raises(InvalidTensorError):
        reader.array(tensor)

    class Late(ArenaReader):
        def view(self, handle: Handle) -> memoryview:
            view = super().view(handle)
            block.release()
            return view

    late = Late(ArenaDirectory(reader._directory.path, b""))
    with pytest.raises(StaleHandleError):
        late.array(tensor)
    late.close()


def test_a_mapping_is_kept_and_renewed_only_after_growth(
    arena: Arena, reader: ArenaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[object] = []
    real = mmap.mmap

    def counting(*args: int, **kwargs: int) -> mmap.mmap:
        mapped.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(mmap, "mmap", counting)
    first = written(arena, b"a" * 1000)
    for _ in range(10_000):
        block = arena.allocate(100_000)
        reader.view(block.handle)
        reader.check(block.handle)
        block.release()
    assert len(mapped) == 1
    early = reader.view(first.handle)
    second = written(arena, b"b" * (2 * MIB))
    assert reader.view(second.handle) == b"b" * (2 * MIB)
    assert early == reader.view(first.handle) == b"a" * 1000
    assert len(mapped) == 2


def test_readers_keep_what_they_have_mapped(arena: Arena, reader: ArenaReader) -> None:
    block = written(arena, b"still here")
    handle, view = block.handle, reader.view(block.handle)
    arena.close()
    assert bytes(reader.view(handle)) == bytes(view) == b"still here"
    reader.forget(handle.arena)
    assert bytes(view) == b"still here"
    with pytest.raises(StaleHandleError):
        reader.view(handle)


def test_mappings_are_bounded_and_descriptors_do_not_leak(directory: ArenaDirectory) -> None:
    reader = ArenaReader(directory, peer_limit=3)
    arenas = [Arena(directory, MIB, first_segment_bytes=4096) for _ in range(8)]
    handles = [written(arena, bytes([n])).handle for n, arena in enumerate(arenas)]
    before = len(opened_in(directory.path))  # of our own arenas; other tests' descriptors come and go
    for _ in range(3):
        for n, handle in enumerate(handles):
            assert bytes(reader.view(handles[0])) == b"\0"  # always in use, so never the one to go
            assert reader.view(handle) == bytes([n])
    assert handles[0].arena in reader._arenas
    assert len(reader._arenas) == 3
    for _ in range(100):
        with pytest.raises(StaleHandleError):
            reader.view(handles[0]._replace(arena=os.urandom(16)))
    assert len(opened_in(directory.path)) == before + 2 * 3  # ours and mmap's
    reader.close()
    assert len(opened_in(directory.path)) == before
    for arena in arenas:
        arena.close()


def short(path: Path) -> None:
    path.write_bytes(b"\0" * 10)
    path.chmod(0o600)


def foreign(path: Path) -> None:
    path.write_bytes(b"\0" * 8192)
    path.chmod(0o600)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, short, foreign])
def test_a_file_that_is_no_arena_of_ours_is_refused(
    directory: ArenaDirectory, reader: ArenaReader, make: Callable[[Path], None]
) -> None:
    name = os.urandom(16)
    make(directory.path / f"{name.hex()}.arena")
    with pytest.raises(StaleHandleError, match=SENTENCE):
        reader.view(Handle(name, 64, 128, 10, 1))


def test_an_arena_is_read_under_its_own_name_alone_not_through_a_link(
    arena: Arena, directory: ArenaDirectory, reader: ArenaReader
) -> None:
    handle, name = written(arena, b"1").handle, arena.id[:8] + os.urandom(8)  # the same magic
    path = directory.path / f"{arena.id.hex()}.arena"
    os.link(path, directory.path / f"{name.hex()}.arena")
    with pytest.raises(StaleHandleError):
        reader.view(handle._replace(arena=name))
    path.rename(directory.path / "elsewhere")
    path.symlink_to(directory.path / "elsewhere")
    with pytest.raises(StaleHandleError):
        reader.view(handle)


def test_an_arena_that_others_can_open_is_refused(arena: Arena, directory: ArenaDirectory, reader: ArenaReader) -> None:
    (directory.path / f"{arena.id.hex()}.arena").chmod(0o640)
    with pytest.raises(StaleHandleError):
        reader.view(written(arena, b"1").handle)


def test_no_write_through_numpy_or_mmap(arena: Arena, reader: ArenaReader) -> None:
    view = reader.view(written(arena, b"1234").handle)
    array = np.frombuffer(view, np.uint8)
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(ValueError):
        array[0] = 1
    with pytest.raises(ValueError):
        array.setflags(write=True)
    assert isinstance(view.obj, mmap.mmap)
    with pytest.raises(TypeError):
        view.obj[0] = 1


OFFENDER = """
import ctypes, sys
from pathlib import Path
import numpy as np
from tensorline.shm import ArenaReader, open_directory
from tensorline.tensor import Handle
path, arena, *numbers = sys.argv[1:]
view = ArenaReader(open_directory(Path(path))).view(Handle(bytes.fromhex(arena), *map(int, numbers)))
print("mapped", flush=True)
ctypes.memset(np.frombuffer(view, np.uint8).ctypes.data, 0, len(view))
print("written", flush=True)
"""


def test_who_writes_through_ctypes_dies(
    arena: Arena, directory: ArenaDirectory, spawn: Callable[..., "Popen[str]"]
) -> None:
    block = written(arena, b"1234" * 1000)
    handle = block.handle
    numbers = (handle.block, handle.offset, handle.length, handle.generation)
    offender = spawn("-c", OFFENDER, directory.path, handle.arena.hex(), *map(str, numbers))
    assert offender.communicate()[0] == "mapped\n"
    assert offender.returncode == -signal.SIGSEGV
    assert block.view == b"1234" * 1000


def test_a_kernel_without_populate_is_no_obstacle() -> None:
    with mmap.mmap(-1, 8192) as memory:
        assert not populate(memory, 9999, 0, 8192)
    assert ctypes.sizeof(ctypes.c_size_t) == 8  # block headers are 64-bit words
