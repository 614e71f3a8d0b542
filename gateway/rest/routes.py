"""The routes of /v2 and what each does; inference here, everything else in `gateway.rest.control`."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable
from typing import Final, TypeVar

from starlette.convertors import Convertor, register_url_convertor
from starlette.routing import BaseRoute, Route

from gateway.operations import Operations
from gateway.rest.answers import JSON, STREAM, Reply, error_body, error_reply
from gateway.rest.bodies import Bodies, ClientGoneError
from gateway.rest.control import Control
from gateway.rest.endpoint import Endpoint, Exchange, Handler, RestRules
from gateway.rest.generation import decode_generate, encode_generate
from gateway.rest.inference import HEADER_LENGTH, decode_infer, decode_raw, encode_infer, header_length
from gateway.service import InferenceService
from tensorline.errors import InvalidTensorError, TensorlineError, UnsupportedError
from tensorline.protocol.infer import InferRequest, InferResponse

__all__ = ["RestRoutes"]

INFER: Final = "HTTP v2/infer"
GENERATE: Final = "HTTP v2/generate"
GENERATE_STREAM: Final = "HTTP v2/generate_stream"
"""As traces call them."""

OFF_LOOP: Final = 32 << 10
"""Bytes of JSON that take about a millisecond."""
PARSERS: Final = 2
"""Large JSON documents that are worked on at once: each takes up to ten times its size in memory meanwhile."""
UNREAD_S: Final = 60.0
"""How long a client may leave an event unread."""

T = TypeVar("T")


class _Digits(Convertor[str]):
    regex = "[0-9]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("digits", _Digits())


class RestRoutes:
    def __init__(self, service: InferenceService, operations: Operations, rules: RestRules) -> None:
        self._service = service
        self._control = Control(operations)
        self._rules = rules
        self._bodies = Bodies(rules.max_input_bytes, rules.max_held_bytes)
        self._parsers = asyncio.Semaphore(PARSERS)

    def routes(self) -> list[BaseRoute]:
        """Source: protocol.md §13.1."""
        control = self._control
        found: list[BaseRoute] = []
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version:digits}"):
            found += [
                self._route(f"{model}/infer", self._infer, "ModelInfer", "POST", is_compressed=True),
                self._route(f"{model}/generate", self._generate, "ModelInfer", "POST", is_compressed=True),
                self._route(f"{model}/generate_stream", self._generate_stream, "ModelInfer", "POST"),
                self._route(f"{model}/ready", control.model_ready, "ModelReady", "GET"),
                self._route(f"{model}/config", control.config, "ModelConfig", "GET"),
                self._route(f"{model}/stats", control.statistics, "ModelStatistics", "GET"),
            ]
        found += [
            self._route("/v2", control.metadata, "ServerMetadata", "GET"),
            self._route("/v2/health/live", control.live, "ServerLive", "GET"),
            self._route("/v2/health/ready", control.ready, "ServerReady", "GET"),
            self._route("/v2/models/stats", control.statistics, "ModelStatistics", "GET"),
            self._route("/v2/models/{model}", control.model, "ModelMetadata", "GET"),
            self._route("/v2/models/{model}/versions/{version:digits}", control.model, "ModelMetadata", "GET"),
            self._route("/v2/models/{model}/trace/setting", control.trace, "TraceSetting", "GET", "POST"),
            self._route("/v2/trace/setting", control.trace, "TraceSetting", "GET", "POST"),
            self._route("/v2/logging", control.logging, "LogSettings", "GET", "POST"),
        ]
        for repository in ("/v2/repository", "/v2/repository/{repository}"):
            found += [
                self._route(f"{repository}/index", control.index, "RepositoryIndex", "POST", is_change=False),
                self._route(f"{repository}/models/{{model}}/load", control.load, "RepositoryModelLoad", "POST"),
                self._route(f"{repository}/models/{{model}}/unload", control.unload, "RepositoryModelUnload", "POST"),
            ]
        for kind, register in (("System", control.register_system), ("Cuda", control.register_cuda)):
            root, rpc = f"/v2/{kind.lower()}sharedmemory", f"{kind}SharedMemory"
            status, unregister = control.region_status(kind), control.unregister(kind)
            found += [
                self._route(f"{root}/status", status, f"{rpc}Status", "GET"),
                self._route(f"{root}/region/{{region}}/status", status, f"{rpc}Status", "GET"),
                self._route(f"{root}/region/{{region}}/register", register, f"{rpc}Register", "POST"),
                self._route(f"{root}/unregister", unregister, f"{rpc}Unregister", "POST"),
                self._route(f"{root}/region/{{region}}/unregister", unregister, f"{rpc}Unregister", "POST"),
            ]
        return found

    def _route(
        self,
        path: str,
        handler: Handler,
        rpc: str,
        *methods: str,
        is_change: bool | None = None,
        is_compressed: bool = False,
    ) -> Route:
        if is_change is None:
            is_change = rpc != "ModelInfer"
        endpoint = Endpoint(handler, rpc, self._rules, self._bodies, is_change, is_compressed)
        return Route(path, endpoint, methods=methods)

    async def _infer(self, exchange: Exchange) -> Reply:
        model, version = exchange.path["model"], exchange.path.get("version", "")
        service, body = self._service, exchange.body
        config, _ = service.models.config(model, version)
        if service.is_decoupled(model, version):
            raise UnsupportedError("HTTP end point doesn't support models with decoupled transaction policy")
        length = header_length(exchange.headers.get(HEADER_LENGTH), len(body))
        if length == 0:
            wanted = decode_raw(model, version, body, config)
        else:
            size = len(body) if length is None else length
            wanted = await self._heavy(size, functools.partial(decode_infer, model, version, body, length))
        request = self._rules.forwarding.apply(wanted.request, exchange.sent_headers())
        context = service.recorder.begin(exchange.metadata(), model)
        response = await service.infer(request, context, None, exchange.started_ns, INFER)
        size = sum(
            tensor.byte_size for tensor in response.outputs if not wanted.binary.get(tensor.name, wanted.is_binary)
        )
        return await self._heavy(size, functools.partial(encode_infer, wanted, response))

    async def _generate(self, exchange: Exchange) -> Reply:
        request = await self._generate_request(exchange)
        answer: InferResponse | None = None
        async with contextlib.aclosing(self._responses(exchange, request, GENERATE)) as responses:
            async for response in responses:
                if answer is not None:
                    raise _not_one()
                answer = response
        if answer is None:
            raise _not_one()
        return Reply(200, (JSON,), (await self._encode_generate(answer),))

    async def _generate_stream(self, exchange: Exchange) -> Reply | None:
        """The first response decides on the status, also when it is an error."""
        request = await self._generate_request(exchange)
        try:
            async with contextlib.aclosing(self._responses(exchange, request, GENERATE_STREAM)) as responses:
                async for response in responses:
                    await _event(exchange, await self._encode_generate(response))
        except TensorlineError as error:
            if not exchange.has_started and not error.has_run:
                raise
            await _event(exchange, error_body(str(error)), error_reply(error).status)
        if not exchange.has_started:
            await _event(exchange, b"")
        await exchange.begin({"type": "http.response.body", "body": b""})
        return None

    async def _generate_request(self, exchange: Exchange) -> InferRequest:
        model, version = exchange.path["model"], exchange.path.get("version", "")
        config, _ = self._service.models.config(model, version)
        decode = functools.partial(decode_generate, model, version, exchange.body, config)
        request = await self._heavy(len(exchange.body), decode)
        return self._rules.forwarding.apply(request, exchange.sent_headers())

    async def _responses(
        self, exchange: Exchange, request: InferRequest, rpc: str
    ) -> AsyncGenerator[InferResponse, None]:
        """All but a decoupled model's bare end."""
        service = self._service
        is_decoupled = service.is_decoupled(request.model, request.version)
        context = service.recorder.begin(exchange.metadata(), request.model)
        stream = service.infer_stream(request, context, None, exchange.started_ns, rpc)
        async with contextlib.aclosing(stream) as responses:
            async for response in responses:
                if response.outputs or not (is_decoupled and response.is_final):
                    yield response

    async def _encode_generate(self, response: InferResponse) -> bytes:
        size = sum(tensor.byte_size for tensor in response.outputs)
        return await self._heavy(size, functools.partial(encode_generate, response))

    async def _heavy(self, size: int, work: Callable[[], T]) -> T:
        """`work` on `size` bytes: here when they are few, else in a thread, in turn."""
        if size < OFF_LOOP:
            return work()
        async with self._parsers:
            return await asyncio.to_thread(work)


async def _event(exchange: Exchange, document: bytes, status: int = 200) -> None:
    """
    Raises:
        ClientGoneError: the client does not read.
    """
    try:
        async with asyncio.timeout(UNREAD_S):
            if not exchange.has_started:
                await exchange.begin({"type": "http.response.start", "status": status, "headers": (STREAM,)})
            if document:
                event = b"data: %b\n\n" % document
                await exchange.begin({"type": "http.response.body", "body": event, "more_body": True})
    except TimeoutError:
        raise ClientGoneError from None


def _not_one() -> InvalidTensorError:
    return InvalidTensorError(
        "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
        "number of responses"
    )
