"""Index, load and unload as the front ends call them, against stages that hold the models."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from gateway.operations.repository import RepositoryControl
from gateway.wishes import Wish, Wishes
from tensorline.errors import NotFoundError, TensorlineError, UnavailableError
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.rpc.frames import LoadOrder
from tensorline.stage.backend import Batch, Device, Instance, ModelDirectory
from tensorline.tensor import Array
from tests.gateway.house import FP32, House, array, instance, open_house
from tests.tensorline.stage.pair import Model, config, open_stage, until

pytestmark = pytest.mark.usefixtures("one_loop")

X = np.array([1, 2], np.float32)
Value = bool | int | str | bytes
TEXT = config(FP32, {"y": "FP32"})
NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"
ESCAPES = ["../../x", "/tmp/x", "1/../../../x", "", "1/", "1//x", "./1/x", "1\\x", "1/\0", "x" * 5000, "1/" + "é" * 200]


class Adder:
    """Adds its version, and a thousand times the parameter `more`; refuses to be loaded with the file `broken`."""

    made = 0

    def __init__(self, model: ModelDirectory, device: Device) -> None:
        Adder.made += 1
        if (model.version_path / "broken").exists():
            raise ValueError("a secret of the model")
        more = model.version_path / "more"
        by = float(more.read_text()) if more.exists() else float(model.config.parameters.get("more", "0"))
        self._by = np.float32(model.version + 1000 * by)

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        return {"y": batch.inputs["x"].astype(np.float32) + self._by}

    def close(self) -> None:
        pass


def adder(text: str = TEXT, versions: tuple[int, ...] = (1,)) -> Model:
    return Model(text, make=lambda model, device: Adder(model, device), versions=versions)


def slow(model: ModelDirectory, device: Device) -> Instance:
    import time

    time.sleep(0.2)
    return Adder(model, device)


class Control:
    """What a client does."""

    def __init__(self, house: House) -> None:
        self._operations = RepositoryControl(house.repository, house.models, house.mesh)

    async def load(self, name: str, given: Mapping[str, Value] | None = None, repository: str = "") -> None:
        request = pb.RepositoryModelLoadRequest(model_name=name, repository_name=repository)
        _fill(request, given or {})
        await self._operations.RepositoryModelLoad(request)

    async def unload(self, name: str, *, repository: str = "", **parameters: Value) -> None:
        request = pb.RepositoryModelUnloadRequest(model_name=name, repository_name=repository)
        _fill(request, parameters)
        await self._operations.RepositoryModelUnload(request)

    async def index(self, *, ready: bool = False, repository: str = "") -> list[tuple[str, str, str, str]]:
        request = pb.RepositoryIndexRequest(ready=ready, repository_name=repository)
        answer = await self._operations.RepositoryIndex(request)
        return [(row.name, row.version, row.state, row.reason) for row in answer.models]

    async def refused(self, name: str, given: Mapping[str, Value] | None = None) -> tuple[str, str]:
        with pytest.raises(TensorlineError) as caught:
            await self.load(name, given)
        return caught.value.status.name, str(caught.value)


def _fill(request: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest, given: Mapping[str, Value]) -> None:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", bytes: "bytes_param"}
    for key, value in given.items():
        setattr(request.parameters[key], kinds[type(value)], value)


@asynccontextmanager
async def explicit(*stages: Mapping[str, Model], **options: object) -> AsyncIterator[tuple[House, Control]]:
    async with open_house(*stages, control_mode="explicit", **options) as house:  # type: ignore[arg-type]
        yield house, Control(house)


async def value(house: House, model: str, version: str = "") -> float:
    return float(array(await house.infer(model, X, version=version))[0])


async def test_load_infer_unload() -> None:
    async with explicit({"m": adder(), "other": adder()}) as (house, control):
        assert await control.index() == [("m", "", "", ""), ("other", "", "", "")]
        with pytest.raises(NotFoundError, match="'m' is not found"):
            await value(house, "m")
        assert house.readiness.is_ready
        await control.load("m")
        assert await value(house, "m") == 2
        assert await control.index() == [("m", "1", "READY", ""), ("other", "", "", "")]
        assert await control.index(ready=True) == [("m", "1", "READY", "")]
        assert house.readiness.is_ready
        await control.unload("m")
        with pytest.raises(NotFoundError, match="'m' has no available versions"):
            await value(house, "m")
        with pytest.raises(UnavailableError, match="'m' version 1 is not at ready state"):
            await value(house, "m", "1")
        assert house.readiness.is_ready
        await until(lambda: house.stages[0].host.models[0].state == "UNAVAILABLE")
        assert ("m", "1", "UNAVAILABLE", "unloaded") in await control.index()
        await control.load("m")
        assert await value(house, "m") == 2


@pytest.mark.parametrize("mode", ["none", "poll"])
async def test_other_modes_refuse(mode: str) -> None:
    async with open_house({"m": adder()}, control_mode=mode) as house:
        control = Control(house)
        for call in (control.load("m"), control.unload("m")):
            with pytest.raises(UnavailableError, match=NOT_EXPLICIT):
                await call
        assert await control.index() == [("m", "1", "READY", "")]
        assert await value(house, "m") == 2


async def test_models_named_at_the_start() -> None:
    async with explicit({"a": adder(), "b": adder()}, load_models=["a"]) as (house, control):
        await until(lambda: house.models.versions("a"))
        assert house.models.expected == ["a"]
        assert [row[:3] for row in await control.index()] == [("a", "1", "READY"), ("b", "", "")]


async def test_all_models_at_the_start() -> None:
    async with explicit({"a": adder(), "b": adder()}, load_models=["*"]) as (house, _):
        await until(lambda: house.readiness.is_ready)
        assert house.models.expected == ["a", "b"]


@pytest.mark.parametrize("name", ["nobody", "", "../m", "/m", "m/1", "x" * 10_000, "m\0", ".."])
async def test_unknown_names(name: str) -> None:
    async with explicit({"m": adder()}) as (house, control):
        status, text = await control.refused(name)
        assert status == "INTERNAL"
        assert text.startswith(f"failed to load '{name[:128]}")
        assert "failed to poll from model repository" in text
        assert len(text) < 500
        await control.unload(name)
        assert house.readiness.is_ready


@pytest.mark.parametrize(
    ("parameters", "status", "text"),
    [
        ({"speed": "high"}, "INVALID_ARGUMENT", "unrecognized load parameter 'speed'."),
        ({"config": b"{}"}, "INVALID_ARGUMENT", "load parameter 'config', expected string_param"),
        ({"config": "{}", "file:1/x": "x"}, "INVALID_ARGUMENT", "'file:1/x', expected bytes_param"),
        ({"file:1/x": b""}, "INTERNAL", "failed to load 'm', failed to poll from model repository"),
        ({"config": ""}, "INTERNAL", "config override is no JSON object"),
        ({"config": "{"}, "INTERNAL", "failed to load 'm', failed to poll from model repository: m: config override"),
        ({"config": '{"max_batch_sise": 1}'}, "INTERNAL", "did you mean 'max_batch_size'?"),
        ({"config": '{"name": "n", "backend": "m"}'}, "INTERNAL", "must be the directory's name 'm'"),
        ({"config": '{"backend": "m", "max_batch_size": -1}'}, "INTERNAL", "max_batch_size"),
        (
            {"config": '{"backend": "m", "input": [{"name": "x", "dims": [1]}]}'},
            "INVALID_ARGUMENT",
            "load failed for model 'm': ",
        ),
        (
            {"config": '{"backend": "m", "version_policy": {"specific": {"versions": [7]}}}'},
            "INVALID_ARGUMENT",
            "load failed for model 'm': at least one version must be available under the version policy of model 'm'",
        ),
        ({"config": '{"backend": "nowhere"}'}, "INVALID_ARGUMENT", "find backend library for backend 'nowhere'"),
    ],
)
async def test_what_load_refuses(parameters: Mapping[str, Value], status: str, text: str) -> None:
    async with explicit({"m": adder()}) as (house, control):
        await control.load("m")
        got = await control.refused("m", parameters)
        assert got[0] == status
        assert text in got[1]
        assert await value(house, "m") == 2
        assert house.readiness.is_ready


@pytest.mark.parametrize("path", ESCAPES)
async def test_files_stay_inside(path: str) -> None:
    async with explicit({"m": adder()}) as (_, control):
        status, text = await control.refused("m", {"config": '{"backend": "m"}', f"file:{path}": b"x"})
        assert status == "INVALID_ARGUMENT"
        assert "file override" in text
        assert len(text) < 500


async def test_a_file_that_is_a_directory_too() -> None:
    async with explicit({"m": adder()}) as (_, control):
        got = await control.refused("m", {"config": '{"backend": "m"}', "file:1": b"x", "file:1/x": b"x"})
        assert got[0] == "INVALID_ARGUMENT"


async def test_repository_name_is_not_supported() -> None:
    async with explicit({"m": adder()}) as (_, control):
        for call in (
            control.load("m", repository="r"),
            control.unload("m", repository="r"),
            control.index(repository="r"),
        ):
            with pytest.raises(TensorlineError, match="'repository_name' specification is not supported") as caught:
                await call
            assert caught.value.status.name == "UNIMPLEMENTED"


async def test_a_failed_load_says_why_and_counts_against_readiness() -> None:
    async with explicit({"m": adder()}) as (house, control):
        (house.stages[0].repository / "m" / "1" / "broken").touch()
        status, text = await control.refused("m")
        assert status == "INVALID_ARGUMENT"
        cause = "Internal: ValueError while loading"
        assert text == f"load failed for model 'm': version 1 is at UNAVAILABLE state: {cause};\n"
        assert await control.index() == [("m", "1", "UNAVAILABLE", "ValueError while loading")]
        assert not house.readiness.is_ready
        await control.unload("m")
        assert house.readiness.is_ready
        (house.stages[0].repository / "m" / "1" / "broken").unlink()
        await control.load("m")
        assert await value(house, "m") == 2


async def test_a_broken_new_version_keeps_the_old() -> None:
    async with explicit({"m": adder()}) as (house, control):
        await control.load("m")
        new = house.stages[0].repository / "m" / "2"
        new.mkdir()
        (new / "broken").touch()
        assert (await control.refused("m"))[0] == "INVALID_ARGUMENT"
        assert await value(house, "m") == 2
        assert [row[:3] for row in await control.index()] == [("m", "1", "READY"), ("m", "2", "UNAVAILABLE")]
        (new / "broken").unlink()
        await control.load("m")
        assert await value(house, "m") == 3
        await until(lambda: [m.state for m in house.stages[0].host.models] == ["UNAVAILABLE", "READY"])


async def test_what_has_not_changed_is_not_loaded_again() -> None:
    text = TEXT + "\nversion_policy { all { } }"
    async with explicit({"m": adder(text, (1, 2))}) as (house, control):
        await control.load("m")
        made = Adder.made
        await control.load("m")
        assert Adder.made == made
        (house.stages[0].repository / "m" / "2" / "more").write_text("1")
        await control.load("m")
        assert Adder.made == made + 1
        assert (await value(house, "m", "1"), await value(house, "m", "2")) == (2, 1003)
        shutil.rmtree(house.stages[0].repository / "m" / "2")
        await control.load("m")
        assert Adder.made == made + 1
        assert await value(house, "m") == 2
        file = house.stages[0].repository / "m" / "config.pbtxt"
        file.write_text(file.read_text().replace("all { }", "latest { num_versions: 1 }"))
        await control.load("m")
        assert Adder.made == made + 1
        assert house.models.config("m", "")[0].version_policy.latest == 1


async def test_eight_loads_at_once_are_one() -> None:
    async with explicit({"m": Model(TEXT, make=slow)}) as (_, control):
        made = Adder.made
        await asyncio.gather(*(control.load("m") for _ in range(8)))
        assert Adder.made == made + 1


async def test_an_overridden_configuration_lasts_until_the_directory_changes() -> None:
    async with explicit({"m": adder()}) as (house, control):
        await control.load("m")
        override = {
            "backend": "m",
            "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
            "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
            "parameters": {"more": {"string_value": "3"}},
        }
        await control.load("m", {"config": json.dumps(override)})
        assert await value(house, "m") == 3002
        given, _ = house.models.config("m", "")
        assert (given.parameters, given.instance_groups[0].kind) == ({"more": "3"}, "KIND_CPU")
        await control.load("m")
        assert await value(house, "m") == 3002
        (house.stages[0].repository / "m" / "labels.txt").write_text("a")
        await control.load("m")
        assert await value(house, "m") == 2


def with_file(more: str, name: str = "m") -> dict[str, Value]:
    override = {
        "backend": name,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
    }
    return {"config": json.dumps(override), "file:7/more": more.encode()}


async def test_files_take_the_directorys_place() -> None:
    async with explicit({"m": adder()}) as (house, control):
        await control.load("m")
        await control.load("m", with_file("5"))
        assert await value(house, "m") == 5008
        assert [row[:3] for row in await control.index(ready=True)] == [("m", "7", "READY")]
        folder = house.stages[0].host.find("m", "7")
        await control.unload("m")
        assert folder is not None
        await control.load("m")
        assert await value(house, "m") == 2


async def test_a_model_of_files_alone_is_not_listed(tmp_path: Path) -> None:
    async with explicit({"m": adder()}) as (house, control):
        await control.load("new", with_file("5"))
        assert await value(house, "new") == 5008
        assert "new" not in [row[0] for row in await control.index()]
        big = {**with_file("6"), "file:7/weights": bytes(9 << 20)}
        await control.load("new", big)
        assert await value(house, "new") == 6008
        await control.unload("new")
        assert (await control.refused("new"))[0] == "INTERNAL"
        repository = house.repository
        assert not repository._orders


async def test_reload_under_load() -> None:
    async with explicit({"m": adder()}) as (house, control):
        await control.load("m")
        stop = asyncio.Event()
        seen: list[float] = []

        async def ask() -> None:
            while not stop.is_set():
                seen.append(await value(house, "m"))

        askers = [asyncio.create_task(ask()) for _ in range(4)]
        for number in range(1, 11):
            (house.stages[0].repository / "m" / "1" / "more").write_text(str(number))
            await control.load("m")
            assert await value(house, "m") == 2 + 1000 * number
        stop.set()
        await asyncio.gather(*askers)
        assert len(seen) > 20
        assert {(each - 2) % 1000 for each in seen} == {0.0}


async def test_an_unload_lets_requests_finish() -> None:
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    def run(batch: Batch) -> Mapping[str, Array]:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(10)
        return {"y": batch.inputs["x"]}

    async with explicit({"m": Model(TEXT, run)}) as (house, control):
        await control.load("m")
        running = asyncio.create_task(value(house, "m"))
        await until(lambda: house.stages[0].host.find("m", "").running)
        await control.unload("m")
        assert [row[1:3] for row in await control.index()] == [("1", "UNLOADING")]
        with pytest.raises(NotFoundError):
            await value(house, "m")
        gate.set()
        assert await running == 1
        await until(lambda: house.stages[0].host.models[0].reason == "unloaded")


def write_pipeline(repository: Path, name: str, *steps: str) -> None:
    lines = [TEXT, 'platform: "ensemble"', "ensemble_scheduling {"]
    tensors = ["x", *(f"t{at}" for at in range(1, len(steps))), "y"]
    for at, step in enumerate(steps):
        maps = f'input_map {{ key: "x" value: "{tensors[at]}" }} output_map {{ key: "y" value: "{tensors[at + 1]}" }}'
        lines.append(f'step [ {{ model_name: "{step}" model_version: -1 {maps} }} ]')
    (repository / name / "1").mkdir(parents=True, exist_ok=True)
    (repository / name / "config.pbtxt").write_text("\n".join([*lines, "}"]))


async def test_a_pipeline_brings_its_models_and_takes_them_with_it(tmp_path: Path) -> None:
    write_pipeline(tmp_path, "chain", "a", "b")
    async with explicit({"a": adder()}, {"b": adder(), "c": adder()}, repositories=[tmp_path]) as (house, control):
        await control.load("b")
        await control.load("chain")
        assert await value(house, "chain") == 3
        assert [row[:3] for row in await control.index()] == [
            ("a", "1", "READY"),
            ("b", "1", "READY"),
            ("c", "", ""),
            ("chain", "1", "READY"),
        ]
        await control.unload("chain")
        assert (await value(house, "a"), await value(house, "b")) == (2, 2)
        await control.load("chain")
        await control.unload("chain", unload_dependents=True)
        with pytest.raises(NotFoundError, match="'a' has no available versions"):
            await value(house, "a")
        assert await value(house, "b") == 2
        with pytest.raises(NotFoundError, match="'chain' has no available versions"):
            await value(house, "chain")
        with pytest.raises(TensorlineError, match="expected bool_param"):
            await control.unload("b", unload_dependents="true")
        assert await value(house, "b") == 2


async def test_unloading_a_part_takes_the_pipeline_down(tmp_path: Path) -> None:
    write_pipeline(tmp_path, "chain", "a", "b")
    async with explicit({"a": adder(), "b": adder()}, repositories=[tmp_path]) as (house, control):
        await control.load("chain")
        await control.unload("b")
        await until(lambda: not house.models.versions("chain"))
        assert house.readiness.is_ready
        assert ("chain", "1", "UNAVAILABLE", "unloaded") in await control.index()
        await control.load("b")
        assert await value(house, "chain") == 3
        await control.unload("b")
        await control.load("chain")
        assert await value(house, "chain") == 3
        await control.unload("chain")
        await control.load("b")
        assert not house.models.versions("chain")


async def test_a_pipeline_whose_parts_are_not_to_be_had(tmp_path: Path) -> None:
    write_pipeline(tmp_path, "chain", "a", "nobody")
    write_pipeline(tmp_path, "self", "self")
    write_pipeline(tmp_path, "wrong", "a")
    file = tmp_path / "wrong" / "config.pbtxt"
    file.write_text(file.read_text().replace("TYPE_FP32", "TYPE_INT32"))
    async with explicit({"a": adder()}, repositories=[tmp_path]) as (_, control):
        status, text = await control.refused("chain")
        assert status == "INVALID_ARGUMENT"
        assert "load failed for model 'chain': ensemble chain contains models that are not available or" in text
        assert "ambiguous: nobody" in text
        assert (await control.refused("self"))[0] == "INVALID_ARGUMENT"
        status, text = await control.refused("wrong")
        assert (status, text[:31]) == ("INVALID_ARGUMENT", "load failed for model 'wrong': ")
        assert "INT32" in text


async def test_a_new_pipeline_that_is_broken_keeps_the_old(tmp_path: Path) -> None:
    write_pipeline(tmp_path, "chain", "a", "a")
    async with explicit({"a": adder(), "b": adder()}, repositories=[tmp_path]) as (house, control):
        await control.load("chain")
        write_pipeline(tmp_path, "chain", "a", "nobody")
        await control.refused("chain")
        assert await value(house, "chain") == 3
        write_pipeline(tmp_path, "chain", "a", "b", "b")
        await control.load("chain")
        assert await value(house, "chain") == 4


async def test_an_instance_that_joins_loads_what_is_wanted() -> None:
    async with explicit({"m": adder()}) as (house, control):
        await control.load("m", with_file("5"))
        path = house.stages[0].directory.path
        async with open_stage({"m": adder(), "n": adder()}, path=path, control_mode="explicit") as late:
            house.registry.tell(instance(house.stages[0]), instance(late))
            await until(lambda: late.host.ready_versions("m"))
            assert late.host.ready_versions("m") == [7]
            await control.load("n")
            await control.unload("m")
            assert not late.host.ready_versions("m")
            assert not house.stages[0].host.ready_versions("m")
        async with open_stage({"m": adder()}, path=path, control_mode="explicit", load_models=["m"]) as later:
            house.registry.tell(instance(house.stages[0]), instance(later))
            await until(lambda: not later.host.ready_versions("m"))


async def test_an_instance_that_is_still_loading_is_told_too() -> None:
    async with explicit({"m": adder(), "slow": Model(TEXT, make=slow)}) as (house, control):
        await control.load("m")
        await control.load("slow")
        made = Adder.made
        path = house.stages[0].directory.path
        models = {"m": adder(), "slow": Model(TEXT, make=slow)}
        async with open_stage(
            models, path=path, control_mode="explicit", load_models=["slow"], is_awaited=False
        ) as late:
            house.registry.tell(instance(house.stages[0]), instance(late))
            await until(lambda: late.host.ready_versions("m") and late.host.ready_versions("slow"))
            assert Adder.made == made + 2


async def test_two_gateways_learn_from_the_stages() -> None:
    async with explicit({"m": adder()}) as (house, control):
        await control.load("m")
        await house.stages[0].end.unload_model("m")
        await until(lambda: not house.models.versions("m") and not house.repository.wishes.loaded)
        assert house.readiness.is_ready
        await house.stages[0].end.load_model(LoadOrder("m"))
        await until(lambda: house.models.expected == ["m"])
        beginning = Wishes(2)  # a worker that starts now hears the same
        beginning.merge(house.repository.wishes.everything())
        assert list(beginning.loaded) == ["m"]
        assert await value(house, "m") == 2


async def test_workers_agree() -> None:
    async with explicit({"a": adder(), "b": adder()}) as (house, control):
        await control.load("a")
        other = Wishes(worker=2)
        assert other.merge(house.repository.wishes.everything()) == ["a"]
        assert other.loaded == house.repository.wishes.loaded
        await house.stages[0].end.unload_model("a")
        await house.stages[0].end.load_model(LoadOrder("b"))
        other.unload("a")
        other.load("b", Wish(is_loaded=True, is_by_name=True))
        await house.repository.merge(other.everything())
        assert house.models.expected == ["b"]
        assert house.repository.wishes.loaded == {"b": Wish(is_loaded=True, is_by_name=True)}
        assert house.repository.wishes.get("a") == Wish(is_loaded=False)


async def test_a_repository_that_is_away_is_told_without_its_place(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    async with explicit({"m": adder()}, repositories=[gone]) as (_, control):
        gone.rmdir()
        status, text = await control.refused("m")
        assert (status, str(tmp_path) in text) == ("INTERNAL", False)
        assert await control.index() == []


async def test_poll_mode_follows_pipelines(tmp_path: Path) -> None:
    write_pipeline(tmp_path, "chain", "a", "a")
    async with open_house({"a": adder()}, control_mode="poll", repositories=[tmp_path]) as house:
        watching = asyncio.create_task(house.repository.watch(0.05))
        assert await value(house, "chain") == 3
        write_pipeline(tmp_path, "chain", "a", "a", "a")
        write_pipeline(tmp_path, "more", "a")
        await until(lambda: house.models.versions("more"))
        assert (await value(house, "chain"), await value(house, "more")) == (4, 2)
        shutil.rmtree(tmp_path / "more")
        await until(lambda: not house.models.versions("more"))
        with pytest.raises(NotFoundError, match="'more' has no available versions"):
            await value(house, "more")
        assert "more" not in [row[0] for row in await Control(house).index()]
        watching.cancel()


async def test_a_name_in_two_repositories(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    async with explicit({"m": adder()}, repositories=[tmp_path]) as (_, control):
        (row,) = await control.index()
        assert row[:3] == ("m", "", "UNAVAILABLE")
        assert "more than one repository" in row[3]
        assert (await control.refused("m"))[0] == "INTERNAL"


async def test_a_changed_pipeline_waits_for_the_models_that_it_needs(tmp_path: Path) -> None:
    write_pipeline(tmp_path, "chain", "a", "a")
    async with open_house({"a": adder()}, control_mode="poll", repositories=[tmp_path]) as house:
        watching = asyncio.create_task(house.repository.watch(0.05))
        write_pipeline(tmp_path, "chain", "a", "late")
        await until(lambda: house.repository._late)
        assert await value(house, "chain") == 3
        async with open_stage({"late": adder(versions=(5,))}, path=house.stages[0].directory.path) as late:
            house.registry.tell(instance(house.stages[0]), instance(late))
            await until(lambda: not house.repository._late)
            assert await value(house, "chain") == 7
        watching.cancel()


async def test_an_instance_that_comes_back_looks_at_no_folder() -> None:
    async with explicit({"m": adder()}) as (house, control):
        await control.load("m")
        (house.stages[0].repository / "m" / "1" / "more").write_text("1")
        house.stages[0].end.end_streams()
        await until(lambda: not house.models.versions("m"))
        await until(lambda: house.models.versions("m"))
        await asyncio.sleep(0.2)
        assert await value(house, "m") == 2
        await control.load("m")
        assert await value(house, "m") == 1002


async def test_an_overridden_pipeline_lasts_until_its_directory_changes(tmp_path: Path) -> None:
    write_pipeline(tmp_path, "chain", "a")
    async with explicit({"a": adder()}, repositories=[tmp_path]) as (house, control):
        tensors = [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}, {"name": "y", "data_type": 11, "dims": [-1]}]
        step = {"model_name": "a", "input_map": {"x": "x"}, "output_map": {"y": "t"}}
        last = {"model_name": "a", "input_map": {"x": "t"}, "output_map": {"y": "y"}}
        override = {
            "platform": "ensemble",
            "input": tensors[:1],
            "output": tensors[1:],
            "ensemble_scheduling": {"step": [step, last]},
        }
        await control.load("chain", {"config": json.dumps(override)})
        assert await value(house, "chain") == 3
        await control.load("chain")
        assert await value(house, "chain") == 3
        (tmp_path / "chain" / "note").touch()
        await control.load("chain")
        assert await value(house, "chain") == 2
        await control.load("other", {"config": json.dumps(override), "file:4/note": b""})
        assert (await house.infer("other", X)).version == "4"


async def test_a_stage_that_goes_while_it_loads() -> None:
    async with explicit({"m": Model(TEXT, make=slow)}) as (house, control):
        loading = asyncio.create_task(control.refused("m"))
        await until(lambda: house.stages[0].host.models)
        house.stages[0].end.end_streams()
        assert (await loading)[0] == "UNAVAILABLE"


async def test_a_client_that_leaves_does_not_stop_a_load() -> None:
    async with explicit({"m": Model(TEXT, make=slow)}) as (house, control):
        loading = asyncio.create_task(control.load("m"))
        await until(lambda: house.stages[0].host.models)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await until(lambda: house.models.versions("m"))


async def test_loads_and_unloads_at_once_end_in_one_state() -> None:
    async with explicit({"m": adder()}) as (house, control):
        for _ in range(10):
            await asyncio.gather(*(call("m") for call in (control.load, control.unload, control.load, control.unload)))
            await control.load("m")
            assert await value(house, "m") == 2
            await control.unload("m")
            assert not house.models.versions("m")
