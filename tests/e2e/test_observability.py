"""Statistics, trace and log settings as the published client sees them, over two workers and a real mesh."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton

from gateway.siblings import Siblings, worker_socket
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tests.e2e.mesh import Mesh, running_mesh, until
from tests.e2e.models import chain_services, ensemble, model
from tests.promtool import check_metrics
from tests.tensorline.telemetry.collector import Collector, open_collector

pytestmark = pytest.mark.slow

CLIENTS = 24
T = TypeVar("T")


@pytest.fixture(scope="module")
async def collector() -> AsyncIterator[Collector]:
    async with open_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
async def mesh(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    root = tmp_path_factory.mktemp("repository")
    model(
        root / "pre",
        "shared",
        "identity",
        batch=8,
        text='dynamic_batching { max_queue_delay_microseconds: 300000 }\nmetric_tags { key: "team" value: "photos" }',
    )
    for name in ("plain", "traced", "silent"):
        model(root / "pre", name, "identity")
    ensemble(root / "pipelines", "both", [("plain", {"x": "x"}, {"y": "a"}), ("traced", {"x": "a"}, {"y": "y"})])
    async with running_mesh(
        root,
        services={"pre": chain_services(root)["pre"]},
        gateway_repositories=[root / "pre", root / "pipelines"],
        workers=2,
        extra_env={
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.target}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        },
        gateway_env={"TENSORLINE_METRICS_CONFIG": "summary_latencies=true;histogram_latencies=true"},
    ) as mesh:
        yield mesh


class Client:
    """The published client on a connection of its own: which worker it meets is the kernel's choice."""

    def __init__(self, mesh: Mesh) -> None:
        own = [("grpc.use_local_subchannel_pool", 1)]
        self.triton = triton.InferenceServerClient(mesh.target, channel_args=own)

    def infer(self, name: str, *shape: int) -> None:
        given = triton.InferInput("x", shape, "FP32")
        given.set_data_from_numpy(np.ones(shape, np.float32))
        self.triton.infer(name, [given])

    def statistics(self, name: str) -> pb.ModelStatistics:
        answer: pb.ModelStatisticsResponse = self.triton.get_inference_statistics(name)
        (row,) = answer.model_stats
        return row

    def trace(self, name: str | None = None, **changes: object) -> dict[str, Any]:
        if changes:
            answer = self.triton.update_trace_settings(name, changes, as_json=True)
        else:
            answer = self.triton.get_trace_settings(name, as_json=True)
        return {key: setting.get("value", []) for key, setting in answer["settings"].items()}

    def log(self, **changes: object) -> dict[str, Any]:
        if changes:
            answer = self.triton.update_log_settings(changes, as_json=True)
        else:
            answer = self.triton.get_log_settings(as_json=True)
        return {key: next(iter(setting.values())) for key, setting in answer["settings"].items()}


@pytest.fixture(scope="module")
async def clients(mesh: Mesh) -> AsyncIterator[list[Client]]:
    # Connections that are opened before both workers listen all go to the first.
    await until(lambda: mesh.log("gateway").count('"gateway serves"') >= 2, 20.0)
    found = [Client(mesh) for _ in range(CLIENTS)]
    yield found
    for client in found:
        client.triton.close()


async def of_each(clients: list[Client], call: Callable[[Client], T]) -> list[T]:
    return list(await asyncio.gather(*(asyncio.to_thread(call, client) for client in clients)))


async def both_workers_serve(mesh: Mesh, name: str) -> None:
    sockets = [mesh.path / "sockets" / f"{worker_socket(mesh.grpc_port, number)}.sock" for number in (1, 2)]
    for path in sockets:
        (body,) = await Siblings([path]).ask(f"/internal/statistics?model={name}")
        (row,) = pb.ModelStatisticsResponse.FromString(body).model_stats
        assert row.inference_count > 0


async def is_zero(mesh: Mesh, series: str) -> bool:
    return (await mesh.metrics())[series] == 0


async def test_any_worker_tells_the_statistics_of_all(mesh: Mesh, clients: list[Client]) -> None:
    await of_each(clients, lambda client: client.infer("plain", 4))
    await both_workers_serve(mesh, "plain")
    for row in await of_each(clients, lambda client: client.statistics("plain")):
        assert (row.inference_count, row.execution_count) == (CLIENTS, CLIENTS)
        assert row.inference_stats.success.count == row.inference_stats.queue.count == CLIENTS
        assert (row.inference_stats.fail.count, row.inference_stats.cache_hit.count) == (0, 0)
        assert [(batch.batch_size, batch.compute_infer.count) for batch in row.batch_stats] == [(1, CLIENTS)]
        assert row.last_inference > 1.6e12


async def test_batches_that_the_workers_share_are_counted_once(mesh: Mesh, clients: list[Client]) -> None:
    for _ in range(3):
        await of_each(clients, lambda client: client.infer("shared", 1, 4))
    await both_workers_serve(mesh, "shared")
    row = await asyncio.to_thread(clients[0].statistics, "shared")
    assert row.inference_count == 3 * CLIENTS
    assert row.execution_count == sum(batch.compute_infer.count for batch in row.batch_stats)
    assert row.inference_count == sum(batch.batch_size * batch.compute_infer.count for batch in row.batch_stats)
    assert row.execution_count < 3 * CLIENTS


async def test_pipelines_and_unknown_models(clients: list[Client]) -> None:
    await of_each(clients, lambda client: client.infer("both", 4))
    row = await asyncio.to_thread(clients[1].statistics, "both")
    assert (row.inference_count, row.execution_count, row.inference_stats.success.count) == (CLIENTS,) * 3
    names = [each.name for each in clients[0].triton.get_inference_statistics().model_stats]
    assert names == ["both", "plain", "shared", "silent", "traced"]
    with pytest.raises(triton.InferenceServerException, match="requested model 'nobody' is not available"):
        clients[0].triton.get_inference_statistics("nobody")


async def test_the_metrics_page_agrees_and_passes_promtool(mesh: Mesh, clients: list[Client]) -> None:
    row = await asyncio.to_thread(clients[0].statistics, "shared")
    _, page = await mesh.get("/metrics", mesh.metrics_port)
    minded = check_metrics(page.encode())
    assert [name for name in minded if not name.startswith("nv_")] == []
    values = await mesh.metrics()
    labels = '{_team="photos",model="shared",version="1"}'
    assert values[f"nv_inference_count{labels}"] == row.inference_count
    assert values[f"nv_inference_exec_count{labels}"] == row.execution_count
    assert values[f"nv_inference_request_success{labels}"] == row.inference_stats.success.count
    assert values[f"nv_inference_queue_duration_us{labels}"] == pytest.approx(row.inference_stats.queue.ns / 1e3, abs=2)
    assert values[f"nv_inference_request_summary_us_count{labels}"] == row.inference_count
    # As the stage said a second ago at most.
    waiting = f"nv_inference_pending_request_count{labels}"
    await until(lambda: is_zero(mesh, waiting))
    assert values[f"nv_model_load_duration_secs{labels}"] > 0
    assert values['tensorline_requests_total{front_end="grpc",status="OK"}'] >= row.inference_count
    assert values["nv_cpu_memory_total_bytes"] == psutil.virtual_memory().total


async def test_trace_settings_act_in_every_worker(mesh: Mesh, clients: list[Client], collector: Collector) -> None:
    await asyncio.to_thread(lambda: clients[0].trace("traced", trace_rate="4", trace_count="1000"))
    await asyncio.to_thread(lambda: clients[1].trace("silent", trace_level=["OFF"]))
    for told in await of_each(clients, lambda client: (client.trace("traced"), client.trace("silent"))):
        assert (told[0]["trace_rate"], told[0]["trace_level"]) == (["4"], ["TIMESTAMPS"])
        assert (told[1]["trace_rate"], told[1]["trace_level"]) == (["1"], ["OFF"])
        assert told[0]["url"] == [f"http://{collector.target}"]

    def roots(name: str) -> int:
        return sum(received.span.name == f"ModelInfer {name}" for received in collector.spans())

    for _ in range(4):
        await of_each(clients, lambda client: client.infer("traced", 1))
        await of_each(clients, lambda client: client.infer("silent", 1))
    # Each worker takes every fourth of its own: less than one of them is left over.
    await until(lambda: CLIENTS - 2 <= roots("traced") <= CLIENTS)
    await asyncio.sleep(0.3)
    assert roots("traced") <= CLIENTS
    assert roots("silent") == 0
    _, rows = await mesh.get("/api/traces?which=list&model=silent")
    assert rows == []

    async def agree_on_what_is_left() -> bool:  # they tell one another a few times a second
        told = await of_each(clients, lambda client: client.trace("traced"))
        return {int(each["trace_count"][0]) for each in told} == {1000 - roots("traced")}

    await until(agree_on_what_is_left, 15.0)
    clients[2].trace("traced", trace_rate=None, trace_count=None)
    clients[3].trace("silent", trace_level=None)
    for told in await of_each(clients, lambda client: (client.trace("traced"), client.trace("silent"))):
        assert (told[0]["trace_rate"], told[0]["trace_count"], told[1]["trace_level"]) == (
            ["1"],
            ["-1"],
            ["TIMESTAMPS"],
        )


async def test_bad_settings_change_nothing(clients: list[Client]) -> None:
    before = clients[0].trace()
    with pytest.raises(triton.InferenceServerException, match="Unable to parse 'trace_rate', got: often"):
        clients[0].trace(None, trace_level=["OFF"], trace_rate="often")
    with pytest.raises(triton.InferenceServerException, match="file location can not be updated"):
        clients[0].trace(None, trace_file="/tmp/x")
    with pytest.raises(triton.InferenceServerException, match="Request for unknown model : nobody"):
        clients[0].trace("nobody", trace_rate="1")
    assert clients[1].trace() == before


async def test_log_settings_are_the_same_in_every_worker(clients: list[Client]) -> None:
    """That a process obeys them is shown in tests/gateway/test_settings_operations.py."""
    assert clients[0].log(log_verbose_level=1, log_info=False)["log_verbose_level"] == 1
    for told in await of_each(clients, Client.log):
        assert (told["log_verbose_level"], told["log_info"], told["log_format"]) == (1, False, "default")
    clients[1].log(log_verbose_level=0, log_info=True, log_format="ISO8601")
    for told in await of_each(clients, Client.log):
        assert (told["log_verbose_level"], told["log_info"], told["log_format"]) == (0, True, "ISO8601")
    with pytest.raises(triton.InferenceServerException, match="invalid argument for log_format, got: XML"):
        clients[0].log(log_format="XML")


async def test_a_version_that_is_loaded_again_counts_from_zero(tmp_path: Path) -> None:
    """And a pipeline of it, too, in every worker."""
    model(tmp_path / "pre", "part", "identity")
    ensemble(tmp_path / "pipelines", "whole", [("part", {"x": "x"}, {"y": "y"})])
    async with running_mesh(
        [tmp_path / "pre", tmp_path / "pipelines"],
        services={"pre": chain_services(tmp_path)["pre"]},
        workers=2,
        extra_env={"TENSORLINE_MODEL_CONTROL_MODE": "explicit", "TENSORLINE_LOAD_MODEL": "*"},
    ) as mesh:
        clients = [Client(mesh) for _ in range(CLIENTS)]
        try:
            await of_each(clients, lambda client: client.infer("whole", 1))
            for name in ("part", "whole"):
                assert (await asyncio.to_thread(clients[0].statistics, name)).inference_count == CLIENTS
            for folder, name in (("pre", "part"), ("pipelines", "whole")):
                config = tmp_path / folder / name / "config.pbtxt"
                config.write_text(config.read_text() + 'metric_tags { key: "team" value: "new" }\n')
                await asyncio.to_thread(clients[0].triton.load_model, name)
            for name in ("part", "whole"):
                await until(lambda name=name: count_is(clients[1], name, 0))  # type: ignore[misc]
            await of_each(clients, lambda client: client.infer("part", 1))
            assert (await asyncio.to_thread(clients[0].statistics, "part")).execution_count == CLIENTS
            series = 'nv_inference_count{_team="new",model="part",version="1"}'
            assert (await mesh.metrics())[series] == CLIENTS
            await asyncio.to_thread(clients[0].triton.unload_model, "part")
            await until(lambda: is_gone(mesh, series))
        finally:
            for client in clients:
                client.triton.close()


async def count_is(client: Client, name: str, count: int) -> bool:
    try:
        return (await asyncio.to_thread(client.statistics, name)).inference_count == count
    except triton.InferenceServerException:  # between the old and the new one
        return False


async def is_gone(mesh: Mesh, series: str) -> bool:
    return series not in await mesh.metrics()


async def test_a_worker_that_starts_again_knows_what_was_set(mesh: Mesh, clients: list[Client]) -> None:
    clients[0].trace("plain", trace_rate="17")
    workers = psutil.Process(mesh.pid("gateway")).children()
    workers[-1].kill()
    mesh.expected.append("gateway worker ended|a worker did not answer")
    await until(lambda: psutil.Process(mesh.pid("gateway")).children()[-1:] not in ([], workers[-1:]), 20)
    await until(lambda: mesh.log("gateway").count('"gateway serves"') >= 3, 20)
    fresh = [Client(mesh) for _ in range(CLIENTS)]
    try:
        rates = [told["trace_rate"] for told in await of_each(fresh, lambda client: client.trace("plain"))]
    finally:
        for client in fresh:
            client.triton.close()
    assert rates == [["17"]] * CLIENTS
