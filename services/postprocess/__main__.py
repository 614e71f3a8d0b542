"""`python -m services.postprocess`: tensors to answers."""

from tensorline.stage.backend import Backends, Device, Instance, ModelDirectory
from tensorline.stage.main import run_stage


def classification(model: ModelDirectory, device: Device) -> Instance:
    from services.postprocess.classification import ClassificationInstance

    return ClassificationInstance(model, device)


BACKENDS: Backends = {"classification": classification}

if __name__ == "__main__":
    run_stage("postprocess", BACKENDS)
