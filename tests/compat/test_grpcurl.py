"""Typed requests as JSON by a command line: `buf curl`, which does for gRPC what grpcurl does.

grpcurl itself is a Go program that no Python package carries; the requests are the same.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compat.server import ROOT, Server

BUF = Path(sys.executable).with_name("buf")
SERVICE = "inference.GRPCInferenceService"


@pytest.fixture(scope="module")
def schema(server: Server) -> list[str]:
    """How buf learns the messages: from our reflection, from the .proto files for a Triton, which has none."""
    return ["--schema", str(ROOT / "protos")] if server.is_triton else ["--reflect"]


def buf_curl(server: Server, schema: list[str], method: str, body: Any = None) -> tuple[int, Any]:
    done = subprocess.run(
        [
            *(str(BUF), "curl", "--http2-prior-knowledge", "--protocol", "grpc", *schema, "-d", json.dumps(body or {})),
            f"http://{server.grpc}/{SERVICE}/{method}",
        ],
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode, json.loads(done.stdout or done.stderr)


def test_reflection_lists_every_method(server: Server) -> None:
    if server.is_triton:
        pytest.skip("no reflection there")
    done = subprocess.run(
        [BUF, "curl", "--http2-prior-knowledge", "--protocol", "grpc", "--list-methods", f"http://{server.grpc}"],
        capture_output=True,
        check=True,
        text=True,
    )
    listed = [line for line in done.stdout.splitlines() if line.startswith(SERVICE)]
    assert len(listed) == 20
    assert "grpc.health.v1.Health/Check" in done.stdout


def test_metadata(server: Server, schema: list[str]) -> None:
    code, answer = buf_curl(server, schema, "ModelMetadata", {"name": "simple"})
    assert (code, answer["inputs"][0]) == (0, {"name": "A", "datatype": "INT32", "shape": ["-1", "16"]})


def test_typed_in_typed_out(server: Server, schema: list[str]) -> None:
    """A12. Triton answers raw."""
    inputs = [
        {"name": "n", "datatype": "UINT32", "shape": ["1", "1"], "contents": {"uintContents": [128]}},
        {"name": "s", "datatype": "BYTES", "shape": ["1"], "contents": {"bytesContents": ["YQBi"]}},
    ]
    code, answer = buf_curl(server, schema, "ModelInfer", {"modelName": "mixed", "inputs": inputs})
    assert code == 0
    if server.is_triton:
        assert answer["rawOutputContents"] == ["gAAAAA==", "AwAAAGEAYg=="]
        return
    found = {output["name"]: output["contents"] for output in answer["outputs"]}
    assert found == {"n_out": {"uintContents": [128]}, "s_out": {"bytesContents": ["YQBi"]}}
    assert "rawOutputContents" not in answer


def test_integers_at_the_edges(server: Server, schema: list[str]) -> None:
    """A08: 64-bit numbers are texts there."""
    values = [str(2**53 + 1), str(2**63 - 1), str(-(2**63))]
    tensor = {"name": "x", "datatype": "INT64", "shape": ["3"], "contents": {"int64Contents": values}}
    code, answer = buf_curl(server, schema, "ModelInfer", {"modelName": "line_INT64", "inputs": [tensor]})
    assert code == 0
    if not server.is_triton:
        assert answer["outputs"][0]["contents"]["int64Contents"] == values


def test_text_that_is_none(server: Server, schema: list[str]) -> None:
    """A01."""
    elements = ["YQBi", "AAA=", "", "//4A", "Y2Fmw6k="]
    tensor = {"name": "x", "datatype": "BYTES", "shape": ["5"], "contents": {"bytesContents": elements}}
    code, answer = buf_curl(server, schema, "ModelInfer", {"modelName": "line_BYTES", "inputs": [tensor]})
    assert code == 0
    if not server.is_triton:
        assert answer["outputs"][0]["contents"]["bytesContents"] == elements


def test_errors(server: Server, schema: list[str]) -> None:
    code, answer = buf_curl(server, schema, "ModelMetadata", {"name": "nobody"})
    assert code != 0
    assert answer["code"] == "not_found"
    assert "'nobody'" in answer["message"]


def test_the_index(server: Server, schema: list[str]) -> None:
    code, answer = buf_curl(server, schema, "RepositoryIndex", {"ready": True})
    assert code == 0
    assert {"name": "simple", "version": "1", "state": "READY"} in answer["models"]
