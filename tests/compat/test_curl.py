"""The REST routes by curl: what a person types, and what a script reads."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.compat.server import Server


@dataclass(frozen=True)
class Reply:
    status: int
    content_type: str
    headers: str
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def curl(server: Server, path: str, *options: str, body: Any = None) -> Reply:
    """Args: body: Bytes, or what goes as JSON; either makes it a POST."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    given = ["--data-binary", "@-"] if data is not None else []
    form = "\n%{http_code}\n%{content_type}\n%{header_json}"
    done = subprocess.run(
        [
            "curl",
            "-sS",
            "--max-time",
            "20",
            *options,
            *given,
            "-w",
            f"%{{stderr}}{form}",
            f"http://{server.http}{path}",
        ],
        input=data,
        capture_output=True,
        check=True,
    )
    _, status, content_type, headers = done.stderr.decode().split("\n", 3)
    return Reply(int(status), content_type, headers, done.stdout)


def tensor(values: Sequence[float], **more: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [len(values)], "data": values, **more}


GET = [
    ("/v2", 200, "extensions"),
    ("/v2/health/live", 200, ""),
    ("/v2/health/ready", 200, ""),
    ("/v2/models/simple", 200, "inputs"),
    ("/v2/models/simple/versions/1", 200, "inputs"),
    ("/v2/models/simple/ready", 200, ""),
    ("/v2/models/simple/versions/1/ready", 200, ""),
    ("/v2/models/simple/config", 200, "max_batch_size"),
    ("/v2/models/simple/versions/1/config", 200, "max_batch_size"),
    ("/v2/models/simple/stats", 200, "model_stats"),
    ("/v2/models/simple/versions/1/stats", 200, "model_stats"),
    ("/v2/models/stats", 200, "model_stats"),
    ("/v2/systemsharedmemory/status", 200, "[]"),
    ("/v2/cudasharedmemory/status", 200, "[]"),
    ("/v2/trace/setting", 200, "trace_level"),
    ("/v2/models/simple/trace/setting", 200, "trace_level"),
    ("/v2/logging", 200, "log_format"),
    ("/v2/models/nobody", 404, "Request for unknown model: 'nobody' is not found"),
    ("/v2/models/simple/versions/9", 404, "'simple' version 9 is not found"),
    ("/v2/models/simple/versions/x", 404, ""),
    ("/v2/models/nobody/ready", 400, "Model version not ready"),
    ("/v2/systemsharedmemory/region/nowhere/status", 404, "Unable to find system shared memory region: 'nowhere'"),
    ("/v2/models/nobody/trace/setting", 400, "Request for unknown model : nobody"),
    ("/v2/models/", 404, "Not Found"),
    ("/v2/", 404, "Not Found"),
    ("/v2/models/simple/", 404, "Not Found"),
    ("/v3", 404, "Not Found"),
]


@pytest.mark.parametrize(("path", "status", "words"), GET)
def test_get(server: Server, path: str, status: int, words: str) -> None:
    reply = curl(server, path)
    assert (reply.status, words in reply.body.decode()) == (status, True), reply.body
    if words and status == 200:
        assert reply.content_type.startswith("application/json")
        reply.json  # noqa: B018 - it is JSON
    if status != 200 and words:
        assert reply.json["error"]


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v2", "POST"),
        ("/v2/health/live", "POST"),
        ("/v2/models/simple/infer", "GET"),
        ("/v2/models/simple/config", "POST"),
        ("/v2/repository/index", "GET"),
        ("/v2/repository/models/simple/load", "GET"),
        ("/v2/systemsharedmemory/region/r/register", "GET"),
        ("/v2/systemsharedmemory/status", "POST"),
        ("/v2/logging", "DELETE"),
    ],
)
def test_wrong_methods(server: Server, path: str, method: str) -> None:
    reply = curl(server, path, "-X", method, *(["-d", ""] if method == "POST" else []))
    assert reply.status == 405, reply.body
    assert reply.json == {"error": "Method Not Allowed"}


def test_infer(server: Server) -> None:
    body = {"id": "c1", "inputs": [tensor([1, 2.5])], "outputs": [{"name": "y"}]}
    for version in ("", "/versions/1"):
        reply = curl(server, f"/v2/models/line_FP32{version}/infer", body=body)
        assert (reply.status, reply.content_type) == (200, "application/json")
        assert reply.json == {
            "id": "c1",
            "model_name": "line_FP32",
            "model_version": "1",
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [2], "data": [1.0, 2.5]}],
        }


def test_nested_data_comes_back_flat(server: Server) -> None:
    nested = {"name": "x", "datatype": "INT32", "shape": [2, 2], "data": [[1, 2], [3, 4]]}
    reply = curl(server, "/v2/models/ident_INT32/infer", body={"inputs": [nested]})
    assert reply.json["outputs"][0]["data"] == [1, 2, 3, 4]


def test_binary_in_and_out(server: Server) -> None:
    values = np.array([1.5, -2], np.float32).tobytes()
    head = json.dumps(
        {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        }
    ).encode()
    header = f"Inference-Header-Content-Length: {len(head)}"
    reply = curl(server, "/v2/models/line_FP32/infer", "-H", header, body=head + values)
    assert (reply.status, reply.content_type) == (200, "application/octet-stream")
    size = int(json.loads(reply.headers)["inference-header-content-length"][0])
    assert json.loads(reply.body[:size])["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}
    ]
    assert reply.body[size:] == values


def test_a_raw_request(server: Server) -> None:
    values = np.arange(5, dtype=np.float32).tobytes()
    reply = curl(server, "/v2/models/line_FP32/infer", "-H", "Inference-Header-Content-Length: 0", body=values)
    size = int(json.loads(reply.headers)["inference-header-content-length"][0])
    assert reply.body[size:] == values


def test_generate(server: Server) -> None:
    reply = curl(server, "/v2/models/line_FP32/generate", body={"x": [1, 2, 3], "id": "g"})
    assert reply.status == 200
    assert reply.json == {"id": "g", "model_name": "line_FP32", "model_version": "1", "y": [1.0, 2.0, 3.0]}
    assert curl(server, "/v2/models/line_FP32/generate", body={"x": 4}).json["y"] == 4.0
    several = curl(server, "/v2/models/repeat/generate", body={"IN": [1, 2], "DELAY": [0]})
    assert "generate expects model to produce exactly 1 response" in several.json["error"]
    wrong = curl(server, "/v2/models/line_FP32/generate", body={"x": 1, "parameters": 3})
    status = server.either(ours=400, triton=500)
    assert (wrong.status, "Expected JSON object" in wrong.json["error"]) == (status, True)


def test_generate_stream(server: Server) -> None:
    reply = curl(server, "/v2/models/repeat/generate_stream", "-N", body={"IN": [7, 8, 9], "DELAY": [1]})
    assert reply.status == 200
    assert reply.content_type.replace(" ", "") == "text/event-stream;charset=utf-8"
    events = [json.loads(event.removeprefix(b"data: ")) for event in reply.body.split(b"\n\n") if event]
    assert [event["OUT"] for event in events] == [7, 8, 9]
    nothing = curl(server, "/v2/models/repeat/generate_stream", body={"IN": [], "DELAY": [1]})
    assert (nothing.status, nothing.body) == (200, b"")
    refused = curl(server, "/v2/models/nobody/generate_stream", body={"x": 1})
    assert (refused.status, "'nobody'" in refused.json["error"]) == (404, True)


def test_repository_routes(server: Server) -> None:
    assert curl(server, "/v2/repository/models/spare/load", "-X", "POST").status == 200
    reply = curl(server, "/v2/repository/models/nobody/load", "-X", "POST")
    assert (reply.status, "failed to load 'nobody'" in reply.json["error"]) == (500, True)
    assert curl(server, "/v2/repository/models/nobody/unload", "-X", "POST").status == 200


def test_answers_are_kept_open_for_the_next_request(server: Server) -> None:
    url = ["-o", "/dev/null", f"http://{server.http}/v2/health/live"]
    done = subprocess.run(
        ["curl", "-sS", "-w", "%{num_connects} ", *url * 3],
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stdout.split() == ["1", "0", "0"]
