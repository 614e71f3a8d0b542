"""Backend `classification`: the best classes of a row of scores.

The input is FP32, one score for each class. Outputs are told apart by their datatype, and each may be left out of the
configuration: INT64 the class, BYTES its label, FP32 its score; `top_k` of each, the best first.

Parameters in config.pbtxt: `top_k` (default: what the outputs' dims say), `labels` (a file in the model's directory,
one label on each line, needed for the BYTES output), `apply` (none, softmax or sigmoid: what makes them scores).

Equal scores stand in the order of their classes. A row with NaN is refused, and so is one of which softmax makes no
numbers (an infinite score, or nothing but minus infinity): a model that is broken should not look sure of itself.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tensorline.config.labels import read_labels
from tensorline.config.model import ModelConfig
from tensorline.errors import ConfigError, InvalidTensorError
from tensorline.stage.backend import Batch, Device, ModelDirectory
from tensorline.stage.builtin import Parameters, batched, input_array, is_wanted, only
from tensorline.tensor import BYTES, Array

__all__ = ["ClassificationInstance", "best_classes"]

ROLES: Final = {"INT64": "class", BYTES: "label", "FP32": "score"}
TOP_LIMIT: Final = 100_000
INSTANT_BYTES: Final = 8 << 10
"""Two rows of a thousand scores: about 100 us, what waking a thread costs."""

Scores = NDArray[np.float32]


class ClassificationInstance:
    def __init__(self, model: ModelDirectory, device: Device) -> None:
        config, p = model.config, Parameters(model.config)
        self._input = only(config.inputs, "input", "classification")
        self._input_shape = batched(config, self._input)
        if self._input.datatype != "FP32" or not self._input_shape:
            raise ConfigError(
                f"input '{self._input.name}' is {self._input.datatype}; backend 'classification' takes FP32"
            )
        self._names = _names_by_role(config)
        self._top_k = _top_k(config, p)
        self._apply = p.choice("apply", {"none": "none", "softmax": "softmax", "sigmoid": "sigmoid"}, "none")
        labels = p.text("labels", "")
        p.refuse_unknown()
        self._labels = _labels(model, labels) if labels else None
        self._label_array = np.array(self._labels or (), np.object_)
        classes = self._input_shape[-1]
        if self._labels is None and "label" in self._names:
            raise ConfigError(
                f"output '{self._names['label']}' needs parameter 'labels', a file in the model's directory"
            )
        if classes != -1 and self._top_k > classes:
            raise ConfigError(
                f"parameter 'top_k' is {self._top_k}, but input '{self._input.name}' has {classes} classes"
            )
        if classes != -1 and self._labels is not None and len(self._labels) != classes:
            raise ConfigError(f"'{labels}' has {len(self._labels)} labels for {classes} classes")
        self.instant_bytes = INSTANT_BYTES

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        scores: Any = input_array(batch, self._input.name, "FP32", self._input_shape)
        classes = scores.shape[-1]
        if classes < self._top_k or (self._labels is not None and len(self._labels) != classes):
            known = f"{len(self._labels)} labels" if self._labels is not None else f"a top_k of {self._top_k}"
            raise InvalidTensorError(f"input '{self._input.name}' has {classes} classes, the model has {known}")
        rows: Scores = scores.reshape(-1, classes)
        highest = rows.max(axis=1, keepdims=True) if rows.size else rows[:, :1]
        self._check(highest)
        best = np.empty((len(rows), self._top_k), np.int64)
        for index, row in enumerate(rows):
            best[index] = best_classes(row, self._top_k)
        made: dict[str, Array] = {"class": best}
        if "label" in self._names:
            made["label"] = self._label_array[best]
        if "score" in self._names:
            made["score"] = self._applied(rows, best, highest)
        # A few numbers for each row: not worth a block of the arena.
        shape = (*scores.shape[:-1], self._top_k)
        return {name: made[role].reshape(shape) for role, name in self._names.items() if is_wanted(batch, name)}

    def close(self) -> None:
        pass

    def _check(self, highest: Scores) -> None:
        """The maximum carries NaN with it, so it alone needs to be looked at."""
        bad = ~np.isfinite(highest) if self._apply == "softmax" else np.isnan(highest)
        if bad.any():
            row = int(bad.argmax())
            raise InvalidTensorError(f"input '{self._input.name}' has NaN or infinite scores in row {row}")

    def _applied(self, rows: Scores, best: NDArray[np.int64], highest: Scores) -> Scores:
        """The chosen scores as softmax or sigmoid makes them, without computing those of the other classes."""
        chosen: Scores = rows[np.arange(len(rows))[:, None], best]
        if self._apply == "softmax":
            return np.asarray(np.exp(chosen - highest) / np.exp(rows - highest).sum(axis=1, keepdims=True))
        if self._apply == "sigmoid":
            # exp of a negative number alone: no overflow at either end.
            small = np.exp(-np.abs(chosen))
            return np.asarray(np.where(chosen >= 0, 1 / (1 + small), small / (1 + small)))
        return chosen


def best_classes(scores: Scores, top_k: int) -> NDArray[np.int64]:
    """Indices of the `top_k` highest of a row without NaN, the highest first, equal ones by index.

    The k-th highest value is found in linear time and only what reaches it is sorted: 1000 scores take 18 us, not 50.
    """
    bound = np.partition(scores, -top_k)[-top_k]
    reach = np.flatnonzero(scores >= bound)
    order = np.argsort(-scores[reach], kind="stable")[:top_k]
    return reach[order]


def _names_by_role(config: ModelConfig) -> dict[str, str]:
    names: dict[str, str] = {}
    for output in config.outputs:
        role = ROLES.get(output.datatype)
        if role is None or role in names:
            raise ConfigError(
                f"output '{output.name}' is {output.datatype}; backend 'classification' gives at most one each of "
                "INT64 (class), BYTES (label) and FP32 (score)"
            )
        names[role] = output.name
    return names


def _top_k(config: ModelConfig, parameters: Parameters) -> int:
    sizes = {batched(config, output)[-1:] for output in config.outputs} - {(-1,)}
    if len(sizes) > 1 or () in sizes:
        raise ConfigError("the outputs' last dims differ; all of them are the number of classes wanted, 'top_k'")
    (fixed,) = next(iter(sizes), (1,))
    top_k = parameters.integer("top_k", fixed, 1, TOP_LIMIT)
    if sizes and top_k != fixed:
        raise ConfigError(f"parameter 'top_k' is {top_k}, but the outputs' dims end in {fixed}")
    return top_k


def _labels(model: ModelDirectory, filename: str) -> tuple[bytes, ...]:
    return tuple(label.encode() for label in read_labels(model.path, filename))
