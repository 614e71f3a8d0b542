"""`tensorline infer`: one request to a gateway, as any client would send it."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from tensorline.cli.failure import CommandError
from tensorline.cli.inputs import Wanted, arrays_of
from tensorline.protocol.stubs.inference.grpc_service_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
)
from tensorline.protocol.stubs.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tensorline.tensor import Array, datatype_of, decode_array, encode_array

__all__ = ["Answer", "Client", "Question", "ask", "open_client"]


@dataclass(frozen=True, slots=True)
class Question:
    """What `tensorline infer` was told."""

    model: str
    """"name" or "name/version"."""
    files: Sequence[Path]
    inputs: Sequence[str]
    outputs: Sequence[str]
    url: str
    timeout_s: float
    is_traced: bool


@dataclass(frozen=True, slots=True)
class Answer:
    model: str
    version: str
    outputs: Mapping[str, Array]
    trace_id: str
    """Hex id of the trace that was asked for; "" when none was."""


class Client:
    """Made by `open_client`."""

    def __init__(self, channel: grpc.Channel, url: str, timeout_s: float) -> None:
        self._stub = GRPCInferenceServiceStub(channel)
        self._url = url
        self._timeout_s = timeout_s

    def inputs(self, model: str, version: str) -> list[Wanted]:
        """What the model takes.

        Raises:
            CommandError: nobody answers, or there is no such model.
        """
        request = ModelMetadataRequest(name=model, version=version)
        with self._told():
            answer = self._stub.ModelMetadata(request, timeout=self._timeout_s)
        return [Wanted(one.name, one.datatype, tuple(one.shape)) for one in answer.inputs]

    def infer(
        self, model: str, version: str, inputs: Mapping[str, Array], outputs: Sequence[str], *, is_traced: bool
    ) -> Answer:
        """
        Raises:
            CommandError: the server's status and its own sentence.
        """
        request = _request(model, version, inputs, outputs)
        trace_id = secrets.token_hex(16) if is_traced else ""
        metadata = (("traceparent", f"00-{trace_id}-{secrets.token_hex(8)}-01"),) if is_traced else ()
        with self._told():
            answer = self._stub.ModelInfer(request, timeout=self._timeout_s, metadata=metadata)
        return Answer(model, answer.model_version, dict(_outputs(answer)), trace_id)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call):
                raise
            details = error.details() or ""
            if error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details:
                raise CommandError(f"no gateway answers at {self._url}; is the mesh up?") from None
            raise CommandError(f"{error.code().name}: {details}") from None


def ask(question: Question) -> Iterator[tuple[Path | None, Answer]]:
    """One request for each file, or a single one without; each answer with the file that it is about.

    Raises:
        CommandError: as `Client`.
        UsageError: what stands on the command line does not fit the model.
    """
    name, _, version = question.model.partition("/")
    with open_client(question.url, question.timeout_s) as client:
        wanted = client.inputs(name, version)
        for file in question.files or (None,):
            arrays = arrays_of(question.inputs, file, wanted)
            yield file, client.infer(name, version, arrays, question.outputs, is_traced=question.is_traced)


@contextmanager
def open_client(url: str, timeout_s: float) -> Iterator[Client]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(url.removeprefix("grpc://"), options=options) as channel:
        yield Client(channel, url, timeout_s)


def _request(model: str, version: str, inputs: Mapping[str, Array], outputs: Sequence[str]) -> ModelInferRequest:
    request = ModelInferRequest(model_name=model, model_version=version)
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=datatype_of(array.dtype), shape=array.shape)
        request.raw_input_contents.append(bytes(encode_array(array)))
    for name in outputs:
        request.outputs.add(name=name)
    return request


def _outputs(answer: ModelInferResponse) -> Iterator[tuple[str, Array]]:
    for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        yield output.name, decode_array(output.datatype, tuple(output.shape), raw)
