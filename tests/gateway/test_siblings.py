"""The workers behind one port: what they say, added up."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.siblings import Siblings, merge_metrics, other_workers, worker_socket
from gateway.web import bind_unix, serve_http

ONE = b"""# HELP a Number of a
# TYPE a counter
a{model="m",version="1"} 2
# HELP b Bytes
# TYPE b gauge
b 1.5
"""
TWO = b"""# HELP a Number of a
# TYPE a counter
a{model="m",version="1"} 40
a{model="with space",version="1"} 1
# HELP b Bytes
# TYPE b gauge
b 1e3
"""


def test_series_are_summed_and_comments_stand_once() -> None:
    merged = merge_metrics([ONE, TWO]).decode().splitlines()
    assert [line for line in merged if line.startswith("#")] == [
        "# HELP a Number of a",
        "# TYPE a counter",
        "# HELP b Bytes",
        "# TYPE b gauge",
    ]
    assert 'a{model="m",version="1"} 42' in merged
    assert "b 1001.5" in merged


def test_series_stand_below_their_family() -> None:
    """A scraper takes what follows a TYPE line to be of that family."""
    merged = merge_metrics([ONE, TWO]).decode().splitlines()
    family = ""
    for line in merged:
        if line.startswith("# TYPE"):
            family = line.split()[2]
        elif not line.startswith("#"):
            assert line.startswith(family), merged


def test_large_counts_are_exact() -> None:
    pages = [b"n 9007199254740001\n", b"n 2\n"]
    assert merge_metrics(pages) == b"n 9007199254740003\n"


def test_what_no_sum_is() -> None:
    pages = [
        b"# TYPE tensorline_instances gauge\ntensorline_instances 3\n# TYPE tensorline_registry_is_fresh gauge\n"
        b"tensorline_registry_is_fresh 1.0\n# TYPE tensorline_event_loop_lag_max_seconds gauge\n"
        b"tensorline_event_loop_lag_max_seconds 0.004\n",
        b"# TYPE tensorline_instances gauge\ntensorline_instances 3\n# TYPE tensorline_registry_is_fresh gauge\n"
        b"tensorline_registry_is_fresh 0.0\n# TYPE tensorline_event_loop_lag_max_seconds gauge\n"
        b"tensorline_event_loop_lag_max_seconds 0.009\n",
    ]
    values = [line for line in merge_metrics(pages).decode().splitlines() if not line.startswith("#")]
    assert values == [
        "tensorline_instances 3",
        "tensorline_registry_is_fresh 0",
        "tensorline_event_loop_lag_max_seconds 0.009",
    ]


def test_of_quantiles_the_slowest_workers_are_told() -> None:
    def page(quantile: str) -> bytes:
        return f'# TYPE s summary\ns{{quantile="0.5"}} {quantile}\ns_sum 2.5\ns_count 1\n'.encode()

    def values(*pages: bytes) -> list[str]:
        return [line for line in merge_metrics(pages).decode().splitlines() if not line.startswith("#")]

    assert values(page("3"), page("7.5"), page("NaN")) == ['s{quantile="0.5"} 7.5', "s_sum 7.5", "s_count 3"]
    assert values(page("NaN"), page("NaN"))[0] == 's{quantile="0.5"} NaN'


def test_one_page_alone_says_the_same() -> None:
    assert sorted(merge_metrics([ONE]).splitlines()) == sorted(ONE.splitlines())


def test_sockets_have_a_name_for_each_port_and_worker() -> None:
    assert worker_socket(8001, 2) == "gateway-8001-worker-2"


@asynccontextmanager
async def serving(path: Path, answer: Response) -> AsyncIterator[Path]:
    async def handle(request: Request) -> Response:
        return answer

    app = Starlette(routes=[Route("/ask", handle)])
    async with serve_http(app, bind_unix(path)):
        yield path


async def test_only_those_that_answer_well_count(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "1.sock", JSONResponse([1])) as good,
        serving(tmp_path / "2.sock", JSONResponse({"error": "no"}, status_code=404)) as refusing,
        serving(tmp_path / "3.sock", JSONResponse([3])) as other,
    ):
        dead = tmp_path / "dead.sock"
        bind_unix(dead).close()
        siblings = Siblings([good, refusing, dead, tmp_path / "nowhere.sock", other])
        assert [json.loads(body) for body in await siblings.ask("/ask")] == [[1], [3]]


async def test_what_is_told_reaches_each(tmp_path: Path) -> None:
    heard: list[bytes] = []

    async def hear(request: Request) -> Response:
        heard.append(await request.body())
        return Response(b"yes")

    app = Starlette(routes=[Route("/tell", hear, methods=["POST"])])
    paths = other_workers(tmp_path, 8001, 2, 3)
    assert [path.name for path in paths] == ["gateway-8001-worker-1.sock", "gateway-8001-worker-3.sock"]
    async with serve_http(app, bind_unix(paths[0])):
        assert await Siblings(paths).tell("/tell", b"this") == [b"yes"]
    assert heard == [b"this"]
    assert other_workers(tmp_path, 8001, 0, 1) == []


async def test_a_silent_one_costs_a_bounded_time(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        writer.close()

    server = await asyncio.start_unix_server(silent, tmp_path / "s.sock")
    try:
        async with asyncio.timeout(4):
            assert await Siblings([tmp_path / "s.sock"]).ask("/ask") == []
    finally:
        server.close()
        await asyncio.sleep(0.05)  # until its end of the connection is closed, too


async def test_nobody_beside_us() -> None:
    assert await Siblings(()).ask("/ask") == []
