"""Blocks of an arena and the table of those that live: no lock, no waiting."""

import secrets
from dataclasses import dataclass
from typing import Final, Protocol

from tensorline.shm.allocator import Allocator, block_size
from tensorline.shm.layout import GENERATION, HEADER_BYTES, LENGTH, MAGIC, WORD_BYTES, magic_of
from tensorline.tensor import Array, Handle, decode_array

__all__ = ["Block", "BlockTable"]

GENERATION_LIMIT: Final = 1 << 64


class Owner(Protocol):
    """What a block needs of its arena."""

    @property
    def id(self) -> bytes: ...

    @property
    def memory(self) -> memoryview: ...

    def release(self, block_offset: int, generation: int) -> bool: ...


@dataclass(slots=True, eq=False)
class Block:
    """A piece of an arena, allocated by its owner and valid until its last reference is released.

    `offset` is where its header lies, `byte_size` the bytes of its payload.
    """

    arena: Owner
    offset: int
    byte_size: int
    generation: int
    size: int
    """Bytes that it takes in the arena."""
    references: int = 1

    @property
    def handle(self) -> Handle:
        """Of the whole payload."""
        return Handle(self.arena.id, self.offset, self.offset + HEADER_BYTES, self.byte_size, self.generation)

    @property
    def view(self) -> memoryview:
        """The payload, writable. It is not zeroed: whoever hands the block out has written every byte."""
        start = self.offset + HEADER_BYTES
        return self.arena.memory[start : start + self.byte_size]

    def array(self, datatype: str, shape: tuple[int, ...]) -> Array:
        """The payload as a writable array (BYTES: a copy of its elements).

        Raises:
            InvalidTensorError: unknown datatype, or the byte size does not fit the shape.
        """
        return decode_array(datatype, shape, self.view)

    def slice(self, start: int, length: int) -> Handle:
        """Of `length` bytes from `start` in the payload: one request's rows.

        Raises:
            ValueError: it does not lie in the payload.
        """
        if start < 0 or length < 0 or start + length > self.byte_size:
            raise ValueError("a slice reaches out of its block")
        return Handle(self.arena.id, self.offset, self.offset + HEADER_BYTES + start, length, self.generation)

    def release(self) -> bool:
        """Give one reference back."""
        return self.arena.release(self.offset, self.generation)


class BlockTable:
    """The live blocks and their headers. The caller sees to it that one thread at a time is in here."""

    def __init__(self, arena: Owner) -> None:
        self.leased_bytes = 0
        self._arena = arena
        self._words = arena.memory.cast("Q")
        self._magic = magic_of(arena.id)
        self._space = Allocator()
        self._live: dict[int, Block] = {}
        # Random, so that a handle of an earlier life fits nothing even if every other field does.
        self._generation = secrets.randbits(62)

    def __len__(self) -> int:
        return len(self._live)

    def add(self, start: int, size: int) -> None:
        """Hand over new space."""
        self._space.add(start, size)

    def missing(self, byte_size: int, end: int) -> int:
        """Bytes to `add` at `end`, where the space ends now, before a block of `byte_size` fits; 0 when it does."""
        size = block_size(byte_size)
        return 0 if self._space.is_free(size) else size - self._space.free_before(end)

    def take(self, byte_size: int) -> Block | None:
        """A block with one reference and a generation that no other has; None when there is no space."""
        size = block_size(byte_size)
        offset = self._space.take(size)
        if offset is None:
            return None
        self._generation = generation = (self._generation + 1) % GENERATION_LIMIT or 1
        word, words = offset // WORD_BYTES, self._words
        words[word + MAGIC] = self._magic
        words[word + LENGTH] = byte_size
        words[word + GENERATION] = generation
        self.leased_bytes += size
        block = self._live[offset] = Block(self._arena, offset, byte_size, generation, size)
        return block

    def find(self, offset: int, generation: int) -> Block | None:
        """The live block of that name."""
        block = self._live.get(offset)
        return block if block is not None and block.generation == generation else None

    def free(self, block: Block) -> None:
        """From here on its handles are stale."""
        del self._live[block.offset]
        self._words[block.offset // WORD_BYTES + GENERATION] = 0  # before the space can be used again
        self._space.give(block.offset, block.size)
        self.leased_bytes -= block.size
