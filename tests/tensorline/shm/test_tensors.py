import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import numpy as np
import pytest

from tensorline.errors import InvalidTensorError, ResourceExhaustedError
from tensorline.shm import Arena, ArenaDirectory, ArenaReader, write_array
from tensorline.tensor import BYTES, DATATYPES, Array, encode_array

PEER = Path(__file__).with_name("echo_peer.py")

spec = importlib.util.spec_from_file_location("echo_peer", PEER)
assert spec is not None
assert spec.loader is not None
echo_peer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(echo_peer)


def sample(datatype: str, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape))
    if datatype == BYTES:
        elements = np.empty(count, np.object_)
        elements[:] = [b"", b"\0\xff", "Zürich".encode(), b"x" * 5000][:count] + [b"y"] * (count - 4)
        return elements.reshape(shape)
    return (np.arange(count) % 100).astype(DATATYPES[datatype]).reshape(shape)


def test_every_datatype_goes_to_another_process_and_back(
    arena: Arena, directory: ArenaDirectory, reader: ArenaReader, spawn: Callable[..., "Popen[str]"]
) -> None:
    peer = spawn(PEER, directory.path)
    assert peer.stdin is not None
    assert peer.stdout is not None
    for datatype in DATATYPES:
        for shape in ((3, 4), (), (0, 5), (1,), (2, 3, 0)):
            array = sample(datatype, shape)
            tensor, block = write_array(arena, "x", array, inline_limit=0)
            assert (block is None) == (tensor.handle is None) == (array.size == 0)
            peer.stdin.write(json.dumps(echo_peer.to_json(tensor)) + "\n")
            peer.stdin.flush()
            echo = echo_peer.from_json(json.loads(peer.stdout.readline()))
            back = reader.array(echo)
            assert (back.dtype, back.shape) == (DATATYPES[datatype], shape)
            assert (back == array).all()
            assert echo.handle is None or (
                echo.handle.arena != arena.id and (datatype == BYTES or not back.flags.writeable)
            )


def test_small_tensors_are_inline_and_hold_nothing(arena: Arena) -> None:
    tensor, block = write_array(arena, "x", np.arange(4, dtype=np.int32), inline_limit=16)
    assert (tensor.data, tensor.handle, block) == (np.arange(4, dtype=np.int32).tobytes(), None, None)
    tensor, block = write_array(arena, "x", np.arange(5, dtype=np.int32), inline_limit=16)
    assert tensor.data is None
    assert block is not None
    assert tensor.handle == block.handle
    assert tensor.byte_size == 20


@pytest.mark.parametrize(
    "array",
    [
        np.arange(20_000, dtype=">f8").reshape(100, 200),
        np.arange(20_000, dtype=np.float32).reshape(100, 200).T,
        np.arange(20_000, dtype=np.int16)[::-2],
        np.broadcast_to(np.float32(3), (100, 100)),
    ],
    ids=["big endian", "transposed", "strided", "broadcast"],
)
def test_any_layout_is_written_dense_and_little_endian(arena: Arena, reader: ArenaReader, array: Array) -> None:
    tensor, _ = write_array(arena, "x", array, inline_limit=0)
    assert tensor.handle is not None
    assert reader.view(tensor.handle) == bytes(encode_array(array))
    np.testing.assert_array_equal(reader.array(tensor), array)


def test_text_becomes_bytes(arena: Arena, reader: ArenaReader) -> None:
    tensor, _ = write_array(arena, "x", np.array(["a", "ü"]), inline_limit=0)
    assert reader.array(tensor).tolist() == [b"a", "ü".encode()]


def test_what_cannot_be_written_leaves_no_block(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidTensorError):
        write_array(arena, "x", np.array([1j]), inline_limit=0)
    with pytest.raises(InvalidTensorError):
        write_array(arena, "x", np.array([object()]), inline_limit=0)
    with pytest.raises(ResourceExhaustedError):
        write_array(arena, "x", np.zeros(5 << 20, np.uint8))
    monkeypatch.setattr(np, "copyto", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_array(arena, "x", np.zeros(1, np.uint8), inline_limit=0)
    assert (arena.leases, arena.leased_bytes) == (0, 0)
