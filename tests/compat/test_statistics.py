"""What was done is counted: ModelStatistics through every published client, and the metrics page."""

from typing import Any

import numpy as np

from tests.compat.clients import Client
from tests.compat.server import Server
from tests.e2e.mesh import until

A = np.zeros((3, 16), np.int32)
ONE = np.ones(1, np.float32)


async def counted(client: Client, model: str) -> dict[str, Any]:
    row: dict[str, Any]
    (row,) = (await client.get_inference_statistics(model))["model_stats"]
    return row


def count(row: dict[str, Any], name: str) -> int:
    return int(row.get("inference_stats", {}).get(name, {}).get("count", 0))


async def test_a_request_of_three_rows(client: Client) -> None:
    before = await counted(client, "simple")
    await client.infer("simple", {"A": A, "B": A})

    async def is_counted() -> bool:
        return count(await counted(client, "simple"), "success") == count(before, "success") + 1

    await until(is_counted, 10)
    row = await counted(client, "simple")
    assert (row["name"], row["version"]) == ("simple", "1")
    assert int(row["inference_count"]) == int(before.get("inference_count", 0)) + 3
    assert int(row["execution_count"]) == int(before.get("execution_count", 0)) + 1
    assert int(row["last_inference"]) > 1_600_000_000_000  # milliseconds since 1970
    for name in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert count(row, name) == count(before, name) + 1
    (batch,) = [each for each in row["batch_stats"] if int(each["batch_size"]) == 3]
    assert int(batch["compute_infer"]["count"]) >= 1


async def test_a_failure_is_counted_and_a_refusal_is_not(client: Client, server: Server) -> None:
    """Triton counts a model's own error as a success; protocol of observability.md §2, rule 4."""
    before = await counted(client, "boom")
    with client.refused("INTERNAL", "bad row"):
        await client.infer("boom", {"x": -ONE})
    with client.refused("INVALID_ARGUMENT", "unexpected shape"):
        await client.infer("boom", {"x": ONE.reshape(1, 1)})
    name, other = server.either(ours=("fail", "success"), triton=("success", "fail"))

    async def is_counted() -> bool:
        return count(await counted(client, "boom"), name) == count(before, name) + 1

    await until(is_counted, 10)
    assert count(await counted(client, "boom"), other) == count(before, other)


async def test_pipelines_count_and_so_do_their_steps(client: Client) -> None:
    names = ("chain", "line_FP32", "spare_step")
    before = {name: await counted(client, name) for name in names}
    await client.infer("chain", {"x": ONE})

    async def is_counted() -> bool:
        now = {name: await counted(client, name) for name in names}
        return all(count(now[name], "success") == count(before[name], "success") + 1 for name in names)

    await until(is_counted, 10)


async def test_all_models_and_versions(client: Client) -> None:
    rows = (await client.get_inference_statistics())["model_stats"]
    found = {(row["name"], row["version"]) for row in rows}
    assert found >= {("simple", "1"), ("versioned", "1"), ("versioned", "3"), ("chain", "1")}
    (row,) = (await client.get_inference_statistics("versioned", "1"))["model_stats"]
    assert row["version"] == "1"


async def test_statistics_of_what_is_not_there(client: Client) -> None:
    with client.refused("INVALID_ARGUMENT", "requested model 'nobody' is not available"):
        await client.get_inference_statistics("nobody")
    with client.refused("INVALID_ARGUMENT", "requested model version is not available for model 'simple'"):
        await client.get_inference_statistics("simple", "9")


def metrics(server: Server) -> dict[str, float]:
    page = server.fetch("/metrics", port=server.metrics)
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/plain")
    rows = [line.rpartition(" ") for line in page.body.decode().splitlines() if line and not line.startswith("#")]
    return {series: float(value) for series, _, value in rows}


async def test_metrics(client: Client, server: Server) -> None:
    label = '{model="simple",version="1"}'
    before = metrics(server)
    await client.infer("simple", {"A": A, "B": A})

    def grew(name: str) -> float:
        return metrics(server)[f"{name}{label}"] - before[f"{name}{label}"]

    await until(lambda: grew("nv_inference_request_success") == 1, 10)
    assert grew("nv_inference_count") == 3
    assert grew("nv_inference_exec_count") == 1
    for name in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        assert f"nv_inference_{name}_duration_us{label}" in before
    assert grew("nv_inference_request_duration_us") > 0
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        assert f'nv_inference_request_failure{{model="simple",reason="{reason}",version="1"}}' in before
    assert before[f"nv_inference_pending_request_count{label}"] == 0
