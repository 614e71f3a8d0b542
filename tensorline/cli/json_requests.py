"""Requests written in JSON: in the form of the REST protocol, or simply the data by the input's name."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tensorline.cli.client import Request
from tensorline.cli.failure import UsageError
from tensorline.cli.inputs import Wanted, array_of, fit
from tensorline.protocol.infer import ParameterValue
from tensorline.tensor import DATATYPES, Array, element_count

__all__ = ["parameter_of", "request_of_json"]

REQUEST_KEYS: Final = frozenset({"id", "parameters", "inputs", "outputs"})
INPUT_KEYS: Final = frozenset({"name", "shape", "datatype", "parameters", "data"})
OUTPUT_KEYS: Final = frozenset({"name", "parameters"})
OF_REST: Final = frozenset({"binary_data", "binary_data_size", "binary_data_output"})
"""Parameters that say how REST carries the bytes; over gRPC they go one way."""


def request_of_json(value: Any, source: str, wanted: Sequence[Wanted]) -> Request:
    """
    Args:
        value: {"inputs": [{"name", "shape", "datatype", "data"}], …} or {name: data}.
        source: What a message calls the place where it stands.
        wanted: What the model takes; the data of the short form gets its datatypes and shapes.
    Raises:
        UsageError: another form, an unknown name, data that does not fit.
    Source: protocol.md §13.3.
    """
    if not isinstance(value, dict):
        raise UsageError(f"{source}: an object is wanted, {_kind(value)} is there")
    if isinstance(value.get("inputs"), list):
        return _whole(value, source)
    by_name = {one.name: one for one in wanted}
    arrays = {}
    for name, data in value.items():
        if name not in by_name:
            raise UsageError(f"{source}: {name!r} is no input; the model takes {', '.join(by_name) or 'nothing'}")
        one = Wanted(name, by_name[name].datatype, by_name[name].shape, f"{source}:")
        arrays[name] = fit(array_of(data, one), one)
    return Request(arrays)


def parameter_of(text: str) -> tuple[str, ParameterValue]:
    """A request parameter as it stands on the command line: NAME=VALUE, the value in JSON or else a text.

    Raises:
        UsageError: another form.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--parameter {text}: write NAME=VALUE")
    try:
        read = json.loads(value)
    except ValueError:
        read = value
    return name, _parameter(read if isinstance(read, bool | int | float | str) else value, f"--parameter {name}")


def _whole(value: Mapping[str, Any], source: str) -> Request:
    _check_keys(value, REQUEST_KEYS, source)
    arrays: dict[str, Array] = {}
    for number, one in enumerate(value["inputs"]):
        where = f"{source}: inputs[{number}]"
        name = _name(one, where, INPUT_KEYS)
        if name in arrays:
            raise UsageError(f"{where}: {name!r} is given twice")
        if _parameters(one, where):
            raise UsageError(f"{where}.parameters cannot be sent by this command; data is wanted")
        arrays[name] = _array(one, name, where)
    outputs = {}
    for number, one in enumerate(_list(value, "outputs", source)):
        where = f"{source}: outputs[{number}]"
        outputs[_name(one, where, OUTPUT_KEYS)] = _parameters(one, where)
    identity = value.get("id", "")
    if not isinstance(identity, str):
        raise UsageError(f"{source}: id is {_kind(identity)}, a string is wanted")
    return Request(arrays, outputs, _parameters(value, source), identity)


def _array(one: Mapping[str, Any], name: str, where: str) -> Array:
    """In the shape and datatype that are written, whether the model takes them or not: that is the server's to say."""
    for key in ("shape", "datatype", "data"):
        if key not in one:
            raise UsageError(f"{where} ({name}): {key} is missing")
    shape, datatype = one["shape"], one["datatype"]
    if datatype not in DATATYPES:
        raise UsageError(f"{where}.datatype is {datatype!r}; one of {', '.join(DATATYPES)} is wanted")
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise UsageError(f"{where}.shape is {json.dumps(shape)}; a list of sizes from 0 is wanted")
    array = array_of(one["data"], Wanted(name, datatype, tuple(shape), f"{where}:"))
    if array.size != element_count(shape):
        raise UsageError(
            f"{where} ({name}): data has {array.size} elements, shape {shape} wants {element_count(shape)}"
        )
    return np.reshape(array, shape)


def _name(one: Any, where: str, keys: frozenset[str]) -> str:
    if not isinstance(one, dict) or not isinstance(one.get("name"), str):
        raise UsageError(f"{where}: an object with a name is wanted")
    _check_keys(one, keys, where)
    return str(one["name"])


def _parameters(one: Mapping[str, Any], where: str) -> dict[str, ParameterValue]:
    found = one.get("parameters", {})
    if not isinstance(found, dict):
        raise UsageError(f"{where}.parameters is {_kind(found)}, an object is wanted")
    return {
        name: _parameter(value, f"{where}.parameters.{name}") for name, value in found.items() if name not in OF_REST
    }


def _parameter(value: Any, where: str) -> ParameterValue:
    if not isinstance(value, bool | int | float | str):
        raise UsageError(f"{where} is {_kind(value)}; a string, a number or a boolean is wanted")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise UsageError(f"{where} is {value}, which 64 bits do not hold")
    return value


def _list(value: Mapping[str, Any], key: str, where: str) -> list[Any]:
    found = value.get(key, [])
    if not isinstance(found, list):
        raise UsageError(f"{where}: {key} is {_kind(found)}, a list is wanted")
    return found


def _check_keys(value: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    for key in value.keys() - known:
        raise UsageError(f"{where}: {key!r} is not known; {', '.join(sorted(known))} are")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
