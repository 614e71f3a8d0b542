"""The gateway's gRPC, as far as the command asks it: the same calls that any client of the protocol makes."""

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc is imported: its own log lines would stand between ours

import grpc

from tensorline.cli.failure import CommandError, UsageError
from tensorline.cli.inputs import Wanted
from tensorline.protocol.infer import ParameterValue
from tensorline.protocol.parameters import encode_parameters
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.protocol.stubs.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tensorline.tensor import Array, datatype_of, decode_array, encode_array

__all__ = [
    "Answer",
    "Client",
    "Request",
    "RequestFailedError",
    "check_target",
    "open_client",
    "why_away",
]

TARGET = re.compile(r"(unix:.+|\[[0-9a-fA-F:.%]+\]:\d{1,5}|[^\s:/\[\]]+:\d{1,5})")
HEADER = re.compile(r"[a-z0-9_.-]+")

ASK_FINAL = "triton_enable_empty_final_response"
FINAL = "triton_final_response"

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent; `outputs` empty: all of them."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Mapping[str, ParameterValue]] = field(default_factory=dict)
    """Parameters by name."""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    model: str
    version: str
    outputs: Mapping[str, Array]
    trace_id: str
    """Hex id of the trace that was asked for; "" when none was."""
    id: str = ""
    is_final: bool = True
    """No further answer to this request will come."""


class RequestFailedError(CommandError):
    """The gateway answered with a failure. `trace_id` and `id` as in `Answer`."""

    def __init__(self, text: str, trace_id: str = "", id: str = "") -> None:
        super().__init__(text)
        self.trace_id = trace_id
        self.id = id


class Client:
    """Made by `open_client`. Every method raises CommandError: nobody answers, or the server's status and sentence."""

    def __init__(self, channel: grpc.Channel, url: str, timeout_s: float, metadata: Metadata = ()) -> None:
        self._stub = GRPCInferenceServiceStub(channel)
        self._url = url
        self._timeout_s = timeout_s
        self._metadata = metadata

    def inputs(self, model: str, version: str) -> list[Wanted]:
        """What the model takes."""
        answer = self._call("ModelMetadata", pb.ModelMetadataRequest(name=model, version=version))
        return [Wanted(one.name, one.datatype, tuple(one.shape)) for one in answer.inputs]

    def config(self, model: str, version: str) -> Any:
        """The completed configuration, an inference.ModelConfig."""
        return self._call("ModelConfig", pb.ModelConfigRequest(name=model, version=version)).config

    def statistics(self, model: str, version: str) -> list[Any]:
        """One inference.ModelStatistics for each version; `model` "": of all models."""
        return list(self._call("ModelStatistics", pb.ModelStatisticsRequest(name=model, version=version)).model_stats)

    def load(self, model: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """
        Args:
            config: JSON that stands in for the model's config.pbtxt; None: that file is used.
            files: Content by path in the model's directory.
        """
        request = pb.RepositoryModelLoadRequest(model_name=model)
        if config is not None:
            request.parameters["config"].string_param = config
        for path, content in files.items():
            request.parameters[f"file:{path}"].bytes_param = content
        self._call("RepositoryModelLoad", request)

    def unload(self, model: str, *, dependents: bool) -> None:
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        if dependents:
            request.parameters["unload_dependents"].bool_param = True
        self._call("RepositoryModelUnload", request)

    def system_regions(self) -> list[Any]:
        """One RegionStatus for each, by name."""
        regions = self._call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()).regions
        return [regions[name] for name in sorted(regions)]

    def cuda_regions(self) -> list[Any]:
        regions = self._call("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()).regions
        return [regions[name] for name in sorted(regions)]

    def infer(self, model: str, version: str, request: Request, *, is_traced: bool) -> Answer:
        trace_id, metadata = _trace(is_traced)
        answer = self._call("ModelInfer", _message(model, version, request), metadata, trace_id)
        return _answer(answer, trace_id)

    def stream(
        self, model: str, version: str, requests: Iterable[Request], *, is_traced: bool
    ) -> Iterator[Answer | RequestFailedError]:
        """Send all on one stream, and yield what comes; the answers of a request carry its id.

        A request that failed yields its error: the others go on.
        """
        trace_id, metadata = _trace(is_traced)
        messages = (_message(model, version, request, ask_final=True) for request in requests)
        with self._told("ModelStreamInfer", trace_id):
            for one in self._stub.ModelStreamInfer(
                messages, timeout=self._timeout_s, metadata=(*self._metadata, *metadata)
            ):
                if one.error_message:
                    yield RequestFailedError(one.error_message, trace_id, one.infer_response.id)
                else:
                    yield _answer(one.infer_response, trace_id)

    def _call(self, rpc: str, request: Any, metadata: Metadata = (), trace_id: str = "") -> Any:
        with self._told(rpc, trace_id):
            return getattr(self._stub, rpc)(request, timeout=self._timeout_s, metadata=(*self._metadata, *metadata))

    @contextmanager
    def _told(self, rpc: str, trace_id: str) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call):
                raise
            away = why_away(error, self._url)
            if away:
                raise CommandError(away) from None
            raise RequestFailedError(_why(error, self._url, rpc, self._timeout_s), trace_id) from None


def why_away(error: Any, url: str) -> str:
    """That a call did not reach a gateway, in one sentence; "": it did."""
    details, code = " ".join((error.details() or "").split()), error.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        if "http1.x" in details or "HTTP/2" in details or "frame" in details:
            return f"what answers at {url} does not speak gRPC; the gateway's gRPC port is 8001 unless it was moved"
        if "failed to connect" in details or "Connection refused" in details:
            return f"no gateway answers at {url}; is the mesh up?"
        if "resol" in details and "lookup" in details:
            return f"no gateway answers at {url}: there is no host of this name"
        if "Socket closed" in details or "recvmsg" in details or "GOAWAY" in details:
            return f"what answers at {url} closed the connection before it had answered"
    return ""


def _why(error: Any, url: str, rpc: str, timeout_s: float) -> str:
    details, code = " ".join((error.details() or "").split()), error.code()
    if code is grpc.StatusCode.UNIMPLEMENTED and (not details or "Method not found" in details):
        return f"the gateway at {url} does not have {rpc}"
    if code is grpc.StatusCode.UNIMPLEMENTED and "decoupled" in details:
        return f"{code.name}: {details}; --stream asks it over ModelStreamInfer"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and details in ("", "Deadline Exceeded"):
        return f"DEADLINE_EXCEEDED: no answer from {url} within {timeout_s:g} s; --timeout gives it longer"
    return f"{code.name}: {details or f'{url} gave no reason'}"


@contextmanager
def open_client(url: str, timeout_s: float, headers: Sequence[str] = ()) -> Iterator[Client]:
    """
    Args:
        headers: "name=value" each; they go with every call.
    Raises:
        UsageError: `url` is no gRPC address, or a header is none.
    """
    target = check_target(url)
    metadata = tuple(map(_header, headers))
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(target, options=options) as channel:
        yield Client(channel, url, timeout_s, metadata)


def check_target(url: str, flag: str = "--url") -> str:
    """The address as gRPC takes it.

    Raises:
        UsageError: it is none.
    """
    target = url.removeprefix("grpc://")
    port = target.rpartition(":")[2]
    if TARGET.fullmatch(target) and (target.startswith("unix:") or int(port) < 1 << 16):
        return target
    hint = ", without http:// in front" if url.startswith("http") else ""
    raise UsageError(f"{flag} {url!r} is no gRPC address: HOST:PORT is wanted{hint}, as localhost:8001")


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    name = name.lower()
    if (
        not equals
        or not HEADER.fullmatch(name)
        or name.endswith("-bin")
        or not (value.isascii() and value.isprintable())
    ):
        raise UsageError(f"--header {name}: write NAME=VALUE, both of plain letters, as user-key=abc")
    return name, value


def _trace(is_traced: bool) -> tuple[str, Metadata]:
    if not is_traced:
        return "", ()
    trace_id = secrets.token_hex(16)
    return trace_id, (("traceparent", f"00-{trace_id}-{secrets.token_hex(8)}-01"),)


def _message(model: str, version: str, request: Request, *, ask_final: bool = False) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=request.id)
    encode_parameters(request.parameters, message.parameters)
    if ask_final:
        message.parameters[ASK_FINAL].bool_param = True
    for name, array in request.inputs.items():
        message.inputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        message.raw_input_contents.append(bytes(encode_array(array)))
    for name, parameters in request.outputs.items():
        encode_parameters(parameters, message.outputs.add(name=name).parameters)
    return message


def _answer(message: pb.ModelInferResponse, trace_id: str) -> Answer:
    if len(message.outputs) != len(message.raw_output_contents):
        raise CommandError(
            f"the answer describes {len(message.outputs)} outputs and holds {len(message.raw_output_contents)}"
        )
    outputs = {
        output.name: decode_array(output.datatype, tuple(output.shape), raw)
        for output, raw in zip(message.outputs, message.raw_output_contents, strict=True)
    }
    is_final = message.parameters[FINAL].bool_param if FINAL in message.parameters else True
    return Answer(message.model_name, message.model_version, outputs, trace_id, message.id, is_final)
