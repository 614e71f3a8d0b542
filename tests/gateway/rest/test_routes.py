"""Inference by REST against real stages."""

import asyncio
import gzip
import time
import zlib
from typing import Any

import numpy as np
import orjson
import pytest

from gateway.forwarding import Forwarding
from gateway.operations import Operations
from gateway.operations.metadata import Metadata
from gateway.operations.regions import SharedMemory
from gateway.rest import RestRules
from gateway.restrictions import Restrictions
from tensorline.errors import BackendError
from tests.client_memory import shared_object
from tests.gateway.house import FP32, add, ensemble, open_house
from tests.gateway.rest.twin import Answer, tensor, twin
from tests.gateway.streams import REPEAT, streamed
from tests.gateway.test_runner import fail
from tests.tensorline.stage.pair import MIB, Model, config


def identity(datatype: str, dims: str = "") -> Model:
    return Model(config({"x": datatype}, {"y": datatype}, dims=dims), lambda batch: {"y": batch.inputs["x"]})


def binary(array: Any, datatype: str, *, out: bool = True, **more: Any) -> tuple[bytes, int]:
    raw = array.tobytes()
    head = orjson.dumps(
        {
            "inputs": [
                {
                    "name": "x",
                    "datatype": datatype,
                    "shape": array.shape,
                    "parameters": {"binary_data_size": len(raw)},
                }
            ],
            "parameters": {"binary_data_output": out},
            **more,
        }
    )
    return head + raw, len(head)


def split(answer: Answer) -> tuple[Any, bytes]:
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers["inference-header-content-length"])
    return orjson.loads(answer.body[:length]), answer.body[length:]


async def test_infer() -> None:
    async with open_house({"one": add(1)}) as house:
        asking = twin(house)
        for path in ("/v2/models/one/infer", "/v2/models/one/versions/1/infer"):
            answer = await asking.ask(path, {"id": "r1", "inputs": [tensor([1, 2.5])]})
            assert answer.json == {
                "id": "r1",
                "model_name": "one",
                "model_version": "1",
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [2], "data": [2.0, 3.5]}],
            }
        assert {record.rpc for record in house.records} == {"HTTP v2/infer"}


async def test_the_body_needs_no_content_type() -> None:
    async with open_house({"one": add(1)}) as house:
        body = {"inputs": [tensor([1])]}
        for kind in ("application/octet-stream", "application/x-www-form-urlencoded", "nonsense"):
            assert (await twin(house).ask("/v2/models/one/infer", body, content_type=kind)).status == 200


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "INT64", "BOOL", "FP32"])
async def test_binary_in_and_out(datatype: str) -> None:
    async with open_house({"same": identity(datatype)}) as house:
        sizes = {"FP16": 2, "BF16": 2, "INT64": 8, "BOOL": 1, "FP32": 4}
        raw = np.frombuffer(b"\1\0" * 4 * sizes[datatype], np.dtype(f"V{sizes[datatype]}"))
        body, length = binary(raw, datatype)
        head, data = split(
            await twin(house).ask("/v2/models/same/infer", body, inference_header_content_length=str(length))
        )
        assert data == raw.tobytes()
        assert head["outputs"][0]["parameters"] == {"binary_data_size": len(data)}


async def test_large_tensors_in_parts() -> None:
    async with open_house({"same": identity("FP32")}) as house:
        array = np.arange(MIB, dtype=np.float32)
        body, length = binary(array, "FP32")
        for chunks in (1, 65):
            answer = await twin(house).ask(
                "/v2/models/same/infer", body, chunks=chunks, inference_header_content_length=str(length)
            )
            assert split(answer)[1] == array.tobytes()
        told = await twin(house).infer("same", tensor(array[:50_000].tolist()))
        assert told.json["outputs"][0]["data"] == array[:50_000].tolist()


async def test_bytes() -> None:
    async with open_house({"same": identity("BYTES")}) as house:
        asking = twin(house)
        texts = ["a\0b", "", "café"]
        assert (await asking.infer("same", tensor(texts, "BYTES"))).json["outputs"][0]["data"] == texts
        raw = np.frombuffer(b"\2\0\0\0\xff\xfe", np.uint8)
        body, length = binary(raw, "BYTES", out=False)
        body = body.replace(b'"shape":[6]', b'"shape":[1]')
        status, text = (
            await asking.ask("/v2/models/same/infer", body, inference_header_content_length=str(length))
        ).error
        assert (status, "not UTF-8" in text) == (400, True)


async def test_raw_requests() -> None:
    async with open_house({"one": add(1), "text": identity("BYTES", "1")}) as house:
        asking = twin(house)
        body = np.array([1, 2], np.float32).tobytes()
        _, data = split(await asking.ask("/v2/models/one/infer", body, inference_header_content_length="0"))
        assert np.frombuffer(data, np.float32).tolist() == [2, 3]
        _, data = split(await asking.ask("/v2/models/text/infer", b"hello", inference_header_content_length="0"))
        assert data == b"\5\0\0\0hello"
        assert (await asking.ask("/v2/models/one/infer", b"abc", inference_header_content_length="0")).error[0] == 400


async def test_what_is_refused_before_a_model_runs() -> None:
    async with open_house({"one": add(1), "repeat": REPEAT}) as house:
        asking = twin(house)
        good = tensor([1])
        for model, body, status, words in (
            ("nobody", b"{", 404, "Request for unknown model: 'nobody' is not found"),
            ("repeat", b"{", 501, "HTTP end point doesn't support models with decoupled transaction policy"),
            ("one", b"{", 400, "failed to parse the request JSON buffer"),
            ("one", b"", 400, "The document is empty"),
            ("one", b"[]", 400, "the request body is an array, an object is wanted"),
            ("one", {"inputs": []}, 400, "expected 1 inputs but got 0 inputs for model 'one'"),
            ("one", {"inputs": [good, good]}, 400, "already exists in request"),
            ("one", {"id": "q", "inputs": [tensor([1], "INT8")]}, 400, "[request id: q] inference input 'x' data-type"),
            ("one", {"inputs": [good], "outputs": [{"name": "z"}]}, 400, "unexpected inference output 'z'"),
        ):
            answer = await asking.ask(f"/v2/models/{model}/infer", body)
            assert answer.error[0] == status
            assert words in answer.error[1]
        assert (await asking.ask("/v2/models/one/infer", b"{}", inference_header_content_length="3")).error == (
            400,
            "inference header size should be in range (0, 2), got: 3",
        )


async def test_failures_of_models() -> None:
    async with open_house({"bad": fail(BackendError("bad row"))}) as house:
        status, text = (await twin(house).infer("bad", tensor([1]))).error
        assert (status, "bad row" in text) == (500, True)
        house.service.is_stopping = True
        answer = await twin(house).infer("bad", tensor([1]))
        assert answer.error == (503, "the gateway is shutting down")
        assert answer.headers["retry-after"] == "1"


async def test_a_pipeline_tells_its_parameters() -> None:
    chain = ensemble("chain", ("one", {"x": "x"}, {"y": "y"}))
    async with open_house({"one": add(1)}, entries=[chain]) as house:
        answer = await twin(house).infer("chain", tensor([1]))
        assert answer.json["parameters"] == {"sequence_id": 0, "sequence_start": False, "sequence_end": False}


async def test_classification() -> None:
    async with open_house({"same": identity("FP32")}) as house:
        wanted = [{"name": "y", "parameters": {"classification": 2}}]
        answer = await twin(house).infer("same", tensor([0.25, 1, 3]), outputs=wanted)
        (output,) = answer.json["outputs"]
        assert (output["datatype"], output["shape"]) == ("BYTES", [2])
        assert [text.split(":")[1] for text in output["data"]] == ["2", "1"]


async def test_shared_memory() -> None:
    async with open_house({"one": add(1)}) as house:
        operations = Operations(Metadata(house.models, house.readiness, "s"), SharedMemory(house.regions))
        asking = twin(house, operations=operations)
        with shared_object(64) as memory:
            memory.write(np.array([1, 2], np.float32).tobytes())
            registered = await asking.ask(
                "/v2/systemsharedmemory/region/r/register", {"key": memory.key, "byte_size": 64}
            )
            assert registered.status == 200
            place = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
            wire = {"name": "x", "datatype": "FP32", "shape": [2], "parameters": place}
            out = {"name": "y", "parameters": {**place, "shared_memory_offset": 32}}
            answer = await asking.infer("one", wire, outputs=[out])
            assert answer.json["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [2]}]
            assert np.frombuffer(memory.read(32, 8), np.float32).tolist() == [2, 3]
            assert (await asking.ask("/v2/systemsharedmemory/unregister", b"")).status == 200
            status, text = (await asking.infer("one", wire)).error
            assert (status, "Unable to find shared memory region: 'r'" in text) == (404, True)


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_the_callers_trace_is_continued() -> None:
    async with open_house({"one": add(1), "repeat": REPEAT}) as house:
        asking = twin(house)
        await asking.ask("/v2/models/one/infer", {"inputs": [tensor([1])]}, traceparent=TRACE)
        await asking.ask("/v2/models/one/generate", {"x": 1}, traceparent=TRACE)
        await asking.ask("/v2/models/repeat/generate_stream", {"IN": 1}, traceparent=TRACE)
        assert {record.context.trace_id.hex() for record in house.records} == {"0af7651916cd43dd8448eb211c80319c"}
        assert [record.rpc for record in house.records] == [
            "HTTP v2/infer",
            "HTTP v2/generate",
            "HTTP v2/generate_stream",
        ]


# -- generate ----------------------------------------------------------------------------------------------------------


async def test_generate() -> None:
    async with open_house({"one": add(1), "text": identity("BYTES"), "square": identity("FP32", "-1, 2")}) as house:
        asking = twin(house)

        async def told(model: str, body: Any) -> Any:
            answer = await asking.ask(f"/v2/models/{model}/generate", body)
            assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
            return answer.json

        assert await told("one", {"x": [1, 2], "id": "g"}) == {
            "id": "g",
            "model_name": "one",
            "model_version": "1",
            "y": [2.0, 3.0],
        }
        assert (await told("one", {"x": 1}))["y"] == 2.0
        assert (await told("one", {"x": []}))["y"] == []
        assert (await told("one", {"x": "NaN", "k": 1, "parameters": {"l": True}}))["y"] == "NaN"
        assert (await told("text", {"x": "hey"}))["y"] == "hey"
        assert (await told("square", {"x": [1, 2, 3, 4]}))["y"] == [1.0, 2.0, 3.0, 4.0]
        for model, body, words in (
            ("square", {"x": [1, 2, 3]}, "The schema can not convert input 'x' to tensor with proper shape"),
            ("one", {"x": [[1]]}, "Unable to parse 'x': an input is one element or a flat array"),
            ("one", {"x": {"a": 1}}, "Unable to parse 'x'"),
            ("one", {"x": "a"}, "element 0 is 'a'"),
            ("one", {"x": 1, "k": [1]}, "parameter 'k' has invalid type"),
            ("one", {"x": 1, "parameters": 5}, "Expected JSON object for keyword: 'parameters'"),
            ("one", {"x": 1, "triton_a": 5}, "reserved"),
            ("one", {"x": 1, "id": 5}, "Unable to parse 'id'"),
            ("one", {}, "expected 1 inputs but got 0"),
            ("one", [], "an object is wanted"),
        ):
            status, text = (await asking.ask(f"/v2/models/{model}/generate", body)).error
            assert status == 400
            assert words in text
        assert (await asking.ask("/v2/models/nobody/generate", {})).status == 404


async def test_members_that_are_no_inputs_are_parameters() -> None:
    async with open_house({"one": add(1)}) as house:
        asked: list[Any] = []
        infer_stream = house.service.infer_stream

        def noted(request: Any, *more: Any) -> Any:
            asked.append(request)
            return infer_stream(request, *more)

        house.service.infer_stream = noted  # type: ignore[method-assign,assignment]
        body = {"x": 1, "id": "i", "a": 1, "b": 2.5, "c": "s", "d": True, "parameters": {"e": 5, "priority": 1}}
        await twin(house).ask("/v2/models/one/generate", body)
        assert asked[0].parameters == {"id": "i", "a": 1, "b": 2.5, "c": "s", "d": True, "e": 5}
        assert (asked[0].id, asked[0].options.priority) == ("i", 1)


async def test_generate_wants_one_response() -> None:
    async with open_house({"repeat": REPEAT}) as house:
        asking = twin(house)
        one = await asking.ask("/v2/models/repeat/generate", {"IN": 5})
        assert one.json == {"IDX": 0, "OUT": 5, "model_name": "repeat", "model_version": "1"}
        for values in ([], [1, 2], list(range(1000))):
            status, text = (await asking.ask("/v2/models/repeat/generate", {"IN": values})).error
            assert status == 400
            assert text.startswith("generate expects model to produce exactly 1 response")
        await house.wait_nothing_held()


def events(answer: Answer) -> list[Any]:
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = answer.body.split(b"\n\n")
    assert found.pop() == b""
    assert all(event.startswith(b"data: ") for event in found)
    return [orjson.loads(event.removeprefix(b"data: ")) for event in found]


async def test_generate_stream() -> None:
    async with open_house({"repeat": REPEAT, "one": add(1)}) as house:
        asking = twin(house)
        answer = await asking.ask("/v2/models/repeat/generate_stream", {"IN": [7, 8, 9], "id": "s"})
        assert answer.status == 200
        assert [(event["OUT"], event["IDX"], event["id"]) for event in events(answer)] == [
            (7, 0, "s"),
            (8, 1, "s"),
            (9, 2, "s"),
        ]
        nothing = await asking.ask("/v2/models/repeat/generate_stream", {"IN": []})
        assert (nothing.status, events(nothing)) == (200, [])
        plain = await asking.ask("/v2/models/one/generate_stream", {"x": 1})
        assert events(plain) == [{"model_name": "one", "model_version": "1", "y": 2.0}]


async def test_failures_of_a_stream() -> None:
    def run(batch: Any) -> Any:
        for value in batch.inputs["x"]:
            if value < 0:
                raise BackendError("bad row")
            yield {"y": np.array([value], np.float32)}

    async with open_house({"boom": streamed(run)}) as house:
        asking = twin(house)
        path = "/v2/models/boom/generate_stream"
        assert (await asking.ask(path, {"x": "a"})).error[0] == 400
        assert (await asking.ask("/v2/models/nobody/generate_stream", {})).error[0] == 404
        first = await asking.ask(path, {"x": [-1]})
        assert (first.status, "bad row" in events(first)[0]["error"]) == (500, True)
        later = await asking.ask(path, {"x": [1, -1]})
        assert later.status == 200
        value, failure = events(later)
        assert (value["y"], "bad row" in failure["error"]) == (1.0, True)


# -- bodies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "GZIP", "identity"])
async def test_compressed_requests(encoding: str) -> None:
    async with open_house({"one": add(1)}) as house:
        plain, length = binary(np.zeros(20_000, np.float32), "FP32")
        packs: dict[str, Any] = {"gzip": gzip.compress, "deflate": zlib.compress}
        pack = packs.get(encoding.lower(), bytes)
        headers: dict[str, Any] = {"inference_header_content_length": str(length), "content_encoding": encoding}
        answer = await twin(house).ask("/v2/models/one/infer", pack(plain), **headers)
        assert split(answer)[1] == np.ones(20_000, np.float32).tobytes()


async def test_compressed_responses() -> None:
    async with open_house({"one": add(1)}) as house:
        body, length = binary(np.zeros(20_000, np.float32), "FP32")
        for accepted, unpack in (
            ("gzip", gzip.decompress),
            ("deflate", zlib.decompress),
            ("deflate;q=0.5, gzip;q=0.4", zlib.decompress),
            ("identity;q=0.1, gzip;q=0.4", gzip.decompress),
            ("*", gzip.decompress),
        ):
            answer = await twin(house).ask(
                "/v2/models/one/infer", body, accept_encoding=accepted, inference_header_content_length=str(length)
            )
            assert answer.headers["content-encoding"] in ("gzip", "deflate")
            assert len(answer.body) == int(answer.headers["content-length"]) < 10_000
            head_length = int(answer.headers["inference-header-content-length"])
            assert unpack(answer.body)[head_length:] == np.ones(20_000, np.float32).tobytes()
        for accepted in ("", "br", "gzip;q=0", "identity, gzip;q=0.5", "gzip;q=x"):
            answer = await twin(house).ask(
                "/v2/models/one/infer", body, accept_encoding=accepted, inference_header_content_length=str(length)
            )
            assert "content-encoding" not in answer.headers


async def test_compressed_bodies_that_are_none() -> None:
    rules = RestRules(max_input_bytes=10_000)
    async with open_house({"one": add(1)}) as house:
        asking = twin(house, rules)

        async def refused(body: bytes, encoding: str = "gzip") -> tuple[int, str]:
            return (await asking.ask("/v2/models/one/infer", body, content_encoding=encoding)).error

        assert await refused(b"{}", "br") == (501, "Unsupported compression type 'br', use gzip or deflate")
        assert await refused(b"{}", "gzip, gzip") == (
            501,
            "Unsupported compression type 'gzip, gzip', use gzip or deflate",
        )
        for body in (b"{}", gzip.compress(b"{}") + b"x", b"\x1f\x8b"):
            assert (await refused(body))[0] == 400
        assert await refused(gzip.compress(b"{}")[:-4]) == (400, "the request body is no gzip: it ends too early")
        too_large = (400, "the request body exceeds the maximum allowed input size of 10000 bytes")
        assert await refused(gzip.compress(bytes(10_001))) == too_large
        assert await refused(gzip.compress(bytes(5_001)) * 2) == too_large
        assert await refused(gzip.compress(bytes(1 << 24))) == too_large  # over the limit also when packed
        assert (await refused(gzip.compress(b"") * 2000))[0] == 400
        several = gzip.compress(b'{"inputs"') + gzip.compress(b":[]}")
        assert "expected 1 inputs" in (await refused(several))[1]


async def test_the_limit_of_a_body() -> None:
    async with open_house({"one": add(1)}) as house:
        asking = twin(house, RestRules(max_input_bytes=100))
        body = orjson.dumps({"inputs": [tensor([1])]})
        for spaces, status in ((100 - len(body), 200), (101 - len(body), 400), (100_000, 400)):
            for chunks in (1, 7):
                answer = await asking.ask("/v2/models/one/infer", body + b" " * spaces, chunks=chunks)
                assert answer.status == status
        assert answer.error == (400, "the request body exceeds the maximum allowed input size of 100 bytes")
        declared = await asking.ask("/v2/models/one/infer", body, content_length="1000")
        assert (declared.status, declared.headers["connection"]) == (400, "close")


async def test_bodies_together_have_a_limit() -> None:
    slow = Model(config(FP32, {"y": "FP32"}), _slow)
    async with open_house({"slow": slow, "one": add(1)}) as house:
        asking = twin(house, RestRules(max_held_bytes=1000))
        body = orjson.dumps({"inputs": [tensor([1])]})
        first = asyncio.create_task(asking.ask("/v2/models/slow/infer", body + b" " * 900))
        while not house.limits.in_flight:
            await asyncio.sleep(0.01)
        for chunks in (1, 5):
            answer = await asking.ask("/v2/models/one/infer", body + b" " * 900, chunks=chunks)
            assert (answer.status, "request bodies are already held" in answer.error[1]) == (503, True)
        assert (await first).status == 200
        assert (await asking.ask("/v2/models/one/infer", body + b" " * 900)).status == 200


def _slow(batch: Any) -> Any:
    time.sleep(0.5)
    return {"y": batch.inputs["x"]}


# -- who may -----------------------------------------------------------------------------------------------------------


CHANGES = [
    "/v2/repository/models/m/load",
    "/v2/repository/models/m/unload",
    "/v2/systemsharedmemory/unregister",
    "/v2/systemsharedmemory/region/r/register",
    "/v2/cudasharedmemory/region/r/unregister",
    "/v2/trace/setting",
    "/v2/models/m/trace/setting",
    "/v2/logging",
]


@pytest.mark.parametrize("path", CHANGES)
async def test_a_page_of_another_origin_changes_nothing(path: str) -> None:
    async with open_house() as house:
        asking = twin(house, operations=Operations())
        for origin in ("http://evil.example", "null", "", "http://localhost", "http://localhost:8001", "http://[x"):
            answer = await asking.ask(path, {}, origin=origin)
            assert answer.error == (403, "a page of another origin may not change this server")
        owns: list[dict[str, Any]] = [{}, {"origin": "http://localhost:8000"}, {"origin": "http://LOCALHOST:8000"}]
        for own in owns:
            assert (await asking.ask(path, {"key": "k", "byte_size": 1}, **own)).status == 501


async def test_a_page_of_another_origin_may_infer() -> None:
    async with open_house({"one": add(1)}) as house:
        answer = await twin(house).ask("/v2/models/one/infer", {"inputs": [tensor([1])]}, origin="http://a.example")
        assert answer.status == 200


async def test_a_page_that_calls_us_by_its_own_name_reaches_nothing() -> None:
    async with open_house({"one": add(1)}) as house:
        for path in ("/v2", "/v2/models/one", "/v2/health/live"):
            assert (await twin(house).ask(path, host="evil.example")).status == 400


async def test_restricted_routes() -> None:
    rules = RestRules(Restrictions(["inference,model-config:api-key=secret", "health:h=x"]))
    async with open_house({"one": add(1), "repeat": REPEAT}) as house:
        asking = twin(house, rules)
        for path, body in (
            ("/v2/models/one/infer", {"inputs": [tensor([1])]}),
            ("/v2/models/one/versions/1/generate", {"x": 1}),
            ("/v2/models/repeat/generate_stream", {"IN": 1}),
            ("/v2/models/one/config", None),
        ):
            wrong: list[dict[str, Any]] = [{}, {"api_key": "Secret"}, {"api_key": ""}, {"h": "x"}]
            for given in wrong:
                answer = await asking.ask(path, body, **given)
                assert answer.error == (403, "This API is restricted, expecting header 'api-key'")
            assert (await asking.ask(path, body, api_key="secret")).status == 200
        assert (await asking.ask("/v2/models/one/ready")).status == 403
        assert (await asking.ask("/v2/models/one/ready", h="x")).status == 200
        assert (await asking.ask("/v2")).status == 200


async def test_forwarded_headers() -> None:
    seen: list[Any] = []
    rules = RestRules(forwarding=Forwarding("x-.*|triton.*"))
    async with open_house({"one": add(1)}) as house:
        infer = house.service.infer

        async def noted(request: Any, *more: Any) -> Any:
            seen.append(dict(request.parameters))
            return await infer(request, *more)

        house.service.infer = noted  # type: ignore[method-assign,assignment]
        asking = twin(house, rules)
        body = {"inputs": [tensor([1])], "parameters": {"x-a": 1, "b": 2}}
        await asking.ask("/v2/models/one/infer", body, x_a="from the header", other="1")
        assert seen == [{"x-a": "from the header", "b": 2}]
