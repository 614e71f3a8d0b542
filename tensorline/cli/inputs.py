"""From what stands on the command line to the arrays that a model takes."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tensorline.cli.failure import UsageError
from tensorline.tensor import BYTES, DATATYPES, Array, datatype_of

__all__ = ["Wanted", "arrays_of", "fit", "read_value"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """An input as the model's metadata describes it; -1 stands for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def arrays_of(given: Sequence[str], file: Path | None, wanted: Sequence[Wanted]) -> dict[str, Array]:
    """
    Args:
        given: "name=value", "name=@file" or "name=@array.npy".
        file: Its bytes are the one element of the BYTES input that `given` leaves out.
    Returns:
        Array of each input, in the shape that the model takes.
    Raises:
        UsageError: an unknown or doubled name, a value that does not fit, a file that cannot be read.
    """
    by_name = {one.name: one for one in wanted}
    arrays: dict[str, Array] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--input {text}: write NAME=VALUE, NAME=@FILE or NAME=@ARRAY.npy")
        if name not in by_name:
            raise UsageError(f"--input {name}: the model takes {', '.join(by_name) or 'nothing'}")
        if name in arrays:
            raise UsageError(f"--input {name} is given twice")
        arrays[name] = fit(read_value(value, by_name[name]), by_name[name])
    if file is not None:
        open_ = [one for one in wanted if one.name not in arrays and one.datatype == BYTES]
        if len(open_) != 1:
            have = ", ".join(f"{one.name} {one.datatype} {list(one.shape)}" for one in wanted)
            raise UsageError(
                f"a file needs one BYTES input to go to, and the model takes {have}: use --input NAME=@FILE"
            )
        arrays[open_[0].name] = fit(np.array(_read(file), dtype=np.object_), open_[0])
    return arrays


def read_value(value: str, wanted: Wanted) -> Array:
    """An array of the wanted datatype, in the shape that is written.

    Raises:
        UsageError: a file that cannot be read, or text that is no value of that datatype.
    """
    if value.startswith("@@"):
        return _parsed(value[1:], wanted)
    if not value.startswith("@"):
        return _parsed(value, wanted)
    path = Path(value[1:])
    if path.suffix == ".npy":
        return _converted(_load(path), wanted)
    raw = _read(path)
    if wanted.datatype == BYTES:
        return np.array(raw, dtype=np.object_)
    return _parsed(raw.decode(errors="replace"), wanted)


def fit(array: Array, wanted: Wanted) -> Array:
    """The array in a shape that the model takes: as it is, with a batch of one in front, or filled in row by row.

    A single value fills the whole tensor.

    Raises:
        UsageError: no such shape has that many elements.
    """
    if _is_taken(array.shape, wanted.shape):
        return array
    if _is_taken((1, *array.shape), wanted.shape):
        return array[np.newaxis]
    free = [axis for axis, size in enumerate(wanted.shape) if size < 0]
    # Of several free dimensions the last one takes all elements; a lone value is one of each.
    shape = [1 if axis in free[:-1] else size for axis, size in enumerate(wanted.shape)]
    if array.size == 1:
        filled = np.empty([abs(size) for size in wanted.shape], dtype=array.dtype)
        # Not np.full: it makes an array of the value first, and one of bytes loses its trailing NULs.
        filled.reshape(-1)[:] = [array.reshape(-1)[0]] * filled.size
        return filled
    try:
        return array.reshape(shape)
    except ValueError:
        raise UsageError(
            f"--input {wanted.name}: a value of shape {list(array.shape)} does not fit {list(wanted.shape)}"
        ) from None


def _is_taken(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(want in (-1, have) for have, want in zip(shape, wanted, strict=True))


def _parsed(text: str, wanted: Wanted) -> Array:
    if wanted.datatype == BYTES:
        return _texts(text)
    try:
        value = json.loads(text)
    except ValueError:
        value = [word for word in re.split(r"[\s,]+", text) if word]
    try:
        # Words are numbers in any notation that Python reads; the list may be nested.
        array = np.array(value)
        if array.dtype.kind in "US":
            array = array.astype(np.float64)
    except ValueError:
        array = np.array(None)
    if array.dtype.kind not in "biuf":
        raise UsageError(f"--input {wanted.name}: {text[:60]!r} is no {wanted.datatype} value")
    return _converted(array, wanted)


def _texts(text: str) -> Array:
    """A JSON list of strings, else the text itself as the only element."""
    if text.startswith("["):
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        flat = np.array(value, dtype=np.object_)
        if value is not None and all(isinstance(element, str) for element in flat.reshape(-1)):
            return flat
    return np.array(text.encode(), dtype=np.object_)


def _converted(array: Array, wanted: Wanted) -> Array:
    """As the wanted datatype, when every value is one of it. Rounding to a shorter float is meant."""
    dtype = DATATYPES[wanted.datatype]
    if wanted.datatype == BYTES or array.dtype == dtype:
        if datatype_of(array.dtype) != wanted.datatype:
            raise UsageError(f"--input {wanted.name}: the array is {array.dtype}, {wanted.datatype} is wanted")
        return array
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
    if dtype.kind in "biu" and not np.array_equal(converted.astype(np.float64), array.astype(np.float64)):
        raise UsageError(f"--input {wanted.name}: not every value is a {wanted.datatype}")
    return converted


def _load(path: Path) -> Array:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{path} holds several arrays, one is wanted")
    return array


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
