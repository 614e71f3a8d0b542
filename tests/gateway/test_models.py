"""What a client can call, by name and version; and what it is told of that which it cannot."""

import numpy as np
import pytest

from gateway.models import Models
from tensorline.errors import InvalidTensorError, NotFoundError, TensorlineError, UnavailableError
from tests.gateway.house import FP32, House, add, array, ensemble, entry, open_house
from tests.tensorline.stage.pair import Model, config, until

TWO_VERSIONS = Model(config(FP32, {"y": "FP32"}, more="version_policy { all { } }"), add(1).run, versions=(1, 3))
TEXT = config(FP32, {"y": "FP32"}) + '\nbackend: "elsewhere"'
X = np.array([1, 2], np.float32)


def refused(models: Models, name: str, version: str = "") -> TensorlineError:
    with pytest.raises(TensorlineError) as caught:
        models.find(name, version)
    return caught.value


def failing() -> Model:
    def make(*_: object) -> object:
        raise FileNotFoundError(2, "No such file or directory", "/secret/place/weights.bin")

    return Model(config(FP32, {"y": "FP32"}), make=make)  # type: ignore[arg-type]


async def test_versions() -> None:
    async with open_house({"two": TWO_VERSIONS}) as house:
        models = house.models
        assert models.versions("two") == [1, 3]
        assert [models.find("two", version).version for version in ("", "1", "3", "03")] == [3, 1, 3, 3]
        assert [models.is_ready("two", version) for version in ("", "1", "2", "3")] == [True, True, False, True]
        assert (await house.infer("two", X, version="01")).version == "1"
        assert (await house.infer("two", X)).version == "3"


@pytest.mark.parametrize(
    "version", ["abc", "1x", "-1", "+1", " 1", "1.0", "١", "²", "9" * 20, "9" * 5000, "-" + "9" * 5000]
)
async def test_what_is_no_version(version: str) -> None:
    async with open_house({"one": add(1)}) as house:
        for ask in (house.models.find, house.models.is_ready, house.models.config):
            with pytest.raises(InvalidTensorError, match="must be integer > 0") as caught:
                ask("one", version)
            assert len(str(caught.value)) < 300


async def test_unknown_names_and_versions() -> None:
    async with open_house({"one": add(1)}) as house:
        error = refused(house.models, "nobody")
        assert (type(error), str(error)) == (NotFoundError, "Request for unknown model: 'nobody' is not found")
        error = refused(house.models, "one", "2")
        assert (type(error), str(error)) == (NotFoundError, "Request for unknown model: 'one' version 2 is not found")
        assert isinstance(refused(house.models, "one", "0"), NotFoundError)
        assert isinstance(refused(house.models, "one", "9" * 19), NotFoundError)
        assert len(str(refused(house.models, "x" * 10_000))) < 300
        assert not house.models.is_ready("nobody", "")


async def test_made_up_names_are_not_remembered() -> None:
    async with open_house({"one": add(1)}) as house:
        for number in range(1000):
            house.models.is_ready(f"made up {number}", "")
        assert len(house.models._ready) < 10
        assert house.models.names == ["one"]


async def test_a_model_whose_stage_is_away() -> None:
    async with open_house({"one": add(1)}, entries=[entry("other", TEXT)]) as house:
        error = refused(house.models, "other")
        assert isinstance(error, UnavailableError)
        assert str(error) == (
            "Request for unknown model: 'other' has no version at ready state: no instance serves it; none hosts "
            "backend 'elsewhere', those that are there host generate, identity, one, repeat"
        )
        assert isinstance(refused(house.models, "other", "1"), UnavailableError)
        assert isinstance(refused(house.models, "other", "2"), NotFoundError)
        assert house.models.names == ["one", "other"]
        house.stages[0].end.end_streams()
        house.registry.tell()
        await until(lambda: not house.models.versions("one"))
        assert isinstance(refused(house.models, "one"), UnavailableError)  # it is known, and may come back
        assert isinstance(refused(house.models, "one", "1"), UnavailableError)
        assert isinstance(refused(house.models, "one", "2"), NotFoundError)


async def test_reasons_are_the_stages_own_words_without_places() -> None:
    async with open_house({"bad": failing()}, entries=[entry("bad", TEXT)]) as house:
        text = str(refused(house.models, "bad"))
        assert "weights.bin" in text
        assert "/secret" not in text
        assert not house.models.versions("bad")


async def test_a_configuration_that_is_refused() -> None:
    async with open_house({"one": add(1)}, entries=[entry("broken", error="model 'broken': no backend")]) as house:
        error = refused(house.models, "broken")
        assert isinstance(error, UnavailableError)
        assert str(error).endswith(": model 'broken': no backend")
        assert not house.models.is_ready("broken", "")


CHAIN = ensemble("chain", ("one", {"x": "x"}, {"y": "a"}), ("two", {"x": "a"}, {"y": "y"}))


async def test_a_pipeline_is_ready_with_its_last_step() -> None:
    async with open_house({"one": add(1)}, {"two": add(10)}, entries=[CHAIN]) as house:
        assert house.models.versions("chain") == [1]
        assert array(await house.infer("chain", X)).tolist() == [12, 13]
        house.stages[1].end.end_streams()
        house.registry.tell()
        await until(lambda: not house.models.is_ready("chain", ""))
        error = refused(house.models, "chain")
        assert isinstance(error, UnavailableError)
        assert "no instance serves 'two', which it needs" in str(error)
        assert "no instance serves 'two'" in str(refused(house.models, "chain", "1"))


async def test_a_pipeline_that_does_not_fit_its_models_says_why() -> None:
    wrong = ensemble("wrong", ("one", {"z": "x"}, {"y": "y"}))
    async with open_house({"one": add(1)}, entries=[wrong]) as house:
        assert not house.models.is_ready("wrong", "")
        assert "input 'z', which the model does not have" in str(refused(house.models, "wrong"))


async def test_pipelines_in_pipelines() -> None:
    outer = ensemble("outer", ("chain", {"x": "x"}, {"y": "y"}))
    async with open_house({"one": add(1), "two": add(1)}, entries=[CHAIN, outer]) as house:
        assert not house.models.is_ready("outer", "")
        assert "its step 'chain' is itself a pipeline" in str(refused(house.models, "outer"))


async def test_the_table_is_compiled_anew_when_it_changes(house: House) -> None:
    first = house.models.find("one", "")
    assert house.models.find("one", "") is first
    house.models.changed()
    assert house.models.find("one", "") is not first


@pytest.fixture
async def house() -> object:
    async with open_house({"one": add(1)}) as house:
        yield house
