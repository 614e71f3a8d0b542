"""What a gateway shows of itself at each scrape."""

import asyncio
import threading
from collections.abc import Mapping

import numpy as np
import pytest

from gateway.gauges import watch_gauges
from tensorline.errors import InvalidTensorError
from tensorline.stage.backend import Batch
from tensorline.tensor import Array
from tests.gateway.house import FP32, House, add, open_house
from tests.tensorline.stage.pair import Model, config, until

X = np.array([1, 2], np.float32)
FP32_OUT = {"y": "FP32"}


def values(house: House, start: str) -> dict[str, float]:
    page = house.recorder.render_metrics().decode()
    lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith(start)]
    return {series: float(value) for series, _, value in lines}


async def test_gauges_say_what_is_now() -> None:
    async with open_house({"one": add(1)}, {"one": add(1)}) as house:
        watch_gauges(house.metrics, house.arena, house.limits, house.mesh, house.registry)
        assert values(house, "tensorline_arena_bytes_capacity") == {
            "tensorline_arena_bytes_capacity": house.arena.limit
        }
        assert values(house, "tensorline_instances{") == {
            'tensorline_instances{service="model",state="READY"}': 2,
        }
        house.limits.enter(10)
        house.registry.is_fresh = False
        assert values(house, "tensorline_in_flight") == {"tensorline_in_flight": 1}
        assert values(house, "tensorline_registry_is_fresh") == {"tensorline_registry_is_fresh": 0}
        house.limits.leave(10)


async def test_leased_bytes_come_and_go() -> None:
    async with open_house({"one": add(1)}) as house:
        watch_gauges(house.metrics, house.arena, house.limits, house.mesh, house.registry)
        block = house.arena.allocate(10_000)
        assert values(house, "tensorline_arena_bytes_leased")["tensorline_arena_bytes_leased"] >= 10_000
        block.release()
        assert values(house, "tensorline_arena_bytes_leased")["tensorline_arena_bytes_leased"] == 0


async def test_what_waits_at_a_stage_is_told_by_model_and_instance() -> None:
    """As its beats say, once a second."""
    release = threading.Event()

    def run(batch: Batch) -> Mapping[str, Array]:
        release.wait(20)
        return {"y": batch.inputs["x"]}

    async with open_house({"slow": Model(config(FP32, FP32_OUT), run), "one": add(1)}) as house:
        watch_gauges(house.metrics, house.arena, house.limits, house.mesh, house.registry)
        name = house.mesh.connections[0].instance_id
        flying = [asyncio.ensure_future(house.infer("slow", X)) for _ in range(4)]
        try:
            waiting = f'tensorline_queue_depth{{instance="{name}",model="slow",version="1"}}'
            await until(lambda: values(house, "tensorline_queue_depth{")[waiting] == 3)
            assert values(house, "nv_inference_pending_request_count{") == {
                'nv_inference_pending_request_count{model="one",version="1"}': 0,
                'nv_inference_pending_request_count{model="slow",version="1"}': 3,
            }
            series = f'tensorline_stage_in_flight{{instance="{name}",service="model"}}'
            assert values(house, "tensorline_stage_in_flight{") == {series: 4}
        finally:
            release.set()
        await asyncio.gather(*flying)
        assert set(values(house, "nv_model_load_duration_secs{")) == {
            'nv_model_load_duration_secs{model="one",version="1"}',
            'nv_model_load_duration_secs{model="slow",version="1"}',
        }


async def test_a_refusal_before_any_success_is_counted_and_a_made_up_name_makes_no_series() -> None:
    async with open_house({"one": add(1)}) as house:
        with pytest.raises(InvalidTensorError):
            await house.infer("one", X.astype(np.int64))
        with pytest.raises(Exception, match="is not found"):
            await house.infer("made up", X)
        refused = values(house, "tensorline_requests_refused_total{")
        assert list(refused.values()) == [1]
        assert "made up" not in house.recorder.render_metrics().decode()
