"""Model repositories for tests: one folder for each stage process, one for the pipelines that the gateway runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorline.tensor import DATATYPES
from tests.e2e.mesh import STAGES, Service

__all__ = [
    "CHAIN",
    "DATATYPE_NAMES",
    "chain_repositories",
    "chain_services",
    "ensemble",
    "model",
    "tensor",
    "write",
    "write_chain",
]

DATATYPE_NAMES = [*DATATYPES]
CHAIN = ("pre", "mid", "post")
"""The processes of a chain, and the folders of their models."""


def tensor(name: str, datatype: str = "FP32", dims: str = "-1", extra: str = "") -> str:
    kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    return f'{{ name: "{name}" data_type: {kind} dims: [ {dims} ] {extra} }}'


def model(
    folder: Path,
    name: str,
    backend: str,
    *,
    datatype: str = "FP32",
    dims: str = "-1",
    inputs: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("y",),
    parameters: Mapping[str, str] | None = None,
    versions: Sequence[int] = (1,),
    batch: int = 0,
    text: str = "",
) -> None:
    """A model of `backend`, its tensors all alike; `text` is further configuration."""
    lines = [f'backend: "{backend}"', f"max_batch_size: {batch}", text]
    lines += [f"input [ {tensor(each, datatype, dims)} ]" for each in inputs]
    lines += [f"output [ {tensor(each, datatype, dims)} ]" for each in outputs]
    lines += [
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in (parameters or {}).items()
    ]
    write(folder / name, "\n".join(lines), versions)


def write(path: Path, config: str, versions: Sequence[int] = (1,)) -> None:
    path.mkdir(parents=True)
    (path / "config.pbtxt").write_text(config)
    for version in versions:
        (path / str(version)).mkdir()


def ensemble(
    folder: Path,
    name: str,
    steps: Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]],
    *,
    datatype: str = "FP32",
    dims: str = "-1",
    inputs: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("y",),
    version: int = -1,
    batch: int = 0,
) -> None:
    """A pipeline. Of each step: the model, its inputs' and its outputs' names in the pipeline."""
    lines = ['platform: "ensemble"', f"max_batch_size: {batch}"]
    lines += [f"input [ {tensor(each, datatype, dims)} ]" for each in inputs]
    lines += [f"output [ {tensor(each, datatype, dims)} ]" for each in outputs]
    lines.append("ensemble_scheduling {")
    for target, taken, given in steps:
        lines.append(f'  step [ {{ model_name: "{target}" model_version: {version}')
        lines += [f'    input_map {{ key: "{key}" value: "{value}" }}' for key, value in taken.items()]
        lines += [f'    output_map {{ key: "{key}" value: "{value}" }}' for key, value in given.items()]
        lines.append("  } ]")
    write(folder / name, "\n".join([*lines, "}"]))


def write_chain(
    root: Path,
    name: str,
    backend: str = "identity",
    *,
    datatype: str = "FP32",
    dims: str = "-1",
    parameters: Mapping[str, str] | None = None,
) -> None:
    """Pipeline `name` of three steps, one in each process of the chain."""
    for place in CHAIN:
        model(root / place, f"{name}_{place}", backend, datatype=datatype, dims=dims, parameters=parameters)
    names = ["x", "a", "b", "y"]
    steps = [(f"{name}_{place}", {"x": names[at]}, {"y": names[at + 1]}) for at, place in enumerate(CHAIN)]
    ensemble(root / "pipelines", name, steps, datatype=datatype, dims=dims)


def chain_services(root: Path, environ: Mapping[str, str] | None = None) -> dict[str, Service]:
    return {place: Service(STAGES, (place,), [root / place], environ or {}) for place in CHAIN}


def chain_repositories(root: Path) -> list[Path]:
    """The gateway's: all of them, so that it is ready when every model is."""
    return [root / place for place in (*CHAIN, "pipelines") if (root / place).is_dir()]
