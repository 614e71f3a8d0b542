"""The wire contract: our stubs against the published client's descriptors, and both of them in one process."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor

from tensorline.protocol import stubs
from tensorline.protocol.pool import POOL
from tensorline.protocol.stubs.inference import grpc_service_pb2, model_config_pb2

published_service: ModuleType = pytest.importorskip("tritonclient.grpc.service_pb2")
published_config: ModuleType = pytest.importorskip("tritonclient.grpc.model_config_pb2")


def enum_rows(enum: EnumDescriptor) -> dict[str, str]:
    return {f"{enum.full_name}.{value.name}": str(value.number) for value in enum.values}


def field_row(field: FieldDescriptor) -> str:
    target = field.message_type or field.enum_type
    oneof = field.containing_oneof.name if field.containing_oneof else ""
    many = "repeated " if field.is_repeated else ""
    return f"{field.number} {many}{field.type} {target.full_name if target else ''} {oneof}".strip()


def message_rows(message: Descriptor) -> dict[str, str]:
    rows = {message.full_name: "map entry" if message.GetOptions().map_entry else "message"}
    rows |= {f"{message.full_name}.{field.name}": field_row(field) for field in message.fields}
    for enum in message.enum_types:
        rows |= enum_rows(enum)
    for nested in message.nested_types:
        rows |= message_rows(nested)
    return rows


def file_rows(file: FileDescriptor) -> dict[str, str]:
    """Every message, field, enum value and method of a file by its full name."""
    rows: dict[str, str] = {}
    for message in file.message_types_by_name.values():
        rows |= message_rows(message)
    for enum in file.enum_types_by_name.values():
        rows |= enum_rows(enum)
    for service in file.services_by_name.values():
        for method in service.methods:
            streams = f"{method.client_streaming} {method.server_streaming}"
            rows[method.full_name] = f"{method.input_type.full_name} {method.output_type.full_name} {streams}"
    return rows


@pytest.mark.parametrize(
    ("ours", "published"), [(grpc_service_pb2, published_service), (model_config_pb2, published_config)]
)
def test_both_have_the_same_messages_fields_and_methods(ours: ModuleType, published: ModuleType) -> None:
    mine, theirs = file_rows(ours.DESCRIPTOR), file_rows(published.DESCRIPTOR)
    missing = sorted(theirs.keys() - mine.keys())
    extra = sorted(mine.keys() - theirs.keys())
    changed = {name: (mine[name], theirs[name]) for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]}
    assert (missing, extra, changed) == ([], [], {})
    assert len(mine) > 150


def test_our_files_are_in_our_own_pool() -> None:
    assert grpc_service_pb2.DESCRIPTOR.pool is POOL
    folder = Path(stubs.__file__).parent / "inference"
    sources = [
        path
        for path in folder.glob("*_pb2.py")
        if "Default()" in path.read_text().replace("_symbol_database.Default()", "")
    ]
    assert sources == []


TOGETHER = """
import {first}
import {second}
from tensorline.protocol.stubs.inference import grpc_service_pb2 as ours
from tritonclient.grpc import service_pb2 as theirs
message = theirs.ModelInferRequest(model_name="m", id="1", raw_input_contents=[b"ab"])
message.inputs.add(name="x", datatype="UINT8", shape=[2])
message.parameters["k"].double_param = 0.5
assert ours.ModelInferRequest.FromString(message.SerializeToString()).parameters["k"].double_param == 0.5
assert ours.ModelInferRequest.DESCRIPTOR is not theirs.ModelInferRequest.DESCRIPTOR
"""
OURS, THEIRS = "tensorline.protocol.stubs.inference.grpc_service_pb2_grpc", "tritonclient.grpc"


@pytest.mark.parametrize(("first", "second"), [(OURS, THEIRS), (THEIRS, OURS)])
def test_both_live_in_one_process(first: str, second: str) -> None:
    script = TOGETHER.format(first=first, second=second)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
