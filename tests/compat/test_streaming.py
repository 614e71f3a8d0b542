"""ModelStreamInfer through the published clients: order, final flags, errors that leave the stream open."""

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as sync_client
import tritonclient.grpc.aio as aio_client

from tests.compat.server import Server

WAIT_S = 20.0


def series(count: int, delay_ms: int = 0) -> list[Any]:
    values, delays = np.arange(count, dtype=np.int32), np.array([delay_ms], np.uint32)
    tensors = [sync_client.InferInput("IN", [count], "INT32"), sync_client.InferInput("DELAY", [1], "UINT32")]
    for tensor, array in zip(tensors, (values, delays), strict=True):
        tensor.set_data_from_numpy(array)
    return tensors


def line(*values: float, shape: Sequence[int] | None = None) -> list[Any]:
    tensor = sync_client.InferInput("x", [len(values)], "FP32")
    tensor.set_data_from_numpy(np.array(values, np.float32))
    if shape is not None:
        tensor.set_shape(list(shape))
    return [tensor]


class Answers:
    """What came on a stream, in its order."""

    def __init__(self) -> None:
        self._came: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def put(self, result: Any, error: Any) -> None:
        self._came.put((result, error))

    def next(self) -> tuple[Any, Any]:
        return self._came.get(timeout=WAIT_S)

    def values(self, count: int) -> list[tuple[str, int, bool]]:
        """Of the next `count` answers of `repeat`: request id, OUT, final flag; -1 for an answer without outputs."""
        found = []
        for _ in range(count):
            result, error = self.next()
            assert error is None, error
            out = result.as_numpy("OUT")
            found.append((result.get_response().id, -1 if out is None else int(out[0]), is_final(result)))
        return found

    @property
    def is_empty(self) -> bool:
        return self._came.empty()


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


@contextmanager
def stream(server: Server, **options: Any) -> Iterator[tuple[Any, Answers]]:
    """The synchronous client with an open stream; half-closed at the end, which must end well by itself."""
    answers = Answers()
    with sync_client.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(result, error), **options)
        yield client, answers
        client.stop_stream()


def test_a_decoupled_model(server: Server) -> None:
    with stream(server) as (client, answers):
        client.async_stream_infer("repeat", series(5), request_id="five")
        assert answers.values(5) == [("five", value, False) for value in range(5)]
    assert answers.is_empty  # the end alone is told to those who ask for it


def test_the_end_of_a_decoupled_model_for_those_who_ask(server: Server) -> None:
    with stream(server) as (client, answers):
        client.async_stream_infer("repeat", series(2), request_id="two", enable_empty_final_response=True)
        assert answers.values(3) == [("two", 0, False), ("two", 1, False), ("two", -1, True)]
    assert answers.is_empty


@pytest.mark.parametrize("is_asked", [False, True])
def test_no_responses_at_all(server: Server, is_asked: bool) -> None:
    """C07."""
    with stream(server) as (client, answers):
        client.async_stream_infer("repeat", series(0), request_id="none", enable_empty_final_response=is_asked)
        if is_asked:
            result, error = answers.next()
            response = result.get_response()
            assert error is None
            assert (response.id, list(response.outputs), is_final(result)) == ("none", [], True)
            assert (response.model_name, response.model_version) == ("repeat", "")
    assert answers.is_empty


def test_interleaved_requests(server: Server) -> None:
    """C08."""
    counts = {"a": 1, "b": 5, "c": 50}
    with stream(server) as (client, answers):
        for at, (id, count) in enumerate(counts.items()):
            client.async_stream_infer("repeat", series(count, at), request_id=id, enable_empty_final_response=True)
        came = answers.values(sum(counts.values()) + 3)
    for id, count in counts.items():
        mine = [(value, final) for name, value, final in came if name == id]
        assert mine == [*((value, False) for value in range(count)), (-1, True)]


def test_answers_of_other_models_keep_the_order_of_their_requests(server: Server) -> None:
    with stream(server) as (client, answers):
        for at in range(30):
            client.async_stream_infer("line_FP32" if at % 2 else "chain", line(at), request_id=str(at))
        for at in range(30):
            result, error = answers.next()
            assert error is None
            assert (result.get_response().id, result.as_numpy("y").tolist(), is_final(result)) == (str(at), [at], True)
    assert answers.is_empty


def test_a_pipeline_with_a_decoupled_step(server: Server) -> None:
    with stream(server) as (client, answers):
        client.async_stream_infer("chain_repeat", series(4), request_id="p", enable_empty_final_response=True)
        came = answers.values(4)
        if not came[-1][2]:
            came += answers.values(1)
    assert [value for _, value, _ in came if value >= 0] == [0, 1, 2, 3]
    assert [final for _, _, final in came].count(True) == 1
    assert came[-1][2]


BAD: dict[str, tuple[Callable[[Any], None], str]] = {
    "unknown model": (lambda client: client.async_stream_infer("nobody", line(1), request_id="bad"), "'nobody'"),
    "shape": (
        lambda client: client.async_stream_infer("line_FP32", line(1, 2, shape=[3]), request_id="bad"),
        "input byte size mismatch for input 'x' for model 'line_FP32'. Expected 12, got 8",
    ),
    "model": (lambda client: client.async_stream_infer("boom", line(-1), request_id="bad"), "bad row"),
}


@pytest.mark.parametrize("case", BAD)
def test_one_bad_request_leaves_the_stream_open(server: Server, case: str) -> None:
    """C10, without the header."""
    send, words = BAD[case]
    with stream(server) as (client, answers):
        client.async_stream_infer("line_FP32", line(1), request_id="first")
        send(client)
        client.async_stream_infer("line_FP32", line(2), request_id="last")
        assert answers.next()[0].get_response().id == "first"
        result, error = answers.next()
        assert result is None
        assert words in error.message()
        assert answers.next()[0].get_response().id == "last"
    assert answers.is_empty


def test_a_failed_execution_ends_a_stream_that_asks_for_it(server: Server) -> None:
    """C10, with the header: only errors of execution do, as on Triton."""
    with stream(server, headers={"triton_grpc_error": "true"}) as (client, answers):
        BAD["shape"][0](client)
        assert "input byte size mismatch" in answers.next()[1].message()
        client.async_stream_infer("boom", line(-1), request_id="bad")
        result, error = answers.next()
        assert result is None
        assert error.status() == "StatusCode.INTERNAL"
        assert "bad row" in error.message()


def test_classes_and_subsets_on_a_stream(server: Server) -> None:
    with stream(server) as (client, answers):
        tensor = sync_client.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.array([[1, 2, 4, 3]], np.float32))
        client.async_stream_infer(
            "labelled", [tensor], outputs=[sync_client.InferRequestedOutput("y", class_count=1)], request_id="c"
        )
        assert answers.next()[0].as_numpy("y").tolist() == [[b"4.000000:2:bird"]]
        client.async_stream_infer("repeat", series(1), outputs=[sync_client.InferRequestedOutput("IDX")])
        assert [output.name for output in answers.next()[0].get_response().outputs] == ["IDX"]


@pytest.mark.parametrize("method", ["gzip", "deflate"])
def test_a_compressed_stream(server: Server, method: str) -> None:
    """A18."""
    with stream(server, compression_algorithm=method) as (client, answers):
        client.async_stream_infer("repeat", series(100), request_id="z")
        assert answers.values(100) == [("z", value, False) for value in range(100)]


def test_a_client_that_leaves(server: Server) -> None:
    """C02, from outside: what it left running is in nobody's way."""
    with sync_client.InferenceServerClient(server.grpc) as client:
        answers = Answers()
        client.start_stream(answers.put)
        client.async_stream_infer("repeat", series(50, 20))
        answers.next()
        client.stop_stream(cancel_requests=True)
    test_a_decoupled_model(server)


async def test_the_asyncio_client(server: Server) -> None:
    counts = {"a": 3, "b": 7}

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for id, count in counts.items():
            yield {"model_name": "repeat", "inputs": series(count, 1), "request_id": id}

    came: dict[str, list[tuple[int, bool]]] = {id: [] for id in counts}
    async with aio_client.InferenceServerClient(server.grpc) as client, asyncio.timeout(WAIT_S):
        async for result, error in client.stream_infer(requests()):
            assert error is None
            came[result.get_response().id].append((int(result.as_numpy("OUT")[0]), is_final(result)))
    assert came == {id: [(value, False) for value in range(count)] for id, count in counts.items()}
