"""The models that the suite talks to, written once: for a mesh of ours, or for a Triton with its Python backend.

`python -m tests.compat.repository FOLDER` writes the second kind; README.md beside this file says how to start a Triton
on it.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorline.tensor import DATATYPES

__all__ = ["DATATYPE_NAMES", "LABELS", "write_repository"]

DATATYPE_NAMES = tuple(DATATYPES)
LABELS = ("cat", "dog", "bird", "fish")
_TRITON_MODELS = Path(__file__).with_name("triton_models")


@dataclass(frozen=True)
class Entry:
    """One model.

    Args:
        kind: A backend of `stages.py` or a builtin one, and a file of `triton_models`; empty: an ensemble.
        config: All of config.pbtxt but the backend.
    """

    name: str
    kind: str
    config: str
    versions: Sequence[int] = (1,)
    files: Mapping[str, str] = field(default_factory=dict)


def _tensor(name: str, datatype: str, dims: str, extra: str = "") -> str:
    kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
    return f'{{ name: "{name}" data_type: {kind} dims: [ {dims} ] {extra} }}'


def _identity(
    name: str, datatype: str, dims: str, *, rows: int = 0, more: str = "", extra: str = "", **settings: Any
) -> Entry:
    config = (
        f"max_batch_size: {rows}\n"
        f"input [ {_tensor('x', datatype, dims)} ]\noutput [ {_tensor('y', datatype, dims, extra)} ]\n{more}"
    )
    return Entry(name, "identity", config, **settings)


def _ensemble(name: str, tensors: str, *steps: tuple[str, Mapping[str, str], Mapping[str, str]]) -> Entry:
    lines = ['platform: "ensemble"', tensors, "ensemble_scheduling {"]
    for model, taken, given in steps:
        lines.append(f'  step [ {{ model_name: "{model}" model_version: -1')
        lines += [f'    input_map {{ key: "{key}" value: "{value}" }}' for key, value in taken.items()]
        lines += [f'    output_map {{ key: "{key}" value: "{value}" }}' for key, value in given.items()]
        lines.append("  } ]")
    return Entry(name, "", "\n".join([*lines, "}"]))


_PAIR = f"input [ {_tensor('A', 'INT32', '16')}, {_tensor('B', 'INT32', '16')} ]"
_SERIES = f"input [ {_tensor('IN', 'INT32', '-1')}, {_tensor('DELAY', 'UINT32', '-1')} ]"
_RESPONSES = f"output [ {_tensor('OUT', 'INT32', '1')}, {_tensor('IDX', 'UINT32', '1')} ]"
_DECOUPLED = "model_transaction_policy { decoupled: true }"
_DELAY = "dynamic_batching { max_queue_delay_microseconds: 20000 }"

ENTRIES = (
    *(_identity(f"ident_{datatype}", datatype, "-1, -1") for datatype in DATATYPE_NAMES),
    *(_identity(f"line_{datatype}", datatype, "-1") for datatype in ("FP32", "INT64", "BYTES")),
    _identity("ident_b8", "FP32", "4", rows=8, more=_DELAY),
    _identity(
        "labelled", "FP32", "4", rows=8, extra='label_filename: "labels.txt"', files={"labels.txt": "\n".join(LABELS)}
    ),
    _identity("versioned", "FP32", "-1", versions=(1, 3), more="version_policy { all { } }"),
    _identity("spare", "FP32", "-1"),
    Entry(
        "mixed",
        "identity",
        f"input [ {_tensor('n', 'UINT32', '1, 1')}, {_tensor('s', 'BYTES', '1')} ]\n"
        f"output [ {_tensor('n_out', 'UINT32', '1, 1')}, {_tensor('s_out', 'BYTES', '1')} ]",
    ),
    Entry(
        "choosy",
        "identity",
        f"input [ {_tensor('x', 'FP32', '-1')}, {_tensor('extra', 'FP32', '-1', 'optional: true')} ]\n"
        f"output [ {_tensor('y', 'FP32', '-1')} ]",
    ),
    Entry(
        "simple",
        "addsub",
        f"max_batch_size: 8\n{_PAIR}\noutput [ {_tensor('SUM', 'INT32', '16')}, {_tensor('DIFF', 'INT32', '16')} ]",
    ),
    Entry("boom", "boom", f"input [ {_tensor('x', 'FP32', '-1')} ]\noutput [ {_tensor('y', 'FP32', '-1')} ]"),
    Entry(
        "parameters", "parameters", f"input [ {_tensor('x', 'FP32', '-1')} ]\noutput [ {_tensor('y', 'BYTES', '1')} ]"
    ),
    Entry("repeat", "repeat", f"{_SERIES}\n{_RESPONSES}\n{_DECOUPLED}"),
    _ensemble(
        "chain",
        f"input [ {_tensor('x', 'FP32', '-1')} ]\noutput [ {_tensor('y', 'FP32', '-1')} ]",
        ("line_FP32", {"x": "x"}, {"y": "between"}),
        ("spare_step", {"x": "between"}, {"y": "y"}),
    ),
    _identity("spare_step", "FP32", "-1"),
    _ensemble(
        "chain_repeat",
        f"{_SERIES}\n{_RESPONSES}",
        ("repeat", {"IN": "IN", "DELAY": "DELAY"}, {"OUT": "OUT", "IDX": "IDX"}),
    ),
)


def write_repository(folder: Path, *, is_triton: bool) -> None:
    for entry in ENTRIES:
        place = folder / entry.name
        backend = "python" if is_triton else entry.kind
        head = f'backend: "{backend}"\n' if entry.kind else ""
        for version in entry.versions:
            (place / str(version)).mkdir(parents=True)
            if is_triton and entry.kind:
                (place / str(version) / "model.py").write_text((_TRITON_MODELS / f"{entry.kind}.py").read_text())
        for name, text in entry.files.items():
            (place / name).write_text(text)
        (place / "config.pbtxt").write_text(head + entry.config + "\n")


if __name__ == "__main__":
    write_repository(Path(sys.argv[1]), is_triton=True)
