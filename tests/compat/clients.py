"""The four clients of tritonclient behind one face, so that a test is written once."""

import inspect
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from typing import Any

import pytest
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.compat.server import Server

__all__ = ["CLIENTS", "HTTP_STATUS", "Client", "open_client"]

CLIENTS = ("grpc", "grpc.aio", "http", "http.aio")
HTTP_STATUS = {
    "CANCELLED": 400,
    "UNKNOWN": 400,
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 400,
    "RESOURCE_EXHAUSTED": 429,
    "UNIMPLEMENTED": 501,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
}
"""Of REST, for each gRPC code."""
_UNWRAPPED = {"get_model_config": "config", "get_model_repository_index": "models"}
"""What the gRPC clients' JSON has around the answer and the HTTP clients' has not."""


class Client:
    """One client; every method of tritonclient is there, awaited: `await client.get_server_metadata()`."""

    def __init__(self, kind: str, module: Any, inner: Any) -> None:
        self.kind = kind
        self.is_grpc = kind.startswith("grpc")
        self.module = module
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        async def call(*args: Any, **options: Any) -> Any:
            if self.is_grpc and name.startswith(("get_", "update_")):
                options["as_json"] = True
            answer = method(*args, **options)
            answer = await answer if inspect.isawaitable(answer) else answer
            if self.is_grpc and name in _UNWRAPPED:
                return answer.get(_UNWRAPPED[name], [] if name.endswith("index") else {})
            return answer

        return call

    def input(self, name: str, array: NDArray[Any], datatype: str = "", **options: Any) -> Any:
        """
        Args:
            options: `binary_data`, for the HTTP clients.
        """
        tensor = self.module.InferInput(name, list(array.shape), datatype or np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array, **({} if self.is_grpc else options))
        return tensor

    def output(self, name: str, class_count: int = 0, **options: Any) -> Any:
        return self.module.InferRequestedOutput(name, class_count=class_count, **({} if self.is_grpc else options))

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, NDArray[Any]] | Sequence[Any],
        outputs: Sequence[Any] | None = None,
        **options: Any,
    ) -> Any:
        """An InferResult; inputs as arrays by name, or as made by `input`; outputs as names, or as made by `output`."""
        tensors = [self.input(*item) for item in inputs.items()] if isinstance(inputs, Mapping) else list(inputs)
        wanted = None if outputs is None else [self.output(each) if isinstance(each, str) else each for each in outputs]
        answer = self._inner.infer(model, tensors, outputs=wanted, **options)
        return await answer if inspect.isawaitable(answer) else answer

    async def arrays(self, model: str, inputs: Mapping[str, NDArray[Any]] | Sequence[Any], **options: Any) -> Any:
        """The outputs' arrays by name."""
        result = await self.infer(model, inputs, **options)
        return {name: result.as_numpy(name) for name in self.names(result)}

    def names(self, result: Any) -> list[str]:
        """Of the outputs that came, in their order."""
        response = result.get_response()
        if self.is_grpc:
            return [output.name for output in response.outputs]
        return [output["name"] for output in response.get("outputs", [])]

    def shape(self, result: Any, name: str) -> list[int]:
        output = result.get_output(name)
        return list(output.shape if self.is_grpc else output["shape"])

    def id(self, result: Any) -> str:
        response = result.get_response()
        return str(response.id if self.is_grpc else response.get("id", ""))

    def version(self, result: Any) -> str:
        response = result.get_response()
        return str(response.model_version if self.is_grpc else response["model_version"])

    @contextmanager
    def refused(self, code: str, words: str) -> Iterator[None]:
        """The block must fail with this gRPC code, or its HTTP status, and a text with `words` in it."""
        with pytest.raises(InferenceServerException, match=re.escape(words)) as caught:
            yield
        status = str(caught.value.status())
        assert status in ((f"StatusCode.{code}",) if self.is_grpc else (str(HTTP_STATUS[code]),)), caught.value


@asynccontextmanager
async def open_client(kind: str, server: Server) -> AsyncIterator[Client]:
    module = import_module(f"tritonclient.{kind}")
    inner = module.InferenceServerClient(server.grpc if kind.startswith("grpc") else server.http)
    try:
        yield Client(kind, module, inner)
    finally:
        closing = inner.close()
        if inspect.isawaitable(closing):
            await closing
