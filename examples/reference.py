"""The answers that the pipeline `classify` must give: Pillow, numpy and ONNX Runtime in a row, in one process.

`python -m examples.reference examples/photos/china.jpg`. Nothing of the services is used here.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as services/model/onnx.py says

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from PIL import Image, ImageOps

from examples.prepare import LABELS, MODEL

__all__ = ["Answer", "preprocess", "probabilities", "top_five"]

Answer = tuple[int, str, float]
"""Class, label, probability."""


def preprocess(photo: Path) -> NDArray[np.float32]:
    """FP32 [1, 3, 224, 224] in RGB: upright, short side 256, the middle, (x - 127) / 128."""
    with Image.open(photo) as file:
        image = ImageOps.exif_transpose(file).convert("RGB")
    factor = 256 / min(image.size)
    image = image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)
    left, top = (image.width - 224) // 2, (image.height - 224) // 2
    pixels = np.asarray(image.crop((left, top, left + 224, top + 224)), dtype=np.float32)
    return np.ascontiguousarray(((pixels - 127) / 128).transpose(2, 0, 1)[np.newaxis])


def probabilities(pixels: NDArray[np.float32], model: Path = MODEL) -> NDArray[np.float64]:
    """Of the 1000 classes, for each picture."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session: Any = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    logits = session.run(["logits"], {"pixels": pixels})[0].astype(np.float64)
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def top_five(photo: Path) -> list[Answer]:
    labels = LABELS.read_text().splitlines()
    scores = probabilities(preprocess(photo))[0]
    return [(int(index), labels[index], float(scores[index])) for index in np.argsort(-scores, kind="stable")[:5]]


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(path)
        for index, label, score in top_five(Path(path)):
            print(f"  {score:.4f}  {index:4d}  {label}")
