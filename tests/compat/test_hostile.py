"""Requests that are none, and requests by the thousand that nobody meant: each is answered or refused in words."""

import random
from collections import Counter
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.compat.server import Server
from tests.gateway.rest.test_fuzz_json import generated as bodies
from tests.gateway.test_fuzz import change_bytes, change_field

SERVICE = "/inference.GRPCInferenceService"
REQUESTS = 3_000
CODES = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "UNAVAILABLE"}


def called(channel: Any, method: str, data: bytes) -> tuple[str, str]:
    try:
        channel.unary_unary(method)(data, timeout=20)
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def test_bytes_that_are_no_message(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        for method in ("ModelInfer", "ModelMetadata", "RepositoryIndex"):
            assert called(channel, f"{SERVICE}/{method}", b"\xff\xff\xff") == ("INTERNAL", "Unable to parse request")


def test_methods_that_are_not_there(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        for method in (f"{SERVICE}/Nothing", "/nobody.Service/Call", "/tensorline.v1.Stage/Exchange"):
            assert called(channel, method, b"")[0] == "UNIMPLEMENTED"


def test_health(server: Server) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=5) == b"\x08\x01"  # SERVING


def requests(seed: int) -> Any:
    rng = random.Random(seed)
    line = pb.ModelInferRequest(model_name="line_FP32", id="r1")
    line.inputs.add(name="x", datatype="FP32", shape=[2])
    line.raw_input_contents.append(bytes(8))
    line.parameters["k"].int64_param = 1
    line.outputs.add(name="y")
    text = pb.ModelInferRequest(model_name="line_BYTES")
    text.inputs.add(name="x", datatype="BYTES", shape=[2]).contents.bytes_contents.extend([b"a", b""])
    while True:
        message = pb.ModelInferRequest()
        message.CopyFrom(rng.choice((line, text)))
        for _ in range(rng.randint(1, 3)):
            change_field(message, rng)
        wire = message.SerializeToString()
        yield change_bytes(wire, rng) if rng.random() < 0.5 else wire


def test_thousands_by_grpc(server: Server) -> None:
    if server.is_triton:
        pytest.skip("some of them end a model's process there")
    counted: Counter[str] = Counter()
    with grpc.insecure_channel(server.grpc) as channel:
        for _, wire in zip(range(REQUESTS), requests(7), strict=False):
            code, text = called(channel, f"{SERVICE}/ModelInfer", wire)
            counted[code] += text != "Unable to parse request"
            assert code == "OK" or text
    assert set(+counted) <= CODES, counted
    assert counted["OK"]
    assert counted["INVALID_ARGUMENT"] > REQUESTS // 10


def test_thousands_by_http(server: Server) -> None:
    if server.is_triton:
        pytest.skip("some of them end a model's process there")
    counted: Counter[int] = Counter()
    for _, (body, length) in zip(range(REQUESTS // 3), bodies(8), strict=False):
        headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
        answer = server.fetch("/v2/models/line_FP32/infer", body, headers=headers)
        counted[answer.status] += 1
        assert answer.status == 200 or answer.error
    assert set(counted) <= {200, 400, 404, 501}, counted
    assert counted[200]
    assert counted[400] > REQUESTS // 30
