"""REST over real connections: clients that leave, that are slow, and that say too much."""

import asyncio
import gzip
import time
from typing import Any

import numpy as np
import orjson
import pytest

from gateway.forwarding import Forwarding
from gateway.rest import RestRules
from gateway.rest import bodies as bodies_module
from tests.gateway.house import FP32, House, add, open_house
from tests.gateway.rest.twin import Connection, serving, tensor
from tests.gateway.streams import streamed
from tests.tensorline.stage.pair import Model, config, until

ONE = orjson.dumps({"inputs": [tensor([1])]})
INFER = "/v2/models/one/infer"


def slow(batch: Any) -> Any:
    time.sleep(0.5)
    return {"y": batch.inputs["x"]}


SLOW = Model(config(FP32, {"y": "FP32"}), slow)


async def is_served(connection: Connection) -> bool:
    await connection.post(INFER, ONE)
    return bool((await connection.answer()).json["outputs"][0]["data"] == [2.0])


async def test_a_connection_serves_one_request_after_another() -> None:
    async with open_house({"one": add(1)}) as house, serving(house) as connect:
        connection = await connect()
        assert [await is_served(connection) for _ in range(3)] == [True] * 3
        await connection.send(b"GET /v2/nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await connection.answer()).error == (404, "Not Found")
        await connection.post(INFER, b"{")
        assert (await connection.answer()).status == 400
        assert await is_served(connection)


async def test_two_requests_sent_at_once_are_answered_in_order() -> None:
    async with open_house({"one": add(1)}) as house, serving(house) as connect:
        connection = await connect()
        for value in (1, 2):
            await connection.post(INFER, orjson.dumps({"inputs": [tensor([value])]}))
        answers = [await connection.answer() for _ in range(2)]
        assert [answer.json["outputs"][0]["data"] for answer in answers] == [[2.0], [3.0]]


async def left(house: House, connection: Connection) -> None:
    """The client goes while its request runs; nothing of it stays."""
    await until(lambda: house.limits.in_flight == 1)
    connection.close()
    await until(lambda: house.limits.in_flight == 0)
    await until(lambda: len(house.records) == 1)
    assert house.last.error == "the client cancelled the request"
    await house.wait_nothing_held()


@pytest.mark.parametrize("route", ["infer", "generate", "generate_stream"])
async def test_a_client_that_leaves_cancels_its_request(route: str, caplog: pytest.LogCaptureFixture) -> None:
    body = ONE if route == "infer" else b'{"x":[1]}'
    async with open_house({"slow": SLOW}) as house, serving(house) as connect:
        connection = await connect()
        await connection.post(f"/v2/models/slow/{route}", body)
        await left(house, connection)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_closing_a_stream_stops_the_model() -> None:
    made = 0

    def run(batch: Any) -> Any:
        nonlocal made
        for value in range(1000):
            made += 1
            yield {"y": np.array([value], np.float32)}
            time.sleep(0.01)

    async with open_house({"count": streamed(run)}) as house, serving(house) as connect:
        connection = await connect()
        await connection.post("/v2/models/count/generate_stream", b'{"x":[1]}')
        head = await connection.head()
        assert "content-type: text/event-stream; charset=utf-8" in head
        assert b'"y":0.0' in await connection.reader.readuntil(b"\n\n")
        connection.close()
        await until(lambda: house.limits.in_flight == 0)
        await house.wait_nothing_held()
    assert made < 500


async def test_a_client_that_leaves_in_the_middle_of_its_body() -> None:
    async with open_house({"one": add(1)}) as house, serving(house) as connect:
        connection = await connect()
        await connection.send(b"POST /v2/models/one/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        await asyncio.sleep(0.05)
        connection.close()
        assert await is_served(await connect())
        assert not house.limits.in_flight


async def test_chunked_bodies() -> None:
    async with open_house({"one": add(1)}) as house, serving(house) as connect:
        connection = await connect()
        head = b"POST /v2/models/one/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in ONE)
        await connection.send(head + chunks + b"0\r\n\r\n")
        assert (await connection.answer()).status == 200
        assert await is_served(connection)


async def test_a_body_that_is_too_large_is_told_so() -> None:
    async with open_house({"one": add(1)}) as house, serving(house, RestRules(max_input_bytes=100_000)) as connect:
        for body in (bytes(100_001), bytes(399_000)):
            connection = await connect()
            await connection.post(INFER, body)
            answer = await connection.answer()
            assert answer.error == (400, "the request body exceeds the maximum allowed input size of 100000 bytes")
            assert await connection.ended()


async def test_a_client_that_asks_first_is_told_before_it_sends() -> None:
    async with open_house({"one": add(1)}) as house, serving(house, RestRules(max_input_bytes=1000)) as connect:
        head = "POST {} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n"
        connection = await connect()
        await connection.send(head.format(INFER, 1001).encode())
        assert (await connection.answer()).status == 400
        assert await connection.ended()
        connection = await connect()
        await connection.send(head.format(INFER, len(ONE)).encode())
        assert (await connection.head()).startswith("HTTP/1.1 100 Continue")
        await connection.send(ONE)
        assert (await connection.answer()).status == 200


async def test_a_client_that_goes_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "SILENT_S", 0.05)
    async with open_house({"one": add(1)}) as house, serving(house) as connect:
        connection = await connect()
        await connection.send(b"POST /v2/models/one/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        answer = await connection.answer()
        assert answer.error == (504, "nothing of the request body came for 0.05 s")
        assert await connection.ended()


async def test_a_head_has_a_bound() -> None:
    async with open_house({"one": add(1)}) as house, serving(house) as connect:
        for head in (
            b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
            b"GET /v2?" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET /v2 HTTP/1.1\r\n" + b"X: a\r\n" * 200_000,  # never ends
        ):
            connection = await connect()
            connection.writer.write(head)
            assert (await connection.head()).startswith("HTTP/1.1 400 ")
        assert await is_served(await connect())


async def test_large_answers_come_whole() -> None:
    same = Model(config(FP32, {"y": "FP32"}), lambda batch: {"y": batch.inputs["x"]})
    async with open_house({"same": same}) as house, serving(house) as connect:
        array = np.arange(1 << 20, dtype=np.float32)
        wire = {"name": "x", "datatype": "FP32", "shape": [1 << 20], "parameters": {"binary_data_size": array.nbytes}}
        head = orjson.dumps({"inputs": [wire], "parameters": {"binary_data_output": True}})
        for encoding in ("", "gzip"):
            connection = await connect()
            headers = [f"Inference-Header-Content-Length: {len(head)}", f"Accept-Encoding: {encoding}"]
            await connection.post("/v2/models/same/infer", head + array.tobytes(), *headers)
            answer = await connection.answer()
            body = gzip.decompress(answer.body) if encoding else answer.body
            assert body.endswith(array.tobytes())


async def test_header_names_are_forwarded_as_they_were_sent() -> None:
    seen: list[Any] = []
    async with (
        open_house({"one": add(1)}) as house,
        serving(house, RestRules(forwarding=Forwarding("X-.*"))) as connect,
    ):
        infer = house.service.infer

        async def noted(request: Any, *more: Any) -> Any:
            seen.append(dict(request.parameters))
            return await infer(request, *more)

        house.service.infer = noted  # type: ignore[method-assign,assignment]
        connection = await connect()
        await connection.post(INFER, ONE, "X-Tenant: Blue", "x-other: 1")
        assert (await connection.answer()).status == 200
        assert seen == [{"X-Tenant": "Blue"}]
