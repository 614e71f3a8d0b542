"""The example repository, step after step in this process, against the reference computation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.prepare import EXAMPLES
from examples.reference import probabilities, top_five
from services.model.onnx import OnnxInstance
from services.postprocess.classification import ClassificationInstance
from services.preprocess.image import ImageInstance
from tensorline.config.load import load_config
from tensorline.stage.backend import Instance, ModelDirectory
from tensorline.tensor import Array
from tests.services.heap_batch import CPU, HeapBatch, bytes_array

MODELS = EXAMPLES / "models"
KNOWN = {
    "china.jpg": ("palace", 0.31),
    "flower.jpg": ("daisy", 0.36),
    "chelsea.png": ("tiger cat", 0.39),
    "coffee.png": ("espresso", 0.95),
}
"""Best class and score, as another implementation of the network was measured to give them."""


def directory(name: str) -> ModelDirectory:
    return ModelDirectory(load_config(MODELS / name), 1, MODELS / name, MODELS / name / "1")


@pytest.fixture(scope="module")
def steps(photos: list[Path]) -> dict[str, Instance]:
    return {
        "photo_decode": ImageInstance(directory("photo_decode"), CPU),
        "efficientnet_lite0": OnnxInstance(directory("efficientnet_lite0"), CPU),
        "imagenet_labels": ClassificationInstance(directory("imagenet_labels"), CPU),
    }


def classify(steps: dict[str, Instance], files: list[bytes]) -> dict[str, Any]:
    """What the gateway does with `classify`: the tensors of the pipeline by name, step after step."""
    tensors: dict[str, Array] = {"image": bytes_array(*files)}
    for step in load_config(MODELS / "classify").steps:
        given = HeapBatch({name: tensors[tensor] for name, tensor in step.inputs.items()}, len(files))
        made = steps[step.model].execute(given)
        tensors |= {tensor: made[name] for name, tensor in step.outputs.items()}
    return {name: tensors[name].tolist() for name in ("class", "label", "score")}


def test_the_five_best_are_those_of_the_reference(steps: dict[str, Instance], photos: list[Path]) -> None:
    for photo in photos:
        answer = classify(steps, [photo.read_bytes()])
        classes, labels, scores = zip(*top_five(photo), strict=True)
        assert answer["class"] == [list(classes)]
        assert [label.decode() for label in answer["label"][0]] == list(labels)
        assert answer["score"][0] == pytest.approx(scores, abs=1e-4)


def test_the_best_is_what_the_network_is_known_for(steps: dict[str, Instance], photos: list[Path]) -> None:
    for photo in photos:
        answer = classify(steps, [photo.read_bytes()])
        label, score = KNOWN[photo.name]
        assert (answer["label"][0][0].decode(), answer["score"][0][0]) == (label, pytest.approx(score, abs=0.006))


def test_a_batch_of_photos_gives_each_its_own_answer(steps: dict[str, Instance], photos: list[Path]) -> None:
    together = classify(steps, [photo.read_bytes() for photo in photos])
    for row, photo in enumerate(photos):
        alone = classify(steps, [photo.read_bytes()])
        assert together["class"][row] == alone["class"][0]
        assert together["score"][row] == pytest.approx(alone["score"][0], abs=1e-5)


def test_the_pixels_are_those_of_the_reference_to_the_bit(steps: dict[str, Instance], photos: list[Path]) -> None:
    from examples.reference import preprocess

    for photo in photos:
        batch = HeapBatch({"image": bytes_array(photo.read_bytes())})
        np.testing.assert_array_equal(steps["photo_decode"].execute(batch)["pixels"], preprocess(photo))


def test_every_entry_of_the_repository_is_a_configuration() -> None:
    names = sorted(path.name for path in MODELS.iterdir() if path.is_dir())
    configs = {name: load_config(MODELS / name) for name in names}
    assert {name: config.backend or config.platform for name, config in configs.items()} == {
        "classify": "ensemble",
        "efficientnet_lite0": "onnxruntime",
        "imagenet_labels": "classification",
        "photo_decode": "image",
    }
    assert {config.max_batch_size for config in configs.values()} == {8}
    assert all(config.dynamic_batching is None for config in configs.values())


def test_the_reference_is_no_function_of_the_batch(photos: list[Path]) -> None:
    first, second = probabilities(np.zeros((2, 3, 224, 224), np.float32))
    np.testing.assert_allclose(first, second, atol=1e-6)
