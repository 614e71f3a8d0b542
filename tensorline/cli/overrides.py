"""Model configurations between the forms in which people have them and the one that a load takes: JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import FieldDescriptor

from tensorline.cli.failure import UsageError
from tensorline.cli.inputs import read_bytes
from tensorline.config.parse import parse_config
from tensorline.errors import ConfigError

__all__ = ["json_of_message", "read_config", "read_files", "text_of_config"]

LONG: Final = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def read_config(path: Path) -> str:
    """JSON for a load, from a file in JSON or in config.pbtxt's form.

    Raises:
        UsageError: it cannot be read, or is neither.
    """
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError:
        raise UsageError(f"--config {path} is no text") from None
    if text.lstrip().startswith("{"):
        try:
            json.loads(text)
        except ValueError as error:
            raise UsageError(f"--config {path} is no JSON: {error}") from None
        return text  # as it is: what it may hold is the server's to say
    try:
        return json.dumps(json_of_message(parse_config(text, f"--config {path}")))
    except ConfigError as error:
        raise UsageError(str(error)) from None


def read_files(texts: Sequence[str], *, has_config: bool) -> dict[str, bytes]:
    """
    Args:
        texts: "path=local", each.
    Raises:
        UsageError: another form, a path twice, a file that cannot be read, or files without a configuration.
    """
    files: dict[str, bytes] = {}
    for text in texts:
        path, equals, local = text.partition("=")
        if not equals or not path or not local:
            raise UsageError(f"--file {text}: write PATH=LOCAL, as 1/model.onnx=new.onnx")
        if path in files:
            raise UsageError(f"--file {path} is given twice")
        files[path] = read_bytes(Path(local))
    if files and not has_config:
        raise UsageError("--file needs --config: files take the place of the whole model directory")
    return files


def text_of_config(config: Any) -> str:
    """In the form of config.pbtxt."""
    return str(text_format.MessageToString(config))


def json_of_message(message: Any, with_defaults: bool = False) -> dict[str, Any]:
    """With the names of the fields, enums as their names and 64-bit integers as numbers. Source: model-config.md.

    Args:
        with_defaults: Also fields that are not set.
    """
    value = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=with_defaults
    )
    _to_numbers(value, message.DESCRIPTOR)
    return dict(value)


def _to_numbers(value: dict[str, Any], descriptor: Any) -> None:
    """protobuf writes 64-bit integers as strings, for readers that know floats alone."""
    for name, held in value.items():
        field = descriptor.fields_by_name[name]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _map_to_numbers(held, field.message_type.fields_by_name["value"])
        elif field.message_type is not None:
            for one in held if isinstance(held, list) else [held]:
                _to_numbers(one, field.message_type)
        elif field.cpp_type in LONG:
            value[name] = [int(one) for one in held] if isinstance(held, list) else int(held)


def _map_to_numbers(held: dict[str, Any], field: Any) -> None:
    for key, one in held.items():
        if field.message_type is not None:
            _to_numbers(one, field.message_type)
        elif field.cpp_type in LONG:
            held[key] = int(one)
