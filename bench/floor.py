"""A grpc.aio server that does nothing: the floor under every figure, and the collector of the tracing row.

Prints its port. `python -m bench.floor` answers ModelInfer; `python -m bench.floor sink` takes OTLP exports.
"""

import sys

import grpc
import uvloop
from grpc import aio

METHODS = {
    "infer": ("inference.GRPCInferenceService", "ModelInfer"),
    "sink": ("opentelemetry.proto.collector.trace.v1.TraceService", "Export"),
}


async def answer(request: bytes, context: object) -> bytes:
    return b""


async def serve(kind: str) -> None:
    service, method = METHODS[kind]
    server = aio.server(options=[("grpc.max_receive_message_length", 64 << 20)])
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1] if len(sys.argv) > 1 else "infer"))
