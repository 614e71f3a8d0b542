"""The KServe v2 / Triton gRPC front end."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gateway.forwarding import NO_FORWARDING, Forwarding
from gateway.grpc_restrictions import RestrictedCalls
from gateway.grpc_stream import InferStream
from gateway.operations import Operation, Operations
from gateway.readiness import Readiness
from gateway.restrictions import NO_RESTRICTIONS, Restrictions
from gateway.service import InferenceService
from tensorline.errors import InternalError, ResourceExhaustedError, UnavailableError, answering
from tensorline.protocol.reflected import BothPools
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.protocol.wire import decode_request_wire, encode_response_wire

__all__ = ["KServeFrontEnd", "make_grpc_server"]

SERVICE = "inference.GRPCInferenceService"
INFER = f"{SERVICE}/ModelInfer"
PUSHBACK_MS = 100
Context = Any  # aio.ServicerContext[Request, Response]: each method has its own pair


class KServeFrontEnd:
    """The methods that are there; every other answers UNIMPLEMENTED, as gRPC does for one that it does not know."""

    def __init__(
        self,
        service: InferenceService,
        operations: Operations,
        max_message_bytes: int,
        forwarding: Forwarding = NO_FORWARDING,
    ) -> None:
        self.operations = operations
        self._service = service
        self._max_message_bytes = max_message_bytes
        self._forwarding = forwarding

    async def ModelInfer(self, request: bytes, context: Context) -> bytes:
        # A message's wire form in and out: protobuf does not copy large tensors then.
        started_ns = time.monotonic_ns()
        async with answering(context):
            try:
                decoded = decode_request_wire(request)
                if self._forwarding.is_active:
                    decoded = self._forwarding.apply(decoded, context.invocation_metadata() or ())
                response = await self._service.infer(
                    decoded,
                    self._service.recorder.begin(context.invocation_metadata() or (), decoded.model),
                    context.time_remaining(),
                    started_ns,
                    INFER,
                )
            except UnavailableError:
                context.set_trailing_metadata((("grpc-retry-pushback-ms", str(PUSHBACK_MS)),))
                raise
            answer = encode_response_wire(response, is_typed=decoded.is_typed)
            if len(answer) > self._max_message_bytes:  # gRPC would refuse it too, with a traceback in the log
                raise ResourceExhaustedError(
                    f"the response has {len(answer)} bytes, at most {self._max_message_bytes} can be sent"
                )
            return answer
        raise AssertionError("answered above")

    async def ModelStreamInfer(self, _: object, context: Context) -> None:
        # The reader/writer form of a grpc.aio handler.
        async with answering(context):
            await InferStream(self._service, context, self._max_message_bytes, self._forwarding).run()


def _handlers(front_end: KServeFrontEnd) -> dict[str, "grpc.RpcMethodHandler[Any, Any]"]:
    """Of the methods that are there; the generated servicer would answer the others with a traceback in the log."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(front_end.ModelInfer),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(front_end.ModelStreamInfer),
    }
    methods = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for name, operation in front_end.operations.by_name.items():
        request, response = getattr(pb, methods[name].input_type.name), getattr(pb, methods[name].output_type.name)
        handlers[name] = grpc.unary_unary_rpc_method_handler(
            _answering(operation, request),
            response_serializer=response.SerializeToString,
        )
    return handlers


def _answering(operation: Operation, request: type[Message]) -> Callable[[bytes, Context], Awaitable[Message]]:
    async def behave(wire: bytes, context: Context) -> Message:
        async with answering(context):
            return await operation(_parsed(request, wire))
        raise AssertionError("answered above")

    return behave


def _parsed(request: type[Message], wire: bytes) -> Message:
    """Not the handler's deserializer: grpc.aio logs its failure with a traceback and answers UNKNOWN."""
    try:
        return request.FromString(wire)
    except DecodeError as err:
        raise InternalError("Unable to parse request") from err


class _LeftClients(logging.Filter):
    """grpc.aio logs a traceback for a client that leaves in the moment in which its answer is sent: no trouble of ours.

    An answer that cannot be sent for another reason, its size, is refused before.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("ExecuteBatchError raised in core")


_LEFT_CLIENTS = _LeftClients()


def make_grpc_server(
    front_end: KServeFrontEnd,
    readiness: Readiness,
    *,
    max_message_bytes: int,
    max_streams: int,
    reuse_port: bool,
    restrictions: Restrictions = NO_RESTRICTIONS,
) -> aio.Server:
    """The public server, without a port yet."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_LEFT_CLIENTS)
    server = aio.server(
        interceptors=[RestrictedCalls(restrictions)] if restrictions.is_active else (),
        options=[
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_concurrent_streams", max_streams),
            ("grpc.max_metadata_size", 16 << 10),
            ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.so_reuseport", 1 if reuse_port else 0),
        ],
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, _handlers(front_end)),))
    health_pb2_grpc.add_HealthServicer_to_server(readiness.checks, server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, pool=cast(DescriptorPool, BothPools()))
    return server
