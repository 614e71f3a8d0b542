"""The gateway's side of the tensor plane: clients' big inputs into its arena, results out of the stages' arenas."""

import asyncio

import numpy as np

from gateway.mesh import Mesh
from tensorline.errors import InternalError, InvalidTensorError
from tensorline.rpc.connection import StageConnection
from tensorline.shm import Arena, ArenaReader
from tensorline.tensor import Handle, Tensor, expected_byte_size

__all__ = ["GatewayPlane"]

OFF_LOOP_BYTES = 1 << 20
"""A copy of this size or more is made in a thread: the loop has others to serve meanwhile."""

ARENA_WAIT_S = 1.0


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

    async def fetch(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors with their bytes in hand, for an answer to a client.

        Raises:
            StaleHandleError: the stage freed a block meanwhile.
            InternalError: a stage sent more or fewer bytes than it declared.
        """
        fetched = []
        for tensor in tensors:
            _check_size(tensor)
            handle = tensor.handle
            if handle is None:
                fetched.append(tensor)
            else:
                data = (
                    await asyncio.to_thread(self._read, handle)
                    if handle.length >= OFF_LOOP_BYTES
                    else self._read(handle)
                )
                fetched.append(Tensor(tensor.name, tensor.datatype, tensor.shape, data))
        return fetched

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


def _check_size(tensor: Tensor) -> None:
    try:
        wanted = expected_byte_size(tensor.datatype, tensor.shape)
    except InvalidTensorError as error:
        raise InternalError(f"output '{tensor.name}': {error}") from error
    if wanted is not None and tensor.byte_size != wanted:
        raise InternalError(f"output '{tensor.name}' came with {tensor.byte_size} bytes, its shape takes {wanted}")
