"""A stage service with the models of `repository.py` that are not builtin: what `triton_models` are for a Triton."""

import json
from collections.abc import Mapping

import numpy as np

from tensorline.errors import BackendError
from tensorline.stage.backend import Backends, Batch, Device, ModelDirectory
from tensorline.stage.main import run_stage
from tensorline.tensor import Array


class Stage:
    """Keeps nothing."""

    def __init__(self, model: ModelDirectory, device: Device) -> None:
        self.output = model.config.outputs[0].name

    def close(self) -> None:
        pass


class AddSub(Stage):
    def execute(self, batch: Batch) -> Mapping[str, Array]:
        a, b = (batch.inputs[name].astype(np.int32, copy=False) for name in "AB")
        return {"SUM": a + b, "DIFF": a - b}


class Boom(Stage):
    def execute(self, batch: Batch) -> Mapping[str, Array]:
        (x,) = batch.inputs.values()
        if (x.astype(np.float32, copy=False) < 0).any():
            raise BackendError("bad row")
        return {self.output: x}


class Parameters(Stage):
    def execute(self, batch: Batch) -> Mapping[str, Array]:
        told = {"id": batch.request_ids[0], "parameters": dict(batch.parameters[0])}
        return {self.output: np.array([json.dumps(told, sort_keys=True).encode()], np.object_)}


BACKENDS: Backends = {"addsub": AddSub, "boom": Boom, "parameters": Parameters}

if __name__ == "__main__":
    run_stage("stages", BACKENDS)
