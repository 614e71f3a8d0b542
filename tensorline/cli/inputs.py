"""From text and files to the array that an input of a model takes."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from tensorline.cli.failure import UsageError
from tensorline.tensor import BYTES, DATATYPES, Array, datatype_of

__all__ = ["Wanted", "array_of", "fit", "load_arrays", "read_bytes", "read_value"]

SHOWN = 60
"""Characters of a value that a message repeats."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An input as the model's metadata describes it; -1 stands for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    given_by: str = "--input"
    """What a message calls the place that the value comes from."""

    def wrong(self, text: str) -> UsageError:
        return UsageError(f"{self.given_by} {self.name}: {text}")


def read_value(value: str, wanted: Wanted) -> Array:
    """An array of the wanted datatype, in the shape that is written.

    Args:
        value: Text, "@file", "@array.npy", or "@@text" for text that begins with an @.
    Raises:
        UsageError: a file that cannot be read, or text that is no value of that datatype.
    """
    if value.startswith("@@"):
        return _parsed(value[1:], wanted)
    if not value.startswith("@"):
        return _parsed(value, wanted)
    path = Path(value[1:])
    if path.suffix == ".npy":
        return array_of(load_arrays(path)[""], wanted)
    raw = read_bytes(path)
    if wanted.datatype == BYTES:
        return np.array(raw, dtype=np.object_)
    try:
        return _parsed(raw.decode(), wanted)
    except UnicodeDecodeError:
        raise wanted.wrong(
            f"{path} is no text, and the model takes {wanted.datatype}: .npy holds such values"
        ) from None


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
        raise wanted.wrong(f"a value of shape {list(array.shape)} does not fit {list(wanted.shape)}") from None


def _is_taken(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(want in (-1, have) for have, want in zip(shape, wanted, strict=True))


def _parsed(text: str, wanted: Wanted) -> Array:
    if wanted.datatype == BYTES:
        return _texts(text)
    try:
        value = json.loads(text)
    except ValueError:
        # Words are numbers in any notation that Python reads; the list may be nested.
        value = [word for word in re.split(r"[\s,]+", text) if word]
    return array_of(value, wanted, text)


def _texts(text: str) -> Array:
    """A JSON list of strings, else the text itself as the only element."""
    if text.startswith("["):
        try:
            return _strings(json.loads(text))
        except ValueError:
            pass
    return np.array(text.encode(), dtype=np.object_)


def _strings(value: Any) -> Array:
    """
    Raises:
        ValueError: it holds something else, or its rows differ in length.
    """
    flat = np.array(value, dtype=np.object_)
    if not all(isinstance(element, str) for element in flat.reshape(-1)):
        raise ValueError("not all are strings")
    return flat


def array_of(value: Any, wanted: Wanted, written: str | None = None) -> Array:
    """What JSON or numpy holds, as an array of the wanted datatype, when every value is one of it.

    Rounding to a shorter float is meant.

    Args:
        written: `value` as the user wrote it.
    Raises:
        UsageError: some value is not.
    """
    if wanted.datatype == BYTES and not isinstance(value, np.ndarray):
        try:
            return _strings(value)
        except ValueError:
            raise wanted.wrong(f"{_shown(value)} is no {BYTES} value: strings are wanted") from None
    try:
        array = np.array(value)
        if array.dtype.kind in "US" and wanted.datatype != BYTES:
            array = array.astype(np.float64)
    except (ValueError, OverflowError):
        array = np.array(None)
    if array.dtype.kind not in "biufSUV" and not (wanted.datatype == BYTES and array.dtype.kind == "O"):
        raise wanted.wrong(f"{_shown(value if written is None else written)} is no {wanted.datatype} value")
    return _converted(array, wanted)


def _converted(array: Array, wanted: Wanted) -> Array:
    dtype = DATATYPES[wanted.datatype]
    is_text = array.dtype.kind in "SUO"
    if wanted.datatype == BYTES or is_text or array.dtype == dtype:
        if datatype_of(array.dtype) != wanted.datatype:
            raise wanted.wrong(f"the array is {array.dtype}, {wanted.datatype} is wanted")
        return array.astype(np.object_) if is_text else array
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
    if dtype.kind in "biu" and not np.array_equal(converted.astype(np.float64), array.astype(np.float64)):
        raise wanted.wrong(f"not every value is a {wanted.datatype}: {_shown(array.tolist())}")
    return converted


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")


def load_arrays(path: Path) -> dict[str, Array]:
    """What a .npy or .npz file holds, by name; the name of the only one in a .npy is "".

    Raises:
        UsageError: it cannot be read, or needs code to be (pickles).
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"": loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def read_bytes(path: Path) -> bytes:
    """
    Raises:
        UsageError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
