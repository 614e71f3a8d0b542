from typing import Any

import grpc
import pytest
from grpc import StatusCode, aio

from tensorline import errors
from tensorline.errors import (
    BackendError,
    ConfigError,
    InternalError,
    InvalidTensorError,
    OverloadedError,
    ResourceExhaustedError,
    StaleHandleError,
    TensorlineError,
    UnavailableError,
    answering,
    error_for_status,
)

pytestmark = pytest.mark.usefixtures("one_loop")

KINDS = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]


async def answer_to(error: BaseException) -> aio.AioRpcError:
    """What a client sees of a handler that raises `error`."""

    async def handler(request: bytes, context: "aio.ServicerContext[bytes, bytes]") -> bytes:
        async with answering(context):
            raise error

    server = aio.server()
    method: Any = grpc.unary_unary_rpc_method_handler(handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Do": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.unary_unary("/t.T/Do")
            with pytest.raises(aio.AioRpcError) as caught:
                await call(b"", timeout=5)
        return caught.value
    finally:
        await server.stop(0)


@pytest.mark.parametrize("kind", KINDS)
async def test_each_error_is_answered_with_its_status_and_its_text(kind: type[TensorlineError]) -> None:
    answer = await answer_to(kind("what came, what was wanted"))
    assert (answer.code(), answer.details()) == (kind.status, "what came, what was wanted")


async def test_a_bug_is_told_as_internal_and_nothing_more() -> None:
    answer = await answer_to(ZeroDivisionError("row 7 of customers"))
    assert (answer.code(), answer.details()) == (StatusCode.INTERNAL, "internal error")


@pytest.mark.parametrize("text", ["x" * 5000, "漢" * 5000, "\N{GRINNING FACE}" * 5000])
async def test_a_long_text_is_cut_to_what_a_header_may_hold(text: str) -> None:
    answer = await answer_to(InvalidTensorError(text))
    details = answer.details() or ""
    assert answer.code() is StatusCode.INVALID_ARGUMENT
    assert text.startswith(details)
    assert 1000 <= len(details.encode()) <= 1024


async def test_a_text_that_no_encoding_can_carry_is_told_all_the_same() -> None:
    answer = await answer_to(BackendError("a \ud800 b"))
    assert (answer.code(), answer.details()) == (StatusCode.INTERNAL, "a ? b")


@pytest.mark.parametrize("kind", KINDS)
def test_a_peers_status_becomes_an_error_of_the_same_status(kind: type[TensorlineError]) -> None:
    error = error_for_status(kind.status.value[0], "text")
    assert (error.status, str(error)) == (kind.status, "text")


@pytest.mark.parametrize("number", [2, 7, 99, 0, -1])
def test_a_status_that_we_do_not_use_is_internal(number: int) -> None:
    assert isinstance(error_for_status(number, "x"), InternalError)


def test_what_is_a_kind_of_what() -> None:
    assert OverloadedError.status is StaleHandleError.status is UnavailableError.status is StatusCode.UNAVAILABLE
    assert ConfigError.status is InvalidTensorError.status is StatusCode.INVALID_ARGUMENT
    assert ResourceExhaustedError.status is StatusCode.RESOURCE_EXHAUSTED
    assert BackendError.status is StatusCode.INTERNAL
