"""The commands that ask a mesh, against small servers that answer as a gateway does."""

import json
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tensorline.cli.app import run
from tensorline.cli.ports import free_port
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.protocol.stubs.inference.grpc_service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)
from tensorline.tensor import encode_bytes_tensor

SPAN = {
    "name": "ModelInfer classify",
    "span_id": "1",
    "parent_id": "",
    "kind": "server",
    "service": "tensorline-gateway",
    "instance_id": "gateway-1",
    "start_ns": 10**18,
    "end_ns": 10**18 + 5 * 10**6,
    "is_error": False,
    "message": "",
    "attributes": {},
}
TRACE = {
    "trace_id": "ab" * 16,
    "model": "classify",
    "version": "1",
    "request_id": "",
    "status": "OK",
    "start_ns": 10**18,
    "duration_ns": 5 * 10**6,
    "steps": 3,
    "spans": [SPAN],
}
MODELS = [
    {
        "name": "classify",
        "version": "1",
        "state": "READY",
        "backend": "ensemble",
        "max_batch_size": 8,
        "steps": ["a", "b"],
    },
    {"name": "a", "version": "1", "state": "READY", "backend": "image", "max_batch_size": 8, "instances": ["x"]},
    {"name": "b", "version": "", "state": "UNAVAILABLE", "reason": "no instance serves it"},
]
INSTANCE = {
    "id": "model-1",
    "service": "model",
    "state": "READY",
    "in_flight": 3,
    "queued": 0,
    "arena_bytes": 8 << 20,
    "is_colocated": True,
    "models": ["a/1 READY", "b/1 LOADING"],
    "host": "box",
}


@dataclass
class Api:
    """What was asked for, and what is answered."""

    url: str = ""
    asked: list[tuple[str, dict[str, list[str]]]] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)
    token: str = ""


@pytest.fixture
def api() -> Iterator[Api]:
    state = Api(answers={"/api/models": MODELS, "/api/instances": [INSTANCE], "/api/traces": [TRACE]})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            state.asked.append((url.path, parse_qs(url.query)))
            if state.token and self.headers["Authorization"] != f"Bearer {state.token}":
                return self.answer(403, {"error": "an operator's token is needed here"})
            if url.path == "/v2/health/ready":
                return self.answer(state.answers.get(url.path, 200), "")
            found = state.answers.get(url.path)
            return self.answer(
                404 if found is None else 200, {"error": "no such trace is kept"} if found is None else found
            )

        def answer(self, status: int, body: object) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield state
        server.shutdown()
        thread.join()


class Inference(GRPCInferenceServiceServicer):
    """Model `measure`: the size of each BYTES element."""

    def __init__(self) -> None:
        self.traceparents: list[str] = []
        self.requests: list[pb.ModelInferRequest] = []

    def ModelMetadata(  # noqa: N802 - the protocol's name
        self, request: pb.ModelMetadataRequest, context: Any
    ) -> pb.ModelMetadataResponse:
        if request.name != "measure":
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
        answer = pb.ModelMetadataResponse(name="measure", versions=["1"])
        answer.inputs.add(name="data", datatype="BYTES", shape=[-1, 1])
        return answer

    def ModelInfer(  # noqa: N802
        self, request: pb.ModelInferRequest, context: Any
    ) -> pb.ModelInferResponse:
        self.requests.append(request)
        self.traceparents += [str(value) for key, value in context.invocation_metadata() if key == "traceparent"]
        raw = request.raw_input_contents[0]
        answer = pb.ModelInferResponse(model_name="measure", model_version="1")
        answer.outputs.add(name="size", datatype="INT32", shape=[1, 1])
        answer.raw_output_contents.append(np.array([len(raw) - 4], np.int32).tobytes())
        answer.outputs.add(name="copy", datatype="BYTES", shape=[1, 1])
        answer.raw_output_contents.append(raw)
        answer.outputs.add(name="odd", datatype="BYTES", shape=[2])
        answer.raw_output_contents.append(encode_bytes_tensor(np.array([b"\xff\x00", b"x"], dtype=object)))
        return answer


@pytest.fixture
def inference() -> Iterator[tuple[str, Inference]]:
    servicer = Inference()  # type: ignore[abstract]  # what is left out answers UNIMPLEMENTED
    checks = health.HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_GRPCInferenceServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    checks.set("asleep", health_pb2.HealthCheckResponse.NOT_SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", servicer
    server.stop(None).wait()


Capture = pytest.CaptureFixture[str]


def test_a_file_is_sent_and_its_answer_shown(inference: tuple[str, Inference], tmp_path: Path, capsys: Capture) -> None:
    url, servicer = inference
    (tmp_path / "a.txt").write_bytes(b"hello")
    (tmp_path / "b.txt").write_bytes(b"hi")
    assert run(["infer", "measure", f"{tmp_path}/a.txt", f"{tmp_path}/b.txt", "--url", url, "--output", "size"]) == 0
    out = capsys.readouterr().out
    assert "a.txt · measure 1" in out
    assert "size INT32" in out
    assert "hello" in out
    assert "2 bytes" in out
    assert [[output.name for output in request.outputs] for request in servicer.requests] == [["size"], ["size"]]
    assert servicer.traceparents == []


def test_an_answer_as_json(inference: tuple[str, Inference], capsys: Capture) -> None:
    assert run(["infer", "measure/1", "--input", "data=hello", "--url", inference[0], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model_version"] == "1"
    assert answer["outputs"] == [
        {"name": "size", "datatype": "INT32", "shape": [1, 1], "data": [5]},
        {"name": "copy", "datatype": "BYTES", "shape": [1, 1], "data": ["hello"]},
        {"name": "odd", "datatype": "BYTES", "shape": [2], "encoding": "base64", "data": ["/wA=", "eA=="]},
    ]
    assert inference[1].requests[0].model_version == "1"


def test_a_trace_is_asked_for_by_the_id_that_was_sent(
    inference: tuple[str, Inference], api: Api, capsys: Capture
) -> None:
    url, servicer = inference
    assert run(["infer", "measure", "--input", "data=x", "--url", url, "--trace", "--http-url", api.url]) == 0
    version, trace_id, _, flags = servicer.traceparents[0].split("-")
    assert (version, flags) == ("00", "01")
    assert api.asked == [("/api/traces", {"which": [trace_id]})]
    assert "ModelInfer classify" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["infer", "measure"], 2, "nothing to send: give a file, or --input NAME=VALUE"),
        (["infer", "nope", "--input", "a=1"], 1, "NOT_FOUND: Request for unknown model: 'nope' is not found"),
        (["infer", "measure", "--input", "date=1"], 2, "--input date: the model takes data"),
        (["infer", "measure", "/nowhere.jpg"], 2, "/nowhere.jpg: No such file or directory"),
        (["infer", "measure", "--timeout", "x"], 2, "Invalid value for '--timeout'"),
    ],
)
def test_a_failing_request_is_one_sentence(
    inference: tuple[str, Inference], arguments: list[str], code: int, told: str, capsys: Capture
) -> None:
    assert run([*arguments, "--url", inference[0]]) == code
    assert_one_sentence(capsys, told)


def test_nobody_there_is_one_sentence(capsys: Capture) -> None:
    port = free_port()
    assert run(["infer", "m", "--input", "a=1", "--url", f"127.0.0.1:{port}"]) == 1
    assert_one_sentence(capsys, f"no gateway answers at 127.0.0.1:{port}; is the mesh up?")
    assert run(["models", "--url", f"http://127.0.0.1:{port}"]) == 1
    assert_one_sentence(capsys, f"no gateway answers at http://127.0.0.1:{port} (Connection refused); is the mesh up?")
    assert run(["models", "--url", "ftp://x"]) == 2
    assert_one_sentence(capsys, "'ftp://x' is no address of a gateway")


def test_models_and_instances_are_listed(api: Api, capsys: Capture) -> None:
    assert run(["models", "--url", api.url]) == 0
    out = capsys.readouterr().out
    assert "a → b" in out
    assert "1 instance" in out
    assert "no instance serves it" in out
    assert run(["instances", "--url", api.url]) == 0
    out = capsys.readouterr().out
    assert "model-1" in out
    assert "8.0" in out
    assert "a/1" in out
    assert "b/1" not in out
    assert run(["models", "--url", api.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == MODELS


def test_traces_are_shown(api: Api, capsys: Capture) -> None:
    assert run(["trace", "slowest", "--model", "classify", "--url", api.url]) == 0
    assert "ModelInfer classify" in capsys.readouterr().out
    assert run(["trace", "list", "--limit", "5", "--url", api.url]) == 0
    assert "ab" * 16 in capsys.readouterr().out
    assert api.asked == [
        ("/api/traces", {"which": ["slowest"], "model": ["classify"]}),
        ("/api/traces", {"which": ["list"], "limit": ["5"]}),
    ]
    assert run(["trace", "--url", api.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [TRACE]
    api.answers["/api/traces"] = None
    assert run(["trace", "last", "--url", api.url]) == 1
    assert_one_sentence(capsys, "no such trace is kept")


def test_the_operators_token_is_sent(api: Api, tmp_path: Path, capsys: Capture) -> None:
    api.token = "secret"
    assert run(["models", "--url", api.url]) == 1
    assert_one_sentence(capsys, "an operator's token is needed here")
    (tmp_path / "token").write_text("secret\n")
    assert run(["models", "--url", api.url, "--token-file", f"{tmp_path}/token"]) == 0
    capsys.readouterr()
    assert run(["models", "--url", api.url, "--token-file", f"{tmp_path}/nothing"]) == 1
    assert_one_sentence(capsys, "nothing: No such file or directory")


def test_a_stranger_on_the_port_is_told_as_such(api: Api, capsys: Capture) -> None:
    api.answers["/api/models"] = b"<html>"
    assert run(["models", "--url", api.url]) == 1
    assert_one_sentence(capsys, "answered with 200 and no JSON: is it a Tensorline gateway?")


def test_health_of_gateways_and_services(inference: tuple[str, Inference], api: Api, capsys: Capture) -> None:
    assert run(["health", inference[0]]) == 0
    assert run(["health", inference[0], "--model", "asleep"]) == 1
    assert_one_sentence(capsys, f"{inference[0]} is NOT_SERVING")
    assert run(["health", api.url]) == 0
    api.answers["/v2/health/ready"] = 400
    assert run(["health", api.url]) == 1
    assert_one_sentence(capsys, f"{api.url} is not ready")
    assert run(["health", f"127.0.0.1:{free_port()}", "--timeout", "1"]) == 1
    assert_one_sentence(capsys, "does not answer")


def test_health_of_the_process_that_the_environment_describes(
    inference: tuple[str, Inference], api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORLINE_HTTP_PORT", api.url.rpartition(":")[2])
    monkeypatch.setenv("TENSORLINE_HTTP_ADDRESS", "0.0.0.0")
    assert run(["health"]) == 0
    monkeypatch.setenv("TENSORLINE_LISTEN", f"0.0.0.0:{inference[0].rpartition(':')[2]}")
    assert run(["health"]) == 0
    assert len(api.asked) == 1


def assert_one_sentence(capsys: Capture, told: str) -> None:
    err = capsys.readouterr().err
    assert told in err
    assert err.startswith("tensorline: ")
    assert len(err.splitlines()) == 1
