"""Arrays that a model answered with, for people and for programs."""

import base64
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorline.cli.client import Answer
from tensorline.tensor import Array, datatype_of

__all__ = ["json_of", "json_of_answer", "print_answer", "print_outputs"]

ROWS = 20
"""Elements of a tensor that are shown."""
TEXT = 60
"""Characters of an element that are shown."""


def print_answer(console: Console, file: str, answer: Answer) -> None:
    """`file`: what the request was about; "" for nothing to tell."""
    about = f"{answer.model} {answer.version}"
    console.print(Text(f"{file} · {about}" if file else about, style="bold"))
    print_outputs(console, answer.outputs)


def json_of_answer(file: str, answer: Answer, traces: Sequence[Any]) -> dict[str, Any]:
    about: dict[str, Any] = {"file": file} if file else {}
    about |= {"id": answer.id} if answer.id else {}
    about |= {"model_name": answer.model, "model_version": answer.version}
    about |= {"outputs": [json_of(*output) for output in answer.outputs.items()]}
    return about | ({"traces": traces} if traces else {})


def print_outputs(console: Console, outputs: Mapping[str, Array]) -> None:
    """Tensors of one shape stand side by side: their elements with the same index belong together."""
    by_shape = sorted(outputs.items(), key=lambda item: item[1].shape)
    for shape, group in groupby(by_shape, key=lambda item: item[1].shape):
        size = int(np.prod(shape))
        told = f"shape {list(shape)}" + (f", the first {ROWS} of {size} elements" if size > ROWS else "")
        console.print(Text(told, style="dim"))
        console.print(_table(shape, dict(group)))


def _table(shape: tuple[int, ...], arrays: Mapping[str, Array]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("index", style="dim", justify="right")
    for name, array in arrays.items():
        is_text = array.dtype.kind == "O"
        table.add_column(Text(f"{name} {datatype_of(array.dtype)}"), justify="left" if is_text else "right")
    for row in range(min(int(np.prod(shape)), ROWS)):
        index = ",".join(str(part) for part in np.unravel_index(row, shape))
        table.add_row(index, *(Text(_shown(array.flat[row])) for array in arrays.values()))
    return table


def _shown(element: Any) -> str:
    if isinstance(element, bytes):
        text = _text(element)
        if text is None or not text.isprintable():
            return f"{len(element)} bytes"
        return text if len(text) <= TEXT else f"{text[:TEXT]}…"
    if isinstance(element, bool | np.bool_):
        return str(bool(element)).lower()
    if isinstance(element, int | np.integer):
        return str(element)
    return f"{float(element):.6g}"


def json_of(name: str, array: Array) -> dict[str, Any]:
    """In the form of the REST protocol: elements in row-major order. BYTES that are no text are in base64."""
    elements = array.reshape(-1).tolist()
    about: dict[str, Any] = {"name": name, "datatype": datatype_of(array.dtype), "shape": list(array.shape)}
    if array.dtype.kind == "O":
        texts = [_text(element) for element in elements]
        if None in texts:
            return about | {"encoding": "base64", "data": [base64.b64encode(element).decode() for element in elements]}
        return about | {"data": texts}
    return about | {"data": [float(element) for element in elements] if array.dtype.kind == "V" else elements}


def _text(element: bytes) -> str | None:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return None
