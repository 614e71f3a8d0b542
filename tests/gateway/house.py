"""A gateway without front ends, and its stages, in one process: real streams and arenas, a registry told by hand."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gateway.mesh import Mesh
from gateway.models import Models
from gateway.plane import GatewayPlane
from gateway.readiness import Readiness
from gateway.repository import Repository
from gateway.rows import CounterRows
from gateway.service import GatewayLimits, InferenceService
from tensorline.config import RepositoryEntry, config_from_text
from tensorline.discovery import ServiceInstance
from tensorline.discovery.watching import Watched
from tensorline.errors import ConfigError
from tensorline.protocol.infer import InferRequest, InferResponse, RequestedOutput
from tensorline.rpc.connection import LocalPeer
from tensorline.shm import Arena, ArenaReader, open_directory
from tensorline.shm.region_table import RegionTable, region_directory
from tensorline.stage.backend import Batch
from tensorline.telemetry.metrics import Metrics
from tensorline.telemetry.record import Process, RequestRecord, TraceContext
from tensorline.telemetry.recorder import Recorder, open_recorder
from tensorline.telemetry.settings import TelemetrySettings
from tensorline.telemetry.store import TraceStore
from tensorline.tensor import Array, Tensor, datatype_of, decode_array, encode_array
from tests.tensorline.stage.pair import MIB, Model, Stage, config, mesh_directory, open_stage, until

__all__ = ["FP32", "House", "Told", "add", "array", "ensemble", "entry", "infer_request", "instance", "open_house"]

FP32 = {"x": "FP32"}
NO_TRACE = TraceContext(bytes(15) + b"\1", b"")


class Told:
    """A registry that says what a test tells it."""

    def __init__(self) -> None:
        self._watched = Watched()
        self.is_fresh = True

    def tell(self, *instances: ServiceInstance) -> None:
        self._watched.publish(frozenset(instances))

    async def register(self, instance: ServiceInstance) -> None:
        """Stages here are told of by `tell`."""

    async def deregister(self, instance_id: str) -> None:
        """As `register`."""

    def watch(self) -> AsyncIterator[frozenset[ServiceInstance]]:
        return self._watched.watch()

    async def aclose(self) -> None:
        self._watched.close()


def add(by: float) -> Model:
    """y is x plus `by`."""

    def run(batch: Batch) -> Mapping[str, Array]:
        x = batch.inputs["x"].astype(np.float32)
        return {"y": x + np.float32(by)}

    return Model(config(FP32, {"y": "FP32"}), run)


def ensemble(
    name: str,
    *steps: tuple[str, Mapping[str, str], Mapping[str, str]],
    outputs: Sequence[str] = ("y",),
    rows: int = 0,
) -> RepositoryEntry:
    """A pipeline over FP32 tensors with input x."""
    lines = [config(FP32, dict.fromkeys(outputs, "FP32"), rows=rows), 'platform: "ensemble"', "ensemble_scheduling {"]
    for model, taken, given in steps:
        maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in taken.items()]
        maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in given.items()]
        lines.append(f'step [ {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }} ]')
    return entry(name, "\n".join([*lines, "}"]))


def entry(name: str, text: str = "", *, error: str = "", versions: tuple[int, ...] = (1,)) -> RepositoryEntry:
    """What a gateway finds in its repository: a configuration, or why there is none."""
    if error:
        return RepositoryEntry(name, Path(name), None, ConfigError(error), ())
    return RepositoryEntry(name, Path(name), config_from_text(text, name), None, versions)


def instance(stage: Stage) -> ServiceInstance:
    """The entry of a stage."""
    return ServiceInstance(
        stage.identity.instance_id, "model", "", local_address=stage.target, nonce=stage.identity.nonce.hex()
    )


def array(response: InferResponse, name: str = "y") -> Array:
    (found,) = [each for each in response.outputs if each.name == name]
    return decode_array(found.datatype, found.shape, found.data or b"")


def infer_request(model: str, x: Array, *outputs: RequestedOutput, id: str = "r1", version: str = "") -> InferRequest:
    tensor = Tensor("x", datatype_of(x.dtype), x.shape, bytes(encode_array(x)))
    return InferRequest(model, version, id, [tensor], outputs)


@dataclass
class House:
    registry: Told
    stages: list[Stage]
    mesh: Mesh
    models: Models
    service: InferenceService
    readiness: Readiness
    limits: GatewayLimits
    arena: Arena
    metrics: Metrics
    recorder: Recorder
    repository: Repository
    records: list[RequestRecord] = field(default_factory=list)
    """Of requests by `infer`, in the order of their ends."""
    regions: RegionTable | None = None

    async def infer(
        self, model: str, x: Array, *outputs: RequestedOutput, timeout_s: float = 5.0, id: str = "r1", version: str = ""
    ) -> InferResponse:
        request = infer_request(model, x, *outputs, id=id, version=version)
        return await self.service.infer(request, NO_TRACE, timeout_s, time.monotonic_ns(), "test/Infer")

    @property
    def last(self) -> RequestRecord:
        """Of the request that ended last."""
        return self.records[-1]

    def held(self) -> tuple[int, list[int]]:
        """Blocks that are still leased: the gateway's, and each stage's."""
        return self.arena.leases, [stage.arena.leases for stage in self.stages]

    async def wait_nothing_held(self) -> None:
        await until(lambda: not self.arena.leases and not any(stage.arena.leases for stage in self.stages))


@asynccontextmanager
async def open_house(
    *stages: Mapping[str, Model],
    entries: Iterable[RepositoryEntry] = (),
    max_in_flight: int = 100,
    max_bytes: int = 64 * MIB,
    arena_bytes: int = 64 * MIB,
    is_strict: bool = True,
    is_told: bool = True,
    max_regions: int = 8,
    repositories: Sequence[Path] = (),
    control_mode: str = "none",
    load_models: Sequence[str] = (),
    **stage_options: int,
) -> AsyncIterator[House]:
    """A gateway and one stage for each mapping of models, all in one directory.

    Args:
        is_told: The registry names every stage, and they are connected when the block begins.
        max_regions: Of clients' shared memory; 0: it is switched off.
        repositories: In another control mode than "none", the gateway's own besides those of the stages.
    """
    async with AsyncExitStack() as stack:
        path = stack.enter_context(mesh_directory())
        control = {"control_mode": control_mode, "load_models": load_models, **stage_options}
        opened = [await stack.enter_async_context(open_stage(each, path=path, **control)) for each in stages]  # type: ignore[arg-type]
        directory = open_directory(path)
        arena = stack.enter_context(Arena(directory, arena_bytes, first_segment_bytes=MIB))
        reader = ArenaReader(directory)
        stack.callback(reader.close)
        reader.attach(arena)
        registry = Told()
        process = Process("gateway", "gateway-1")
        metrics = Metrics(process_metrics=False)
        store = TraceStore(process)
        recorder = await stack.enter_async_context(
            open_recorder(process, TelemetrySettings(), metrics=metrics, store=store)
        )

        def changed() -> None:
            models.changed()
            repository.follow()
            rows.follow()

        mesh = Mesh(registry, LocalPeer("gateway-1", directory.nonce, arena.id, 64 * MIB), reader, changed)
        models = Models(mesh, entries)
        paths = [] if control_mode == "none" else [*repositories, *(stage.repository for stage in opened)]
        repository = Repository(mesh, models, paths, control_mode, load_models)
        stack.push_async_callback(repository.aclose)
        if control_mode != "none":
            await repository.start()
        rows = CounterRows(recorder, models, mesh)
        limits = GatewayLimits(max_in_flight, max_bytes)
        plane = GatewayPlane(arena, reader, mesh, 4096)
        regions = None
        if max_regions:
            path = stack.enter_context(region_directory(directory))
            regions = stack.enter_context(RegionTable(path, directory.path, max_regions))
        service = InferenceService(mesh, models, plane, limits, 60.0, recorder, regions)
        readiness = Readiness(models, is_strict=is_strict)
        readiness.accepts = True
        house = House(
            *(registry, opened, mesh, models, service, readiness, limits, arena, metrics, recorder),
            repository,
            regions=regions,
        )
        noted = recorder.record

        def note(record: RequestRecord) -> None:
            house.records.append(record)
            noted(record)

        recorder.record = note  # type: ignore[method-assign]
        following = asyncio.create_task(mesh.run())
        stack.push_async_callback(_cancelled, following)
        if is_told:
            registry.tell(*map(instance, opened))
            is_awaited = control_mode != "explicit"  # else a stage may have nothing to say
            await until(
                lambda: (
                    len(mesh.connections) == len(opened)
                    and all(_has_spoken(each) or not is_awaited for each in mesh.connections)
                )
            )
        yield house


def _has_spoken(connection: object) -> bool:
    return bool(getattr(connection, "_models", None))


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
