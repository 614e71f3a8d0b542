"""A stage's repositories while it serves: loads, warm-up, files of clients, and what changes on disk."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
import pytest

from tensorline.config import find_entry, scan
from tensorline.errors import TensorlineError, UnavailableError
from tensorline.rpc.frames import LoadOrder
from tensorline.stage import repository as module
from tensorline.stage.backend import Batch, Device, Instance, ModelDirectory
from tensorline.tensor import Array
from tests.tensorline.stage.inner import Place, open_place
from tests.tensorline.stage.pair import until
from tests.tensorline.stage.test_host import Echo, hosting, write

T = TypeVar("T")


@pytest.fixture
def place(path: Path) -> Iterator[Place]:
    with open_place(path) as place:
        yield place


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    return path


def fragile(model: ModelDirectory, device: Device) -> Instance:
    if (model.version_path / "broken").exists():
        raise ValueError("no")
    return Echo(model, device)


async def test_explicit_loads_what_it_is_told(place: Place, repository: Path) -> None:
    write(repository, "a")
    write(repository, "b")
    write(repository, "elsewhere", "other")
    async with hosting(place, repository, mode="explicit", names=["a"]) as it:
        assert it.states == {"a/1": "READY"}
        assert await it.repository.load(LoadOrder("b"))
        assert it.states == {"a/1": "READY", "b/1": "READY"}
        assert not await it.repository.load(LoadOrder("elsewhere"))
        assert not await it.repository.load(LoadOrder("nobody"))
        await it.repository.unload("a")
        with pytest.raises(UnavailableError, match="'a' has no available versions"):
            it.host.find("a", "")
        await until(lambda: it.reasons == {"a": "unloaded"})
        assert it.made[0].closed == 1
        await it.repository.unload("nobody")


async def test_other_modes_refuse(place: Place, repository: Path) -> None:
    write(repository, "a")
    async with hosting(place, repository) as it:
        with pytest.raises(UnavailableError, match="control mode is 'none'"):
            await it.repository.load(LoadOrder("a"))
        with pytest.raises(UnavailableError, match="control mode is 'none'"):
            await it.repository.unload("a")


async def test_polling_follows_the_directories(place: Place, repository: Path) -> None:
    write(repository, "a", "fragile")
    async with hosting(place, repository, mode="poll", fragile=fragile) as it:
        watching = asyncio.create_task(it.repository.watch(0.05))
        (repository / "a" / "2").mkdir()
        await until(lambda: it.host.ready_versions("a") == [2])
        write(repository, "b")
        await until(lambda: it.host.ready_versions("b") == [1])
        (repository / "a" / "3").mkdir()
        (repository / "a" / "3" / "broken").touch()
        await until(lambda: it.states.get("a/3") == "UNAVAILABLE")
        assert await it.call("a") == 2
        (repository / "a" / "config.pbtxt").write_text("max_batch_size: many")
        shutil.rmtree(repository / "b")
        await until(lambda: "b/1" not in it.states)
        assert await it.call("a") == 2
        watching.cancel()


async def test_what_is_still_being_copied_waits(place: Place, repository: Path) -> None:
    write(repository, "a")
    async with hosting(place, repository, mode="poll") as it:
        copying = repository / "a" / "2"
        copying.mkdir()
        following = asyncio.create_task(it.repository.follow())
        for at in range(8):
            await asyncio.sleep(0.1)
            (copying / "model").write_text("x" * at)
        await following
        assert it.host.ready_versions("a") == [1]
        await it.repository.follow()
        assert it.host.ready_versions("a") == [2]


@pytest.mark.parametrize("when", ["start", "poll"])
async def test_what_changes_while_it_is_read_is_loaded_at_the_next_look(
    place: Place, repository: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    write(repository, "a")
    file = repository / "a" / "config.pbtxt"

    def edited_after(read: Callable[..., T]) -> Callable[..., T]:
        def reading(*given: object) -> T:
            answer = read(*given)
            monkeypatch.undo()
            file.write_text(file.read_text().replace("max_batch_size: 8", "max_batch_size: 4 "))
            return answer

        return reading

    if when == "start":
        monkeypatch.setattr(module, "scan", edited_after(scan))
    async with hosting(place, repository, mode="poll") as it:
        if when == "poll":
            monkeypatch.setattr(module, "find_entry", edited_after(find_entry))
            (repository / "a" / "2").mkdir()
            await it.repository.follow()
        assert it.host.find("a", "").config.max_batch_size == 8
        await it.repository.follow()
        assert it.host.find("a", "").config.max_batch_size == 4


async def test_a_look_at_what_stands_still_opens_no_file(place: Place, repository: Path) -> None:
    write(repository, "a")
    async with hosting(place, repository, mode="poll") as it:
        changes = len(it.changes)
        (repository / "a" / "1" / "__pycache__").mkdir()
        await it.repository.follow()
        assert len(it.changes) == changes


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("tensorline-model-*"))


OVERRIDE = """{"backend": "fragile", "max_batch_size": 8,
"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}]}"""


async def test_files_live_as_long_as_the_model(place: Place, repository: Path) -> None:
    before = folders()
    async with hosting(place, repository, mode="explicit", fragile=fragile) as it:
        await it.repository.load(LoadOrder("m", OVERRIDE, {"4/weights": b"w", "labels": b"l"}, "one"))
        (folder,) = folders() - before
        assert (folder / "m" / "4" / "weights").read_bytes() == b"w"
        assert (await it.call("m"), it.host.models[0].override) == (4, "one")
        with pytest.raises(TensorlineError, match="load failed for model 'm': version 5"):
            await it.repository.load(LoadOrder("m", OVERRIDE, {"5/broken": b""}, "two"))
        assert folders() - before == {folder}
        assert await it.call("m") == 4
        await it.repository.load(LoadOrder("m", OVERRIDE, {"6/weights": b"w"}, "three"))
        assert await it.call("m") == 6
        await until(lambda: not folder.exists())
        await it.repository.unload("m")
        await until(lambda: folders() == before)
        await it.repository.load(LoadOrder("m", OVERRIDE, {"6/weights": b"w"}, "three"))
    assert folders() == before


@pytest.mark.parametrize("file", ["../x", "/tmp/x", "1/../../x", "a/", ""])
async def test_files_do_not_leave_the_folder(place: Place, repository: Path, file: str) -> None:
    before = folders()
    async with hosting(place, repository, mode="explicit", fragile=fragile) as it:
        with pytest.raises(TensorlineError, match="file override"):
            await it.repository.load(LoadOrder("m", OVERRIDE, {file: b"w"}, "one"))
        assert folders() == before


async def test_links_out_of_the_repository_are_refused(place: Place, repository: Path, tmp_path: Path) -> None:
    write(repository, "m")
    (tmp_path / "secret").touch()
    (repository / "m" / "1" / "model").symlink_to(tmp_path / "secret")
    async with hosting(place, repository, mode="explicit") as it:
        with pytest.raises(TensorlineError, match="'1/model' is a link out of the repository") as caught:
            await it.repository.load(LoadOrder("m"))
        assert str(tmp_path) not in str(caught.value)


class Noting(Echo):
    seen: ClassVar[list[tuple[int, str, float]]] = []

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        x = batch.inputs["x"]
        Noting.seen.append((len(x), batch.request_ids[0], float(x.reshape(-1)[0])))
        if x.reshape(-1)[0] == 9:
            raise ValueError("not nine")
        return super().execute(batch)


def sample(data: str, *, batch_size: int = 1, count: int = 0, dims: str = "2", name: str = "x") -> str:
    return (
        f'model_warmup [ {{ name: "s" batch_size: {batch_size} count: {count} '
        f'inputs {{ key: "{name}" value {{ data_type: TYPE_FP32 dims: [ {dims} ] {data} }} }} }} ]\n'
    )


async def test_every_instance_warms_up_before_it_serves(place: Place, repository: Path) -> None:
    Noting.seen.clear()
    more = sample("zero_data: true", batch_size=3, count=2) + sample("zero_data: true", batch_size=0)
    more += sample("random_data: true")
    more += sample('input_data_file: "seven"') + "instance_group [ { count: 2 kind: KIND_CPU } ]"
    write(repository, "m", "noting", more)
    (repository / "m" / "warmup").mkdir()
    (repository / "m" / "warmup" / "seven").write_bytes(np.array([7, 7], np.float32).tobytes())
    async with hosting(place, repository, noting=Noting) as it:
        assert it.states == {"m/1": "READY"}
        rows = sorted(rows for rows, _, _ in Noting.seen)
        assert rows == [1, 1, 1, 1, 3, 3, 3, 3]
        assert {first for _, _, first in Noting.seen} >= {0.0, 7.0}
        assert {request for _, request, _ in Noting.seen} == {"warmup"}
        assert await it.call("m") == 1


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (sample('input_data_file: "nine"'), "failed to run warmup sample 's': "),
        (sample('input_data_file: "nobody"'), "has no file 'warmup/nobody'"),
        (sample('input_data_file: "nine"', dims="3"), "warmup sample 's', input 'x': "),
        (sample("zero_data: true", name="z"), "the model has no such input"),
        (sample("zero_data: true", batch_size=9), "model_warmup[0].batch_size is 9, must be at most 8"),
        (sample("zero_data: true", dims="-1"), "dims is [-1], must be sizes >= 1"),
        (sample(""), "must be zero_data, random_data or input_data_file"),
        (sample('input_data_file: "../config.pbtxt"'), "a path inside the model's directory"),
    ],
)
async def test_a_warmup_that_fails_fails_the_load(place: Place, repository: Path, more: str, reason: str) -> None:
    write(repository, "m", "noting", more)
    (repository / "m" / "warmup").mkdir()
    (repository / "m" / "warmup" / "nine").write_bytes(np.array([9, 9], np.float32).tobytes())
    async with hosting(place, repository, noting=Noting) as it:
        assert reason in it.reasons["m"]
        assert not place.arena.leases


async def test_labels_that_are_missing_fail_the_load(place: Place, repository: Path) -> None:
    write(repository, "m")
    file = repository / "m" / "config.pbtxt"
    output = 'output [ { name: "z" data_type: TYPE_FP32 dims: [ 1 ] label_filename: "l.txt" } ]'
    file.write_text(file.read_text() + output)
    async with hosting(place, repository) as it:
        assert it.reasons == {"m": "model 'm': label file 'l.txt' does not exist"}


async def test_the_end_does_not_wait_for_what_drains(place: Place, repository: Path) -> None:
    write(repository, "m", "held")
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Held(Echo):
        def execute(self, batch: Batch) -> Mapping[str, Array]:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(10)
            return super().execute(batch)

    async with hosting(place, repository, mode="explicit", names=["*"], held=Held) as it:
        calls = [asyncio.ensure_future(it.call("m")) for _ in range(2)]
        await asyncio.sleep(0.05)
        await it.repository.unload("m")
        assert it.states == {"m/1": "UNLOADING"}
        loop.call_later(1.2, gate.set)
    assert it.states == {"m/1": "UNAVAILABLE"}
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(each, AssertionError) for each in outcomes].count(True) == 1  # the one that waited


async def test_links_in_a_circle_are_one_models_trouble(place: Place, repository: Path) -> None:
    write(repository, "good")
    write(repository, "round")
    (repository / "round" / "1" / "a").symlink_to(repository / "round" / "1" / "b")
    (repository / "round" / "1" / "b").symlink_to(repository / "round" / "1" / "a")
    async with hosting(place, repository) as it:
        assert it.states == {"good/1": "READY", "round/": "UNAVAILABLE"}
