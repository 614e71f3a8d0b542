"""Index, load and unload of the model repository."""

from collections.abc import Mapping

from gateway.mesh import Mesh
from gateway.models import Models
from gateway.repository import Repository
from gateway.repository_index import list_models
from tensorline.config import is_model_name
from tensorline.config.override import check_files, refused
from tensorline.config.parse import TEXT_LIMIT
from tensorline.errors import InternalError, InvalidTensorError, UnsupportedError
from tensorline.protocol.infer import shown
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.rpc.hosted import READY

__all__ = ["RepositoryControl"]

CONFIG = "config"
FILE = "file:"
DEPENDENTS = "unload_dependents"


class RepositoryControl:
    """Source: protocol.md §11, errors.md §8."""

    def __init__(self, repository: Repository, models: Models, mesh: Mesh) -> None:
        self._repository = repository
        self._models = models
        self._mesh = mesh

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        _refuse_repository(request.repository_name)
        rows = await list_models(self._repository, self._models, self._mesh)
        answer = pb.RepositoryIndexResponse()
        for row in rows:
            if row.state == READY or not request.ready:
                answer.models.add(name=row.name, version=row.version, state=row.state, reason=row.reason)
        return answer

    async def RepositoryModelLoad(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        _refuse_repository(request.repository_name)
        config, files = _overrides(request.parameters)
        name = request.model_name
        if files and not config:
            raise InternalError(f"{refused(shown(name))}: parameter '{FILE}...' needs parameter '{CONFIG}'")
        check_files(files)
        if len(config.encode()) > TEXT_LIMIT:
            size = len(config.encode())
            raise InternalError(f"{refused(shown(name))}: '{CONFIG}' has {size} bytes, at most {TEXT_LIMIT} are read")
        if not is_model_name(name):
            raise InternalError(f"{refused(shown(name))}: it is no name of a model")
        await self._repository.load(name, config, files)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        _refuse_repository(request.repository_name)
        takes_dependents = False
        if DEPENDENTS in request.parameters:
            given = request.parameters[DEPENDENTS]
            if given.WhichOneof("parameter_choice") != "bool_param":
                raise InvalidTensorError(f"invalid value type for '{DEPENDENTS}' parameter, expected bool_param")
            takes_dependents = given.bool_param
        await self._repository.unload(request.model_name, takes_dependents=takes_dependents)
        return pb.RepositoryModelUnloadResponse()


def _refuse_repository(name: str) -> None:
    if name:
        raise UnsupportedError("'repository_name' specification is not supported")


def _overrides(parameters: Mapping[str, pb.ModelRepositoryParameter]) -> tuple[str, dict[str, bytes]]:
    """
    Raises:
        InvalidTensorError: a key that is none, or a value of another type.
    """
    config, files = "", {}
    for key, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if key == CONFIG:
            if kind != "string_param":
                raise InvalidTensorError(f"invalid value type for load parameter '{CONFIG}', expected string_param.")
            config = value.string_param or " "  # what was given empty is no JSON, and refused as that
        elif key.startswith(FILE):
            if kind != "bytes_param":
                raise InvalidTensorError(f"invalid value type for load parameter '{shown(key)}', expected bytes_param.")
            files[key.removeprefix(FILE)] = value.bytes_param
        else:
            raise InvalidTensorError(f"unrecognized load parameter '{shown(key)}'.")
    return config, files
