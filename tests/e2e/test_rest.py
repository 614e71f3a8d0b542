"""The REST twin of a whole mesh, with the published HTTP clients and with bare connections."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tensorline.tensor import Array
from tests.e2e.mesh import Mesh, running_mesh, until
from tests.e2e.models import chain_services, model, write_chain

pytestmark = [
    pytest.mark.slow,
    # aiohttp's advice to tritonclient, which sends bytes.
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]

LARGE = 4 << 20
"""Elements of FP32: 16 MiB."""
ENVIRON = {
    "TENSORLINE_HTTP_RESTRICTED_API": "logging:admin-key=secret;trace:trace-key=other",
    "TENSORLINE_GRPC_RESTRICTED_PROTOCOL": "logging:admin-key=secret",
    "TENSORLINE_HTTP_HEADER_FORWARD_PATTERN": "X-.*",
    "TENSORLINE_HTTP_MAX_INPUT_SIZE": "20MiB",
}


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    root = tmp_path_factory.mktemp("repository")
    write_chain(root, "chain")
    model(root / "pre", "coop", "coop", datatype="INT32", dims="1")
    model(root / "pre", "echo", "echo", datatype="BYTES")
    repositories = [root / place for place in ("pre", "mid", "post", "pipelines")]
    async with running_mesh(
        root / "pre", services=chain_services(root), gateway_repositories=repositories, gateway_env=ENVIRON
    ) as mesh:
        yield mesh


@asynccontextmanager
async def published(kind: str, mesh: Mesh) -> AsyncIterator[tuple[Any, Any]]:
    """One of tritonclient's two HTTP clients, and the module that it is from."""
    module = import_module(f"tritonclient.{kind}")
    client = module.InferenceServerClient(f"127.0.0.1:{mesh.http_port}")
    try:
        yield module, client
    finally:
        await ended(client.close())


async def ended(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


def inputs(module: Any, array: Array, name: str = "x", **options: Any) -> list[Any]:
    tensor = module.InferInput(name, list(array.shape), "FP32" if array.dtype == np.float32 else "INT32")
    tensor.set_data_from_numpy(array, **options)
    return [tensor]


@pytest.mark.parametrize("kind", ["http", "http.aio"])
async def test_a_large_tensor_through_three_processes(kind: str, mesh: Mesh) -> None:
    array = np.random.default_rng(5).random(LARGE, np.float32)
    async with published(kind, mesh) as (module, client):
        for options in ({}, {"request_compression_algorithm": "gzip", "response_compression_algorithm": "deflate"}):
            result = await ended(client.infer("chain", inputs(module, array), **options))
            np.testing.assert_array_equal(result.as_numpy("y"), array)


@pytest.mark.parametrize("kind", ["http", "http.aio"])
async def test_json_both_ways(kind: str, mesh: Mesh) -> None:
    array = np.array([0.1, -0.0, np.nan, np.inf, -np.inf, 3.4028235e38, 1e-45], np.float32)
    async with published(kind, mesh) as (module, client):
        wanted = [module.InferRequestedOutput("y", binary_data=False)]
        result = await ended(client.infer("chain", inputs(module, array, binary_data=False), outputs=wanted))
        np.testing.assert_array_equal(result.as_numpy("y"), array)


@pytest.mark.parametrize("kind", ["http", "http.aio"])
async def test_what_is_too_large_is_told_so(kind: str, mesh: Mesh) -> None:
    async with published(kind, mesh) as (module, client):
        with pytest.raises(InferenceServerException, match="exceeds the maximum allowed input size of 20971520 bytes"):
            await ended(client.infer("chain", inputs(module, np.zeros(6 << 20, np.float32))))
        array = np.zeros(3, np.float32)
        assert (await ended(client.infer("chain", inputs(module, array)))).as_numpy("y").tolist() == [0.0] * 3


async def test_restricted_routes(mesh: Mesh) -> None:
    refusal = {"error": "This API is restricted, expecting header 'admin-key'"}
    assert await mesh.get("/v2/logging") == (403, refusal)
    assert (await mesh.get("/v2/logging", None, **{"admin-key": "secret"}))[0] == 200
    assert (await mesh.get("/v2/trace/setting", None, **{"admin-key": "secret"}))[0] == 403
    assert (await mesh.get("/v2/models/chain"))[0] == 200


async def opened(mesh: Mesh) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", mesh.http_port)


def posted(path: str, document: object, *headers: str) -> bytes:
    body = json.dumps(document).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@pytest.mark.parametrize("route", ["infer", "generate_stream"])
async def test_a_client_that_leaves_stops_the_model(route: str, mesh: Mesh) -> None:
    tensor = {"name": "x", "datatype": "INT32", "shape": [1], "data": [20_000]}
    name = f"left-{route}"
    document = {"id": name, "inputs": [tensor]} if route == "infer" else {"id": name, "x": 20_000}
    _, writer = await opened(mesh)
    writer.write(posted(f"/v2/models/coop/{route}", document))
    await until(lambda: f"begun {name}" in mesh.log("pre"), 10.0)
    writer.close()
    await until(lambda: f"cancelled {name}" in mesh.log("pre"), 10.0)


TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


async def test_parameters_headers_and_trace_reach_the_stage(mesh: Mesh) -> None:
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1], "data": ["[]"]}
    parameters = {"i": 2**53 + 1, "u": 2**64 - 1, "d": 0.5, "s": "é", "b": True, "priority": 1}
    document = {"id": "told", "inputs": [tensor], "parameters": parameters}
    reader, writer = await opened(mesh)
    headers = ("X-Tenant: blue", "Other: 1", f"traceparent: 00-{TRACE_ID}-b7ad6b7169203331-01", "Connection: close")
    writer.write(posted("/v2/models/echo/infer", document, *headers))
    _, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    (said,) = json.loads(json.loads(body)["outputs"][0]["data"][0])
    del parameters["priority"]
    assert said["parameters"] == {**parameters, "X-Tenant": "blue"}
    assert said["id"] == "told"
    _, (kept,) = await mesh.get(f"/api/traces?which={TRACE_ID}")
    assert (kept["model"], kept["request_id"]) == ("echo", "told")
