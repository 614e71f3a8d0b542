"""Restricted RPCs of the gRPC server: refused before a handler is called."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from gateway.restrictions import RestrictedError, Restrictions, category_of

__all__ = ["RestrictedCalls"]

Handler = Any  # grpc.RpcMethodHandler, which has no type of its own for a method that is not there
Continuation = Callable[[Any], Awaitable[Handler]]


class RestrictedCalls(aio.ServerInterceptor):
    def __init__(self, restrictions: Restrictions) -> None:
        self._restrictions = restrictions

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Handler:
        handler = await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        try:
            self._restrictions.check(category_of(handler_call_details.method.rpartition("/")[2]), metadata.get)
        except RestrictedError as error:
            return handler and _refusing(handler, str(error))
        return handler


def _refusing(handler: Handler, reason: str) -> Handler:
    async def refuse(_: object, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, reason)

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
