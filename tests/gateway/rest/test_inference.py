"""An infer request's body to our values, and a response to its body."""

import json
from typing import Any

import orjson
import pytest

from gateway.rest.inference import RestRequest, decode_infer, decode_raw, encode_infer, header_length
from tensorline.config import config_from_text
from tensorline.errors import InvalidTensorError, UnsupportedError
from tensorline.protocol.infer import InferRequest, InferResponse, RegionUse, RequestedOutput
from tensorline.tensor import Tensor
from tests.gateway.rest.twin import tensor
from tests.tensorline.stage.pair import config


def decode(document: object, binary: bytes | None = None) -> RestRequest:
    head = json.dumps(document).encode()
    return decode_infer("m", "2", head + (binary or b""), None if binary is None else len(head))


def binary_input(name: str, size: object, **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": "UINT8", "shape": [1], "parameters": {"binary_data_size": size, **more}}


def refused(document: object, binary: bytes | None = None) -> str:
    with pytest.raises(InvalidTensorError) as caught:
        decode(document, binary)
    return str(caught.value)


def test_a_whole_request() -> None:
    document = {
        "id": "r1",
        "parameters": {"sequence_id": 2**64 - 1, "priority": 2, "a": 1, "b": 2.5, "c": "s", "d": True, "e": 2**64 - 1},
        "inputs": [tensor([1, 2], "INT8")],
        "outputs": [{"name": "y", "parameters": {"classification": 3}}, {"name": "z"}],
    }
    request = decode(document).request
    assert (request.model, request.version, request.id) == ("m", "2", "r1")
    assert request.inputs[0] == ("x", "INT8", (2,), b"\1\2", None)
    assert request.outputs == [RequestedOutput("y", 3), RequestedOutput("z")]
    assert request.parameters == {"a": 1, "b": 2.5, "c": "s", "d": True, "e": 2**64 - 1}
    assert (request.options.sequence_id, request.options.priority) == (2**64 - 1, 2)


def test_binary_tensors_are_views_in_the_order_of_the_inputs() -> None:
    inputs = [binary_input("a", 2), tensor([7], "UINT8"), binary_input("b", 0), binary_input("c", 3)]
    tensors = decode({"inputs": inputs}, b"aaccc").request.inputs
    assert [bytes(each.data or b"") for each in tensors] == [b"aa", b"\7", b"", b"ccc"]
    assert isinstance(tensors[0].data, memoryview)


def test_regions() -> None:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": 2**63}
    wire = {"name": "x", "datatype": "FP32", "shape": [2], "parameters": parameters}
    output = {"name": "y", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 4}}
    request = decode({"inputs": [wire], "outputs": [output]}).request
    assert request.inputs[0].data is None
    assert request.regions == {"x": RegionUse("r", 2**63, 8)}
    assert request.outputs == [RequestedOutput("y", 0, RegionUse("r", 0, 4))]


def test_which_outputs_are_binary() -> None:
    outputs = [{"name": "y", "parameters": {"binary_data": True}}, {"name": "z", "parameters": {"binary_data": False}}]
    wanted = decode({"inputs": [], "outputs": outputs, "parameters": {"binary_data_output": True}})
    assert (wanted.is_binary, wanted.binary) == (True, {"y": True, "z": False})
    assert wanted.request.parameters == {}


WRONG: list[tuple[object, str]] = [
    ({}, "Unable to parse 'inputs': it is missing, an array is wanted"),
    ({"inputs": {}}, "Unable to parse 'inputs': it is an object"),
    ({"inputs": [1]}, "Unable to parse 'inputs': it has an integer in it"),
    ({"inputs": [{}]}, "Unable to parse 'name' of an input: it is missing"),
    ({"inputs": [{"name": "x"}]}, "Unable to parse 'datatype' of input 'x'"),
    ({"inputs": [tensor([1], shape=5)]}, "Unable to parse 'shape' of input 'x': it is an integer"),
    ({"inputs": [tensor([1], shape=[-1])]}, "Unable to parse 'shape' of input 'x': -1 is no dimension"),
    ({"inputs": [tensor([1], shape=[1.0])]}, "'shape' of input 'x': 1.0 is no dimension"),
    ({"inputs": [tensor([1], shape=["1"])]}, "'shape' of input 'x': a string is no dimension"),
    ({"inputs": [tensor([1], shape=[True])]}, "is no dimension"),
    ({"inputs": [tensor([1], shape=[2**63])]}, "9223372036854775808 is no dimension"),
    ({"inputs": [tensor([1], shape=[1] * 33)]}, "a shape of 33 dimensions, at most 32 are allowed"),
    ({"inputs": [tensor(5, shape=[1])]}, "Unable to parse 'data' of input 'x': it is an integer, an array is wanted"),
    ({"inputs": [tensor([1], parameters=[])]}, "Unable to parse 'parameters' of input 'x'"),
    ({"inputs": [tensor([1], parameters={"a": {}})]}, "parameter 'a' has invalid type"),
    ({"id": 5, "inputs": []}, "Unable to parse 'id': it is an integer, a string is wanted"),
    ({"inputs": [], "parameters": []}, "Unable to parse 'parameters': it is an array"),
    ({"inputs": [], "parameters": {"a": None}}, "parameter 'a' has invalid type"),
    ({"inputs": [], "parameters": {"a": [1]}}, "parameter 'a' has invalid type"),
    (
        {"inputs": [], "parameters": {"triton_x": 1}},
        "parameter keys starting with 'triton_' are reserved, got 'triton_x'",
    ),
    (
        {"inputs": [], "parameters": {"triton_enable_empty_final_response": True}},
        "parameter keys starting with 'triton_' are reserved",
    ),
    ({"inputs": [], "parameters": {"sequence_start": 1}}, "invalid value type for 'sequence_start'"),
    ({"inputs": [], "parameters": {"priority": -1}}, "invalid value -1 for 'priority'"),
    ({"inputs": [], "parameters": {"binary_data_output": 1}}, "Unable to parse 'binary_data_output' of the request's"),
    ({"inputs": [], "parameters": {f"k{n}": 1 for n in range(257)}}, "request has 257 parameters, at most 256"),
    ({"inputs": [], "outputs": {}}, "Unable to parse 'outputs'"),
    ({"inputs": [], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "'binary_data' of output 'y'"),
    ({"inputs": [], "outputs": [{"name": "y", "parameters": {"classification": 0}}]}, "expected >= 1"),
    ({"inputs": [], "outputs": [{"name": "y", "parameters": {"classification": "1"}}]}, "'classification' of output"),
    (
        {
            "inputs": [],
            "outputs": [
                {
                    "name": "y",
                    "parameters": {
                        "classification": 1,
                        "shared_memory_region": "r",
                        "shared_memory_byte_size": 1,
                    },
                }
            ],
        },
        "output can't set both 'shared_memory_region' and 'classification'",
    ),
    ({"inputs": [], "outputs": [{"name": "y"}] * 1025}, "request has 1025 outputs, at most 1024"),
    ({"id": "é" * (32 << 10) + "x", "inputs": []}, "request id has 65537 bytes, at most 65536"),
]


@pytest.mark.parametrize(("document", "told"), WRONG, ids=range(len(WRONG)))
def test_wrong_members(document: object, told: str) -> None:
    assert told in refused(document)


@pytest.mark.parametrize(
    "wire",
    [
        {"name": "x", "datatype": "UINT8", "shape": [1]},
        {"name": "x", "datatype": "UINT8", "shape": [1], "parameters": {}},
        {**binary_input("x", 1), "data": [1]},
        binary_input("x", 1, shared_memory_region="r", shared_memory_byte_size=1),
    ],
)
def test_data_comes_from_one_place(wire: object) -> None:
    told = "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters'"
    assert refused({"inputs": [wire]}, b"a").startswith(told)


def test_sizes_of_binary_data() -> None:
    for size in (3, -1, 2**70):
        assert "input 'x'" in refused({"inputs": [binary_input("x", size)]}, b"ab")
    assert "'binary_data_size'" in refused({"inputs": [binary_input("x", "1")]}, b"ab")
    assert "1 bytes follow those of its inputs" in refused({"inputs": [binary_input("x", 1)]}, b"ab")
    assert "only 0 bytes remain" in refused({"inputs": [binary_input("x", 1)]})


def test_a_long_sequence_id_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="string correlation ID cannot be longer than 128"):
        decode({"inputs": [], "parameters": {"sequence_id": "x" * 129}})


def test_the_header_of_the_jsons_length() -> None:
    assert header_length(None, 5) is None
    assert [header_length(value, 5) for value in (b"0", b"5", b"03")] == [0, 5, 3]
    for value in (b"6", b"-1", b"x", b"", b"1.0", b"1 ", b"\xb2", b"9" * 5000):
        with pytest.raises(InvalidTensorError, match=r"inference header size should be in range \(0, 5\), got: "):
            header_length(value, 5)


def raw(body: bytes, datatype: str, *dims: int, rows: int = 0) -> Tensor:
    text = config(
        {"x": datatype}, {"y": datatype}, dims=", ".join(map(str, dims)), rows=rows, more='backend: "identity"'
    )
    wanted = decode_raw("m", "", body, config_from_text(text, "m"))
    assert wanted.is_binary
    (found,) = wanted.request.inputs
    return found


def test_raw_requests() -> None:
    assert raw(b"12345678", "FP32", -1).shape == (2,)
    assert raw(b"12345678", "FP32", -1, rows=8).shape == (1, 2)
    assert raw(b"12345678", "UINT8", 2, -1).shape == (2, 4)
    assert raw(b"1234", "FP32", 1).shape == (1,)
    assert raw(b"123", "FP32", 5).shape == (5,)  # refused where sizes are checked
    assert raw(b"ab", "BYTES", 1) == ("x", "BYTES", (1,), b"\2\0\0\0ab", None)
    for datatype, dims, told in (
        ("FP32", (-1, -1), "more than one variable-sized dimension"),
        ("FP32", (-1,), "3 bytes are no multiple of 4"),
        ("BYTES", (-1,), "For BYTE datatype raw input 'x'"),
    ):
        with pytest.raises(InvalidTensorError, match=told):
            raw(b"123", datatype, *dims)
    two = config_from_text(config({"a": "FP32", "b": "FP32"}, more='backend: "identity"'), "m")
    with pytest.raises(InvalidTensorError, match="Raw request must only have 1 input to be deduced but got 2 inputs"):
        decode_raw("m", "", b"", two)


OUTPUTS = [Tensor("y", "UINT8", (2,), b"\1\2"), Tensor("z", "BYTES", (1,), b"\1\0\0\0a")]
REQUEST = InferRequest("m", "", "", [])


def test_a_response_in_json() -> None:
    reply = encode_infer(RestRequest(REQUEST), InferResponse("m", "1", "r", OUTPUTS, {"p": True}))
    assert reply.headers == ((b"content-type", b"application/json"),)
    assert b"".join(reply.body) == (
        b'{"id":"r","model_name":"m","model_version":"1","parameters":{"p":true},"outputs":['
        b'{"name":"y","datatype":"UINT8","shape":[2],"data":[1,2]},'
        b'{"name":"z","datatype":"BYTES","shape":[1],"data":["a"]}]}'
    )


def test_a_response_in_binary_form() -> None:
    for wanted in (RestRequest(REQUEST, False, {"y": True}), RestRequest(REQUEST, True, {"z": False})):
        reply = encode_infer(wanted, InferResponse("m", "1", "", OUTPUTS))
        head, data = reply.body
        assert reply.headers == (
            (b"content-type", b"application/octet-stream"),
            (b"inference-header-content-length", b"%d" % len(head)),
        )
        assert orjson.loads(head)["outputs"] == [
            {"name": "y", "datatype": "UINT8", "shape": [2], "parameters": {"binary_data_size": 2}},
            {"name": "z", "datatype": "BYTES", "shape": [1], "data": ["a"]},
        ]
        assert data == b"\1\2"


def test_an_output_in_a_region_has_no_data() -> None:
    response = InferResponse("m", "1", "", OUTPUTS, regions={"y": RegionUse("r", 0, 2), "z": RegionUse("r", 2, 5)})
    for is_binary in (False, True):
        (head,) = encode_infer(RestRequest(REQUEST, is_binary), response).body
        assert orjson.loads(head)["outputs"] == [
            {"name": "y", "datatype": "UINT8", "shape": [2]},
            {"name": "z", "datatype": "BYTES", "shape": [1]},
        ]
