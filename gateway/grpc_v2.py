"""The KServe v2 / Triton gRPC front end."""

import logging
import time
from typing import Any, cast

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gateway.readiness import Readiness
from gateway.service import InferenceService
from tensorline import __version__
from tensorline.errors import ResourceExhaustedError, UnavailableError, answering
from tensorline.protocol.reflected import BothPools
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.protocol.wire import decode_request_wire, encode_response_wire

__all__ = ["EXTENSIONS", "KServeFrontEnd", "make_grpc_server"]

SERVICE = "inference.GRPCInferenceService"
INFER = f"{SERVICE}/ModelInfer"
EXTENSIONS = ("classification", "model_configuration", "parameters")
PUSHBACK_MS = 100
TAKES_BYTES = ("ModelInfer",)
"""Methods that get and give a message's wire form: large tensors are then not copied by protobuf."""
Context = Any  # aio.ServicerContext[Request, Response]: each method has its own pair


class KServeFrontEnd:
    """The methods of this release; every other answers UNIMPLEMENTED, as gRPC does for a method that is not there."""

    def __init__(self, service: InferenceService, readiness: Readiness, server_id: str, max_message_bytes: int) -> None:
        self._service = service
        self._readiness = readiness
        self._server_id = server_id
        self._max_message_bytes = max_message_bytes

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._readiness.is_ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name=self._server_id, version=__version__, extensions=EXTENSIONS)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        async with answering(context):
            ready = self._readiness.accepts and self._service.models.is_ready(request.name, request.version)
            return pb.ModelReadyResponse(ready=ready)
        raise AssertionError("answered above")

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        async with answering(context):
            config, version = self._service.models.config(request.name, request.version)
            versions = [version] if request.version else self._service.models.versions(request.name)
            answer = pb.ModelMetadataResponse(
                name=config.name, versions=map(str, versions), platform=config.platform or config.backend
            )
            batch = [-1] if config.max_batch_size > 0 else []
            for into, specs in ((answer.inputs, config.inputs), (answer.outputs, config.outputs)):
                for spec in specs:
                    into.add(name=spec.name, datatype=spec.datatype, shape=[*batch, *spec.dims])
            return answer
        raise AssertionError("answered above")

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        async with answering(context):
            config, _ = self._service.models.config(request.name, request.version)
            answer = pb.ModelConfigResponse()
            answer.config.ParseFromString(config.encoded)
            return answer
        raise AssertionError("answered above")

    async def ModelInfer(self, request: bytes, context: Context) -> bytes:
        started_ns = time.monotonic_ns()
        async with answering(context):
            try:
                decoded = decode_request_wire(request)
                response = await self._service.infer(
                    decoded,
                    self._service.recorder.begin(context.invocation_metadata() or ()),
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


def _handlers(front_end: KServeFrontEnd) -> dict[str, "grpc.RpcMethodHandler[Any, Any]"]:
    """Of the methods that are there; the generated servicer would answer the others with a traceback in the log."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
        behaviour = getattr(front_end, method.name, None)
        if behaviour is not None:
            if method.name in TAKES_BYTES:
                handlers[method.name] = grpc.unary_unary_rpc_method_handler(behaviour)
                continue
            request, response = getattr(pb, method.input_type.name), getattr(pb, method.output_type.name)
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                behaviour, request_deserializer=request.FromString, response_serializer=response.SerializeToString
            )
    return handlers


class _LeftClients(logging.Filter):
    """grpc.aio logs a traceback for a client that leaves in the moment in which its answer is sent: no trouble of ours.

    An answer that cannot be sent for another reason, its size, is refused before.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("ExecuteBatchError raised in core")


_LEFT_CLIENTS = _LeftClients()


def make_grpc_server(
    front_end: KServeFrontEnd, readiness: Readiness, *, max_message_bytes: int, max_streams: int, reuse_port: bool
) -> aio.Server:
    """The public server, without a port yet."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_LEFT_CLIENTS)
    server = aio.server(
        options=[
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_concurrent_streams", max_streams),
            ("grpc.max_metadata_size", 16 << 10),
            ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.so_reuseport", 1 if reuse_port else 0),
        ]
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, _handlers(front_end)),))
    health_pb2_grpc.add_HealthServicer_to_server(readiness.checks, server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, pool=cast(DescriptorPool, BothPools()))
    return server
