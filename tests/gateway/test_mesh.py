"""Instances as a gateway knows them: what the registry says, and what their streams say, which counts for more."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from tensorline.errors import OverloadedError, TensorlineError, UnavailableError
from tests.gateway.house import FP32, House, add, array, instance, open_house
from tests.tensorline.stage.pair import Model, config, open_stage, until

X = np.array([1, 2], np.float32)
SLOW = Model(
    config(FP32, {"y": "FP32"}, more='parameters { key: "execute_delay_ms" value { string_value: "300" } }')
    + '\nbackend: "identity"'
)


def serving(house: House, model: str = "one") -> int:
    return len(house.mesh.serving(model, ""))


async def test_what_the_registry_names_is_connected() -> None:
    async with open_house({"one": add(1)}, {"one": add(1), "two": add(2)}, is_told=False) as house:
        mesh = house.mesh
        await asyncio.sleep(0.05)
        assert (mesh.connections, mesh.model_names) == ([], set())
        house.registry.tell(instance(house.stages[0]))
        await until(lambda: serving(house) == 1)
        house.registry.tell(*map(instance, house.stages))
        await until(lambda: serving(house) == 2)
        assert mesh.model_names == {"one", "two"}
        assert (mesh.newest("one"), mesh.newest("nobody")) == ("1", "")
        assert mesh.has_near
        assert [(view.state, view.is_colocated) for view in mesh.instances] == [("READY", True)] * 2


async def test_an_entry_that_lists_other_models_is_the_same_instance() -> None:
    async with open_house({"one": add(1)}) as house:
        (before,) = house.mesh.connections
        house.registry.tell(replace(instance(house.stages[0]), models=("one/1",)))
        await asyncio.sleep(0.1)
        assert house.mesh.connections == [before]


async def test_a_stream_that_stands_outlives_its_entry() -> None:
    async with open_house({"one": add(1)}) as house:
        house.registry.tell()
        await asyncio.sleep(0.1)
        assert array(await house.infer("one", X)).tolist() == [2, 3]
        house.stages[0].end.end_streams()
        await until(lambda: not house.mesh.connections)
        await asyncio.sleep(0.3)
        assert not house.mesh.connections  # and is not looked for any more
        assert house.mesh.instances == []


async def test_a_stream_that_breaks_is_opened_again_while_its_entry_stands() -> None:
    async with open_house({"one": add(1)}) as house:
        (before,) = house.mesh.connections
        house.stages[0].end.end_streams()
        await until(lambda: house.mesh.connections not in ([], [before]) and serving(house) == 1)
        assert array(await house.infer("one", X)).tolist() == [2, 3]


async def test_work_in_flight_ends_well_when_its_instance_drains_and_leaves_the_registry() -> None:
    for is_told_first in (True, False):
        async with open_house({"slow": SLOW}) as house:
            flying = asyncio.create_task(house.infer("slow", X))
            await until(lambda: house.stages[0].end.in_flight)
            if is_told_first:
                house.registry.tell()
                await asyncio.sleep(0.02)
            house.stages[0].end.drain()
            await until(lambda: not serving(house, "slow"))
            house.registry.tell()
            assert array(await flying).tolist() == X.tolist()
            assert [view.state for view in house.mesh.instances] == ["DRAINING"]


async def test_nobody_at_the_address_and_somebody_else() -> None:
    async with open_house({"one": add(1)}, is_told=False) as house:
        real = instance(house.stages[0])
        gone = replace(real, id="model-gone", local_address="unix:/dev/shm/nowhere.sock")
        other = replace(real, id="model-other")
        house.registry.tell(gone, other)
        await asyncio.sleep(0.3)
        assert house.mesh.connections == []
        assert [(view.id, view.state) for view in house.mesh.instances] == [
            ("model-gone", "UNREACHABLE"),
            ("model-other", "UNREACHABLE"),
        ]
        house.registry.tell(gone, other, real)
        await until(lambda: serving(house) == 1)


async def test_a_stage_comes_back_at_the_same_address() -> None:
    async with open_house({"one": add(1)}) as house:
        path = house.stages[0].directory.path
        async with open_stage({"two": add(2)}, path=path) as second:
            house.registry.tell(instance(house.stages[0]), instance(second))
            await until(lambda: serving(house, "two") == 1)
            config = house.mesh.config("two", -1)
            assert config is not None
        await until(lambda: not serving(house, "two"))
        assert house.mesh.config("two", -1) == config  # remembered: it may come back
        assert house.mesh.known_versions("two") == [1]
        assert house.mesh.ready_versions("two") == []
        with pytest.raises(UnavailableError, match="model 'two' has no instance ready at present"):
            house.mesh.pick("two", "")


async def test_two_share_the_work() -> None:
    async with open_house({"slow": SLOW}, {"slow": SLOW}) as house:
        await asyncio.gather(*(house.infer("slow", X) for _ in range(6)))
        assert [len(stage.executed) for stage in house.stages] == [3, 3]


async def test_everybody_has_all_that_it_accepts() -> None:
    async with open_house({"slow": SLOW}, max_in_flight=2) as house:
        (connection,) = house.mesh.connections
        connection.max_in_flight = 1
        flying = asyncio.create_task(house.infer("slow", X))
        await until(lambda: connection.in_flight == 1)
        with pytest.raises(OverloadedError, match="every instance of model 'slow' has as many requests in flight"):
            await house.infer("slow", X)
        assert array(await flying).tolist() == X.tolist()


async def test_settled_when_everybody_has_spoken() -> None:
    async with open_house({"one": add(1)}, {"two": add(2)}, is_told=False) as house:
        mesh = house.mesh
        assert not mesh._is_settled.is_set()
        nowhere = replace(instance(house.stages[0]), id="gone", local_address="unix:/dev/shm/nowhere.sock")
        house.registry.tell(nowhere, *map(instance, house.stages))
        await mesh.wait_settled(5.0)
        assert (serving(house, "one"), serving(house, "two")) == (1, 1)
        began = time.monotonic()
        await mesh.wait_settled(5.0)
        assert time.monotonic() - began < 0.4


async def test_settled_when_nobody_is_there() -> None:
    async with open_house({"one": add(1)}, is_told=False) as house:
        house.registry.tell()
        async with asyncio.timeout(1):
            await house.mesh.wait_settled(5.0)


async def test_a_registry_that_says_nothing_holds_nobody_for_ever() -> None:
    async with open_house({"one": add(1)}, is_told=False) as house:
        began = time.monotonic()
        await house.mesh.wait_settled(0.1)
        assert 0.05 < time.monotonic() - began < 4


async def test_a_broken_configuration_of_a_stage_is_that_models_trouble() -> None:
    from tensorline.rpc.hosted import HostedModel

    async with open_house({"one": add(1)}) as house:
        (connection,) = house.mesh.connections
        good = connection._models[0]
        bad = HostedModel("bad", "1", "READY", "", b"\xff\xff\xff")
        house.mesh._models(connection, [good, bad, replace(good, name="odd", version="x")])
        assert not house.models.is_ready("bad", "")
        assert not house.models.is_ready("odd", "")
        assert array(await house.infer("one", X)).tolist() == [2, 3]
        assert house.mesh.config("bad", -1) is None
        with pytest.raises(TensorlineError):
            await house.infer("bad", X)
