"""The inner half of a stage without a stream: an arena of its own and one of a peer, and requests made by hand."""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tensorline.rpc.frames import StageResult
from tensorline.shm import Arena, ArenaReader, open_directory
from tensorline.stage.backend import Batch
from tensorline.stage.batch import Plane
from tensorline.stage.execution import Executed
from tensorline.stage.request import StageRequest
from tensorline.tensor import Array, Tensor, datatype_of, decode_array, encode_array

__all__ = ["INLINE", "MIB", "Asked", "Function", "Place", "ask", "inline", "open_place"]

MIB = 1 << 20
INLINE = 64
"""Bytes that travel in the frame: small, so that small tensors have handles."""

Run = Callable[[Batch], Mapping[str, Array]]


class Function:
    """An instance that is one function."""

    def __init__(self, run: Run) -> None:
        self.execute = run
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def inline(name: str, array: Array) -> Tensor:
    return Tensor(name, datatype_of(array.dtype), array.shape, bytes(encode_array(array)))


@dataclass
class Place:
    arena: Arena
    peer: Arena
    """Of whoever sends the inputs."""
    reader: ArenaReader
    plane: Plane

    def put(self, name: str, array: Array) -> Tensor:
        """By handle: `array` in a block of the peer's."""
        raw = bytes(encode_array(array))
        block = self.peer.allocate(len(raw))
        block.view[:] = raw
        return Tensor(name, datatype_of(array.dtype), array.shape, None, block.handle)

    def put_rows(self, name: str, array: Array, rows: Sequence[int]) -> list[Tensor]:
        """By handle: neighbours in one block, with so many rows each."""
        whole = self.put(name, array)
        assert whole.handle is not None
        size, start, tensors = whole.byte_size // sum(rows), whole.handle.offset, []
        for count in rows:
            handle = whole.handle._replace(offset=start, length=count * size)
            tensors.append(Tensor(name, whole.datatype, (count, *array.shape[1:]), None, handle))
            start += count * size
        return tensors

    def arrays(self, result: StageResult) -> dict[str, Array]:
        """Copies of the outputs."""
        assert result.status == 0, result.error
        arrays: dict[str, Array] = {}
        for each in result.outputs:
            if each.handle is None:
                array = decode_array(each.datatype, each.shape, each.data or b"")
            else:
                array = self.reader.array(each)
            assert each.name not in arrays
            arrays[each.name] = np.array(array)
        return arrays

    def give_back(self, *executed: Executed) -> None:
        for one in executed:
            assert all(block.release() for block in one.blocks)


@contextmanager
def open_place(path: Path, arena_bytes: int = 4 * MIB) -> Iterator[Place]:
    directory = open_directory(path)
    with (
        Arena(directory, arena_bytes, first_segment_bytes=min(MIB, arena_bytes)) as arena,
        Arena(directory, MIB) as peer,
    ):
        reader = ArenaReader(directory)
        reader.attach(arena)
        yield Place(arena, peer, reader, Plane(arena, reader, INLINE))
        assert arena.leases == 0
        reader.close()


def exposed(place: Place) -> Place:
    return replace(place, plane=replace(place.plane, expose_model_errors=True))


def _unanswered(result: StageResult) -> None:
    raise AssertionError("an execution answers nobody")


def ask(
    *inputs: Tensor,
    rows: int = 1,
    outputs: tuple[str, ...] = (),
    request_id: str = "",
    deadline: float = math.inf,
    is_inline_only: bool = False,
    answer: Callable[[StageResult], None] = _unanswered,
    model: str = "m",
) -> StageRequest:
    return StageRequest(
        model, "", list(inputs), outputs, request_id, deadline, answer, is_inline_only=is_inline_only, rows=rows
    )


@dataclass
class Asked:
    """A request and its answers."""

    request: StageRequest = field(init=False)
    results: list[StageResult] = field(default_factory=list)
    _done: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(cls, *inputs: Tensor, deadline: float = math.inf, request_id: str = "", version: str = "") -> "Asked":
        asked = cls()
        asked.request = ask(*inputs, deadline=deadline, request_id=request_id, answer=asked._take)
        asked.request.version = version
        return asked

    def _take(self, result: StageResult) -> None:
        assert not self.results, "answered twice"
        self.results.append(result)
        self._done.set()

    async def result(self, within_s: float = 5.0) -> StageResult:
        async with asyncio.timeout(within_s):
            await self._done.wait()
        return self.results[0]
