"""The text of a config.pbtxt as a message, with errors that say where and what was probably meant."""

import difflib
import re

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import Descriptor

from tensorline.errors import ConfigError
from tensorline.protocol.pool import POOL
from tensorline.protocol.stubs.inference import model_config_pb2 as pb

__all__ = ["TEXT_LIMIT", "parse_config", "parse_config_json"]

TEXT_LIMIT = 1 << 20
"""Bytes of one config.pbtxt."""

_NO_FIELD = re.compile(r'Message type "(?P<type>[\w.]+)" has no field named "(?P<name>[^"]*)"')
_NO_JSON_VALUE = re.compile(
    r"Invalid enum value (?P<name>\S+) for enum type (?P<type>[\w.]+) at (?P<path>[\w.\[\]]+?)\.*$"
)
_NO_VALUE = re.compile(r'Enum type "(?P<type>[\w.]+)" has no value (?:named|with number) (?P<name>\S+?)\.?$')


def parse_config(text: str, source: str) -> pb.ModelConfig:
    """Parse protobuf text format.

    Args:
        source: What an error calls the text: "resnet/config.pbtxt".
    Raises:
        ConfigError: names `source`, the line, the field, and the nearest name that exists.
    """
    if len(text) > TEXT_LIMIT:
        raise ConfigError(f"{source} has {len(text)} characters, at most {TEXT_LIMIT} are read")
    try:
        return text_format.Parse(text, pb.ModelConfig(), descriptor_pool=POOL)
    except text_format.ParseError as err:
        line = err.GetLine()
        raise ConfigError(f"{source}{'' if line is None else f' line {line}'}: {_explained(err, text)}") from err
    except (RecursionError, ValueError, TypeError, LookupError, AttributeError) as err:  # of text_format, unlocated
        raise ConfigError(f"{source}: {str(err).replace('inference.', '')}") from err


def parse_config_json(text: str, source: str) -> pb.ModelConfig:
    """Parse the JSON form: field names as in the text form or in camel case, enum values by name.

    Raises:
        ConfigError: names `source`, the line of what is no JSON, the field, and the nearest name that exists.
    """
    if len(text) > TEXT_LIMIT:
        raise ConfigError(f"{source} has {len(text)} characters, at most {TEXT_LIMIT} are read")
    if not text.lstrip().startswith("{"):
        raise ConfigError(f"{source} is no JSON object")
    try:
        return json_format.Parse(text, pb.ModelConfig(), descriptor_pool=POOL)
    except (json_format.Error, RecursionError, ValueError, TypeError, LookupError, AttributeError) as err:
        raise ConfigError(f"{source}: {_explained_json(str(err))}") from err


def _explained_json(reason: str) -> str:
    if found := _NO_JSON_VALUE.search(reason):
        values = [value.name for value in POOL.FindEnumTypeByName(f"inference.{_short(found['type'])}").values]
        where = found["path"].partition(".")[2]
        return f"field '{where}': unknown value '{found['name']}' of {found['type']}{_nearest(found['name'], values)}"
    if found := _NO_FIELD.search(reason):
        message: Descriptor = POOL.FindMessageTypeByName(found["type"])
        names = [field.name for field in message.fields]
        return f"unknown field '{found['name']}' in {_short(found['type'])}{_nearest(found['name'], names)}"
    return reason.replace("inference.", "").replace("\n", " ").strip()


def _explained(err: text_format.ParseError, text: str) -> str:
    reason = re.sub(r"^\d+:\d+ : ", "", str(err))
    if found := _NO_FIELD.search(reason):
        message: Descriptor = POOL.FindMessageTypeByName(found["type"])
        names = [field.name for field in message.fields]
        return f"unknown field '{found['name']}' in {_short(found['type'])}{_nearest(found['name'], names)}"
    field = _field_before(text, err.GetLine(), err.GetColumn())
    if found := _NO_VALUE.search(reason):
        values = [value.name for value in POOL.FindEnumTypeByName(found["type"]).values]
        return f"{field}unknown value '{found['name']}' of {_short(found['type'])}{_nearest(found['name'], values)}"
    return field + re.sub(r"^'.*?': ", "", reason.replace("inference.", ""), flags=re.DOTALL).replace("\n", " ").strip()


def _short(full_name: str) -> str:
    return full_name.removeprefix("inference.")


def _nearest(name: str, valid: list[str]) -> str:
    by_case = {value.lower(): value for value in valid}
    close = difflib.get_close_matches(name.lower(), by_case, n=1, cutoff=0.5)
    if not close:  # "FP32" for TYPE_FP32
        close = [low for low in by_case if low.endswith("_" + name.lower())][:1]
    if close:
        return f"; did you mean '{by_case[close[0]]}'?"
    return f"; it has {', '.join(valid)}"


def _field_before(text: str, line: int | None, column: int | None) -> str:
    """`field 'data_type': `, which text_format leaves out of errors about a value."""
    lines = text.split("\n")
    if line is None or column is None or not 0 < line <= len(lines):
        return ""
    found = re.findall(r"([A-Za-z_]\w*)\s*[:{]", lines[line - 1][: column - 1])
    return f"field '{found[-1]}': " if found else ""
