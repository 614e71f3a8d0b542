"""What goes in comes out, whatever its datatype, shape and form; and what cannot be is refused in Triton's words."""

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import psutil
import pytest
from grpc import ChannelConnectivity, Compression, StatusCode, aio

from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.tensor import Array
from tests.e2e.client import Failure, Stub, arrays, failure, infer, outcome, request
from tests.e2e.mesh import Mesh, running_mesh
from tests.e2e.models import (
    DATATYPE_NAMES,
    chain_repositories,
    chain_services,
    ensemble,
    model,
    tensor,
    write,
    write_chain,
)

BAD, MISSING, AWAY, NO = (
    StatusCode.INVALID_ARGUMENT,
    StatusCode.NOT_FOUND,
    StatusCode.UNAVAILABLE,
    StatusCode.UNIMPLEMENTED,
)
CHAINED = ("FP32", "INT64", "BYTES")
DELAY = "dynamic_batching { max_queue_delay_microseconds: 50000 }"


def write_models(root: Path) -> None:
    pre = root / "pre"
    for datatype in DATATYPE_NAMES:
        model(pre, f"ident_{datatype}", "identity", datatype=datatype)
    for datatype in CHAINED:
        model(pre, f"plane_{datatype}", "identity", datatype=datatype, dims="-1, -1")
        write_chain(root, f"chain_{datatype}", datatype=datatype)
        write_chain(root, f"chain_plane_{datatype}", datatype=datatype, dims="-1, -1")
    model(pre, "scalar", "identity", dims="")
    model(pre, "ident_b8", "identity", batch=8, text=DELAY)
    model(pre, "two", "identity", dims="4", inputs=("A", "B"), outputs=("y",), batch=8, text=DELAY)
    mixed = f"input [ {tensor('n', 'UINT32', '1, 1')}, {tensor('s', 'BYTES', '1')} ]"
    write(pre / "mixed", f'backend: "identity" {mixed} {mixed.replace("input", "output", 1)}')
    optional = "optional: true"
    write(
        pre / "choosy",
        f'backend: "identity" input [ {tensor("A")}, {tensor("B", extra=optional)} ] output [ {tensor("y")} ]',
    )
    model(pre, "versioned", "identity", versions=(1, 3), text="version_policy { all { } }")
    model(pre, "refused", "refusing")
    model(pre, "boom", "boom")
    ensemble(root / "pipelines", "orphaned", [("nowhere", {"x": "x"}, {"y": "y"})])
    write(root / "pipelines" / "broken", 'backend: "identity" no_such_field: 1')


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    root = tmp_path_factory.mktemp("repository")
    write_models(root)
    async with running_mesh(
        root,
        services=chain_services(root),
        gateway_repositories=chain_repositories(root),
        gateway_env={"TENSORLINE_STRICT_READINESS": "false"},
        is_awaited=False,
    ) as mesh:
        await mesh.wait_ready()
        await mesh.wait_instances(3)
        # Meant: a model whose weights are missing, and one that raises what it should not.
        mesh.expected += ['"failed to load model"', '"model failed"', '"model configuration refused"']
        yield mesh


@dataclass(frozen=True)
class Quiet:
    """A client that asks for nothing and pings."""

    stub: Stub
    began: float
    lost: "asyncio.Future[None]"


@pytest.fixture(scope="module")
async def quiet(mesh: Mesh) -> AsyncIterator[Quiet]:
    options = [("grpc.keepalive_time_ms", 5500), ("grpc.keepalive_permit_without_calls", 1)]
    async with mesh.channel(*options, ("grpc.http2.max_pings_without_data", 0)) as channel:
        stub = Stub(channel)
        await stub.ServerLive(pb.ServerLiveRequest())
        lost = asyncio.ensure_future(channel.wait_for_state_change(ChannelConnectivity.READY))
        yield Quiet(stub, time.monotonic(), lost)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)


async def test_a_quiet_client_joins(quiet: Quiet) -> None:
    """The last test here asks what became of it."""
    assert not quiet.lost.done()


@pytest.fixture(scope="module")
async def stub(mesh: Mesh) -> AsyncIterator[Stub]:
    async with mesh.stub() as stub:
        yield stub


def text(*elements: bytes) -> Array:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


NOT_TEXT = (b"a\0b", b"\0\0", b"", b"\xff\xfe\0", "café".encode())


@pytest.mark.parametrize("name", ["ident_BYTES", "chain_BYTES"])
async def test_bytes_that_are_no_text(stub: Stub, name: str) -> None:  # A01
    sent = request(name, x=text(*NOT_TEXT))
    assert arrays(await stub.ModelInfer(sent))["y"].tolist() == list(NOT_TEXT)
    typed = pb.ModelInferRequest(model_name=name)
    typed.inputs.add(name="x", datatype="BYTES", shape=[5]).contents.bytes_contents.extend(NOT_TEXT)
    answer = await stub.ModelInfer(typed)
    assert list(answer.outputs[0].contents.bytes_contents) == list(NOT_TEXT)


@pytest.mark.parametrize("datatype", CHAINED)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("kind", ["", "chain_"])
async def test_no_elements(stub: Stub, datatype: str, shape: tuple[int, ...], kind: str) -> None:  # A03
    name = f"{kind}{'plane' if len(shape) == 2 else 'ident' if not kind else ''}_{datatype}".replace("__", "_")
    dtype = {"FP32": np.float32, "INT64": np.int64, "BYTES": np.object_}[datatype]
    answer = await stub.ModelInfer(request(name, x=np.empty(shape, dtype)))
    assert tuple(answer.outputs[0].shape) == shape
    assert list(answer.raw_output_contents) == [b""]
    typed = pb.ModelInferRequest(model_name=name)
    typed.inputs.add(name="x", datatype=datatype, shape=shape).contents.SetInParent()
    answer = await stub.ModelInfer(typed)
    assert tuple(answer.outputs[0].shape) == shape


async def test_scalars(stub: Stub) -> None:  # A05
    answer = await stub.ModelInfer(request("scalar", x=np.array(1.5, np.float32)))
    assert (list(answer.outputs[0].shape), answer.raw_output_contents[0]) == ([], np.float32(1.5).tobytes())
    one_dimension = await failure(stub.ModelInfer(request("scalar", x=np.array([1.5], np.float32))))
    assert one_dimension.code is BAD
    assert "Expected [], got [1]" in one_dimension.text
    too_long = request("scalar", x=np.array(1.5, np.float32))
    too_long.raw_input_contents[0] = bytes(8)
    refused = await failure(stub.ModelInfer(too_long))
    assert refused.code is BAD
    assert "Expected 4, got 8" in refused.text


async def test_inputs_that_disagree_on_the_batch(mesh: Mesh, stub: Stub) -> None:  # A06
    series = 'nv_inference_count{model="two",version="1"}'
    good = request("two", A=np.ones((2, 4), np.float32), B=np.ones((2, 4), np.float32))
    bad = request("two", A=np.ones((2, 4), np.float32), B=np.ones((3, 4), np.float32))
    flying = [asyncio.ensure_future(outcome(stub.ModelInfer(good))) for _ in range(20)]
    refused = await failure(stub.ModelInfer(bad))
    assert refused.code is BAD
    assert re.search(r"'A' has 2, 'B' has 3", refused.text)
    assert await asyncio.gather(*flying) == [None] * 20
    assert (await mesh.metrics())[series] == 40  # rows of the good ones


EDGES = {
    "INT64": np.array([2**53 + 1, 2**63 - 1, -(2**63)], np.int64),
    "UINT64": np.array([2**53 + 1, 2**64 - 1], np.uint64),
}


@pytest.mark.parametrize("datatype", EDGES)
async def test_integers_at_the_edges(stub: Stub, datatype: str) -> None:  # A08
    values = EDGES[datatype]
    answer = await infer(stub, f"ident_{datatype}", x=values)
    assert answer["y"].tolist() == values.tolist()
    typed = pb.ModelInferRequest(model_name=f"ident_{datatype}")
    field = f"{datatype.lower()}_contents"
    getattr(typed.inputs.add(name="x", datatype=datatype, shape=values.shape).contents, field).extend(values.tolist())
    response = await stub.ModelInfer(typed)
    assert list(getattr(response.outputs[0].contents, field)) == values.tolist()


@pytest.mark.parametrize(
    ("datatype", "dtype", "bits"), [("FP16", np.float16, 0x3C01), ("BF16", ml_dtypes.bfloat16, 0x3F81)]
)
async def test_half_floats(stub: Stub, datatype: str, dtype: Any, bits: int) -> None:  # A10
    pattern = np.array([bits], np.uint16)
    answer = await stub.ModelInfer(request(f"ident_{datatype}", x=pattern.view(dtype)))
    assert answer.raw_output_contents[0] == pattern.tobytes()
    typed = pb.ModelInferRequest(model_name=f"ident_{datatype}")
    typed.inputs.add(name="x", datatype=datatype, shape=[1]).contents.fp32_contents.append(1.0)
    refused = await failure(stub.ModelInfer(typed))
    assert refused.code is BAD
    assert "raw_input_contents" in refused.text


async def test_the_answer_has_the_form_of_the_question(stub: Stub) -> None:  # A12
    raw = request("mixed", n=np.array([[128]], np.uint32), s=text(b"hi"))
    answer = await stub.ModelInfer(raw)
    assert len(answer.raw_output_contents) == 2
    assert not any(output.HasField("contents") for output in answer.outputs)
    typed = pb.ModelInferRequest(model_name="mixed")
    typed.inputs.add(name="n", datatype="UINT32", shape=[1, 1]).contents.uint_contents.append(128)
    typed.inputs.add(name="s", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hi")
    answer = await stub.ModelInfer(typed)
    assert not answer.raw_output_contents
    found = {output.name: output.contents for output in answer.outputs}
    assert (list(found["n"].uint_contents), list(found["s"].bytes_contents)) == ([128], [b"hi"])


@pytest.mark.parametrize("id", ["", "k" * (64 << 10), "a\nb\x1b[31m\u2028c", "身份编号"])
async def test_ids_come_back_as_they_were(mesh: Mesh, stub: Stub, id: str) -> None:  # A14
    answer = await stub.ModelInfer(request("ident_FP32", id=id, x=np.ones(1, np.float32)))
    assert answer.id == id
    refused = await failure(stub.ModelInfer(request("boom", id=id, x=np.full(1, -2, np.float32))))
    assert refused.code is StatusCode.INTERNAL
    escaped = id[:64].translate({ord(each): f"\\u{ord(each):04x}" for each in "\n\x1b\u2028"})
    assert (escaped or "<id_unknown>") in refused.text
    assert not re.search("[\x00-\x1f\u2028]", refused.text)
    for line in mesh.log("pre").splitlines():
        if line.startswith("{"):
            assert len(json.loads(line).get("request_id", "")) <= 600  # 256 characters, each perhaps escaped


@pytest.mark.parametrize("compression", [Compression.Gzip, Compression.Deflate])
async def test_compressed_requests(stub: Stub, compression: Compression) -> None:  # A18
    values = np.arange(100_000, dtype=np.float32)
    answer = await stub.ModelInfer(request("ident_FP32", x=values), compression=compression)
    np.testing.assert_array_equal(arrays(answer)["y"], values)
    bad = request("ident_FP32", x=values)
    bad.inputs[0].shape[0] = 3
    refused = await failure(stub.ModelInfer(bad, compression=compression))
    assert refused.code is BAD


@pytest.mark.parametrize("name", ["ident_FP32", "chain_FP32"])
async def test_big_tensors(mesh: Mesh, stub: Stub, name: str) -> None:  # A16; 512 MiB would need arenas of that size
    for size in (5 << 20, 64 << 20):
        values = np.random.default_rng(size).random(size // 4, np.float32)
        answer = await infer(stub, name, x=values)
        assert np.array_equal(answer["y"], values)
    await mesh.wait_idle()


@pytest.mark.parametrize("name", ["ident_FP32", "chain_FP32"])
async def test_more_than_the_arena_holds(mesh: Mesh, stub: Stub, name: str) -> None:
    """The arenas are of 256 MiB."""
    refused = await failure(stub.ModelInfer(request(name, x=np.zeros(75 << 20, np.float32)), timeout=30))
    assert refused.code is StatusCode.RESOURCE_EXHAUSTED
    assert await infer(stub, name, x=np.ones(3, np.float32))
    await mesh.wait_idle()


async def test_subsets_and_versions(stub: Stub) -> None:
    mixed = request("mixed", ["s"], n=np.array([[1]], np.uint32), s=text(b"hi"))
    assert [output.name for output in (await stub.ModelInfer(mixed)).outputs] == ["s"]
    one = np.ones(1, np.float32)
    for version, ran in (("", "3"), ("1", "1"), ("3", "3"), ("01", "1")):
        assert (await stub.ModelInfer(request("versioned", version=version, x=one))).model_version == ran
    assert list((await stub.ModelMetadata(pb.ModelMetadataRequest(name="versioned"))).versions) == ["1", "3"]
    only = await stub.ModelMetadata(pb.ModelMetadataRequest(name="versioned", version="1"))
    assert list(only.versions) == ["1"]


async def test_optional_inputs(stub: Stub) -> None:
    one, two = np.ones(1, np.float32), np.ones(2, np.float32)
    for inputs in ({"A": one}, {"A": one, "B": two}, {"B": two, "A": one}):
        assert (await infer(stub, "choosy", given=inputs))["y"].shape == (1,)


# ---- What is refused. Each entry: the request, its code, what the text must hold (errors.md).

ONE = np.ones(1, np.float32)


def ident(**changed: Any) -> Any:
    message = request("ident_FP32", id="r1", x=ONE)
    for name, value in changed.items():
        setattr(message, name, value)
    return message


def shaped(*shape: int, size: int = 4, name: str = "ident_FP32") -> Any:
    message = request(name, id="r1", x=ONE)
    message.inputs[0].shape[:] = shape
    message.raw_input_contents[0] = bytes(size)
    return message


def with_parameter(key: str, **value: Any) -> Any:
    message = ident()
    if value:
        message.parameters[key].CopyFrom(pb.InferParameter(**value))
    else:
        message.parameters[key].SetInParent()
    return message


def with_output(name: str = "y", model_name: str = "ident_FP32", **value: Any) -> Any:
    message = request(model_name, id="r1", x=ONE)
    output = message.outputs.add(name=name)
    if value:
        output.parameters["classification"].CopyFrom(pb.InferParameter(**value))
    return message


def raw_text(raw: bytes, *shape: int) -> Any:
    message = pb.ModelInferRequest(model_name="ident_BYTES", id="r1")
    message.inputs.add(name="x", datatype="BYTES", shape=shape)
    message.raw_input_contents.append(raw)
    return message


def both_forms() -> Any:
    message = ident()
    message.inputs[0].contents.fp32_contents.append(1.0)
    return message


def without_data() -> Any:
    message = ident()
    del message.raw_input_contents[:]
    return message


def typed(datatype: str = "FP32", **lists: list[Any]) -> Any:
    message = pb.ModelInferRequest(model_name=f"ident_{datatype}", id="r1")
    message.inputs.add(name="x", datatype=datatype, shape=[1], contents=pb.InferTensorContents(**lists))
    return message


def twice() -> Any:
    message = request("two", id="r1", A=np.ones((1, 4), np.float32), B=np.ones((1, 4), np.float32))
    message.inputs[1].name = "A"
    return message


def renamed(name: str, model_name: str = "ident_FP32") -> Any:
    message = request(model_name, id="r1", x=ONE)
    message.inputs[0].name = name
    return message


def datatyped(datatype: str) -> Any:
    message = ident()
    message.inputs[0].datatype = datatype
    return message


def in_region(**values: Any) -> Any:
    message = ident()
    for key, value in values.items():
        message.inputs[0].parameters[key].CopyFrom(value)
    return message


STRING = pb.InferParameter(string_param="region")
REFUSED: dict[str, tuple[Callable[[], Any], StatusCode, str]] = {
    # names and versions (§2)
    "unknown model": (lambda: request("nobody", x=ONE), MISSING, "Request for unknown model: 'nobody' is not found"),
    "no model": (lambda: request("", x=ONE), MISSING, "Request for unknown model: '' is not found"),
    "a path": (lambda: request("../../etc/passwd", x=ONE), MISSING, "is not found"),
    "unknown version": (
        lambda: ident(model_version="2"),
        MISSING,
        "Request for unknown model: 'ident_FP32' version 2 is not found",
    ),
    "version 0": (lambda: ident(model_version="0"), MISSING, "version 0 is not found"),
    "no number": (lambda: ident(model_version="abc"), BAD, "failed to read version from string"),
    "half a number": (lambda: ident(model_version="1x"), BAD, "failed to read version from string"),
    "negative version": (lambda: ident(model_version="-1"), BAD, "must be integer > 0"),
    "endless version": (lambda: ident(model_version="9" * 5000), BAD, "must be integer > 0"),
    "not loaded": (lambda: request("refused", x=ONE), AWAY, "'refused'"),
    "bad configuration": (lambda: request("broken", x=ONE), AWAY, "'broken'"),
    "step without instance": (lambda: request("orphaned", x=ONE), AWAY, "'nowhere'"),
    # inputs: names, datatype, shape (§3)
    "no input": (
        lambda: pb.ModelInferRequest(model_name="two", id="r1"),
        BAD,
        "expected 2 inputs but got 0 inputs for model 'two'",
    ),
    "one of two": (
        lambda: request("two", id="r1", A=np.ones((1, 4), np.float32)),
        BAD,
        "expected 2 inputs but got 1 inputs for model 'two'. Got input(s) ['A'], but missing required input(s) ['B']. "
        "Please provide all required input(s).",
    ),
    "too many": (
        lambda: request("ident_FP32", id="r1", x=ONE, z=ONE),
        BAD,
        "expected 1 inputs but got 2 inputs for model 'ident_FP32'",
    ),
    "optional alone": (
        lambda: request("choosy", id="r1", B=ONE),
        BAD,
        "expected number of inputs between 1 and 2 but got 1",
    ),
    "wrong name": (lambda: renamed("z"), BAD, "unexpected inference input 'z' for model 'ident_FP32'"),
    "pipeline's name": (
        lambda: renamed("z", "chain_FP32"),
        BAD,
        "unexpected inference input 'z' for model 'chain_FP32'",
    ),
    "duplicate": (twice, BAD, "input 'A' already exists in request"),
    "datatype": (
        lambda: datatyped("INT32"),
        BAD,
        "inference input 'x' data-type is 'INT32', but model 'ident_FP32' expects 'FP32'",
    ),
    "no datatype": (lambda: datatyped("fp32"), BAD, "data-type is '<invalid>'"),
    "rank": (
        lambda: shaped(1, 1),
        BAD,
        "unexpected shape for input 'x' for model 'ident_FP32'. Expected [-1], got [1,1]",
    ),
    "batch rank": (lambda: shaped(1, name="ident_b8"), BAD, "Expected [-1,-1], got [1]"),
    "no shape": (
        lambda: shaped(name="ident_b8"),
        BAD,
        "input 'x' has no shape but model requires batch dimension",
    ),
    "minus one": (lambda: shaped(-1), BAD, "All input dimensions should be specified for input 'x'"),
    "very negative": (lambda: shaped(-(2**63)), BAD, "All input dimensions should be specified for input 'x'"),
    "batch": (
        lambda: shaped(9, 1, size=36, name="ident_b8"),
        BAD,
        "inference request batch-size must be <= 8 for 'ident_b8'",
    ),
    "batch 0": (lambda: shaped(0, 1, size=0, name="ident_b8"), BAD, "input byte size mismatch"),
    "2 GB claim": (lambda: shaped(1 << 29), BAD, "input byte size mismatch for input 'x' for model 'ident_FP32'."),
    "overflow": (lambda: shaped(2**63 - 1), BAD, "exceed maximum size"),
    "overflow to 4": (lambda: shaped(2**62 + 1), BAD, "exceed maximum size"),
    "rank of thousands": (lambda: shaped(*[1] * 5000), BAD, "dimensions, at most 32 are allowed"),
    "output": (lambda: with_output("z"), BAD, "unexpected inference output 'z' for model 'ident_FP32'"),
    "pipeline's output": (lambda: with_output("b", "chain_FP32"), BAD, "unexpected inference output 'b'"),
    # inputs: data (§4)
    "too short": (
        lambda: shaped(1, size=3),
        BAD,
        "input byte size mismatch for input 'x' for model 'ident_FP32'. Expected 4, got 3",
    ),
    "too long": (lambda: shaped(1, size=5), BAD, "Expected 4, got 5"),
    "typed too long": (lambda: typed(fp32_contents=[1.0, 2.0]), BAD, "Expected 4, got 8"),
    "both forms": (both_forms, BAD, "contents field must not be specified when using raw_input_contents"),
    "other list": (
        lambda: typed(int_contents=[1]),
        BAD,
        "unexpected explicit tensor data for input tensor 'x'",
    ),
    "no data": (without_data, BAD, "unable to find data for input tensor 'x'"),
    "few strings": (
        lambda: raw_text(b"\1\0\0\0a", 2),
        BAD,
        "expected 2 string elements for inference input 'x' for model 'ident_BYTES', got 1",
    ),
    "many strings": (
        lambda: raw_text(b"\1\0\0\0a" * 2, 1),
        BAD,
        "unexpected number of string elements 2 for inference input 'x' for model 'ident_BYTES', expecting 1",
    ),
    "cut length": (
        lambda: raw_text(b"\1\0", 1),
        BAD,
        "incomplete string length indicator for inference input 'x' for model 'ident_BYTES', expecting 4 bytes but "
        "only 2 bytes available",
    ),
    "cut string": (
        lambda: raw_text(b"\7\0\0\0a", 1),
        BAD,
        "incomplete string data for inference input 'x' for model 'ident_BYTES', expecting string of length 7 but "
        "only 1 bytes available",
    ),
    "2 GB string": (lambda: raw_text(b"\xff\xff\xff\x7fa", 1), BAD, "expecting string of length 2147483647"),
    # parameters (§5)
    "unset parameter": (lambda: with_parameter("k"), BAD, "invalid value type for 'k'"),
    "reserved": (
        lambda: with_parameter("triton_x", bool_param=True),
        BAD,
        "parameter keys starting with 'triton_' are reserved",
    ),
    "priority": (lambda: with_parameter("priority", int64_param=-1), BAD, "expected value >= 0"),
    "priority type": (
        lambda: with_parameter("priority", string_param="1"),
        BAD,
        "expected int64_param or uint64_param",
    ),
    "timeout": (lambda: with_parameter("timeout", string_param="1"), BAD, "invalid value type for 'timeout'"),
    "sequence": (lambda: with_parameter("sequence_id", bool_param=True), BAD, "invalid value type"),
    "sequence start": (lambda: with_parameter("sequence_start", int64_param=1), BAD, "invalid value type"),
    "sequence id": (
        lambda: with_parameter("sequence_id", string_param="s" * 129),
        NO,
        "string correlation ID cannot be longer than 128 characters",
    ),
    "long key": (lambda: with_parameter("k" * 129, bool_param=True), BAD, "at most 128"),
    "long value": (lambda: with_parameter("k", string_param="v" * 65537), BAD, "at most 65536"),
    "class 0": (lambda: with_output(int64_param=0), BAD, "classification"),
    "class type": (lambda: with_output(string_param="1"), BAD, "expected int64_param"),
    # client memory (§6); more of it in test_shared_memory.py
    "region": (
        lambda: in_region(shared_memory_region=STRING),
        BAD,
        "'shared_memory_byte_size' must be specified along with 'shared_memory_region'",
    ),
    "region size": (
        lambda: in_region(shared_memory_byte_size=pb.InferParameter(int64_param=4)),
        BAD,
        "can not be specified without 'shared_memory_region'",
    ),
    # models (§11)
    "model error": (lambda: request("boom", id="r1", x=np.full(1, -1, np.float32)), StatusCode.INTERNAL, "bad row"),
    "exception": (
        lambda: request("boom", id="r1", x=np.full(1, -2, np.float32)),
        StatusCode.INTERNAL,
        "[request id: r1] model 'boom' failed: RuntimeError",
    ),
    "interrupt": (lambda: request("boom", x=np.full(1, 13, np.float32)), StatusCode.INTERNAL, "KeyboardInterrupt"),
    "exit": (lambda: request("boom", x=np.full(1, 14, np.float32)), StatusCode.INTERNAL, "SystemExit"),
}
EMOJI = "🦜" * 4000
FOREIGN: dict[str, Callable[[], Any]] = {
    # Texts of clients that take four bytes a character, and twelve in a trailer: no error may outgrow its header.
    "model": lambda: request(EMOJI, x=ONE),
    "version": lambda: ident(model_version=EMOJI),
    "input": lambda: renamed(EMOJI),
    "id": lambda: request("ident_FP32", id=EMOJI, x=np.ones((1, 1), np.float32)),
    "inputs": lambda: request("ident_FP32", id=EMOJI[:999], given={f"{EMOJI[:99]}{at}": ONE for at in range(60)}),
    "output": lambda: with_output(EMOJI),
    "datatype": lambda: datatyped(EMOJI),
    "parameter": lambda: with_parameter("triton_" + EMOJI, bool_param=True),
}
SPY = re.compile(
    r"/work|/dev/shm|/tmp|/proc|\.sock|\.py|unix:|127\.0\.0\.1|localhost|0x[0-9a-f]{6,}|(?=[0-9]*[a-f])[0-9a-f]{32}|Traceback|"
    r"\bFile \"|tensorline\.|gateway\.|numpy|object at"
)
"""What no text for a client may hold: paths, sockets, addresses, handles, stacks."""


def refusal(mesh: Mesh, found: Failure) -> None:
    """What holds of every refusal."""
    assert not SPY.search(found.text), found.text
    assert not any(str(mesh.pid(name)) in re.findall(r"\d+", found.text) for name in mesh.names), found.text
    assert str(os.getpid()) not in found.text
    assert found.took_s < 1.0
    for key, value in found.trailers.items():
        assert not SPY.search(f"{key} {value}")


@pytest.mark.parametrize("case", REFUSED)
async def test_refused(mesh: Mesh, stub: Stub, case: str) -> None:
    make, code, words = REFUSED[case]
    found = await failure(stub.ModelInfer(make(), timeout=5))
    assert (found.code, found.text) == (code, found.text)
    assert words in found.text
    refusal(mesh, found)


@pytest.mark.parametrize("case", FOREIGN)
async def test_long_foreign_text_is_refused_in_words(mesh: Mesh, stub: Stub, case: str) -> None:
    for _ in range(10):  # between the soft and the hard limit of headers the library refuses at random
        found = await failure(stub.ModelInfer(FOREIGN[case](), timeout=5))
        assert found.code in (BAD, MISSING), found.text
        refusal(mesh, found)


@pytest.mark.parametrize("ask", ["ModelMetadata", "ModelConfig"])
@pytest.mark.parametrize(
    ("name", "version", "code"),
    [
        ("nobody", "", MISSING),
        ("ident_FP32", "2", MISSING),
        ("ident_FP32", "abc", BAD),
        ("ident_FP32", "-1", BAD),
        ("ident_FP32", "9" * 5000, BAD),
        ("refused", "", AWAY),
        ("refused", "1", AWAY),
        ("orphaned", "", AWAY),
    ],
)
async def test_metadata_refused(mesh: Mesh, stub: Stub, ask: str, name: str, version: str, code: StatusCode) -> None:
    message = getattr(pb, f"{ask}Request")(name=name, version=version)
    found = await failure(getattr(stub, ask)(message, timeout=5))
    assert found.code is code
    refusal(mesh, found)


async def test_ready_of_what_is_not(stub: Stub) -> None:
    for name, version, ready in (
        ("ident_FP32", "", True),
        ("ident_FP32", "1", True),
        ("ident_FP32", "2", False),
        ("nobody", "", False),
        ("", "", False),
        ("refused", "", False),
        ("broken", "", False),
        ("orphaned", "", False),
        ("chain_FP32", "", True),
        ("chain_FP32", "1", True),
    ):
        answer = await stub.ModelReady(pb.ModelReadyRequest(name=name, version=version))
        assert answer.ready is ready, (name, version)
    for version in ("abc", "-1", "9" * 5000):
        assert (await failure(stub.ModelReady(pb.ModelReadyRequest(name="ident_FP32", version=version)))).code is BAD
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready  # told to be: strict_readiness is off


def send_bytes(channel: aio.Channel, method: str, data: bytes) -> Awaitable[bytes]:
    call: Any = channel.unary_unary(method)
    answer: Awaitable[bytes] = call(data, timeout=10)
    return answer


async def test_unparsable_and_unknown(mesh: Mesh) -> None:
    async with mesh.channel() as channel:
        garbage = await failure(send_bytes(channel, "/inference.GRPCInferenceService/ModelInfer", b"\xff\xff\xff"))
        assert garbage.code in (StatusCode.INTERNAL, BAD)
        unknown = await failure(send_bytes(channel, "/inference.GRPCInferenceService/Nothing", b""))
        assert (unknown.code, bool(SPY.search(unknown.text))) == (NO, False)
        stranger = await failure(send_bytes(channel, "/tensorline.v1.Stage/Exchange", b""))
        assert stranger.code is NO


async def test_mutated_requests(mesh: Mesh, stub: Stub) -> None:  # IN07, in small
    """Whatever the bytes are: an answer, or a refusal that says why; the logs show no bug (S3)."""
    rng = np.random.default_rng(2024)
    seeds = [make().SerializeToString() for make, _, _ in REFUSED.values()]
    seeds = [seed for seed in seeds if len(seed) < 4096 and b"boom" not in seed]
    codes: dict[StatusCode, int] = {}
    before = psutil.Process(mesh.pid("gateway")).memory_info().rss
    async with mesh.channel() as channel:

        async def one(seed: bytes) -> None:
            found = await outcome(send_bytes(channel, "/inference.GRPCInferenceService/ModelInfer", mutated(seed, rng)))
            code = StatusCode.OK if found is None else found.code
            codes[code] = codes.get(code, 0) + 1
            if found is not None:
                assert not SPY.search(found.text), found.text
                assert code is not StatusCode.INTERNAL or found.text == "Unable to parse request", found.text

        for _ in range(30):
            await asyncio.gather(*(one(seeds[int(rng.integers(len(seeds)))]) for _ in range(100)))
    assert set(codes) <= {StatusCode.OK, BAD, MISSING, NO, AWAY, StatusCode.INTERNAL}, codes
    assert codes[BAD] > 300, codes
    assert psutil.Process(mesh.pid("gateway")).memory_info().rss - before < 50 << 20


def mutated(seed: bytes, rng: np.random.Generator) -> bytes:
    """A few bytes changed, cut out, put in twice, or put in from nowhere."""
    data = bytearray(seed)
    for _ in range(int(rng.integers(1, 4))):
        at, kind = int(rng.integers(len(data) + 1)), int(rng.integers(5))
        if kind == 0 and at < len(data):
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            del data[at : at + int(rng.integers(1, 8))]
        elif kind == 2:
            data[at:at] = data[at : at + int(rng.integers(1, 64))]
        elif kind == 3:
            data[at:at] = rng.bytes(int(rng.integers(1, 12)))
        else:
            data[at:] = data[at : at + int(rng.integers(1, 200))]
    return bytes(data)


async def test_an_endless_deadline(stub: Stub) -> None:
    assert arrays(await stub.ModelInfer(request("chain_FP32", x=ONE), timeout=1e9))


async def test_after_all_that_nothing_is_held(mesh: Mesh, stub: Stub) -> None:
    """S1, S2 and S4; the logs are checked when the mesh ends."""
    assert (await infer(stub, "chain_FP32", x=ONE))["y"].tolist() == [1]
    await mesh.wait_idle()
    _, page = await mesh.get("/metrics", mesh.metrics_port)
    assert "nobody" not in page  # no client's text becomes a series
    assert "🦜" not in page


async def test_pings_from_a_quiet_client_are_no_offence(quiet: Quiet) -> None:  # F18, shortened
    """Four of them: two too many would be the end."""
    await asyncio.sleep(quiet.began + 23.0 - time.monotonic())
    assert not quiet.lost.done()
    began = time.monotonic()
    assert arrays(await quiet.stub.ModelInfer(request("chain_FP32", x=ONE)))
    assert time.monotonic() - began < 0.2
