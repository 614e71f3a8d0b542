"""The classification extension: an output's top classes as text in place of its numbers."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tensorline.errors import InvalidTensorError
from tensorline.tensor import BYTES, Array, Tensor, datatype_of, decode_array, encode_bytes_tensor

__all__ = ["ELEMENT_LIMIT", "classify", "classify_tensor"]

ELEMENT_LIMIT: Final = 1_000_000
"""Elements of an output that is classified."""


def classify_tensor(tensor: Tensor, count: int, labels: Sequence[str] = (), *, is_batched: bool) -> Tensor:
    """As `classify`, for a tensor that has its bytes at hand."""
    if tensor.data is None:
        raise ValueError(f"tensor '{tensor.name}' has no bytes to classify")
    if tensor.datatype == BYTES:
        raise _unsupported(BYTES)
    scores = decode_array(tensor.datatype, tensor.shape, tensor.data)
    found = classify(scores, count, labels, is_batched=is_batched)
    return Tensor(tensor.name, BYTES, found.shape, encode_bytes_tensor(found))


def classify(scores: Array, count: int, labels: Sequence[str] = (), *, is_batched: bool) -> NDArray[np.object_]:
    """The `count` largest scores of each batch item as `<value>:<index>[:<label>]`, largest first.

    Equal scores go by index, NaN comes last.

    Args:
        scores: [batch, ...], or [...] without batching; all but the batch dimension is flattened for the index.
        labels: Entry k names class k; an index beyond them has no label.
    Returns:
        Text of shape [batch, n] or [n], n the lesser of `count` and the classes there are.
    Raises:
        InvalidTensorError: FP16, BF16, BOOL or BYTES scores, or more than a million of them.
    Source: protocol.md §6.
    """
    if scores.dtype.kind not in "iuf" or scores.dtype == np.float16:
        raise _unsupported(datatype_of(scores.dtype))
    if scores.size > ELEMENT_LIMIT:
        raise InvalidTensorError(
            f"classification output tensor too large: {scores.size} elements, at most {ELEMENT_LIMIT} are classified"
        )
    items, item = (scores.shape[0], scores.shape[1:]) if is_batched and scores.ndim else (1, scores.shape)
    rows = scores.reshape(items, math.prod(item))
    n = min(count, rows.shape[1])
    found = np.empty((items, n), np.object_)
    for at, row in enumerate(rows):
        found[at] = [_text(row[index], int(index), labels) for index in _top(row, n)]
    return found if is_batched else found.reshape(n)


def _unsupported(datatype: str) -> InvalidTensorError:
    return InvalidTensorError(f"class result not available for output due to unsupported type '{datatype}'")


def _top(row: Array, n: int) -> NDArray[np.intp]:
    """Indexes of the n largest, in order; only what is needed is sorted."""
    keys = np.where(np.isnan(row), -np.inf, row) if row.dtype.kind == "f" else row
    if n == 0:
        return np.empty(0, np.intp)
    least = np.partition(keys, keys.size - n)[keys.size - n]
    above = np.flatnonzero(keys > least)
    chosen = np.sort(np.concatenate((above, np.flatnonzero(keys == least)[: n - above.size])))
    # A stable sort of the reversed keys, read backwards: descending, and equals keep their order.
    order = np.argsort(keys[chosen][::-1], kind="stable")[::-1]
    return chosen[chosen.size - 1 - order]


def _text(value: np.generic, index: int, labels: Sequence[str]) -> str:
    shown = f"{value:f}" if value.dtype.kind == "f" else str(value)
    return f"{shown}:{index}:{labels[index]}" if index < len(labels) else f"{shown}:{index}"
