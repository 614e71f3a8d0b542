"""The gateway's side of the tensor plane: clients' big inputs into its arena, results out of the stages' arenas."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from gateway.mesh import Mesh
from gateway.regions import RequestRegions
from tensorline.errors import InternalError, InvalidTensorError
from tensorline.rpc.connection import StageConnection
from tensorline.shm import Arena, ArenaReader
from tensorline.tensor import BYTES, Handle, Tensor, expected_byte_size

__all__ = ["GatewayPlane"]

OFF_LOOP_BYTES = 1 << 20
"""A copy of this size or more is made in a thread: the loop has others to serve meanwhile."""

TEXTS_OFF_LOOP_BYTES = 1 << 16
"""As `OFF_LOOP_BYTES`, of BYTES tensors in a region: their elements are looked at one by one."""

ARENA_WAIT_S = 1.0

T = TypeVar("T")


class GatewayPlane:
    def __init__(self, arena: Arena, reader: ArenaReader, mesh: Mesh, inline_bytes: int) -> None:
        self._arena = arena
        self._reader = reader
        self._mesh = mesh
        self._inline_bytes = inline_bytes

    def needs_placing(self, tensors: list[Tensor]) -> bool:
        """Some tensor is too big for a frame, and a stage is there that can read our arena."""
        limit = self._inline_bytes
        return any(t.data is not None and len(t.data) > limit for t in tensors) and self._mesh.has_near

    async def place(self, tensor: Tensor, patience_s: float) -> Tensor:
        """The tensor in our arena, with one reference that the request's ledger gives back.

        Args:
            patience_s: What is left of the request's time: no longer is waited for room.
        Raises:
            ResourceExhaustedError: the arena is full and nobody made room.
        """
        data = tensor.data
        if data is None or len(data) <= self._inline_bytes:
            return tensor
        block = await self._arena.allocate_or_wait(len(data), max(0.0, min(ARENA_WAIT_S, patience_s)))
        target, source = np.frombuffer(block.view, np.uint8), np.frombuffer(data, np.uint8)
        if len(data) < OFF_LOOP_BYTES:
            np.copyto(target, source)
        else:
            # Slice assignment to an mmap keeps the GIL; this does not.
            copying = asyncio.ensure_future(asyncio.to_thread(np.copyto, target, source))
            try:
                await asyncio.shield(copying)
            except BaseException:
                # The thread writes on: until it is done nobody else may have the block.
                copying.add_done_callback(lambda _: block.release())
                raise
        return Tensor(tensor.name, tensor.datatype, tensor.shape, None, block.handle)

    async def place_region(self, tensor: Tensor, regions: RequestRegions, patience_s: float) -> Tensor:
        """As `place`, of an input in its client's shared memory, which goes straight into our arena.

        Raises:
            ResourceExhaustedError: as `place`.
            InvalidTensorError: the client made its memory shorter, or there is no such BYTES tensor in it.
        """
        size = regions.inputs[tensor.name].byte_size
        is_slow = size >= (TEXTS_OFF_LOOP_BYTES if tensor.datatype == BYTES else OFF_LOOP_BYTES)
        if size <= self._inline_bytes or not self._mesh.has_near:
            data = memoryview(bytearray(size))
            await _maybe_in_thread(is_slow, lambda: regions.read(tensor, data))
            return Tensor(tensor.name, tensor.datatype, tensor.shape, bytes(data) if not is_slow else data)
        block = await self._arena.allocate_or_wait(size, max(0.0, min(ARENA_WAIT_S, patience_s)))
        try:
            await _maybe_in_thread(is_slow, lambda: regions.read(tensor, block.view))
        except BaseException:
            block.release()
            raise
        return Tensor(tensor.name, tensor.datatype, tensor.shape, None, block.handle)

    async def fetch(self, tensors: list[Tensor], regions: RequestRegions | None = None) -> list[Tensor]:
        """The tensors with their bytes in hand, for an answer to a client.

        Those in `regions` are written there, straight out of the stage's arena, and have no bytes then.

        Raises:
            StaleHandleError: the stage freed a block meanwhile.
            InternalError: a stage sent more or fewer bytes than it declared, or the client gave too little room.
            InvalidTensorError: the client made its memory shorter.
        """
        fetched = []
        for tensor in tensors:
            _check_size(tensor)
            handle = tensor.handle
            if regions is not None and tensor.name in regions.outputs:
                is_slow = tensor.byte_size >= OFF_LOOP_BYTES
                await _maybe_in_thread(is_slow, self._writer(tensor, regions))
                fetched.append(Tensor(tensor.name, tensor.datatype, tensor.shape, b""))
            elif handle is None:
                fetched.append(tensor)
            else:
                data = (
                    await asyncio.to_thread(self._read, handle)
                    if handle.length >= OFF_LOOP_BYTES
                    else self._read(handle)
                )
                fetched.append(Tensor(tensor.name, tensor.datatype, tensor.shape, data))
        return fetched

    def _writer(self, tensor: Tensor, regions: RequestRegions) -> Callable[[], None]:
        def write() -> None:
            handle = tensor.handle
            if handle is None:
                regions.write(tensor.name, tensor.data or b"")
            else:
                regions.write(tensor.name, self._reader.view(handle))
                self._reader.check(handle)

        return write

    def _read(self, handle: Handle) -> bytes:
        data = bytes(self._reader.view(handle))
        self._reader.check(handle)
        return data

    def carried(self, tensors: list[Tensor], to: StageConnection) -> list[Tensor]:
        """As `to` can take them: handles where it reads our arenas, else the bytes."""
        if to.is_colocated:
            return tensors
        return [
            tensor
            if tensor.handle is None
            else Tensor(tensor.name, tensor.datatype, tensor.shape, self._read(tensor.handle))
            for tensor in tensors
        ]

    def give_back(self, handle: Handle) -> None:
        """Tell the block's owner that this request is done with it."""
        if handle.arena == self._arena.id:
            self._arena.release(handle.block, handle.generation)
            return
        owner = self._mesh.owner(handle.arena)
        if owner is not None:
            owner.release((handle,))


async def _maybe_in_thread(is_slow: bool, work: Callable[[], T]) -> T:
    """`work`, to its end also when the caller is cancelled: the memory that it touches is another's after that."""
    if not is_slow:
        return work()
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        if not working.cancelled():
            working.exception()  # nobody is left to be told
        raise


def _check_size(tensor: Tensor) -> None:
    try:
        wanted = expected_byte_size(tensor.datatype, tensor.shape)
    except InvalidTensorError as error:
        raise InternalError(f"output '{tensor.name}': {error}") from error
    if wanted is not None and tensor.byte_size != wanted:
        raise InternalError(f"output '{tensor.name}' came with {tensor.byte_size} bytes, its shape takes {wanted}")
