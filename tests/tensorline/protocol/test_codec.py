"""Requests and responses over the wire forms, raw and typed."""

import contextlib
import math
import struct
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tensorline.errors import InvalidTensorError, TensorlineError
from tensorline.protocol.codec import decode_request, encode_response
from tensorline.protocol.contents import decode_contents, encode_contents, varint
from tensorline.protocol.infer import InferResponse, Limits, RequestedOutput
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.tensor import DATATYPES, Tensor, encode_array, encode_bytes_tensor

Contents = pb.InferTensorContents
Input = pb.ModelInferRequest.InferInputTensor


def request(*inputs: Input, raw: tuple[bytes, ...] = (), **fields: str) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(model_name="m", inputs=inputs, raw_input_contents=raw, **fields)  # type: ignore[arg-type]


def typed(name: str, datatype: str, *shape: int, **contents: object) -> Input:
    return Input(name=name, datatype=datatype, shape=shape, contents=Contents(**contents))  # type: ignore[arg-type]


def plain(name: str = "x", datatype: str = "UINT8", *shape: int) -> Input:
    return Input(name=name, datatype=datatype, shape=shape or (2,))


def test_a_raw_request() -> None:
    message = request(plain(), plain("s", "BYTES", 1), raw=(b"ab", b"\0\0\0\0", b"surplus"), id="é1", model_version="3")
    message.parameters["k"].int64_param = 7
    message.parameters["priority"].int64_param = 2
    message.outputs.add(name="y")
    message.outputs.add(name="z").parameters["classification"].int64_param = 3
    decoded = decode_request(message)
    assert (decoded.model, decoded.version, decoded.id) == ("m", "3", "é1")
    assert decoded.inputs == [Tensor("x", "UINT8", (2,), b"ab"), Tensor("s", "BYTES", (1,), b"\0\0\0\0")]
    assert type(decoded.inputs[0].data) is bytes
    assert decoded.outputs == [RequestedOutput("y"), RequestedOutput("z", 3)]
    assert (decoded.parameters, decoded.options.priority, decoded.is_typed) == ({"k": 7}, 2, False)


EDGES: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("bool_contents", [True, False]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 65535]),
    "UINT32": ("uint_contents", [128, 2**32 - 1]),
    "UINT64": ("uint64_contents", [2**53 + 1, 2**64 - 1]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-32768, 32767]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1]),
    "FP32": ("fp32_contents", [1.5, -math.inf]),
    "FP64": ("fp64_contents", [0.1, 5e-324]),
}


@pytest.mark.parametrize(("datatype", "field", "values"), [(d, f, v) for d, (f, v) in EDGES.items()])
def test_typed_contents_both_ways(datatype: str, field: str, values: list[object]) -> None:
    decoded = decode_request(request(typed("x", datatype, 2, **{field: values})))
    raw = np.array(values, DATATYPES[datatype]).tobytes()
    assert decoded.inputs == [Tensor("x", datatype, (2,), raw)]
    assert decoded.is_typed
    answer = encode_response(InferResponse("m", "1", "", decoded.inputs), is_typed=True)
    assert list(getattr(answer.outputs[0].contents, field)) == values
    assert len(answer.raw_output_contents) == 0


@pytest.mark.parametrize("count", [0, 1, 31, 32, 127, 128, 5000])
@pytest.mark.parametrize("datatype", ["BOOL", "FP32", "FP64", "INT16"])
def test_typed_contents_of_any_length(datatype: str, count: int) -> None:
    field, values = EDGES[datatype]
    values = [values[index % 2] for index in range(count)]
    raw = np.array(values, DATATYPES[datatype]).tobytes()
    assert decode_contents("x", "m", datatype, Contents(**{field: values})) == raw
    assert list(getattr(encode_contents(datatype, raw), field)) == values


ODD_BYTES = [b"a\0b", b"\0\0", b"", b"\xff\xfe\x00", "café".encode()]


def test_bytes_that_are_no_text_in_both_forms() -> None:
    raw = encode_bytes_tensor(np.array(ODD_BYTES, object))
    as_raw = decode_request(request(plain("s", "BYTES", 5), raw=(raw,)))
    as_typed = decode_request(request(typed("s", "BYTES", 5, bytes_contents=ODD_BYTES)))
    assert as_raw.inputs == as_typed.inputs == [Tensor("s", "BYTES", (5,), raw)]
    answer = encode_response(InferResponse("m", "1", "", as_typed.inputs), is_typed=True)
    assert list(answer.outputs[0].contents.bytes_contents) == ODD_BYTES
    assert encode_response(InferResponse("m", "1", "", as_raw.inputs)).raw_output_contents[0] == raw


def test_narrow_integers_keep_their_low_bits() -> None:
    decoded = decode_request(request(typed("x", "INT8", 2, int_contents=[300, -129])))
    assert decoded.inputs[0].data == bytes([44, 127])


def test_present_but_empty_contents_are_no_bytes() -> None:
    assert decode_request(request(typed("x", "FP16", 0))).inputs[0].data == b""


def test_a_repeated_list_is_one_list() -> None:
    """A client may send a packed list in pieces, or unpacked; after parsing that is no longer to be seen."""
    pieces = b"".join(b"\x32\x04" + struct.pack("<f", value) for value in (1, 2)) + b"\x35" + struct.pack("<f", 3)
    contents = Contents.FromString(pieces + b"\xfa\x01\x03odd")
    assert decode_contents("x", "m", "FP32", contents) == struct.pack("<3f", 1, 2, 3)


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        (
            request(plain(), typed("q", "UINT8", 1, uint_contents=[1]), raw=(b"ab",)),
            InvalidTensorError,
            "contents field must not be specified when using raw_input_contents for input tensor 'q' for model 'm'",
        ),
        (request(plain()), InvalidTensorError, "unable to find data for input tensor 'x' for model 'm'"),
        (request(plain(), plain("q"), raw=(b"ab",)), InvalidTensorError, "unable to find data for input tensor 'q'"),
        (
            request(typed("x", "INT32", 1, fp32_contents=[1])),
            InvalidTensorError,
            "unexpected explicit tensor data for input tensor 'x' for model 'm' of type 'FP32', expected datatype "
            "'INT32'",
        ),
        (
            request(typed("x", "INT32", 1, int_contents=[1], fp32_contents=[1])),
            InvalidTensorError,
            "unexpected explicit tensor data for input tensor 'x'",
        ),
        (
            request(typed("x", "FP16", 1, fp32_contents=[1])),
            InvalidTensorError,
            "of type 'FP32', expected datatype 'FP16'; send it in raw_input_contents",
        ),
        (request(typed("x", "STRING", 1, bytes_contents=[b"a"])), InvalidTensorError, "expected datatype '<invalid>'"),
        (
            request(plain("x", "UINT8", *[1] * 33), raw=(b"a",)),
            InvalidTensorError,
            "input 'x' has a shape of 33 dimensions, at most 32 are allowed",
        ),
        (request(id="i" * 65537), InvalidTensorError, "request id has 65537 bytes, at most 65536 are allowed"),
        (
            request(*[plain()] * 1025, raw=(b"ab",)),
            InvalidTensorError,
            "request has 1025 inputs, at most 1024 are allowed",
        ),
    ],
)
def test_what_is_refused(message: pb.ModelInferRequest, kind: type[TensorlineError], text: str) -> None:
    with pytest.raises(kind) as caught:
        decode_request(message)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("parameter", "kind", "text"),
    [
        (
            {"classification": pb.InferParameter(int64_param=0)},
            InvalidTensorError,
            "invalid value 0 for 'classification'",
        ),
        ({"classification": pb.InferParameter(string_param="3")}, InvalidTensorError, "expected int64_param"),
    ],
)
def test_output_parameters_that_are_refused(
    parameter: dict[str, pb.InferParameter], kind: type[TensorlineError], text: str
) -> None:
    message = request(plain(), raw=(b"ab",))
    message.outputs.add(name="y", parameters=parameter)
    with pytest.raises(kind, match=text):
        decode_request(message)


def test_other_parameters_of_tensors_are_let_through() -> None:
    message = request(plain(), raw=(b"ab",))
    message.inputs[0].parameters["content_type"].string_param = "image/jpeg"
    message.outputs.add(name="y").parameters["q"].bool_param = True
    assert decode_request(message).outputs == [RequestedOutput("y")]


def test_limits_may_be_others() -> None:
    message = request(plain(), plain("q"), raw=(b"ab", b"cd"))
    assert len(decode_request(message, Limits(inputs=2)).inputs) == 2
    with pytest.raises(InvalidTensorError, match="request has 2 inputs, at most 1 are allowed"):
        decode_request(message, Limits(inputs=1))


def test_a_response_of_any_kind_of_bytes() -> None:
    view = encode_array(np.arange(3, dtype=np.float32))
    response = InferResponse(
        "m", "2", "id", [Tensor("y", "FP32", (3,), view), Tensor("e", "INT8", (0,), b"")], {"final": True, "n": 2**63}
    )
    message = encode_response(response)
    assert (message.model_name, message.model_version, message.id) == ("m", "2", "id")
    assert [(out.name, out.datatype, list(out.shape)) for out in message.outputs] == [
        ("y", "FP32", [3]),
        ("e", "INT8", [0]),
    ]
    assert list(message.raw_output_contents) == [np.arange(3, dtype=np.float32).tobytes(), b""]
    assert message.parameters["n"].uint64_param == 2**63
    assert message.parameters["final"].bool_param


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_one_output_that_cannot_be_typed_makes_all_raw(datatype: str) -> None:
    outputs = [Tensor("y", "INT8", (1,), b"\x05"), Tensor("h", datatype, (1,), b"\x01\x3c")]
    message = encode_response(InferResponse("m", "1", "", outputs), is_typed=True)
    assert list(message.raw_output_contents) == [b"\x05", b"\x01\x3c"]
    assert not any(out.HasField("contents") for out in message.outputs)


def test_an_empty_typed_output_has_contents() -> None:
    message = encode_response(InferResponse("m", "1", "", [Tensor("y", "FP32", (0,), b"")]), is_typed=True)
    assert message.outputs[0].HasField("contents")


def test_raw_bool_bytes_of_any_value_are_true_when_typed() -> None:
    assert list(encode_contents("BOOL", b"\x00\x01\x80\xff").bool_contents) == [False, True, True, True]


@pytest.mark.parametrize(
    ("datatype", "data"),
    [("FP32", b"abc"), ("INT16", b"a"), ("BYTES", b"\x05\0\0\0ab"), ("BYTES", b"\0\0"), ("FP16", b"ab")],
)
def test_what_is_no_tensor_is_not_encoded(datatype: str, data: bytes) -> None:
    with pytest.raises(ValueError):
        encode_contents(datatype, data)


def test_a_tensor_without_bytes_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="tensor 'y' has no bytes"):
        encode_response(InferResponse("m", "1", "", [Tensor("y", "INT8", (1,))]))


@given(st.integers(0, 2**40))
def test_varint(number: int) -> None:
    assert varint(number) == bytes(pb.StatisticDuration(ns=number).SerializeToString()[1:]) or number == 0


@given(st.binary(max_size=300))
def test_whatever_is_sent_is_decoded_or_refused(wire: bytes) -> None:
    try:
        message = pb.ModelInferRequest.FromString(wire)
    except DecodeError:
        return
    with contextlib.suppress(TensorlineError):
        decode_request(message)
