"""Ready means that a request would be served now: one answer for all who ask."""

from typing import Any

from grpc_health.v1 import health_pb2

from gateway.readiness import Readiness
from tests.gateway.house import FP32, House, add, ensemble, entry, open_house
from tests.tensorline.stage.pair import config, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
CHAIN = ensemble("chain", ("one", {"x": "x"}, {"y": "y"}))
AWAY = entry("away", config(FP32, {"y": "FP32"}) + '\nbackend: "elsewhere"')


def told(house: House) -> dict[str, int]:
    """What grpc.health answers, by service name."""
    checks: Any = house.readiness.checks
    return dict(checks._server_status)


async def test_every_model_counts_when_it_is_strict() -> None:
    async with open_house({"one": add(1)}, entries=[CHAIN]) as house:
        assert house.readiness.is_ready
        house.stages[0].end.end_streams()
        house.registry.tell()
        await until(lambda: not house.readiness.is_ready)
    async with open_house({"one": add(1)}, entries=[AWAY]) as house:
        assert not house.readiness.is_ready
        assert Readiness(house.models, is_strict=False).is_ready is False  # its front ends are not open


async def test_only_the_gateway_counts_when_it_is_not() -> None:
    async with open_house({"one": add(1)}, entries=[AWAY], is_strict=False) as house:
        assert house.readiness.is_ready
        house.readiness.accepts = False
        assert not house.readiness.is_ready


async def test_a_mesh_without_models_is_ready() -> None:
    async with open_house() as house:
        assert house.readiness.is_ready


async def test_health_is_told_what_changed() -> None:
    async with open_house({"one": add(1)}, entries=[CHAIN, AWAY]) as house:
        await house.readiness.publish()
        assert told(house) == {"": NOT_SERVING, "one": SERVING, "chain": SERVING, "away": NOT_SERVING}
        house.stages[0].end.end_streams()
        house.registry.tell()
        await until(lambda: not house.models.versions("one"))
        await house.readiness.publish()
        assert told(house) == {"": NOT_SERVING, "one": NOT_SERVING, "chain": NOT_SERVING, "away": NOT_SERVING}


async def test_a_gateway_that_stops_serves_nothing() -> None:
    async with open_house({"one": add(1)}) as house:
        await house.readiness.publish()
        assert told(house) == {"": SERVING, "one": SERVING}
        house.readiness.accepts = False
        await house.readiness.publish()
        assert told(house) == {"": NOT_SERVING, "one": NOT_SERVING}
