"""Stages that are not as they should be: none hurts the others, or holds a request for longer than it takes to say."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gateway.mesh import Mesh
from gateway.steps import SingleStep
from tensorline.discovery import ServiceInstance
from tensorline.errors import InternalError, TensorlineError, UnavailableError
from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tests.gateway.house import House, Told, add, array, instance, open_house
from tests.leaks import no_leaks
from tests.tensorline.rpc.scripted import ScriptedStage, open_scripted
from tests.tensorline.stage.pair import until

X = np.array([1, 2], np.float32)
BIG = np.arange(1 << 15, dtype=np.float32)
Y = {"name": "y", "datatype": "FP32", "shape": [2]}


def path_of(house: House) -> Path:
    return house.stages[0].directory.path


def config_of(house: House, model: str) -> bytes:
    config = house.mesh.config(model, -1)
    assert config is not None
    return config.encoded


def hosted(name: str, version: str, config: bytes) -> pb.Frame:
    model = {"name": name, "version": version, "state": "READY", "config": config}
    return pb.Frame(models=pb.Models(models=[model]))  # type: ignore[list-item]


@asynccontextmanager
async def open_odd(house: House) -> AsyncIterator[ScriptedStage]:
    """A scripted stage in the mesh, beside the house's own."""
    directory = path_of(house) / "odd"
    directory.mkdir()
    async with open_scripted(directory, instance_id="odd-1") as odd:
        entry = ServiceInstance("odd-1", "model", "", local_address=odd.target)
        house.registry.tell(entry, *map(instance, house.stages))
        await until(lambda: odd._context is not None)
        try:
            yield odd
        finally:
            house.registry.tell(*map(instance, house.stages))
            odd.end()


async def test_two_entries_that_lead_to_one_instance_are_one() -> None:
    """Blocks are leased to a stream: what came by the one could not be given back by the other."""
    async with open_house({"one": add(1)}, is_told=False) as house:
        entry = instance(house.stages[0])
        link = path_of(house) / "link.sock"
        os.symlink(entry.local_address.removeprefix("unix:"), link)
        unknown = ServiceInstance("", "", "", local_address=f"unix:{link}")
        house.registry.tell(unknown, entry)
        await until(lambda: house.models.is_ready("one", ""))
        await asyncio.sleep(0.3)
        for _ in range(4):
            assert array(await house.infer("one", BIG)).tolist() == (BIG + 1).tolist()
            await house.wait_nothing_held()
        assert len(house.mesh.connections) == 1
        (before,) = house.mesh.connections
        house.registry.tell(unknown)  # and the one that is left leads there too
        house.stages[0].end.end_streams()
        await until(lambda: house.mesh.connections not in ([], [before]) and house.models.is_ready("one", ""))
        assert array(await house.infer("one", BIG)).tolist() == (BIG + 1).tolist()
        await house.wait_nothing_held()
        link.unlink()


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("other", "9" * 5000),
        ("other", "x"),
        ("other", ""),
        ("other", "0"),
        ("other", "-1"),
        ("other", "1"),  # the configuration is that of "one"
        ("../one", "1"),
        ("", "1"),
        ("x" * 10_000, "1"),
    ],
)
async def test_a_model_that_is_told_wrongly_is_not_there(
    name: str, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_house({"one": add(1)}) as house, open_odd(house) as odd:
        await odd.say(hosted(name, version, config_of(house, "one")))
        await until(lambda: "a stage's model configuration is unusable" in caplog.text)
        assert house.models.names == ["one"]
        house.stages[0].end.announce_models()  # the table is made anew, on another stage's stream
        await asyncio.sleep(0.05)
        assert len(house.mesh.connections) == 2
        assert array(await house.infer("one", X)).tolist() == [2, 3]


async def test_a_configuration_that_is_garbage(caplog: pytest.LogCaptureFixture) -> None:
    async with open_house({"one": add(1)}) as house, open_odd(house) as odd:
        await odd.say(hosted("bad", "1", b"\xff" * 100))
        await until(lambda: "a stage's model configuration is unusable" in caplog.text)
        assert house.models.names == ["one"]
        assert array(await house.infer("one", X)).tolist() == [2, 3]


async def test_a_stage_that_says_nothing_holds_nobody_up() -> None:
    async with open_house({"one": add(1)}, is_told=False) as house:
        directory = path_of(house) / "odd"
        directory.mkdir()
        async with open_scripted(directory, None) as silent:
            house.registry.tell(
                ServiceInstance("odd-1", "model", "", local_address=silent.target), *map(instance, house.stages)
            )
            await until(lambda: house.models.is_ready("one", ""))
            views = {view.id: view.state for view in house.mesh.instances}
            assert views == {"odd-1": "UNREACHABLE", house.stages[0].identity.instance_id: "READY"}


async def test_the_end_of_the_watch_closes_everything() -> None:
    async with open_house({"one": add(1)}, is_told=False) as house:
        async with no_leaks(path_of(house), [house.arena, house.stages[0].arena]):
            registry, changes = Told(), 0

            def changed() -> None:
                nonlocal changes
                changes += 1

            mesh = Mesh(registry, house.mesh._local, house.mesh._reader, changed)
            running = asyncio.create_task(mesh.run())
            real = instance(house.stages[0])
            gone = replace(real, id="gone", local_address="unix:/dev/shm/nowhere.sock")
            registry.tell(real, gone, replace(real, id="somebody-else"))
            await until(lambda: mesh.serving("one", ""))
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert (mesh.connections, mesh.serving("one", ""), mesh.instances) == ([], [], [])
            assert changes == 2
        assert house.stages[0].end.streams == 0


# -- answers -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def asked(house: House) -> AsyncIterator[tuple[ScriptedStage, int, "asyncio.Task[object]"]]:
    """A request that lies at a scripted stage, the only one with its model; and its number there."""
    async with open_odd(house) as odd:
        config = config_of(house, "one").replace(b"one", b"odd")
        await odd.say(hosted("odd", "1", config))
        await until(lambda: house.models.is_ready("odd", ""))
        asking = asyncio.create_task(house.infer("odd", X, timeout_s=20.0))
        await until(lambda: odd.of_kind("submit"))
        yield odd, odd.of_kind("submit")[0].submit.id, asking
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def result(number: int, output: dict[str, object] | None = None, **more: object) -> pb.Frame:
    outputs = [] if output is None else [output]
    return pb.Frame(result=pb.Result(id=number, outputs=outputs, **{"final": True, **more}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ({**Y, "inline": b"\0" * 7}, TensorlineError),
        ({**Y, "shape": [-2], "inline": b"\0" * 8}, TensorlineError),
        ({**Y, "datatype": "FP33", "inline": b"\0" * 8}, TensorlineError),
        (
            {**Y, "handle": {"arena": b"no such arena...", "offset": 64, "length": 8, "generation": 1, "block": 64}},
            UnavailableError,
        ),
    ],
)
async def test_an_answer_that_cannot_be_read_is_an_error_at_once(
    output: dict[str, object], error: type[TensorlineError]
) -> None:
    async with open_house({"one": add(1)}) as house, asked(house) as (odd, number, asking):
        await odd.say(result(number, output))
        async with asyncio.timeout(2):
            with pytest.raises(error) as caught:
                await asking
        assert "no such arena" not in str(caught.value)
        assert [(step.model, step.status != 0 or house.last.status != 0) for step in house.last.steps] == [
            ("odd", True)
        ]
        assert len(house.records) == 1
        assert house.held() == (0, [0])
        assert array(await house.infer("one", X)).tolist() == [2, 3]


async def test_an_answer_to_nobody_and_a_second_one_are_passed_over() -> None:
    async with open_house({"one": add(1)}) as house, asked(house) as (odd, number, asking):
        await odd.say(result(number + 77, {**Y, "inline": b"\0" * 8}))
        good = result(number, {**Y, "inline": X.tobytes()})
        await odd.say(good, good)
        async with asyncio.timeout(2):
            response = await asking
        assert array(response).tolist() == [1, 2]  # type: ignore[arg-type]
        assert array(await house.infer("one", X)).tolist() == [2, 3]
        assert len(house.records) == 2


async def test_a_bug_at_an_answer_ends_its_request_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def complete(*_: object) -> object:
        raise ZeroDivisionError("row 7 of customers")

    async with open_house({"one": add(1)}) as house:
        monkeypatch.setattr(SingleStep, "complete", complete)
        began = time.monotonic()
        with pytest.raises(InternalError, match=r"^internal error$"):
            await house.infer("one", BIG)
        assert time.monotonic() - began < 8
        assert "row 7 of customers" in caplog.text
        await house.wait_nothing_held()
        assert (house.last.status, house.limits.in_flight) == (13, 0)
