"""Which models have counters, and when these begin anew."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gateway.rows import traits_of
from tensorline.config import config_from_text
from tensorline.rpc.hosted import HostedModel
from tests.gateway.house import FP32, House, add, open_house
from tests.tensorline.stage.pair import config, until

X = np.array([1, 2], np.float32)


def counts(house: House) -> Mapping[tuple[str, str], int]:
    house.recorder.settle()
    return {(model, version): row.success_count for model, version, row in house.metrics.models}


def say(house: House, stage: int = 0, **changes: object) -> None:
    """As if a stage announced its only model anew."""
    connection, (hosted,) = house.mesh.hosted[stage]
    house.mesh._models(connection, [replace(hosted, **changes)])  # type: ignore[arg-type]


def hosted(house: House) -> HostedModel:
    return house.mesh.hosted[0][1][0]


async def test_a_row_is_there_before_any_request() -> None:
    async with open_house({"one": add(1), "two": add(2)}) as house:
        assert counts(house) == {("one", "1"): 0, ("two", "1"): 0}


async def test_a_version_that_its_stage_loaded_again_counts_from_zero() -> None:
    async with open_house({"one": add(1)}) as house:
        await house.infer("one", X)
        assert hosted(house).load > 0
        assert hosted(house).load_ns > 0
        say(house)
        assert counts(house) == {("one", "1"): 1}
        say(house, load=hosted(house).load + 1)
        assert counts(house) == {("one", "1"): 0}
        await house.infer("one", X)
        assert counts(house) == {("one", "1"): 1}


async def test_a_version_that_was_unloaded_has_no_row() -> None:
    async with open_house({"one": add(1)}) as house:
        await house.infer("one", X)
        say(house, state="UNAVAILABLE", reason="unloaded", load=0)
        assert counts(house) == {}


async def test_a_row_stays_while_another_stage_serves_the_version() -> None:
    async with open_house({"one": add(1)}, {"one": add(1)}) as house:
        await house.infer("one", X)
        say(house, 0, state="UNAVAILABLE", load=0)
        assert counts(house) == {("one", "1"): 1}
        say(house, 1, state="UNAVAILABLE", load=0)
        assert counts(house) == {}


async def test_a_row_outlives_the_stage_that_died() -> None:
    """Its failures must be seen."""
    async with open_house({"one": add(1)}) as house:
        await house.infer("one", X)
        house.registry.tell()
        house.stages[0].end.end_streams()
        await until(lambda: not house.mesh.connections)
        assert counts(house) == {("one", "1"): 1}


def test_what_the_configuration_says_of_metrics() -> None:
    text = config(
        FP32,
        FP32,
        more='backend: "x" metric_tags { key: "team" value: "photos" } metric_tags { key: "cost centre" value: "7" }\n'
        "model_transaction_policy { decoupled: true }\n"
        'model_metrics { metric_control { metric_identifier { family: "nv_inference_first_response_histogram_ms" }'
        " histogram_options { buckets: [ 10, 0.5, 100 ] } } }",
    )
    traits = traits_of(config_from_text(text, "m"))
    assert traits.tags == {"_team": "photos", "_cost_centre": "7"}
    assert traits.is_decoupled
    assert traits.first_response_us == (500, 10_000, 100_000)


def test_tags_are_bounded() -> None:
    tags = "\n".join(f'metric_tags {{ key: "k{number}" value: "{"v" * 500}" }}' for number in range(50))
    traits = traits_of(config_from_text(config(FP32, FP32, more=f'backend: "x" {tags}'), "m"))
    assert len(traits.tags) == 16
    assert {len(value) for value in traits.tags.values()} == {128}
