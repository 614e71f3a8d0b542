"""The routes besides inference: a path and a JSON body to the operation's message, its answer to JSON.

Source: protocol.md §9 to §13.1.
"""

import base64
import binascii
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Final

from google.protobuf.message import Message

from gateway.operations import Operations
from gateway.rest.answers import Reply, empty_reply, json_reply
from gateway.rest.endpoint import Exchange
from gateway.rest.messages import message_value
from gateway.rest.strict_json import kind_name, member, parse_object
from tensorline.errors import InvalidTensorError, TensorlineError, UnsupportedError
from tensorline.protocol.infer import shown
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.telemetry.trace_rules import TRACE_KEYS

__all__ = ["Control"]

UINT64: Final = 1 << 64
INT64_MAX: Final = (1 << 63) - 1
UINT32: Final = 1 << 32
HANDLE_BYTES: Final = 64
FILE: Final = "file:"
TRACE_SETTINGS: Final = (*TRACE_KEYS, "trace_file")
LOG_SETTINGS: Final = ("log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format")

Handle = Callable[[Exchange], Awaitable[Reply]]


class Control:
    """One method for each operation, named as its route."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def _call(self, rpc: str, message: Message) -> Any:
        try:
            operation = self._operations[rpc]
        except KeyError:
            raise UnsupportedError(f"this server does not have {rpc}") from None
        return await operation(message)

    # -- the server and its models -------------------------------------------------------------------------------------

    async def metadata(self, exchange: Exchange) -> Reply:
        return json_reply(message_value(await self._call("ServerMetadata", pb.ServerMetadataRequest())))

    async def live(self, exchange: Exchange) -> Reply:
        """Triton answers health without a body; KServe's client wants the JSON of the Open Inference Protocol."""
        answer = await self._call("ServerLive", pb.ServerLiveRequest())
        return json_reply({"live": answer.live}, 200 if answer.live else 400)

    async def ready(self, exchange: Exchange) -> Reply:
        answer = await self._call("ServerReady", pb.ServerReadyRequest())
        return json_reply({"ready": answer.ready}, 200 if answer.ready else 400)

    async def model(self, exchange: Exchange) -> Reply:
        message = pb.ModelMetadataRequest(**_model(exchange))
        return json_reply(message_value(await self._call("ModelMetadata", message)))

    async def model_ready(self, exchange: Exchange) -> Reply:
        try:
            answer = await self._call("ModelReady", pb.ModelReadyRequest(**_model(exchange)))
        except TensorlineError as error:
            return json_reply({"error": str(error)}, 400)
        if not answer.ready:
            return json_reply({"error": "Model version not ready"}, 400)
        return json_reply({"name": exchange.path["model"], "ready": True})

    async def config(self, exchange: Exchange) -> Reply:
        answer = await self._call("ModelConfig", pb.ModelConfigRequest(**_model(exchange)))
        return json_reply(message_value(answer.config))

    async def statistics(self, exchange: Exchange) -> Reply:
        answer = await self._call("ModelStatistics", pb.ModelStatisticsRequest(**_model(exchange)))
        return json_reply(message_value(answer))

    # -- the repository ------------------------------------------------------------------------------------------------

    async def index(self, exchange: Exchange) -> Reply:
        document = parse_object(exchange.body, is_optional=True)
        message = pb.RepositoryIndexRequest(
            repository_name=exchange.path.get("repository", ""), ready=member(document, "ready", bool, default=False)
        )
        answer = await self._call("RepositoryIndex", message)
        rows = [{key: value for key, value in message_value(row).items() if value} for row in answer.models]
        return json_reply(rows)

    async def load(self, exchange: Exchange) -> Reply:
        document = parse_object(exchange.body, is_optional=True)
        path = exchange.path
        message = pb.RepositoryModelLoadRequest(
            repository_name=path.get("repository", ""), model_name=path.get("model", "")
        )
        parameters = member(document, "parameters", dict, default={})
        for key in parameters:
            text = member(parameters, key, str, "of the load parameters")
            if key.startswith(FILE):
                message.parameters[key].bytes_param = _decoded(text, f"load parameter '{shown(key)}'")
            else:
                message.parameters[key].string_param = text
        await self._call("RepositoryModelLoad", message)
        return empty_reply()

    async def unload(self, exchange: Exchange) -> Reply:
        document = parse_object(exchange.body, is_optional=True)
        path = exchange.path
        message = pb.RepositoryModelUnloadRequest(
            repository_name=path.get("repository", ""), model_name=path.get("model", "")
        )
        for key, value in member(document, "parameters", dict, default={}).items():
            into = message.parameters[key]
            if isinstance(value, bool):
                into.bool_param = value
            elif isinstance(value, int) and -INT64_MAX - 1 <= value <= INT64_MAX:
                into.int64_param = value
            elif isinstance(value, str):
                into.string_param = value
            else:
                raise _no_parameter(key, value)
        await self._call("RepositoryModelUnload", message)
        return empty_reply()

    # -- clients' shared memory ----------------------------------------------------------------------------------------

    def region_status(self, kind: str) -> Handle:
        async def status(exchange: Exchange) -> Reply:
            message = getattr(pb, f"{kind}SharedMemoryStatusRequest")(name=exchange.path.get("region", ""))
            answer = await self._call(f"{kind}SharedMemoryStatus", message)
            return json_reply([message_value(region) for _, region in sorted(answer.regions.items())])

        return status

    async def register_system(self, exchange: Exchange) -> Reply:
        document = parse_object(exchange.body)
        message = pb.SystemSharedMemoryRegisterRequest(
            name=exchange.path["region"],
            key=_region_member(document, "key", str),
            offset=_integer(document, "offset", 0),
            byte_size=_integer(document, "byte_size"),
        )
        await self._call("SystemSharedMemoryRegister", message)
        return empty_reply()

    async def register_cuda(self, exchange: Exchange) -> Reply:
        document = parse_object(exchange.body)
        text = member(_region_member(document, "raw_handle", dict), "b64", str, "of 'raw_handle'")
        handle = _decoded(text, "'raw_handle'")
        if len(handle) != HANDLE_BYTES:
            raise InvalidTensorError(
                f"'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t of {HANDLE_BYTES} bytes, it has "
                f"{len(handle)}"
            )
        message = pb.CudaSharedMemoryRegisterRequest(
            name=exchange.path["region"],
            raw_handle=handle,
            device_id=_integer(document, "device_id", limit=INT64_MAX),
            byte_size=_integer(document, "byte_size"),
        )
        await self._call("CudaSharedMemoryRegister", message)
        return empty_reply()

    def unregister(self, kind: str) -> Handle:
        async def unregister(exchange: Exchange) -> Reply:
            message = getattr(pb, f"{kind}SharedMemoryUnregisterRequest")(name=exchange.path.get("region", ""))
            await self._call(f"{kind}SharedMemoryUnregister", message)
            return empty_reply()

        return unregister

    # -- settings ------------------------------------------------------------------------------------------------------

    async def trace(self, exchange: Exchange) -> Reply:
        """`trace_level` is an array of strings, every other value a string; null clears."""
        message = pb.TraceSettingRequest(model_name=exchange.path.get("model", ""))
        for key, value in _settings(exchange, TRACE_SETTINGS):
            values = [value] if isinstance(value, str) and key != "trace_level" else [] if value is None else value
            is_list = isinstance(values, list) and (isinstance(value, str) or value is None or key == "trace_level")
            if not is_list or not all(isinstance(each, str) for each in values):
                wanted = "an array of strings" if key == "trace_level" else "a string"
                raise InvalidTensorError(
                    f"Unable to parse '{shown(key)}': it is {kind_name(value)}, {wanted} or null is wanted"
                )
            message.settings[key].value.extend(values)
        answer = await self._call("TraceSetting", message)
        settings: dict[str, Any] = {}
        for key, setting in answer.settings.items():
            several = key == "trace_level" or len(setting.value) > 1
            settings[key] = list(setting.value) if several else "".join(setting.value)
        return json_reply(settings)

    async def logging(self, exchange: Exchange) -> Reply:
        message = pb.LogSettingsRequest()
        for key, value in _settings(exchange, LOG_SETTINGS):
            into = message.settings[key]
            if isinstance(value, bool):
                into.bool_param = value
            elif isinstance(value, int) and 0 <= value < UINT32:
                into.uint32_param = value
            elif isinstance(value, str):
                into.string_param = value
            else:
                raise _no_parameter(key, value)
        answer = await self._call("LogSettings", message)
        return json_reply(
            {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in answer.settings.items()}
        )


def _settings(exchange: Exchange, known: Collection[str]) -> Iterable[tuple[str, Any]]:
    """What a POST sets; keys that nobody knows are ignored, whatever their values are."""
    document = parse_object(exchange.body) if exchange.is_post else {}
    return [(key, value) for key, value in document.items() if key in known]


def _model(exchange: Exchange) -> dict[str, str]:
    return {"name": exchange.path.get("model", ""), "version": exchange.path.get("version", "")}


def _no_parameter(key: str, value: object) -> InvalidTensorError:
    told = str(value) if isinstance(value, int | float) else kind_name(value)
    return InvalidTensorError(f"Unable to parse '{shown(key)}': it is {shown(told)}, which this value cannot be")


def _region_member(document: dict[str, Any], key: str, kind: Any) -> Any:
    if key not in document:
        raise InvalidTensorError(f"Shared memory register request has no '{key}' field")
    return member(document, key, kind)


def _integer(document: dict[str, Any], key: str, default: int | None = None, limit: int = UINT64 - 1) -> int:
    if default is not None and key not in document:
        return default
    value: int = _region_member(document, key, int)
    if not 0 <= value <= limit:
        raise InvalidTensorError(f"Unable to parse '{key}': it is {value}, an integer from 0 to {limit} is wanted")
    return value


def _decoded(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidTensorError(f"{what} is no base64") from None
