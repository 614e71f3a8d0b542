"""One trace from the client's call through every process, into a real collector and out of the gateway's own store."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc import StatusCode
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from examples.prepare import EXAMPLES
from tests.consul import free_ports
from tests.e2e.client import Failure, Stub, arrays, failure, infer, outcome, request
from tests.e2e.mesh import STAGES, Mesh, Service, running_mesh, until
from tests.e2e.models import chain_services, ensemble, model
from tests.tensorline.telemetry.collector import Collector, Received, open_collector

CALLER = "00f067aa0ba902b7"
RATIO = 0.25
ONE = np.ones(1, np.float32)
PHASES = ["queue", "compute_input", "compute_infer", "compute_output"]


def traceparent(trace: str, flags: str = "01") -> tuple[tuple[str, str], ...]:
    return (("traceparent", f"00-{trace}-{CALLER}-{flags}"),)


@pytest.fixture(scope="module")
async def collector() -> AsyncIterator[Collector]:
    async with open_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
async def mesh(
    photos: list[Path], collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mesh]:
    root, example = tmp_path_factory.mktemp("repository"), EXAMPLES / "models"
    model(root / "pre", "copy", "identity")
    model(root / "team", "spans", "spans")
    model(root / "team", "boom", "boom")
    model(root / "team", "echo", "echo", datatype="BYTES", dims="1")
    model(root / "post", "pass", "identity")
    steps = [("copy", {"x": "x"}, {"y": "a"}), ("boom", {"x": "a"}, {"y": "b"}), ("pass", {"x": "b"}, {"y": "y"})]
    ensemble(root / "pipelines", "failing", steps)
    ensemble(
        root / "pipelines",
        "failing_last",
        [steps[0], ("pass", {"x": "a"}, {"y": "b"}), ("boom", {"x": "b"}, {"y": "y"})],
    )
    async with running_mesh(
        root,
        services={
            "preprocess": Service("services.preprocess", (), [example, root / "pre"]),
            "model": Service("services.model", (), [example]),
            "postprocess": Service("services.postprocess", (), [example, root / "post"]),
            "team": Service(STAGES, ("team",), [root / "team"]),
        },
        gateway_repositories=[example, *(root / name for name in ("pre", "team", "post", "pipelines"))],
        extra_env={
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.target}",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": str(RATIO),
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        },
    ) as mesh:
        mesh.expected.append('"model failed"')
        yield mesh


@pytest.fixture(scope="module")
async def stub(mesh: Mesh) -> AsyncIterator[Stub]:
    async with mesh.stub() as stub:
        yield stub


def of(collector: Collector, trace: str) -> list[Received]:
    return [received for received in collector.spans() if received.span.trace_id.hex() == trace]


async def exported(collector: Collector, trace: str, count: int) -> list[Received]:
    """All spans of one trace, once there are `count`."""
    try:
        await until(lambda: len(of(collector, trace)) >= count)
    except TimeoutError:
        raise AssertionError([each.span.name for each in of(collector, trace)]) from None
    await asyncio.sleep(0.2)  # and no more
    found = of(collector, trace)
    assert len(found) == count, [each.span.name for each in found]
    return found


def service(received: Received) -> object:
    return received.resource["service.name"]


async def test_one_trace_across_all_four_processes(
    mesh: Mesh, stub: Stub, collector: Collector, photos: list[Path]
) -> None:
    trace = "a1" * 16
    image = np.array([[photos[0].read_bytes()]], object)
    await stub.ModelInfer(request("classify", id="photo 1", image=image), metadata=traceparent(trace))
    spans = await exported(collector, trace, 1 + 3 * 5)
    (root,) = [each for each in spans if each.span.kind == Span.SPAN_KIND_SERVER]
    assert (root.span.name, root.span.parent_span_id.hex()) == ("ModelInfer classify", CALLER)
    assert service(root) == "tensorline-gateway"
    assert root.attributes["tensorline.request_id"] == "photo 1"
    steps = {each.span.name: each for each in spans if each.span.kind == Span.SPAN_KIND_CLIENT}
    hosts = {
        "photo_decode": "tensorline-preprocess",
        "efficientnet_lite0": "tensorline-model",
        "imagenet_labels": "tensorline-postprocess",
    }
    assert set(steps) == set(hosts)
    end = 0
    for name, host in hosts.items():
        step = steps[name].span
        assert step.parent_span_id == root.span.span_id
        assert root.span.start_time_unix_nano <= step.start_time_unix_nano
        assert step.end_time_unix_nano <= root.span.end_time_unix_nano
        inner = [each for each in spans if each.span.parent_span_id == step.span_id]
        assert [each.span.name for each in inner] == PHASES
        assert {service(each) for each in inner} == {host}
        assert end <= step.start_time_unix_nano  # one after the other
        for each in inner:
            assert step.start_time_unix_nano <= each.span.start_time_unix_nano <= each.span.end_time_unix_nano
            assert each.span.end_time_unix_nano <= step.end_time_unix_nano
        end = step.end_time_unix_nano
    pids = {each.resource["process.pid"] for each in spans}
    assert pids == {mesh.pid(name) for name in ("gateway", "preprocess", "model", "postprocess")}
    assert {each.span.status.code for each in spans} == {Status.STATUS_CODE_UNSET}


async def test_the_callers_flag_is_obeyed(mesh: Mesh, stub: Stub, collector: Collector) -> None:  # G01
    await stub.ModelInfer(request("echo", x=np.array([b""], object)))
    ids = {flags: [f"{number:030x}{flags}" for number in range(1, 101)] for flags in ("00", "01")}
    for flags, traces in ids.items():
        for trace in traces:
            message = request("echo", x=np.array([b""], object))
            answer = await stub.ModelInfer(message, metadata=traceparent(trace, flags))
            (told,) = json.loads(arrays(answer)["y"][0])
            assert (told["trace_id"], told["trace_flags"]) == (trace, int(flags))
    before = {each.span.trace_id for each in collector.spans()}
    await until(lambda: {each.span.trace_id.hex() for each in collector.spans()} >= set(ids["01"]))
    assert not {each.span.trace_id.hex() for each in collector.spans()} & set(ids["00"])
    before = {each.span.trace_id for each in collector.spans()}
    flagged = 0
    for _ in range(100):
        answer = await stub.ModelInfer(request("echo", x=np.array([b""], object)))
        (told,) = json.loads(arrays(answer)["y"][0])
        flagged += told["trace_flags"]
    # Beside the share: the slowest of the minute, each time there is a slower one.
    assert 8 <= flagged <= 45
    await asyncio.sleep(0.5)
    kept = len({each.span.trace_id for each in collector.spans()} - before)
    assert flagged <= kept <= flagged + 10


@pytest.mark.parametrize(("name", "order"), [("failing", ["copy", "boom"]), ("failing_last", ["copy", "pass", "boom"])])
async def test_one_tree_with_a_failing_stage(
    mesh: Mesh, stub: Stub, collector: Collector, name: str, order: list[str]
) -> None:  # G02
    trace = f"{len(order):032x}"
    await failure(stub.ModelInfer(request(name, x=-ONE), metadata=traceparent(trace)))
    count = 1 + 5 * (len(order) - 1) + 4  # the failing stage has no output to write
    spans = await exported(collector, trace, count)
    (root,) = [each for each in spans if not each.span.name.startswith(("compute", "queue", *order))]
    assert root.span.parent_span_id.hex() == CALLER
    assert root.attributes["rpc.response.status_code"] == "INTERNAL"
    assert (root.span.status.code, root.attributes["error.type"]) == (Status.STATUS_CODE_ERROR, "INTERNAL")
    steps = {each.span.name: each for each in spans if each.span.parent_span_id == root.span.span_id}
    assert list(steps) == order
    for step, each in steps.items():
        is_failed = step == "boom"
        assert (each.span.status.code == Status.STATUS_CODE_ERROR) is is_failed, step
        assert each.attributes["rpc.response.status_code"] == ("INTERNAL" if is_failed else "OK")
        inner = [other for other in spans if other.span.parent_span_id == each.span.span_id]
        assert [other.span.name for other in inner] == PHASES[: 3 if is_failed else 4]
        assert any(other.span.status.code == Status.STATUS_CODE_ERROR for other in inner) is is_failed
        assert {service(other) for other in inner} == {"team" if is_failed else service(inner[0])}
    assert steps["boom"].span.status.message == "bad row"


STATUSES: dict[str, tuple[Any, StatusCode, bool]] = {
    "INVALID_ARGUMENT": (request("copy", z=ONE), StatusCode.INVALID_ARGUMENT, False),
    "NOT_FOUND": (request("nobody", x=ONE), StatusCode.NOT_FOUND, False),
    "INTERNAL": (request("boom", x=-ONE), StatusCode.INTERNAL, True),
    "OK": (request("copy", x=ONE), StatusCode.OK, False),
}


@pytest.mark.parametrize("name", STATUSES)
async def test_statuses(stub: Stub, collector: Collector, name: str) -> None:  # G05
    message, code, is_error = STATUSES[name]
    trace = f"{name.encode().hex():0>32.32}"
    found = await outcome(stub.ModelInfer(message, metadata=traceparent(trace)))
    assert code is (StatusCode.OK if found is None else found.code)
    await until(lambda: of(collector, trace))
    root = of(collector, trace)[0]
    assert root.attributes["rpc.response.status_code"] == name
    assert (root.span.status.code == Status.STATUS_CODE_ERROR) is is_error
    assert ("error.type" in root.attributes) is is_error


async def test_trailers_are_kept(mesh: Mesh, stub: Stub, collector: Collector) -> None:  # G05; last step away
    trace = "ee" * 16
    await mesh.stop("team")
    found: Failure = await failure(stub.ModelInfer(request("failing", x=ONE), metadata=traceparent(trace)))
    assert (found.code, found.trailers["grpc-retry-pushback-ms"]) == (StatusCode.UNAVAILABLE, "100")
    await until(lambda: of(collector, trace))
    assert of(collector, trace)[0].span.status.message == found.text
    mesh.start("team")
    await mesh.wait_ready()


async def test_spans_of_a_stages_own_code(mesh: Mesh, stub: Stub, collector: Collector) -> None:
    trace = "c0" * 16
    await stub.ModelInfer(request("spans", x=ONE), metadata=traceparent(trace))
    spans = await exported(collector, trace, 1 + 5 + 1)
    (own,) = [each for each in spans if each.span.name == "look up prices"]
    (step,) = [each for each in spans if each.span.kind == Span.SPAN_KIND_CLIENT]
    assert own.span.parent_span_id == step.span.span_id
    assert service(own) == "team"
    assert own.attributes == {"rows": 1}
    (compute,) = [each for each in spans if each.span.name == "compute_infer"]
    assert compute.span.start_time_unix_nano <= own.span.start_time_unix_nano + 1_000_000
    silent = "c1" * 16
    await stub.ModelInfer(request("spans", x=ONE), metadata=traceparent(silent, "00"))
    await asyncio.sleep(0.3)
    assert of(collector, silent) == []


@pytest.mark.parametrize(
    "header", ["garbage", "00-" + "0" * 32 + f"-{CALLER}-01", "ff-" + "a" * 32 + f"-{CALLER}-01", "x" * 4000]
)
async def test_a_broken_header_costs_no_request(stub: Stub, header: str) -> None:
    assert arrays(await stub.ModelInfer(request("copy", x=ONE), metadata=(("traceparent", header),)))


async def test_the_gateways_own_store(mesh: Mesh, stub: Stub) -> None:
    trace = "d0" * 16
    await stub.ModelInfer(request("copy", id="last one", x=ONE), metadata=traceparent(trace))
    for which in (trace, "last", "last&model=copy"):
        status, found = await mesh.get(f"/api/traces?which={which}")
        assert status == 200
        assert [(each["trace_id"], each["request_id"]) for each in found] == [(trace, "last one")]
        assert [span["name"] for span in found[0]["spans"]] == ["ModelInfer copy", "copy", *PHASES]
        assert {span["service"] for span in found[0]["spans"]} == {"tensorline-gateway", "tensorline-preprocess"}
    _, rows = await mesh.get("/api/traces")
    assert rows[0]["trace_id"] == trace
    assert "spans" not in rows[0]
    _, rows = await mesh.get("/api/traces?which=list&limit=2&model=copy")
    assert [row["model"] for row in rows] == ["copy", "copy"]
    _, (slowest,) = await mesh.get("/api/traces?which=slowest&model=copy")
    assert slowest["model"] == "copy"
    two = await asyncio.gather(*(infer(stub, "copy", x=ONE) for _ in range(2)))
    assert len(two) == 2
    for _ in range(2):
        await stub.ModelInfer(request("copy", x=ONE), metadata=traceparent("d1" * 16))
        await stub.ModelInfer(request("copy", x=ONE), metadata=traceparent("d2" * 16, "00"))
    await stub.ModelInfer(request("pass", x=ONE), metadata=traceparent("d1" * 16))
    _, three = await mesh.get(f"/api/traces?which={'D1' * 16}")
    assert [each["model"] for each in three] == ["copy", "copy", "pass"]
    _, last = await mesh.get("/api/traces?which=last&model=copy")
    assert [(each["trace_id"], each["model"]) for each in last] == [("d1" * 16, "copy")]
    assert (await mesh.get(f"/api/traces?which={'d2' * 16}"))[0] == 404  # its caller wanted no trace


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("which=nothing", 400),
        ("which=", 400),
        (f"which={'ab' * 16}", 404),
        ("which=ab", 400),
        ("which=last&model=nobody+else", 404),
        ("which=slowest&model=nobody", 404),
        ("limit=0", 400),
        ("limit=1001", 400),
        ("limit=-1", 400),
        ("limit=x", 400),
        (f"limit={'9' * 5000}", 400),
        (f"which={'9' * 5000}", 400),
        ("limit=%D9%A3", 400),
    ],
)
async def test_questions_that_have_no_answer(mesh: Mesh, query: str, status: int) -> None:
    found, body = await mesh.get(f"/api/traces?{query}")
    assert found == status
    assert set(body) == {"error"}


async def test_other_hosts_names_are_refused(mesh: Mesh) -> None:
    for host, status in (
        ("localhost", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 400),
        ("", 400),
    ):
        for path in ("/v2", "/api/models", "/api/traces", "/api/instances"):
            assert (await mesh.get(path, Host=host))[0] == status, (host, path)
    assert (await mesh.get("/nothing"))[0] == 404


async def test_a_dead_collector_costs_spans_alone(tmp_path: Path) -> None:  # promise 29
    model(tmp_path / "pre", "ident", "identity")
    model(tmp_path / "pre", "spans", "spans")
    (port,) = free_ports(1)
    async with (
        running_mesh(
            tmp_path / "pre",
            services={"pre": chain_services(tmp_path)["pre"]},
            extra_env={"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_TRACES_SAMPLER": "always_on"},
        ) as mesh,
        mesh.stub() as stub,
    ):
        for _ in range(100):
            assert await infer(stub, "ident", x=ONE)
            assert await infer(stub, "spans", x=ONE)
        # The SDK's own exporter, of the stage's own spans, says on the log that nobody takes them.
        mesh.expected += ["opentelemetry", "collector"]
        began = time.monotonic()
        for name in ("gateway", "pre"):
            assert await mesh.stop(name) == 0
        assert time.monotonic() - began < 8.0
