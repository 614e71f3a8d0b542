"""What a client is told of a pipeline that is not ready: which step's model, which version, and why."""

import re

import pytest

from gateway.models import Models
from tensorline.errors import UnavailableError
from tests.gateway.house import FP32, add, entry, open_house
from tests.tensorline.stage.pair import Model, config, until


def chain(version: int) -> str:
    return f"""{config(FP32, {"y": "FP32"})}
platform: "ensemble"
ensemble_scheduling {{ step [ {{ model_name: "one" model_version: {version}
  input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "y" }} }} ] }}"""


def refused(models: Models, name: str) -> str:
    with pytest.raises(UnavailableError) as caught:
        models.find(name, "")
    assert not models.is_ready(name, "")
    return str(caught.value)


async def test_the_version_that_a_step_wants() -> None:
    both = Model(config(FP32, {"y": "FP32"}, more="version_policy { all { } }"), add(1).run, versions=(1, 2))
    async with open_house({"one": add(1)}, {"one": both}, entries=[entry("chain", chain(2))]) as house:
        assert house.models.is_ready("chain", "")
        house.registry.tell()
        house.stages[1].end.end_streams()
        await until(lambda: not house.models.is_ready("chain", ""))
        assert house.models.is_ready("one", "")
        assert "no instance serves 'one' version 2, which it needs" in refused(house.models, "chain")


async def test_the_reason_of_the_stage_that_should_host_it() -> None:
    def make(*_: object) -> object:
        raise FileNotFoundError(2, "No such file or directory", "/secret/place/weights.bin")

    broken = Model(config(FP32, {"y": "FP32"}), make=make)  # type: ignore[arg-type]
    async with open_house({"one": broken}, entries=[entry("chain", chain(-1))]) as house:
        text = refused(house.models, "chain")
        assert re.search(r"no instance serves 'one' \(.*weights\.bin.*\), which it needs", text)
        assert "/secret" not in text
