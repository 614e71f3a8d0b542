"""Made-up inputs, to try a model without having data for it."""

from collections.abc import Sequence

import numpy as np

from tensorline.cli.failure import UsageError
from tensorline.cli.inputs import Wanted
from tensorline.tensor import BYTES, DATATYPES, Array

__all__ = ["parse_shapes", "random_array"]

INTEGERS = 100
LETTERS = 8
ELEMENTS = 1 << 28
"""More would be a slip of the finger."""


def parse_shapes(texts: Sequence[str], wanted: Sequence[Wanted]) -> dict[str, tuple[int, ...]]:
    """
    Args:
        texts: "name:1,3,224,224", or the sizes alone where the model takes one input.
    Raises:
        UsageError: another form, an unknown or doubled name, sizes that the model does not take.
    """
    by_name = {one.name: one for one in wanted}
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, colon, sizes = text.rpartition(":")
        if not colon and len(wanted) == 1:
            name = wanted[0].name
        if name not in by_name:
            have = ", ".join(by_name) or "nothing"
            raise UsageError(f"--shape {text}: write NAME:SIZE,SIZE…; the model takes {have}")
        if name in shapes:
            raise UsageError(f"--shape {name} is given twice")
        shape = tuple(_size(size, text) for size in sizes.split(",") if size)
        expected = by_name[name].shape
        fits = len(shape) == len(expected) and all(
            want in (-1, have) for have, want in zip(shape, expected, strict=True)
        )
        if not fits:
            raise UsageError(f"--shape {text}: the model takes {list(expected)}, where -1 is any size")
        shapes[name] = shape
    return shapes


def random_array(wanted: Wanted, shape: tuple[int, ...] | None, generator: np.random.Generator) -> Array:
    """Floats from 0 to 1, integers from 0 to 99, words of eight letters; unless `shape` is given, a batch of one.

    Raises:
        UsageError: some other size is for the user to choose, or the whole is huge.
    """
    if shape is None:
        if -1 in wanted.shape[1:]:
            raise UsageError(
                f"--random: {wanted.name} has the shape {list(wanted.shape)}; choose sizes with "
                f"--shape {wanted.name}:{','.join('N' if size < 0 else str(size) for size in wanted.shape)}"
            )
        shape = tuple(1 if size < 0 else size for size in wanted.shape)
    count = int(np.prod(shape, dtype=object)) if shape else 1
    if count > ELEMENTS:
        raise UsageError(f"--shape {wanted.name}: {count} elements are more than the {ELEMENTS} that are made up")
    return _values(wanted.datatype, count, generator).reshape(shape)


def _values(datatype: str, count: int, generator: np.random.Generator) -> Array:
    if datatype == BYTES:
        words = generator.integers(ord("a"), ord("z") + 1, (count, LETTERS), np.uint8)
        return np.array([None, *(word.tobytes() for word in words)], dtype=np.object_)[1:]
    if datatype == "BOOL":
        return generator.integers(0, 2, count).astype(np.bool_)
    dtype = DATATYPES[datatype]
    if dtype.kind in "iu":
        return generator.integers(0, INTEGERS, count).astype(dtype)
    return generator.random(count, np.float32).astype(dtype)


def _size(text: str, whole: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) < 19:
        return int(text)
    raise UsageError(f"--shape {whole}: {text!r} is no size")
