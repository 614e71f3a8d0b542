"""Arrays into an arena: a tensor that others can read, by one copy."""

from typing import Final

import numpy as np

from tensorline.shm.arena import Arena
from tensorline.shm.blocks import Block
from tensorline.tensor import BYTES, Array, Tensor, datatype_of, encode_array, encode_bytes_tensor

__all__ = ["INLINE_LIMIT", "write_array"]

INLINE_LIMIT: Final = 4096
"""Bytes up to which a tensor travels in its frame: a copy that is cheaper than a block, its lease and its release."""


def write_array(
    arena: Arena, name: str, array: Array, *, inline_limit: int = INLINE_LIMIT, timeout_s: float = 0.0
) -> tuple[Tensor, Block | None]:
    """A tensor with the elements of `array`, and the block that holds them; None when they are inline.

    The block has one reference, which is the caller's. Numbers are copied without the interpreter's lock, whatever
    their byte order and strides. May block: for an instance's thread, or for small arrays.

    Args:
        timeout_s: How long to wait for room in a full arena.
    Raises:
        InvalidTensorError: the protocol has no such datatype, or an element of BYTES is neither bytes nor text.
        ResourceExhaustedError: the arena is full.
    """
    datatype, shape = datatype_of(array.dtype), array.shape
    raw = encode_bytes_tensor(array) if datatype == BYTES else None
    byte_size = array.nbytes if raw is None else len(raw)
    if byte_size <= inline_limit or byte_size == 0:
        data = bytes(encode_array(array)) if raw is None else raw
        return Tensor(name, datatype, shape, data=data), None
    block = arena.allocate_blocking(byte_size, timeout_s)
    try:
        if raw is None:
            np.copyto(block.array(datatype, shape), array)
        else:
            np.copyto(np.frombuffer(block.view, np.uint8), np.frombuffer(raw, np.uint8))
    except BaseException:
        block.release()
        raise
    return Tensor(name, datatype, shape, handle=block.handle), block
