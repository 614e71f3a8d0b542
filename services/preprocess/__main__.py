"""`python -m services.preprocess`: bytes to tensors."""

from tensorline.stage.backend import Backends, Device, Instance, ModelDirectory
from tensorline.stage.main import run_stage


def image(model: ModelDirectory, device: Device) -> Instance:
    from services.preprocess.image import ImageInstance  # Pillow: not before a model of this backend loads

    return ImageInstance(model, device)


BACKENDS: Backends = {"image": image}

if __name__ == "__main__":
    run_stage("preprocess", BACKENDS)
