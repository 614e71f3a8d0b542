"""The metrics page as Prometheus's own `promtool check metrics` sees it."""

import io

import numpy as np
import pytest

from gateway.gauges import watch_gauges, watch_process
from gateway.siblings import merge_metrics
from tensorline.telemetry.counters import ModelTraits
from tensorline.telemetry.logs import LogLines
from tensorline.telemetry.metrics import FAMILIES, Metrics
from tensorline.telemetry.metrics_options import MetricsOptions
from tests.gateway.house import add, open_house
from tests.promtool import check_metrics
from tests.tensorline.telemetry.records import failed, pipeline, refused, single

pytestmark = pytest.mark.slow

# Triton's names are what they are: not what Prometheus would have them be.
HABITS = (
    'should have "_total" suffix',
    "should not have",
    "use base unit",
    "abbreviated units",
    "should not include type",
)


def strange(page: bytes) -> list[str]:
    """What promtool minds, except for the habits that Triton's names break."""
    return [
        f"{name} {text}"
        for name, texts in check_metrics(page).items()
        for text in texts
        if not (name.startswith("nv_") and any(habit in text for habit in HABITS))
    ]


def full_page() -> bytes:
    options = MetricsOptions(summary_latencies=True, histogram_latencies=True)
    metrics = Metrics(options=options)
    metrics.models.declare("efficientnet_lite0", "1", ModelTraits({"_team": 'a "b"\\\n'}, is_decoupled=True))
    metrics.models.declare("idle", "1", ModelTraits(is_decoupled=True))
    for record in (single(), pipeline(), failed(13), refused(5), refused(3)):
        metrics.record(record)
    for name, family in FAMILIES.items():
        metrics.watch(name, lambda labels=family.labels: {tuple(labels): 1.5} if labels else 3)  # type: ignore[misc]
    return metrics.render()


def test_every_family_passes() -> None:
    page = full_page()
    assert strange(page) == []
    for name in FAMILIES:
        assert f"# TYPE {name} ".encode() in page


def test_the_page_of_several_workers_passes() -> None:
    page = full_page()
    merged = merge_metrics([page, page, Metrics().render()])
    assert strange(merged) == []
    assert b'\nnv_inference_request_success{model="photo",version="1"} 2\n' in merged


def test_promtool_would_mind() -> None:
    assert strange(b"# TYPE a counter\na 1\n") != []
    with pytest.raises(AssertionError):
        check_metrics(b"a{ 1\n")


async def test_the_page_of_a_running_gateway_passes() -> None:
    async with open_house({"one": add(1)}, {"one": add(1)}) as house:
        watch_gauges(house.metrics, house.arena, house.limits, house.mesh, house.registry)
        watch_process(house.metrics, LogLines(io.BytesIO(), "gateway", "g", json=True), has_cpu=True)
        for _ in range(3):
            await house.infer("one", np.ones(2, np.float32))
        assert strange(house.recorder.render_metrics()) == []
