"""The HTTP side for people and tools: who may ask what, and what all workers together answer."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from starlette.applications import Starlette

from gateway.addresses import is_loopback
from gateway.admin import AdminRoutes, metrics_app
from gateway.siblings import Siblings
from gateway.web import bind_unix, serve_http
from tensorline.errors import TensorlineError
from tensorline.telemetry.metrics import CONTENT_TYPE
from tensorline.telemetry.record import TraceContext
from tests.gateway.house import FP32, House, add, ensemble, entry, infer_request, open_house
from tests.tensorline.stage.pair import config

X = np.array([1, 2], np.float32)
CHAIN = ensemble("chain", ("one", {"x": "x"}, {"y": "y"}))
AWAY = entry("away", config(FP32, {"y": "FP32"}) + '\nbackend: "elsewhere"')
ADMIN = ["/api/models", "/api/instances", "/api/traces"]


@dataclass
class Answer:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


async def ask(app: Starlette, target: str, *, method: str = "GET", query: bytes = b"", **headers: str) -> Answer:
    """What `app` answers; header names with _ for -."""
    path, _, rest = target.partition("?")
    named = {"host": "localhost:8000", **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query or rest.encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    answer = Answer(0)

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    await app(scope, receive, send)
    return answer


def admin(
    house: House, address: str = "127.0.0.1", token_file: Path | None = None, siblings: Sequence[Path] = ()
) -> Starlette:
    return AdminRoutes(
        house.service,
        house.mesh,
        house.recorder.store,
        address,
        token_file,
        Siblings(siblings),
    ).app()


async def infer(house: House, model: str, number: int) -> None:
    """A request with a trace id of its own."""
    context = TraceContext(number.to_bytes(16, "big"), b"")
    started_ns = int(asyncio.get_running_loop().time() * 1e9)
    await house.service.infer(infer_request(model, X), context, 5.0, started_ns, "test/Infer")


@asynccontextmanager
async def sibling(house: House, path: Path) -> AsyncIterator[Path]:
    """Another worker's socket, as gateway.main opens it."""
    app = admin(house)
    app.routes.extend(metrics_app(house.recorder, Siblings(())).routes)
    async with serve_http(app, bind_unix(path)):
        yield path


# -- who may ask -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "fe80::1", "", "127.example.com", "1270.0.0.1"])
def test_beyond_loopback(address: str) -> None:
    assert not is_loopback(address)


async def test_on_loopback_everybody_of_this_host_may_ask() -> None:
    async with open_house({"one": add(1)}) as house:
        app = admin(house)
        assert [(await ask(app, path)).status for path in ADMIN] == [200] * 3
        for path in ("/", "/v2", "/api", "/api/models/", "/metrics"):
            unknown = await ask(app, path)
            assert (unknown.status, unknown.json) == (404, {"error": "Not Found"})
        refused = await ask(app, "/api/models", method="POST")
        assert (refused.status, refused.json) == (405, {"error": "Method Not Allowed"})


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.0.0.1", "[::1]:8000", "[::1]"])
async def test_names_of_this_host(host: str) -> None:
    async with open_house() as house:
        assert (await ask(admin(house), "/api/models", host=host)).status == 200


async def test_the_address_that_it_is_bound_to_is_such_a_name() -> None:
    async with open_house() as house:
        assert (await ask(admin(house, "127.0.0.2"), "/api/models", host="127.0.0.2:8000")).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "evil.example:127", ""]
)
async def test_a_page_of_another_site_does_not_reach_us(host: str) -> None:
    async with open_house() as house:
        for path in ADMIN:
            assert (await ask(admin(house), path, host=host)).status == 400


async def test_beyond_loopback_nobody_may_without_a_token() -> None:
    async with open_house() as house:
        app = admin(house, "0.0.0.0")
        for path in ADMIN:
            for authorization in ("", "Bearer", "Bearer ", "Bearer None"):
                refused = await ask(app, path, host="mesh.example", authorization=authorization)
                assert (refused.status, refused.json) == (403, {"error": "an operator's token is needed here"})


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
async def test_the_token_is_read_at_each_use(address: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    async with open_house() as house:
        app = admin(house, address, file)

        async def status(token: str) -> int:
            return (await ask(app, "/api/models", authorization=f"Bearer {token}")).status

        assert [await status(token) for token in ("first", "", "firs", "first2", "FIRST", "\xe9")] == [200] + [403] * 5
        assert (await ask(app, "/api/models")).status == 403
        file.write_text("second")
        assert [await status(token) for token in ("first", "second")] == [403, 200]
        file.write_text(" \n")
        assert [await status(token) for token in ("", " ", "second")] == [403] * 3


async def test_a_token_file_that_cannot_be_read_opens_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_house() as house:
        for file in (tmp_path / "nowhere", tmp_path):
            refused = await ask(admin(house, token_file=file), "/api/models", authorization="Bearer x")
            assert refused.status == 403
            assert str(tmp_path) not in refused.body.decode()
    assert "the operators' token cannot be read" in caplog.text


# -- what is answered --------------------------------------------------------------------------------------------------


async def test_models() -> None:
    async with open_house({"one": add(1)}, {"one": add(1)}, entries=[CHAIN, AWAY]) as house:
        away, chain, one = (await ask(admin(house), "/api/models")).json
        assert (away["name"], away["version"], away["state"]) == ("away", "", "UNAVAILABLE")
        assert "no instance serves it; none hosts backend 'elsewhere'" in away["reason"]
        assert (chain["state"], chain["backend"], chain["steps"]) == ("READY", "ensemble", ["one"])
        assert (one["version"], one["backend"], one["max_batch_size"], one["steps"]) == ("1", "one", 0, [])
        assert sorted(one["instances"]) == sorted(stage.identity.instance_id for stage in house.stages)


async def test_instances() -> None:
    async with open_house({"one": add(1)}) as house:
        (view,) = (await ask(admin(house), "/api/instances")).json
        assert view["id"] == house.stages[0].identity.instance_id
        assert (view["service"], view["state"], view["models"]) == ("model", "READY", ["one/1 READY"])
        assert "dev" not in view["id"]


async def test_traces() -> None:
    async with open_house({"one": add(1), "two": add(2)}) as house:
        app = admin(house)
        for which in ("last", "slowest", "0" * 31 + "7"):
            assert (await ask(app, f"/api/traces?which={which}")).status == 404
        assert (await ask(app, "/api/traces")).json == []
        for number, model in enumerate(["one", "two", "one"], 1):
            await infer(house, model, number)
        with pytest.raises(TensorlineError):
            await infer(house, "nobody", 4)
        ids = [row["trace_id"] for row in (await ask(app, "/api/traces")).json]
        assert ids == [f"{number:032x}" for number in (4, 3, 2, 1)]
        assert [row["trace_id"] for row in (await ask(app, "/api/traces?limit=2")).json] == ids[:2]
        rows = (await ask(app, "/api/traces?model=two&which=list")).json
        assert [row["trace_id"] for row in rows] == [ids[2]]
        for which, wanted in (("last", ids[0]), ("last&model=one", ids[1]), (ids[3].upper(), ids[3])):
            (trace,) = (await ask(app, f"/api/traces?which={which}")).json
            assert trace["trace_id"] == wanted
        (slowest,) = (await ask(app, "/api/traces?which=slowest")).json
        assert slowest["duration_ns"] > 0
        assert (await ask(app, "/api/traces?which=slowest&model=nobody")).status == 404


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "9" * 4000, "abc", "", "1.5", "%D9%A1", "+5"])
async def test_a_limit_that_is_none(limit: str) -> None:
    async with open_house() as house:
        refused = await ask(admin(house), f"/api/traces?limit={limit}")
        assert refused.status == 400
        assert "a number from 1 to 1000 is wanted" in refused.json["error"]
        assert len(refused.body) < 200


@pytest.mark.parametrize("which", ["", "first", "0" * 31, "0" * 33, "g" * 32, "x" * 4000, "%00", "%FF"])
async def test_a_trace_that_none_can_be(which: str) -> None:
    async with open_house() as house:
        refused = await ask(admin(house), f"/api/traces?which={which}")
        assert refused.status == 400
        assert len(refused.body) < 400


# -- several workers ---------------------------------------------------------------------------------------------------


async def test_all_workers_traces() -> None:
    async with open_house({"one": add(1)}) as house, open_house({"one": add(1)}) as other:
        await infer(house, "one", 1)
        await infer(other, "one", 2)
        await infer(house, "one", 3)
        directory = other.stages[0].directory.path
        async with sibling(other, directory / "w.sock") as path:
            app = admin(house, siblings=[path, directory / "nowhere.sock"])
            rows = (await ask(app, "/api/traces")).json
            assert [int(row["trace_id"], 16) for row in rows] == [3, 2, 1]
            assert [int(row["trace_id"], 16) for row in (await ask(app, "/api/traces?limit=2")).json] == [3, 2]
            (trace,) = (await ask(app, f"/api/traces?which={2:032x}")).json
            assert int(trace["trace_id"], 16) == 2
            await infer(other, "one", 4)
            (last,) = (await ask(app, "/api/traces?which=last")).json
            assert int(last["trace_id"], 16) == 4
            both = [(await ask(each, "/api/traces?which=slowest")).json[0] for each in (app, admin(other))]
            assert both[0]["duration_ns"] >= both[1]["duration_ns"]


@pytest.mark.parametrize("query", [b"model=\xff\xfe", "model=é".encode(), b"model=a b", b"model=a%0d%0aHost:%20x"])
async def test_no_question_breaks_the_way_to_the_other_workers(query: bytes) -> None:
    async with open_house({"one": add(1)}) as house:
        async with sibling(house, house.stages[0].directory.path / "w.sock") as path:
            answer = await ask(admin(house, siblings=[path]), "/api/traces", query=query)
            assert (answer.status, answer.json) == (200, [])


async def test_all_workers_metrics() -> None:
    async with open_house({"one": add(1)}) as house, open_house({"one": add(1)}) as other:
        await infer(house, "one", 1)
        await infer(other, "one", 2)
        wanted = 'nv_inference_request_success{model="one",version="1"}'
        alone = await ask(metrics_app(house.recorder, Siblings(())), "/metrics")
        assert f"{wanted} 1\n" in alone.body.decode()
        assert alone.headers["content-type"] == CONTENT_TYPE
        directory = other.stages[0].directory.path
        async with sibling(other, directory / "w.sock") as path:
            page = await ask(metrics_app(house.recorder, Siblings([path, directory / "nowhere.sock"])), "/metrics")
        assert f"{wanted} 2\n" in page.body.decode()
        assert page.headers["content-type"] == alone.headers["content-type"]
