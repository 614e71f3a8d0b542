"""Decoupled models for tests, and clients of ModelStreamInfer."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from grpc import aio

from gateway.grpc_v2 import KServeFrontEnd, make_grpc_server
from gateway.operations import Operations
from gateway.operations.metadata import Metadata
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.stage.backend import Batch, Device, ModelDirectory
from tensorline.tensor import Array, encode_array
from tests.gateway.house import House
from tests.tensorline.stage.pair import Model, config

__all__ = ["DECOUPLED", "REPEAT", "Talk", "repeat", "repeat_request", "serving", "streamed", "told"]

DECOUPLED = "model_transaction_policy { decoupled: true }"
LIMIT = 1 << 20


def repeat(**values: object) -> Model:
    """The built-in backend `repeat`."""
    lines = ['backend: "repeat"', DECOUPLED]
    for name, datatype in (("IN", "INT32"), ("DELAY", "UINT32"), ("WAIT", "UINT32")):
        optional = "" if name == "IN" else "optional: true"
        lines.append(f'input [ {{ name: "{name}" data_type: TYPE_{datatype} dims: [ -1 ] {optional} }} ]')
    for name, datatype in (("OUT", "INT32"), ("IDX", "UINT32")):
        lines.append(f'output [ {{ name: "{name}" data_type: TYPE_{datatype} dims: [ -1 ] }} ]')
    for key, value in values.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    return Model("\n".join(lines))


REPEAT = repeat()

Stream = Callable[[Batch], Iterator[Mapping[str, Array]]]


def streamed(run: Stream, *, max_streams: int = 1, more: str = "", **shape: Any) -> Model:
    """A decoupled model over FP32 x and y that is one generator function."""

    class Instance:
        def __init__(self, model: ModelDirectory, device: Device) -> None:
            self.max_streams = max_streams

        def stream(self, request: Batch) -> Iterator[Mapping[str, Array]]:
            return run(request)

        def close(self) -> None:
            pass

    return Model(config({"x": "FP32"}, {"y": "FP32"}, more=f"{DECOUPLED} {more}", **shape), make=Instance)


def repeat_request(
    *values: int, id: str = "", model: str = "repeat", delay_ms: int = 0, empty_final: bool = False
) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, id=id)
    inputs: dict[str, Array] = {"IN": np.array(values, np.int32)}
    if delay_ms:
        inputs["DELAY"] = np.array([delay_ms], np.uint32)
    for name, array in inputs.items():
        message.inputs.add(name=name, datatype="INT32" if name == "IN" else "UINT32", shape=array.shape)
        message.raw_input_contents.append(bytes(encode_array(array)))
    if empty_final:
        message.parameters["triton_enable_empty_final_response"].bool_param = True
    return message


@asynccontextmanager
async def serving(house: House) -> AsyncIterator[aio.Channel]:
    operations = Operations(Metadata(house.models, house.readiness, "server 1"))
    front_end = KServeFrontEnd(house.service, operations, LIMIT)
    server = make_grpc_server(front_end, house.readiness, max_message_bytes=LIMIT, max_streams=10, reuse_port=False)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            yield channel
    finally:
        await server.stop(0.1)


class Talk:
    """A stream of requests and responses; what is sent may also be bytes that are no request."""

    def __init__(self, channel: aio.Channel, *metadata: tuple[str, str], timeout_s: float | None = None) -> None:
        self.call: Any = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )(timeout=timeout_s, metadata=metadata)

    async def send(self, *messages: pb.ModelInferRequest | bytes) -> None:
        for message in messages:
            await self.call.write(message if isinstance(message, bytes) else message.SerializeToString())

    async def next(self, within_s: float = 5.0) -> pb.ModelStreamInferResponse:
        async with asyncio.timeout(within_s):
            message = await self.call.read()
        assert message is not aio.EOF
        assert isinstance(message, pb.ModelStreamInferResponse)
        return message

    async def take(self, count: int) -> list[pb.ModelStreamInferResponse]:
        return [await self.next() for _ in range(count)]

    async def rest(self, within_s: float = 5.0) -> list[pb.ModelStreamInferResponse]:
        """Half-close, and everything until the end."""
        messages = []
        async with asyncio.timeout(within_s):
            await self.call.done_writing()
            while (message := await self.call.read()) is not aio.EOF:
                messages.append(message)
        return messages


def told(messages: Sequence[pb.ModelStreamInferResponse]) -> list[tuple[str, object]]:
    """Of each message the id, and its error or its first number."""
    return [
        (m.infer_response.id, m.error_message or np.frombuffer(m.infer_response.raw_output_contents[0], "<i4")[0])
        for m in messages
    ]
