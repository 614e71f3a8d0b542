"""Calls by KServe's client, run with its packages: `kserve_script.py GRPC HTTP` prints what came, as JSON."""

import asyncio
import json
import sys
from collections.abc import Awaitable
from typing import Any

import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.constants.constants import PredictorProtocol

ARRAY = np.arange(16, dtype=np.int32).reshape(1, 16)


def request(*, is_binary: bool) -> InferRequest:
    tensors = [InferInput(name=name, shape=[1, 16], datatype="INT32") for name in "AB"]
    for tensor in tensors:
        tensor.set_data_from_numpy(ARRAY, binary_data=is_binary)
    return InferRequest(model_name="simple", infer_inputs=tensors, request_id="k1")


def told(response: Any) -> dict[str, Any]:
    return {
        "id": response.id,
        "model": response.model_name,
        "outputs": {output.name: np.asarray(output.as_numpy()).reshape(-1).tolist() for output in response.outputs},
    }


async def grpc(address: str) -> dict[str, Any]:
    async with InferenceGRPCClient(url=address) as client:
        return {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready(),
            "model": await client.is_model_ready(model_name="simple"),
            "raw": told(await client.infer(request(is_binary=True))),
            "typed": told(await client.infer(request(is_binary=False))),
        }


async def unless_empty(call: Awaitable[bool]) -> bool | None:
    """None for the empty body that Triton answers: the client wants JSON there."""
    try:
        return await call
    except json.JSONDecodeError:
        return None


async def rest(address: str) -> dict[str, Any]:
    async with InferenceRESTClient(RESTConfig(protocol=PredictorProtocol.REST_V2)) as client:
        url = f"http://{address}"
        answers = {
            "live": await unless_empty(client.is_server_live(url)),
            "ready": await unless_empty(client.is_server_ready(url)),
            "model": await unless_empty(client.is_model_ready(url, "simple")),
            "raw": told(await client.infer(url, request(is_binary=True), model_name="simple")),
            "typed": told(await client.infer(url, request(is_binary=False), model_name="simple")),
        }
        try:
            await client.infer(url, request(is_binary=True), model_name="nobody")
        except httpx.HTTPStatusError as error:
            answers["unknown"] = error.response.status_code
        return answers


async def main() -> None:
    print(json.dumps({"grpc": await grpc(sys.argv[1]), "rest": await rest(sys.argv[2])}))


asyncio.run(main())
