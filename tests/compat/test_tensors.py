"""What goes in comes out: datatypes x shapes x raw/typed x gRPC/REST x in band/shared memory."""

import gzip
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
import tritonclient.utils.shared_memory as shm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from tensorline.tensor import DATATYPES, Array, decode_array, encode_array, encode_bytes_tensor
from tests.compat.clients import CLIENTS, Client
from tests.compat.repository import DATATYPE_NAMES
from tests.compat.server import Server

ROOM = 1 << 16
HALF = ("FP16", "BF16")
EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FIELDS = {
    "BOOL": "bool_contents",
    "BYTES": "bytes_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
}


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, Array]:
    """A datatype, and an array of it of two dimensions; every bit pattern may come, of NaN and infinity too."""
    datatype = draw(st.sampled_from(DATATYPE_NAMES))
    shape = draw(st.tuples(st.integers(0, 5), st.integers(0, 40)))
    count = shape[0] * shape[1]
    if datatype == "BYTES":
        array = np.empty(count, np.object_)
        array[:] = draw(st.lists(st.binary(max_size=20), min_size=count, max_size=count))
        return datatype, array.reshape(shape)
    itemsize = DATATYPES[datatype].itemsize
    raw = draw(st.binary(min_size=count * itemsize, max_size=count * itemsize))
    if datatype == "BOOL":
        raw = bytes(byte & 1 for byte in raw)
    return datatype, decode_array(datatype, shape, raw)


def raw(array: Array) -> bytes:
    return encode_bytes_tensor(array) if array.dtype == np.object_ else bytes(encode_array(array))


@dataclass(frozen=True)
class Both:
    """Clients of both front ends, and a region that both know."""

    grpc: Any
    http: Any
    handle: Any
    region: str


@pytest.fixture(scope="module")
def both(server: Server) -> Iterator[Both]:
    name = f"compat_{uuid.uuid4().hex[:12]}"
    handle = shm.create_shared_memory_region(name, f"/{name}", 2 * ROOM)
    with (
        grpc_client.InferenceServerClient(server.grpc) as grpc,
        http_client.InferenceServerClient(server.http) as http,
    ):
        grpc.register_system_shared_memory(name, f"/{name}", 2 * ROOM)
        try:
            yield Both(grpc, http, handle, name)
        finally:
            grpc.unregister_system_shared_memory(name)
            shm.destroy_shared_memory_region(handle)


def typed_message(datatype: str, array: Array) -> Any:
    message = service_pb2.ModelInferRequest(model_name=f"ident_{datatype}")
    tensor = message.inputs.add(name="x", datatype=datatype, shape=array.shape)
    tensor.contents.SetInParent()
    getattr(tensor.contents, FIELDS[datatype]).extend(array.reshape(-1).tolist())
    return message


@given(tensor=tensors())
@EXAMPLES
def test_raw_by_grpc_and_binary_by_http(both: Both, tensor: tuple[str, Array]) -> None:
    datatype, array = tensor
    for client, module in ((both.grpc, grpc_client), (both.http, http_client)):
        sent = module.InferInput("x", list(array.shape), datatype)
        sent._raw_data = raw(array)  # the bytes themselves: NaNs and BF16 keep their bits
        if module is grpc_client:
            sent._raw_content = sent._raw_data
        else:
            sent._parameters["binary_data_size"] = len(sent._raw_data)
        result = client.infer(f"ident_{datatype}", [sent])
        assert raw_of(result, module) == raw(array)


def raw_of(result: Any, module: Any) -> bytes:
    """The bytes of the only output as they came."""
    if module is grpc_client:
        (data,) = result.get_response().raw_output_contents
        return bytes(data)
    return bytes(getattr(result, "_buffer", b""))  # an answer without any bytes has none


@given(tensor=tensors())
@EXAMPLES
def test_in_shared_memory(both: Both, tensor: tuple[str, Array]) -> None:
    datatype, array = tensor
    data = raw(array)
    if not data:
        return  # a region use has a size of at least 1
    for client, module in ((both.grpc, grpc_client), (both.http, http_client)):
        shm.set_shared_memory_region(both.handle, [np.frombuffer(data, np.uint8)])
        sent = module.InferInput("x", list(array.shape), datatype)
        sent.set_shared_memory(both.region, len(data))
        wanted = module.InferRequestedOutput("y")
        wanted.set_shared_memory(both.region, ROOM, offset=ROOM)
        result = client.infer(f"ident_{datatype}", [sent], outputs=[wanted])
        assert shm.get_contents_as_numpy(both.handle, np.uint8, [len(data)], ROOM).tobytes() == data
        output = result.get_output("y")
        assert list(output.shape if module is grpc_client else output["shape"]) == list(array.shape)


@given(tensor=tensors())
@EXAMPLES
def test_typed_by_grpc(both: Both, server: Server, tensor: tuple[str, Array]) -> None:
    """Typed in, typed out; Triton answers raw in any case."""
    datatype, array = tensor
    if datatype in HALF:
        return
    if datatype.startswith("FP"):  # a NaN may lose bits in this client: a float of Python has 64
        array = np.nan_to_num(array)
    answer = both.grpc._client_stub.ModelInfer(typed_message(datatype, array))
    assert list(answer.outputs[0].shape) == list(array.shape)
    if server.is_triton:
        assert answer.raw_output_contents[0] == raw(array)
    else:
        assert not answer.raw_output_contents
        values = getattr(answer.outputs[0].contents, FIELDS[datatype])
        assert raw(np.array([*values], array.dtype)) == raw(array.reshape(-1))


@given(tensor=tensors())
@EXAMPLES
def test_json_by_http(server: Server, tensor: tuple[str, Array]) -> None:
    """Numbers, exactly; texts that are UTF-8."""
    datatype, array = tensor
    if datatype in HALF:
        return
    if datatype == "BYTES":
        texts = [element.hex().encode() for element in array.reshape(-1).tolist()]
        array = np.array(texts, np.object_).reshape(array.shape)
    elif datatype.startswith("FP"):
        array = np.nan_to_num(array)
    values = [each.decode() if isinstance(each, bytes) else each for each in array.reshape(-1).tolist()]
    tensor_json = {"name": "x", "datatype": datatype, "shape": array.shape, "data": values}
    answer = server.fetch(f"/v2/models/ident_{datatype}/infer", {"inputs": [tensor_json]})
    assert answer.status == 200, answer.body
    (output,) = answer.json["outputs"]
    assert (output["datatype"], output["shape"]) == (datatype, list(array.shape))
    came = [each.encode() for each in output["data"]] if datatype == "BYTES" else output["data"]
    if server.is_triton and datatype.startswith("FP"):  # its numbers are off in the last digit
        assert np.allclose(np.array(came, np.float64), array.reshape(-1).astype(np.float64))
    else:
        assert raw(np.array(came, array.dtype)) == raw(array.reshape(-1))


EDGES = {
    "INT64": [2**53 + 1, 2**63 - 1, -(2**63)],
    "UINT64": [2**53 + 1, 2**63 - 1, 2**64 - 1],
}


@pytest.mark.parametrize("datatype", EDGES)
def test_integers_at_the_edges_in_json(server: Server, datatype: str) -> None:
    """A08."""
    values = EDGES[datatype]
    body = {"inputs": [{"name": "x", "datatype": datatype, "shape": [1, 3], "data": [values]}]}
    answer = server.fetch(f"/v2/models/ident_{datatype}/infer", body)
    assert answer.json["outputs"][0]["data"] == values


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BYTES"])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
async def test_no_elements(server: Server, kind: str, datatype: str, shape: tuple[int, ...]) -> None:
    """A03."""
    from tests.compat.clients import open_client

    dtype = np.object_ if datatype == "BYTES" else DATATYPES[datatype]
    model = f"line_{datatype}" if len(shape) == 1 else f"ident_{datatype}"
    async with open_client(kind, server) as client:
        result = await client.infer(model, [client.input("x", np.empty(shape, dtype), datatype)])
        assert client.shape(result, "y") == list(shape)
        assert result.as_numpy("y").shape == shape


async def test_text_that_is_none(client: Client) -> None:
    """A01."""
    text = np.array([b"a\0b", b"\0\0", b"", b"\xff\xfe\0", "café".encode()], np.object_)
    assert (await client.arrays("line_BYTES", {"x": text}))["y"].tolist() == text.tolist()


@pytest.mark.parametrize(("datatype", "bits"), [("FP16", 0x3C01), ("BF16", 0x3F81)])
def test_half_floats(both: Both, server: Server, datatype: str, bits: int) -> None:
    """A10: raw keeps the bits; typed and JSON say what to do instead."""
    array = np.array([[bits]], np.uint16).view(ml_dtypes.bfloat16 if datatype == "BF16" else np.float16)
    message = service_pb2.ModelInferRequest(model_name=f"ident_{datatype}")
    message.inputs.add(name="x", datatype=datatype, shape=[1, 1])
    message.raw_input_contents.append(array.tobytes())
    assert both.grpc._client_stub.ModelInfer(message).raw_output_contents[0] == array.tobytes()
    body = {"inputs": [{"name": "x", "datatype": datatype, "shape": [1, 1], "data": [1.0]}]}
    answer = server.fetch(f"/v2/models/ident_{datatype}/infer", body)
    assert answer.status == 400
    assert f"receiving {datatype} data via JSON is not supported" in answer.error


def test_compressed_json(server: Server) -> None:
    """A18, by HTTP: the answer is compressed as asked, and a request may be."""
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    data = gzip.compress(json.dumps(body).encode())
    headers = {"Content-Encoding": "gzip", "Accept-Encoding": "deflate;q=0.1, gzip"}
    answer = server.fetch("/v2/models/ident_FP32/infer", data, headers=headers)
    assert answer.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(answer.body))["outputs"][0]["data"] == [1, 2, 3, 4]
