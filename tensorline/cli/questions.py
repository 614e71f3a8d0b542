"""From what `tensorline infer` was told to the requests that it sends."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorline.cli.client import Request
from tensorline.cli.failure import UsageError
from tensorline.cli.inputs import Wanted, array_of, fit, load_arrays, read_bytes, read_value
from tensorline.cli.json_requests import parameter_of, request_of_json
from tensorline.cli.random_inputs import parse_shapes, random_array
from tensorline.tensor import BYTES, Array

__all__ = ["Question", "questions_of"]

ARRAYS: Final = (".npy", ".npz")


@dataclass(frozen=True, slots=True)
class Question:
    """What stands on the command line besides the model and where it is."""

    files: Sequence[Path] = ()
    """Of each goes what it holds, in a request of its own."""
    inputs: Sequence[str] = ()
    """ "name=value", "name=@file" or "name=@array.npy"; in every request."""
    data: Sequence[str] = ()
    """JSON, or "@file" of it; a request of each."""
    outputs: Sequence[str] = ()
    parameters: Sequence[str] = ()
    """ "name=value", the value in JSON or a text."""
    shapes: Sequence[str] = ()
    is_random: bool = False
    """What is left of the inputs is made up."""
    seed: int | None = None


def questions_of(question: Question, wanted: Sequence[Wanted]) -> Iterator[tuple[str, Request]]:
    """Each request with what it is about: a file's name, or "".

    Raises:
        UsageError: an unknown or doubled name, a value that does not fit, a file that cannot be read.
    """
    shapes = parse_shapes(question.shapes, wanted)
    generator = np.random.default_rng(question.seed)
    given = _given(question.inputs, wanted)
    parameters = dict(parameter_of(text) for text in question.parameters)
    for about, request in _sources(question, given, wanted):
        inputs = _joined(given, request.inputs, about)
        for one in wanted:
            if one.name not in inputs and (question.is_random or one.name in shapes):
                inputs[one.name] = random_array(one, shapes.get(one.name), generator)
        outputs = {**request.outputs, **{name: {} for name in question.outputs}}
        yield about, replace(request, inputs=inputs, outputs=outputs, parameters={**request.parameters, **parameters})


def _sources(question: Question, given: Mapping[str, Array], wanted: Sequence[Wanted]) -> Iterator[tuple[str, Request]]:
    """Each request with what its own source says."""
    for file in question.files:
        if file.suffix == ".json":
            yield from _documents(_text(file), str(file), wanted)
        else:
            open_ = [one for one in wanted if one.name not in given]
            yield str(file), Request(_of_file(file, open_, wanted))
    for number, text in enumerate(question.data, 1):
        is_file = text.startswith("@")
        # What is the only request has no name: there is nothing to tell it from.
        about = text[1:] if is_file else f"--data[{number}]" if len(question.data) > 1 else ""
        yield from _documents(_text(Path(text[1:])) if is_file else text, about, wanted)
    if not question.files and not question.data:
        yield "", Request({})


def _documents(text: str, about: str, wanted: Sequence[Wanted]) -> Iterator[tuple[str, Request]]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{about or '--data'} is no JSON: {error}") from None
    documents = value if isinstance(value, list) else [value]
    for number, document in enumerate(documents, 1):
        what = f"{about or '--data'}[{number}]" if len(documents) > 1 else about
        yield what, request_of_json(document, what or "--data", wanted)


def _given(texts: Sequence[str], wanted: Sequence[Wanted]) -> dict[str, Array]:
    by_name = {one.name: one for one in wanted}
    arrays: dict[str, Array] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--input {text}: write NAME=VALUE, NAME=@FILE or NAME=@ARRAY.npy")
        if name not in by_name:
            raise UsageError(f"--input {name}: the model takes {', '.join(by_name) or 'nothing'}")
        if name in arrays:
            raise UsageError(f"--input {name} is given twice")
        arrays[name] = fit(read_value(value, by_name[name]), by_name[name])
    return arrays


def _of_file(file: Path, open_: Sequence[Wanted], wanted: Sequence[Wanted]) -> dict[str, Array]:
    if file.suffix not in ARRAYS:
        one = _only([each for each in open_ if each.datatype == BYTES], f"{file} needs one BYTES input", wanted)
        return {one.name: fit(np.array(read_bytes(file), dtype=np.object_), one)}
    arrays = load_arrays(file)
    if file.suffix == ".npy":
        arrays = {_only(open_, f"{file} needs one input", wanted).name: arrays[""]}
    by_name = {one.name: replace(one, given_by=str(file)) for one in wanted}
    for name in arrays:
        if name not in by_name:
            raise UsageError(f"{file} holds {name!r}, and the model takes {', '.join(by_name) or 'nothing'}")
    return {name: fit(array_of(array, by_name[name]), by_name[name]) for name, array in arrays.items()}


def _only(candidates: Sequence[Wanted], what: str, wanted: Sequence[Wanted]) -> Wanted:
    if len(candidates) == 1:
        return candidates[0]
    have = ", ".join(f"{one.name} {one.datatype} {list(one.shape)}" for one in wanted) or "nothing"
    raise UsageError(f"{what} to go to, and the model takes {have}: use --input NAME=@FILE")


def _joined(given: Mapping[str, Array], own: Mapping[str, Array], about: str) -> dict[str, Any]:
    doubled = given.keys() & own.keys()
    if doubled:
        raise UsageError(f"--input {min(doubled)} is given a second time by {about or '--data'}")
    return {**given, **own}


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no JSON: it is no text") from None
