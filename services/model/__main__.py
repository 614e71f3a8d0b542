"""`python -m services.model`: the engines."""

from tensorline.stage.backend import Backends, Device, Instance, ModelDirectory
from tensorline.stage.main import run_stage


def onnxruntime(model: ModelDirectory, device: Device) -> Instance:
    from services.model.onnx import OnnxInstance

    return OnnxInstance(model, device)


BACKENDS: Backends = {"onnxruntime": onnxruntime}

if __name__ == "__main__":
    run_stage("model", BACKENDS)
