"""Whatever a client sends is answered, or refused in words: 100,000 requests, and memory stays flat."""

import gc
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
from google.protobuf.message import DecodeError
from grpc import StatusCode

from gateway.validation import RequestChecker
from tensorline.config import config_from_text
from tensorline.errors import InternalError, TensorlineError
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.protocol.wire import LARGE, decode_request_wire

REQUESTS = 100_000
CHECKED_EVERY = 20_000
GROWTH = 16 << 20
"""Bytes that the process may grow by, after the first of five parts has warmed it up."""
ALLOWED = {StatusCode.OK, StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND, StatusCode.UNIMPLEMENTED}
DATATYPES = ("FP32", "INT64", "BYTES", "BOOL", "FP16", "UINT8", "fp32", "")
SIZES = (0, 1, 2, 4, 8, 9, -1, 1 << 31, 1 << 62, -(1 << 63), (1 << 63) - 1)
TEXTS = ("", "x", "z", "A", "r" * 200, "身份", "a\0b", "../..", "triton_x", "sequence_id", "shared_memory_region")
CONFIGS = {
    "line": 'backend: "identity" input [{name: "x" data_type: TYPE_FP32 dims: [-1]}] '
    'output [{name: "y" data_type: TYPE_FP32 dims: [-1]}]',
    "text": 'backend: "identity" input [{name: "x" data_type: TYPE_STRING dims: [-1, 2]}] '
    'output [{name: "y" data_type: TYPE_STRING dims: [-1, 2]}]',
    "batch": 'backend: "identity" max_batch_size: 8 '
    'input [{name: "A" data_type: TYPE_INT64 dims: [2]}, {name: "B" data_type: TYPE_BOOL dims: [-1] optional: true}] '
    'output [{name: "y" data_type: TYPE_INT64 dims: [2]}]',
}


def valid_requests() -> Iterator[Any]:
    """One of each form: raw, typed, batched, with every kind of parameter, and one that is taken apart on the wire."""
    line = pb.ModelInferRequest(model_name="line", id="r1")
    line.inputs.add(name="x", datatype="FP32", shape=[2])
    line.raw_input_contents.append(bytes(8))
    line.outputs.add(name="y")
    yield line
    big = pb.ModelInferRequest(model_name="line")
    big.inputs.add(name="x", datatype="FP32", shape=[LARGE // 4])
    big.raw_input_contents.append(bytes(LARGE))
    yield big
    typed = pb.ModelInferRequest(model_name="line", model_version="1")
    typed.inputs.add(name="x", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1, 2])
    yield typed
    text = pb.ModelInferRequest(model_name="text")
    text.inputs.add(name="x", datatype="BYTES", shape=[1, 2])
    text.raw_input_contents.append(b"\1\0\0\0a\0\0\0\0")
    yield text
    batch = pb.ModelInferRequest(model_name="batch")
    batch.inputs.add(name="A", datatype="INT64", shape=[1, 2])
    batch.inputs.add(name="B", datatype="BOOL", shape=[1, 3])
    batch.raw_input_contents.extend([bytes(16), bytes(3)])
    for key, value in (("a", {"bool_param": True}), ("timeout", {"int64_param": 5}), ("s", {"string_param": "t"})):
        batch.parameters[key].CopyFrom(pb.InferParameter(**value))
    batch.parameters["d"].double_param = 0.5
    batch.parameters["priority"].uint64_param = 1
    batch.outputs.add(name="y").parameters["classification"].int64_param = 1
    batch.inputs[0].parameters["shared_memory_region"].string_param = "region"
    batch.inputs[0].parameters["shared_memory_byte_size"].int64_param = 16
    yield batch


def change_field(message: Any, random: random.Random) -> None:
    """One field of the message, or of one inside it, gets another value, goes, or is there once more."""
    fields = message.DESCRIPTOR.fields
    field = random.choice(fields)
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        change_parameter(value[random.choice(TEXTS)], random)
    elif field.is_repeated:
        change_list(value, field, random)
    elif field.message_type is not None:
        value.SetInParent()
        change_field(value, random)
    else:
        setattr(message, field.name, scalar(field, random))


def change_list(values: Any, field: Any, random: random.Random) -> None:
    kind = random.randrange(4)
    if kind == 0 and values:
        del values[random.randrange(len(values))]
    elif field.message_type is not None:
        change_field(values[random.randrange(len(values))] if values and kind > 1 else values.add(), random)
    elif kind == 1 and values:
        values.extend(values[:50])
    else:
        values.append(scalar(field, random))


def change_parameter(parameter: Any, random: random.Random) -> None:
    field = random.choice(parameter.DESCRIPTOR.fields)
    setattr(parameter, field.name, scalar(field, random))


def scalar(field: Any, random: random.Random) -> Any:
    kind = field.type
    if kind == field.TYPE_STRING:
        return random.choice(DATATYPES if field.name == "datatype" else TEXTS)
    if kind == field.TYPE_BYTES:
        return random.randbytes(random.choice((0, 1, 4, 8, 16, 40)))
    if kind in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return random.choice((0.0, -1.5, float("inf"), float("nan"), 3e38))
    if kind == field.TYPE_BOOL:
        return random.random() < 0.5
    low, high = {
        field.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
        field.TYPE_UINT32: (0, (1 << 32) - 1),
        field.TYPE_UINT64: (0, (1 << 64) - 1),
    }.get(kind, (-(1 << 63), (1 << 63) - 1))
    return min(max(random.choice(SIZES), low), high)


def change_bytes(wire: bytes, random: random.Random) -> bytes:
    """A few bytes changed, cut out, put in twice, or put in from nowhere."""
    data = bytearray(wire)
    for _ in range(random.randint(1, 3)):
        at, kind = random.randrange(len(data) + 1), random.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            del data[at : at + random.randint(1, 8)]
        elif kind == 2:
            data[at:at] = data[at : at + random.randint(1, 64)]
        elif kind == 3:
            data[at:at] = random.randbytes(random.randint(1, 12))
        else:
            data[at:] = data[at : at + random.randint(1, 200)]
    return bytes(data)


def generated(seed: int) -> Iterator[bytes]:
    """Valid messages with changes in their fields, in their bytes, or in both."""
    rng = random.Random(seed)
    valid = list(valid_requests())
    wires = [message.SerializeToString() for message in valid]
    big = next(at for at, wire in enumerate(wires) if len(wire) > LARGE)
    while True:
        at = rng.randrange(len(valid))
        if at == big and rng.random() < 0.9:  # each costs as much as ten others
            continue
        wire = wires[at]
        if rng.random() < 0.6:
            message = pb.ModelInferRequest.FromString(wire)
            for _ in range(rng.randint(1, 4)):
                change_field(message, rng)
            wire = message.SerializeToString()
        if rng.random() < 0.5:
            wire = change_bytes(wire, rng)
        yield wire


def answer(wire: bytes, checkers: dict[str, RequestChecker]) -> StatusCode:
    """What a gateway does with it before a stage hears of it."""
    try:
        request = decode_request_wire(wire)
        checker = checkers.get(request.model)
        if checker is None:
            return StatusCode.NOT_FOUND
        checker.check(request)
    except InternalError as error:
        # Of bytes that are no message, and in Triton's words; else it stands out in the count.
        is_true = str(error) == "Unable to parse request" and not is_message(wire)
        return StatusCode.INTERNAL if is_true else StatusCode.UNKNOWN
    except TensorlineError as error:
        return error.status if str(error) else StatusCode.UNKNOWN
    return StatusCode.OK


def is_message(wire: bytes) -> bool:
    try:
        pb.ModelInferRequest.FromString(wire)
    except DecodeError:
        return False
    return True


def test_the_decoder_and_the_checker() -> None:
    checkers = {name: RequestChecker(config_from_text(text, name)) for name, text in CONFIGS.items()}
    process, sizes, codes = psutil.Process(), [], Counter[StatusCode]()
    for count, wire in zip(range(1, REQUESTS + 1), generated(3), strict=False):
        codes[answer(wire, checkers)] += 1
        if count % CHECKED_EVERY == 0:
            gc.collect()
            sizes.append(process.memory_info().rss)
    assert set(codes) <= ALLOWED | {StatusCode.INTERNAL}, codes
    assert all(codes[code] > REQUESTS // 100 for code in (StatusCode.OK, StatusCode.INVALID_ARGUMENT)), codes
    assert max(sizes[1:]) - sizes[0] < GROWTH, sizes
