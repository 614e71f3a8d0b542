"""What a stage makes of a repository: what it loads, what it refuses and why, and who is found by name."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tensorline.errors import BackendError, NotFoundError, OverloadedError, TensorlineError, UnavailableError
from tensorline.stage.backend import Batch, Device, Instance, ModelDirectory
from tensorline.stage.host import ModelHost
from tensorline.stage.repository import StageRepository
from tensorline.tensor import Array
from tests.tensorline.stage.inner import Asked, Place, inline, open_place
from tests.tensorline.stage.pair import config

ONE = np.ones((1, 1), np.float32)


@pytest.fixture
def place(path: Path) -> Iterator[Place]:
    with open_place(path) as place:
        yield place


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    return path


def write(repository: Path, name: str, backend: str = "echo", more: str = "", versions: Sequence[int] = (1,)) -> None:
    for version in versions:
        (repository / name / str(version)).mkdir(parents=True)
    text = config({"x": "FP32"}, {"y": "FP32"}, rows=8, more=f'backend: "{backend}"\n{more}')
    (repository / name / "config.pbtxt").write_text(text)


class Echo:
    """Says by its answer which version it is of."""

    def __init__(self, model: ModelDirectory, device: Device) -> None:
        self.model = model
        self.device = device
        self.closed = 0

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        return {"y": batch.inputs["x"].astype(np.float32) * np.float32(self.model.version)}

    def close(self) -> None:
        self.closed += 1


@dataclass
class Hosting:
    host: ModelHost
    repository: StageRepository
    made: list[Echo]
    changes: list[dict[str, str]] = field(default_factory=list)
    """The states after each change."""

    @property
    def states(self) -> dict[str, str]:
        return {f"{m.name}/{m.version}": m.state for m in self.host.models}

    @property
    def reasons(self) -> dict[str, str]:
        return {m.name: m.reason for m in self.host.models if m.state == "UNAVAILABLE"}

    async def call(self, model: str, version: str = "") -> float:
        asked = Asked.of(inline("x", ONE), version=version)
        asked.request.model = model
        self.host.submit(asked.request)
        result = await asked.result()
        assert result.status == 0, result.error
        assert result.outputs[0].data is not None
        return float(np.frombuffer(result.outputs[0].data, np.float32)[0])


Factory = Callable[[ModelDirectory, Device], Instance]


@asynccontextmanager
async def hosting(
    place: Place,
    *repositories: Path,
    threads: int = 4,
    mode: str = "none",
    names: Sequence[str] = (),
    **backends: Factory,
) -> AsyncIterator[Hosting]:
    made: list[Echo] = []

    def echo(model: ModelDirectory, device: Device) -> Instance:
        made.append(Echo(model, device))
        return made[-1]

    hosting: Hosting

    def changed() -> None:
        hosting.changes.append(hosting.states)

    host = ModelHost({"echo": echo, **backends}, place.plane, 16, lambda executed: None, changed, threads)
    repository = StageRepository(host, repositories, mode, names)
    hosting = Hosting(host, repository, made)
    await repository.start()
    try:
        yield hosting
    finally:
        await host.aclose(1.0)
        await repository.aclose()


def raising(error: BaseException) -> Factory:
    def make(model: ModelDirectory, device: Device) -> Instance:
        raise error

    return make


async def test_it_loads_what_its_backends_can_run(place: Place, repository: Path, tmp_path: Path) -> None:
    write(repository, "mine")
    write(repository, "not_mine", "onnxruntime")
    other = tmp_path / "other"
    write(other, "mine_too")
    async with hosting(place, repository, other) as it:
        assert it.states == {"mine/1": "READY", "mine_too/1": "READY"}
        assert await it.call("mine") == 1
        with pytest.raises(NotFoundError, match="Request for unknown model: 'not_mine' is not found"):
            it.host.find("not_mine", "")
        (first, _) = it.host.models
        assert first.config
        assert {each.model.version_path for each in it.made} == {repository / "mine" / "1", other / "mine_too" / "1"}


async def test_every_change_is_told(place: Place, repository: Path) -> None:
    write(repository, "a")
    write(repository, "b", "bad")
    async with hosting(place, repository, threads=1, bad=raising(BackendError("no"))) as it:
        assert it.changes[0] == {"a/1": "LOADING", "b/1": "LOADING"}
        assert len(it.changes) == 3
        assert it.changes[-1] == it.states == {"a/1": "READY", "b/1": "UNAVAILABLE"}


async def test_what_loads_is_not_there_yet(place: Place, repository: Path) -> None:
    write(repository, "slow", "slow")
    write(repository, "fast")
    gate = threading.Event()

    def slow(model: ModelDirectory, device: Device) -> Instance:
        gate.wait(10)
        return Echo(model, device)

    host = ModelHost({"slow": slow, "echo": Echo}, place.plane, 16, lambda executed: None, lambda: None)
    loading = asyncio.ensure_future(StageRepository(host, [repository]).start())
    async with asyncio.timeout(5):
        while not list(host.versions):
            await asyncio.sleep(0.005)
    assert {m.name: m.state for m in host.models} == {"slow": "LOADING", "fast": "READY"}
    assert host.find("fast", "").version == 1
    with pytest.raises(UnavailableError, match="'slow' version 1 is not at ready state"):
        host.find("slow", "1")
    gate.set()
    await loading
    assert host.find("slow", "").version == 1
    await host.aclose(1.0)


LEAKY = FileNotFoundError(2, "No such file or directory", "/secret/place/weights.bin")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BackendError("weights of another model"), "weights of another model"),
        (LEAKY, "FileNotFoundError: No such file or directory: weights.bin"),
        (OSError("/secret/place is away"), "OSError: failed: "),
        (ValueError("/secret/place"), "ValueError while loading"),
        (ImportError("No module named 'torch'"), "ImportError while loading"),
        (MemoryError(), "MemoryError while loading"),
        (SystemExit(3), "SystemExit while loading"),
        (KeyboardInterrupt(), "KeyboardInterrupt while loading"),
        (asyncio.CancelledError(), "CancelledError while loading"),
        (GeneratorExit(), "GeneratorExit while loading"),
        (StopIteration(), "StopIteration while loading"),
        (BackendError("a\nb" + "x" * 5000), "a\\u000ab" + "x" * 509 + "…"),
    ],
)
async def test_what_does_not_load_says_why_and_the_others_serve(
    place: Place, repository: Path, error: BaseException, reason: str
) -> None:
    write(repository, "bad", "bad")
    write(repository, "good")
    async with hosting(place, repository, bad=raising(error)) as it:
        assert it.reasons == {"bad": reason}
        assert await it.call("good") == 1
        with pytest.raises(UnavailableError, match="'bad' version 1 is not at ready state"):
            it.host.find("bad", "1")
        with pytest.raises(UnavailableError, match="'bad' has no available versions"):
            it.host.find("bad", "")


async def test_a_broken_configuration_says_what_is_wrong(place: Place, repository: Path) -> None:
    write(repository, "good")
    write(repository, "broken", more="max_batch_size: many")
    write(repository, "bad", more="instance_group [ { count: 1 gpus: [ 0 ] kind: KIND_CPU } ]")
    async with hosting(place, repository) as it:
        assert it.states == {"good/1": "READY", "broken/": "UNAVAILABLE", "bad/": "UNAVAILABLE"}
        assert "broken/config.pbtxt" in it.reasons["broken"]
        assert "gpus" in it.reasons["bad"]
        assert not any(str(repository) in reason for reason in it.reasons.values())
        assert await it.call("good") == 1


async def test_a_directory_may_be_called_anything(place: Place, repository: Path) -> None:
    write(repository, "good")
    for name in (b"\xff", b"a\nb", b"x" * 200):
        os.mkdir(bytes(repository) + b"/" + name)
    async with hosting(place, repository) as it:
        assert [m.name for m in it.host.models] == ["good", "\\udcff", "a\\u000ab", "x" * 128 + "…"]
        for model in it.host.models:
            assert len(f"{model.name}{model.reason}".encode()) < 1024


UNSUPPORTED = {
    "sequence_batching": "sequence_batching { }",
    "response_cache": "response_cache { enable: true }",
    "dynamic_batching.preserve_ordering": "dynamic_batching { preserve_ordering: true }",
    "dynamic_batching.priority_levels": "dynamic_batching { priority_levels: 2 default_priority_level: 1 }",
    "allow_ragged_batch": 'input [ { name: "r" data_type: TYPE_FP32 dims: [ 1 ] allow_ragged_batch: true } ]',
    "is_shape_tensor": 'input [ { name: "r" data_type: TYPE_INT32 dims: [ 1 ] is_shape_tensor: true } ]',
}


@pytest.mark.parametrize("name", UNSUPPORTED)
async def test_what_this_release_cannot_do_is_refused_by_name(place: Place, repository: Path, name: str) -> None:
    write(repository, "m", more=UNSUPPORTED[name])
    async with hosting(place, repository) as it:
        assert it.reasons == {"m": f"model 'm' uses {name}, which this release does not offer yet"}
        assert not it.made


@pytest.mark.parametrize(
    ("policy", "ready", "newest"),
    [
        ("", [12], 12),
        ("version_policy { latest { num_versions: 2 } }", [3, 12], 12),
        ("version_policy { all { } }", [1, 3, 12], 12),
        ("version_policy { specific { versions: [ 1, 3 ] } }", [1, 3], 3),
    ],
)
async def test_versions(place: Place, repository: Path, policy: str, ready: list[int], newest: int) -> None:
    write(repository, "m", more=policy, versions=(12, 1, 3))
    async with hosting(place, repository) as it:
        assert it.states == {f"m/{version}": "READY" for version in ready}
        assert await it.call("m") == newest
        for version in ready:
            assert await it.call("m", str(version)) == version


async def test_the_newest_is_the_newest_that_loads(place: Place, repository: Path) -> None:
    write(repository, "m", "odd", more="version_policy { all { } }", versions=(1, 2))

    def odd(model: ModelDirectory, device: Device) -> Instance:
        if model.version == 2:
            raise BackendError("half a file")
        return Echo(model, device)

    async with hosting(place, repository, odd=odd) as it:
        assert it.states == {"m/1": "READY", "m/2": "UNAVAILABLE"}
        assert await it.call("m") == 1


@pytest.mark.parametrize(
    ("model", "version", "kind", "text"),
    [
        ("n", "", NotFoundError, "Request for unknown model: 'n' is not found"),
        ("", "", NotFoundError, "Request for unknown model: '' is not found"),
        ("n", "1", NotFoundError, "Request for unknown model: 'n' is not found"),
        ("m", "2", NotFoundError, "Request for unknown model: 'm' version 2 is not found"),
        ("m", "0", NotFoundError, "Request for unknown model: 'm' version 0 is not found"),
        ("m", "-1", NotFoundError, "Request for unknown model: 'm' version -1 is not found"),
        ("m", "one", NotFoundError, "Request for unknown model: 'm' version one is not found"),
        ("m", "01", NotFoundError, "Request for unknown model: 'm' version 01 is not found"),
        ("m", "١", NotFoundError, "Request for unknown model: 'm' version ١ is not found"),
        ("m", "9" * 5000, NotFoundError, "Request for unknown model: 'm' version 999"),
        ("broken", "", UnavailableError, "Request for unknown model: 'broken' has no available versions"),
    ],
)
async def test_who_is_not_found(
    place: Place, repository: Path, model: str, version: str, kind: type[TensorlineError], text: str
) -> None:
    write(repository, "m")
    write(repository, "broken", more="max_batch_size: many")
    async with hosting(place, repository) as it:
        with pytest.raises(kind) as caught:
            it.host.find(model, version)
        assert str(caught.value).startswith(text)


async def test_groups_of_instances(place: Place, repository: Path) -> None:
    groups = """instance_group [
      { name: "first" count: 2 kind: KIND_CPU },
      { count: 1 },
      { name: "spare" count: 3 passive: true }
    ]"""
    write(repository, "m", more=groups)
    async with hosting(place, repository) as it:
        assert len(it.made) == 3
        assert {each.device for each in it.made} == {Device("cpu")}
        names = {thread.name for thread in threading.enumerate() if thread.name.startswith("instance-")}
        assert names == {"instance-first_0", "instance-first_1", "instance-m_1_0"}
    assert [each.closed for each in it.made] == [1, 1, 1]


async def test_a_gpu_that_is_not_there_is_refused(place: Place, repository: Path) -> None:
    write(repository, "m", more="instance_group [ { count: 1 kind: KIND_GPU } ]")
    async with hosting(place, repository) as it:
        assert it.reasons == {
            "m": "instance group 'm_0' of model 'm' has kind KIND_GPU but no GPUs are available",
        }


async def test_instances_of_a_version_that_fails_are_closed(place: Place, repository: Path) -> None:
    write(repository, "m", "third", more="instance_group [ { count: 3 kind: KIND_CPU } ]")
    write(repository, "good")
    made: list[Echo] = []

    class Stubborn(Echo):
        def close(self) -> None:
            super().close()
            raise RuntimeError("cannot")

    def third(model: ModelDirectory, device: Device) -> Instance:
        if len(made) == 2:
            raise BackendError("no memory for a third")
        made.append(Stubborn(model, device) if not made else Echo(model, device))
        return made[-1]

    async with hosting(place, repository, third=third) as it:
        assert it.reasons == {"m": "no memory for a third"}
        assert it.states["good/1"] == "READY"
        assert [each.closed for each in made] == [1, 1]
    assert [each.closed for each in made] == [1, 1]


async def test_loads_share_the_threads_that_there_are(place: Place, repository: Path) -> None:
    for at in range(6):
        write(repository, f"m{at}", "slow")
    at_once: list[int] = []
    running = 0
    lock = threading.Lock()

    def slow(model: ModelDirectory, device: Device) -> Instance:
        nonlocal running
        with lock:
            running += 1
            at_once.append(running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return Echo(model, device)

    async with hosting(place, repository, threads=2, slow=slow) as it:
        assert set(it.states.values()) == {"READY"}
    assert max(at_once) == 2


async def test_a_load_that_nobody_waits_for_any_more_does_not_hold_up_the_end(place: Place, repository: Path) -> None:
    write(repository, "m", "slow")
    gate = threading.Event()

    def slow(model: ModelDirectory, device: Device) -> Instance:
        gate.wait(10)
        return Echo(model, device)

    host = ModelHost({"slow": slow}, place.plane, 16, lambda executed: None, lambda: None)
    loading = asyncio.ensure_future(StageRepository(host, [repository]).start())
    await asyncio.sleep(0.1)
    began = time.monotonic()
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    await host.aclose(1.0)
    assert time.monotonic() - began < 2
    gate.set()


async def test_a_full_queue_is_the_services_limit_where_the_model_has_none(place: Place, repository: Path) -> None:
    write(repository, "m", "held")
    gate = threading.Event()

    class Held(Echo):
        def execute(self, batch: Batch) -> Mapping[str, Array]:
            gate.wait(10)
            return super().execute(batch)

    async with hosting(place, repository, held=Held) as it:
        calls = [asyncio.ensure_future(it.call("m")) for _ in range(17)]
        await asyncio.sleep(0.05)
        assert it.host.queued == 16
        with pytest.raises(OverloadedError, match=r"Exceeds maximum queue size \(16\)"):
            await it.call("m")
        gate.set()
        assert await asyncio.gather(*calls) == [1.0] * 17


async def test_after_the_end_nobody_is_served(place: Place, repository: Path) -> None:
    write(repository, "m")
    async with hosting(place, repository) as it:
        await it.call("m")
    assert it.states == {"m/1": "UNAVAILABLE"}
    assert it.made[0].closed == 1
    with pytest.raises(UnavailableError):
        it.host.find("m", "")
