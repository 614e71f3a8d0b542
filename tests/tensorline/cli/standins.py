"""Small servers that answer as a gateway does, and keep what they were asked."""

import json
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.protocol.stubs.inference.grpc_service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)
from tensorline.protocol.stubs.inference.model_config_pb2 import TYPE_STRING
from tensorline.tensor import encode_bytes_tensor

__all__ = ["INSTANCE", "MODELS", "SPAN", "TRACE", "Api", "Inference", "api", "inference"]

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
        self.is_odd = True
        """Also answer with bytes that are no text."""
        self.traceparents: list[str] = []
        self.requests: list[pb.ModelInferRequest] = []
        self.loads: list[pb.RepositoryModelLoadRequest] = []
        self.unloads: list[pb.RepositoryModelUnloadRequest] = []

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
        if raw.endswith(b"bad"):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "data is bad")
        answer = pb.ModelInferResponse(model_name="measure", model_version="1", id=request.id)
        answer.outputs.add(name="size", datatype="INT32", shape=[1, 1])
        answer.raw_output_contents.append(np.array([len(raw) - 4], np.int32).tobytes())
        answer.outputs.add(name="copy", datatype="BYTES", shape=[1, 1])
        answer.raw_output_contents.append(raw)
        if self.is_odd:
            answer.outputs.add(name="odd", datatype="BYTES", shape=[2])
            answer.raw_output_contents.append(encode_bytes_tensor(np.array([b"\xff\x00", b"x"], dtype=object)))
        return answer

    def ModelStreamInfer(  # noqa: N802
        self, request_iterator: Iterator[pb.ModelInferRequest], context: Any
    ) -> Iterator[pb.ModelStreamInferResponse]:
        """Two answers and an empty end to each request; an error for bad data."""
        for request in request_iterator:
            if request.raw_input_contents[0].endswith(b"bad"):
                answer = pb.ModelStreamInferResponse(error_message="data is bad")
                answer.infer_response.id = request.id
                yield answer
                continue
            for is_final in (False, False):
                part = self.ModelInfer(request, context)
                part.parameters["triton_final_response"].bool_param = is_final
                yield pb.ModelStreamInferResponse(infer_response=part)
            end = pb.ModelInferResponse(model_name="measure", id=request.id)
            end.parameters["triton_final_response"].bool_param = True
            yield pb.ModelStreamInferResponse(infer_response=end)

    def ModelConfig(self, request: pb.ModelConfigRequest, context: Any) -> pb.ModelConfigResponse:  # noqa: N802
        answer = pb.ModelConfigResponse()
        answer.config.name = f"{request.name}/{request.version}"
        answer.config.max_batch_size = 8
        answer.config.input.add(name="data", data_type=TYPE_STRING, dims=[-1])
        answer.config.sequence_batching.max_sequence_idle_microseconds = 5_000_000
        answer.config.parameters["ending"].string_value = "!"
        return answer

    def ModelStatistics(  # noqa: N802
        self, request: pb.ModelStatisticsRequest, context: Any
    ) -> pb.ModelStatisticsResponse:
        if request.name == "absent":
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        answer = pb.ModelStatisticsResponse()
        one = answer.model_stats.add(name=request.name or "measure", version="1", inference_count=7, execution_count=3)
        one.inference_stats.fail.count = 2
        one.inference_stats.queue.MergeFrom(pb.StatisticDuration(count=4, ns=40_000))
        one.inference_stats.compute_infer.MergeFrom(pb.StatisticDuration(count=4, ns=5_000_000))
        return answer

    def RepositoryModelLoad(  # noqa: N802
        self, request: pb.RepositoryModelLoadRequest, context: Any
    ) -> pb.RepositoryModelLoadResponse:
        self.loads.append(request)
        return pb.RepositoryModelLoadResponse()

    def RepositoryModelUnload(  # noqa: N802
        self, request: pb.RepositoryModelUnloadRequest, context: Any
    ) -> pb.RepositoryModelUnloadResponse:
        self.unloads.append(request)
        return pb.RepositoryModelUnloadResponse()

    def SystemSharedMemoryStatus(  # noqa: N802
        self, request: pb.SystemSharedMemoryStatusRequest, context: Any
    ) -> pb.SystemSharedMemoryStatusResponse:
        answer = pb.SystemSharedMemoryStatusResponse()
        answer.regions["mine"].MergeFrom(
            pb.SystemSharedMemoryStatusResponse.RegionStatus(name="mine", key="/key", offset=64, byte_size=4096)
        )
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
