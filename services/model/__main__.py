"""`python -m services.model`: the engines."""

from tensorline.config import ModelConfig
from tensorline.stage.backend import Backends, Device, Instance, ModelDirectory
from tensorline.stage.main import run_stage


class Onnxruntime:
    def __call__(self, model: ModelDirectory, device: Device) -> Instance:
        from services.model.onnx import OnnxInstance

        return OnnxInstance(model, device)

    def complete(self, model: ModelDirectory) -> ModelConfig:
        from services.model.onnx import complete

        return complete(model)


BACKENDS: Backends = {"onnxruntime": Onnxruntime()}

if __name__ == "__main__":
    run_stage("model", BACKENDS)
