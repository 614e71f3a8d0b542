"""Requests as a client writes them, with our stubs: short to say, and every field within reach."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from grpc import StatusCode
from grpc.aio import AioRpcError

from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.tensor import Array, datatype_of, decode_array, encode_array, encode_bytes_tensor

if TYPE_CHECKING:
    from tensorline.protocol.stubs.inference.grpc_service_pb2_grpc import GRPCInferenceServiceAsyncStub as Stub
else:
    from tensorline.protocol.stubs.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub as Stub

__all__ = ["Failure", "Stub", "arrays", "failure", "infer", "outcome", "request"]


def request(
    model: str,
    outputs: Sequence[str] = (),
    *,
    id: str = "",
    version: str = "",
    given: Mapping[str, Array] | None = None,
    **inputs: Array,
) -> pb.ModelInferRequest:
    """A raw request; inputs by name, also in `given`."""
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=id)
    for name, array in {**(given or {}), **inputs}.items():
        message.inputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        raw = encode_bytes_tensor(array) if array.dtype == np.object_ else bytes(encode_array(array))
        message.raw_input_contents.append(raw)
    for name in outputs:
        message.outputs.add(name=name)
    return message


def arrays(response: pb.ModelInferResponse) -> dict[str, Array]:
    """The outputs of a raw response."""
    return {
        output.name: decode_array(output.datatype, tuple(output.shape), raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


async def infer(
    stub: Stub,
    model: str,
    *,
    timeout_s: float = 20.0,
    id: str = "",
    given: Mapping[str, Array] | None = None,
    **inputs: Array,
) -> dict[str, Array]:
    return arrays(await stub.ModelInfer(request(model, id=id, given={**(given or {}), **inputs}), timeout=timeout_s))


@dataclass(frozen=True)
class Failure:
    code: StatusCode
    text: str
    took_s: float
    trailers: Mapping[str, str]


async def outcome(call: Any) -> Failure | None:
    """How the awaitable `call` fails, if it does."""
    began = time.monotonic()
    try:
        await call
    except AioRpcError as error:
        trailers = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
        return Failure(error.code(), error.details() or "", time.monotonic() - began, trailers)
    return None


async def failure(call: Any) -> Failure:
    """How it fails, which it must."""
    found = await outcome(call)
    assert found is not None
    return found
