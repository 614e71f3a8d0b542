"""The classification backend: the best classes, their labels and scores."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.postprocess.classification import ClassificationInstance, best_classes
from tensorline.errors import ConfigError, InvalidTensorError
from tests.services.heap_batch import CPU, HeapBatch, model, parameters, tensor


def config(top_k: int = 2, classes: int = 4, batch: int = 8, **values: object) -> str:
    outputs = [tensor("class", "INT64", top_k), tensor("label", "BYTES", top_k), tensor("score", "FP32", top_k)]
    return f"""backend: "classification" max_batch_size: {batch} input [ {tensor("scores", "FP32", classes)} ]
        output [ {", ".join(outputs)} ] {parameters(**{"labels": "labels.txt", **values})}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "labels.txt").write_text("tench\ncrane\nhüpf\ncrane\n", encoding="utf-8")
    return tmp_path


def run(folder: Path, scores: Any, outputs: tuple[str, ...] = (), text: str | None = None) -> dict[str, Any]:
    array = np.asarray(scores, np.float32)
    backend = ClassificationInstance(model(text or config(), folder), CPU)
    result = backend.execute(HeapBatch({"scores": array}, len(array), outputs))
    return {name: value.tolist() for name, value in result.items()}


def test_the_best_come_first_with_label_and_score(folder: Path) -> None:
    assert run(folder, [[0.1, 0.9, 0.5, 0.0], [4, 3, 2, 8]]) == {
        "class": [[1, 2], [3, 0]],
        "label": [[b"crane", "hüpf".encode()], [b"crane", b"tench"]],
        "score": [[pytest.approx(0.9), pytest.approx(0.5)], [8, 4]],
    }


def test_equal_scores_stand_in_the_order_of_their_classes(folder: Path) -> None:
    assert run(folder, [[1, 7, 7, 7], [0, 0, 0, 0]])["class"] == [[1, 2], [0, 1]]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.data())
def test_best_classes_is_a_stable_descending_sort(values: list[int], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(values)))
    expected = sorted(range(len(values)), key=lambda index: (-values[index], index))[:top_k]
    assert best_classes(np.array(values, np.float32), top_k).tolist() == expected


def test_softmax_and_sigmoid(folder: Path) -> None:
    logits = np.array([[1000.0, 1001.0, -1000.0, -np.inf]], np.float32)
    exponentials = np.exp([-1.0, 0.0])
    assert run(folder, logits, text=config(apply="softmax"))["score"][0] == pytest.approx(
        sorted(exponentials / exponentials.sum(), reverse=True)
    )
    assert run(folder, [[0, 200, -200, 1]], text=config(top_k=4, apply="sigmoid"))["score"][0] == pytest.approx(
        [1, 0.7310586, 0.5, 0]
    )


@pytest.mark.parametrize(
    ("apply", "row"),
    [
        ("none", [0, np.nan, 1, 2]),
        ("sigmoid", [0, np.nan, 1, 2]),
        ("softmax", [0, np.nan, 1, 2]),
        ("softmax", [0, np.inf, 1, 2]),
        ("softmax", [-np.inf] * 4),
    ],
)
def test_a_row_that_is_no_scores_is_refused(folder: Path, apply: str, row: list[float]) -> None:
    with pytest.raises(InvalidTensorError, match=r"^input 'scores' has NaN or infinite scores in row 1$"):
        run(folder, [[0, 1, 2, 3], row], text=config(apply=apply))


def test_infinite_scores_have_an_order_too(folder: Path) -> None:
    assert run(folder, [[-np.inf, np.inf, 0, 1]])["class"] == [[1, 3]]


def test_outputs_may_be_left_out_and_bear_any_name(folder: Path) -> None:
    text = f"""backend: "classification" input [ {tensor("logits", "FP32", -1)} ]
        output [ {tensor("which", "INT64", 3)} ]"""
    backend = ClassificationInstance(model(text, folder), CPU)
    result = backend.execute(HeapBatch({"logits": np.array([3, 1, 2], np.float32)}))
    assert {name: value.tolist() for name, value in result.items()} == {"which": [0, 2, 1]}
    with pytest.raises(InvalidTensorError, match=r"^input 'logits' has 2 classes, the model has a top_k of 3$"):
        backend.execute(HeapBatch({"logits": np.zeros(2, np.float32)}))


def test_labels_hold_for_a_number_of_classes_that_is_only_known_then(folder: Path) -> None:
    with pytest.raises(InvalidTensorError, match=r"^input 'scores' has 3 classes, the model has 4 labels$"):
        run(folder, [[1, 2, 3]], text=config(classes=-1))


def test_more_leading_dimensions(folder: Path) -> None:
    text = f"""backend: "classification" max_batch_size: 2 input [ {tensor("s", "FP32", 3, 4)} ]
        output [ {tensor("c", "INT64", 3, 1)} ]"""
    scores = np.eye(4, dtype=np.float32)[[[0, 1, 2], [3, 2, 1]]]
    result = ClassificationInstance(model(text, folder), CPU).execute(HeapBatch({"s": scores}, 2))
    assert result["c"].tolist() == [[[0], [1], [2]], [[3], [2], [1]]]


@pytest.mark.parametrize("name", ["../secret.txt", "/etc/passwd", "link.txt", "sub/../../secret.txt"])
def test_labels_outside_of_the_model_directory_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.txt").write_text("a\nb\nc\nd\n")
    inside = tmp_path / "m"
    inside.mkdir()
    (inside / "link.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ConfigError, match="outside the model's directory"):
        ClassificationInstance(model(config(labels=name), inside), CPU)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (config(labels="none.txt"), "label file 'none.txt' does not exist"),
        (config(classes=5), "'labels.txt' has 4 labels for 5 classes"),
        (config(top_k=6), "parameter 'top_k' is 6, but input 'scores' has 4 classes"),
        (config(top_k=3) + parameters(top_k=2), "parameter 'top_k' is 2, but the outputs' dims end in 3"),
        (config(apply="Softmax"), "parameter 'apply' is 'Softmax'; allowed: none, softmax, sigmoid"),
        (config(topk=2), "parameter 'topk' is not one of backend 'classification'; did you mean 'top_k'?"),
        (config().replace("labels.txt", ""), "output 'label' needs parameter 'labels'"),
        (config().replace("TYPE_FP32 dims: [2]", "TYPE_FP32 dims: [3]"), "the outputs' last dims differ"),
        (
            config().replace("TYPE_INT64", "TYPE_INT32"),
            "output 'class' is INT32; backend 'classification' gives at most",
        ),
        (config().replace("TYPE_INT64", "TYPE_FP32"), "output 'score' is FP32; backend 'classification' gives at most"),
        (config().replace("TYPE_FP32 dims: [4]", "TYPE_FP64 dims: [4]"), "takes FP32"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_at_load(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClassificationInstance(model(text, folder), CPU)
    assert message in str(caught.value)
