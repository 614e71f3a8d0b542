"""Make the checked-in stubs from the .proto files: `make protos`.

Needs grpcio-tools 1.81.1 exactly (code of later ones is refused by protobuf 6) and mypy-protobuf. Two changes are made
to what protoc writes: imports point into our package, and files of package `inference` register in a pool of our own
(tensorline/protocol/pool.py says why).
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
STUBS = ROOT.parent / "tensorline" / "protocol" / "stubs"
PACKAGE = "tensorline.protocol.stubs"
POOL_LINE = "_descriptor_pool.Default()"


def main() -> None:
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        run = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{ROOT}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
        ]
        plugins = Path(sys.executable).parent
        run += [
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"--mypy_out={out}",
            f"--mypy_grpc_out={out}",
        ]
        subprocess.run([*run, *sources], check=True)
        shutil.rmtree(STUBS, ignore_errors=True)
        for made in sorted(out.rglob("*_pb2*.py*")):
            target = STUBS / made.relative_to(out)
            if made.suffix == ".py" and "_grpc" in made.name and "service " not in _source_of(made, out):
                continue  # an empty servicer file
            if made.name.endswith("_grpc.pyi") and "service " not in _source_of(made, out):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_adapted(made.read_text(), private_pool=made.parent.name == "inference"))
        for folder in [STUBS, *[path for path in STUBS.rglob("*") if path.is_dir()]]:
            (folder / "__init__.py").write_text("")
    print(f"wrote {sum(1 for _ in STUBS.rglob('*.py*'))} files")


def _source_of(made: Path, out: Path) -> str:
    stem = re.sub(r"_pb2(_grpc)?$", "", made.stem)
    return (ROOT / made.relative_to(out)).with_name(stem + ".proto").read_text()


def _adapted(text: str, *, private_pool: bool) -> str:
    packages = r"(inference|tensorline\.v1)"
    text = re.sub(rf"^from {packages} import ", rf"from {PACKAGE}.\1 import ", text, flags=re.MULTILINE)
    text = re.sub(rf"^import {packages}\.(\w+)", rf"import {PACKAGE}.\1.\2", text, flags=re.MULTILINE)
    text = re.sub(rf"(?<![\w.'\"/]){packages}\.(\w+_pb2)", rf"{PACKAGE}.\1.\2", text)
    if private_pool and POOL_LINE in text:
        text = text.replace(POOL_LINE, "POOL")
        text = text.replace(
            "from google.protobuf import descriptor_pool as _descriptor_pool\n",
            "from tensorline.protocol.pool import POOL\n",
        )
    return text


if __name__ == "__main__":
    main()
