"""A stage of your own in ten lines: `python examples/stages/shout.py` serves backend `shout`.

Its model stands in a repository like any other: `examples/stages/models/shout/config.pbtxt`.
"""

from collections.abc import Mapping

import numpy as np

from tensorline.stage.backend import Batch, Device, ModelDirectory
from tensorline.stage.main import run_stage
from tensorline.tensor import Array


class Shout:
    def __init__(self, model: ModelDirectory, device: Device) -> None:
        self.ending = model.config.parameters.get("ending", "!").encode()

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        loud = [word.upper() + self.ending for word in batch.inputs["text"].ravel().tolist()]
        return {"loud": np.array(loud, dtype=object).reshape(batch.inputs["text"].shape)}

    def close(self) -> None:
        pass


if __name__ == "__main__":
    run_stage("shout", {"shout": Shout})
