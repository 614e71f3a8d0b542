"""What the gateway is and which models it has: health, metadata, configuration."""

from gateway.models import Models
from gateway.readiness import Readiness
from tensorline import __version__
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb

__all__ = ["EXTENSIONS", "Metadata"]

EXTENSIONS = (
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


class Metadata:
    """Source: protocol.md §9."""

    def __init__(self, models: Models, readiness: Readiness, server_id: str) -> None:
        self._models = models
        self._readiness = readiness
        self._server_id = server_id

    async def ServerLive(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._readiness.is_ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name=self._server_id, version=__version__, extensions=EXTENSIONS)

    async def ModelReady(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        ready = self._readiness.accepts and self._models.is_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        config, version = self._models.config(request.name, request.version)
        versions = [version] if request.version else self._models.versions(request.name)
        answer = pb.ModelMetadataResponse(
            name=config.name, versions=map(str, versions), platform=config.platform or config.backend
        )
        batch = [-1] if config.max_batch_size > 0 else []
        for into, specs in ((answer.inputs, config.inputs), (answer.outputs, config.outputs)):
            for spec in specs:
                into.add(name=spec.name, datatype=spec.datatype, shape=[*batch, *spec.dims])
        return answer

    async def ModelConfig(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        found = self._models.find(request.name, request.version)
        answer = pb.ModelConfigResponse()
        answer.config.ParseFromString(found.config.encoded)
        if found.is_decoupled:  # of a pipeline: because one of its steps is
            answer.config.model_transaction_policy.decoupled = True
        return answer
