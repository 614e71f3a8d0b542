"""A stage and the gateways that talk to it, in one process, over real sockets and real arenas.

`open_stage` is what `serve_stage` opens, without registry and signals; `open_caller` is a gateway's end of one stream.
"""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tensorline.errors import UnavailableError
from tensorline.rpc.connecting import connect_stage
from tensorline.rpc.connection import LocalPeer, StageConnection
from tensorline.rpc.frames import ParameterValue, StageResult, Submission
from tensorline.rpc.hosted import HostedModel
from tensorline.shm import Arena, ArenaDirectory, ArenaReader, Leases, open_directory
from tensorline.stage.backend import Backends, Batch, Device, Instance, InstanceFactory, ModelDirectory
from tensorline.stage.batch import Plane
from tensorline.stage.builtin import BUILTIN
from tensorline.stage.execution import Executed
from tensorline.stage.host import ModelHost
from tensorline.stage.main import upkeep
from tensorline.stage.repository import StageRepository
from tensorline.stage.server import StageEnd, StageIdentity, open_server
from tensorline.tensor import Array, Tensor, datatype_of, decode_array, encode_array

__all__ = [
    "MIB",
    "Call",
    "Caller",
    "Model",
    "Stage",
    "config",
    "connection_to",
    "mesh_directory",
    "open_caller",
    "open_stage",
    "tensor",
    "until",
]

MIB = 1 << 20
Run = Callable[[Batch], Mapping[str, Array]]

_names = itertools.count()


async def until(is_so: Callable[[], object], within_s: float = 5.0) -> None:
    """For what tells nobody when it changes."""
    async with asyncio.timeout(within_s):
        while not is_so():
            await asyncio.sleep(0.005)


@contextmanager
def mesh_directory() -> Iterator[Path]:
    """Of its own, in memory, with a name that leaves room for sockets' (their paths are limited to 107 bytes)."""
    path = Path(tempfile.mkdtemp(prefix="tl-rs-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path)


class _FunctionInstance:
    def __init__(self, run: Run) -> None:
        self.execute = run

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Model:
    """Args:
    run: What its instances do; None: `config` names a backend.
    make: Makes its instances, where a function is not enough.
    """

    config: str
    run: Run | None = None
    make: InstanceFactory | None = None
    versions: Sequence[int] = (1,)

    def factory(self) -> InstanceFactory | None:
        run = self.run
        if run is None:
            return self.make

        def make(model: ModelDirectory, device: Device) -> Instance:
            return _FunctionInstance(run)

        return make


def config(
    inputs: Mapping[str, str],
    outputs: Mapping[str, str] | None = None,
    *,
    rows: int = 0,
    more: str = "",
    dims: str = "",
) -> str:
    """Text of a config.pbtxt: datatypes by name, all with one dimension of any size unless `dims` says more."""

    def tensors(kind: str, specs: Mapping[str, str]) -> str:
        given = [
            f'{kind} [ {{ name: "{name}" data_type: TYPE_{"STRING" if datatype == "BYTES" else datatype} '
            f"dims: [ {dims or '-1'} ] }} ]"
            for name, datatype in specs.items()
        ]
        return "\n".join(given)

    return "\n".join([f"max_batch_size: {rows}", tensors("input", inputs), tensors("output", outputs or {}), more])


def write_repository(root: Path, models: Mapping[str, Model]) -> Backends:
    """The models' directories, and a backend of each model's name for those that bring their code."""
    backends: dict[str, InstanceFactory] = dict(BUILTIN)
    for name, model in models.items():
        text, factory = model.config, model.factory()
        if factory is not None:
            backends[name] = factory
            text += f'\nbackend: "{name}"'
        for version in model.versions:
            (root / name / str(version)).mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(text)
    return backends


@dataclass
class Stage:
    directory: ArenaDirectory
    arena: Arena
    leases: Leases
    reader: ArenaReader
    end: StageEnd
    host: ModelHost
    identity: StageIdentity
    target: str
    port: int
    repository: Path
    executed: list[Executed] = field(default_factory=list)

    @property
    def executions(self) -> list[int]:
        """Rows of each batch that ran, in order."""
        rows: dict[int, int] = {}
        for one in self.executed:
            if one.result.timing is not None:
                rows[one.result.timing.batch_id] = one.result.timing.batch_size
        return list(rows.values())


@asynccontextmanager
async def open_stage(
    models: Mapping[str, Model],
    *,
    path: Path | None = None,
    arena_bytes: int = 64 * MIB,
    inline_bytes: int = 4096,
    max_in_flight: int = 320,
    max_queue: int = 256,
    inline_limit: int = 256 * MIB,
    expose_model_errors: bool = False,
    has_lane: bool = True,
    listen: str = "",
    drain_s: float = 2.0,
    control_mode: str = "none",
    load_models: Sequence[str] = (),
    is_awaited: bool = True,
) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        path = path or stack.enter_context(mesh_directory())
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        backends = write_repository(repository, models)
        directory = open_directory(path)
        arena = stack.enter_context(Arena(directory, arena_bytes, first_segment_bytes=MIB))
        leases, reader = Leases(arena), ArenaReader(directory)
        stack.callback(reader.close)
        reader.attach(arena)
        name = f"model-{next(_names)}"
        sockets = path / f"{name}.sock", path / f"{name}-lane.sock"
        for each in sockets:
            stack.callback(each.unlink, missing_ok=True)
        identity = StageIdentity(
            name, "model", directory.nonce, max_in_flight, inline_limit, str(sockets[1]) if has_lane else ""
        )
        end = StageEnd(identity, arena, leases)
        plane = Plane(arena, reader, inline_bytes, expose_model_errors)
        executed: list[Executed] = []

        def on_executed(one: Executed) -> None:
            executed.append(one)
            end.lease(one)

        host = ModelHost(backends, plane, max_queue, on_executed, end.announce_models)
        end.serve_models(host)
        repository_of = StageRepository(host, [repository], control_mode, load_models)
        end.serve_loads(repository_of)
        _, port = await stack.enter_async_context(open_server(end, str(sockets[0]), str(sockets[1]), listen))
        stack.push_async_callback(repository_of.aclose)
        stack.push_async_callback(host.aclose, drain_s)
        keeping = asyncio.create_task(upkeep(leases))
        stack.callback(keeping.cancel)
        starting = asyncio.create_task(repository_of.start())
        stack.callback(starting.cancel)
        if is_awaited:
            await starting
        target = f"unix:{sockets[0]}"
        yield Stage(directory, arena, leases, reader, end, host, identity, target, port, repository, executed)


def tensor(name: str, array: Array, shape: tuple[int, ...] | None = None) -> Tensor:
    """`array` with its bytes in hand."""
    return Tensor(name, datatype_of(array.dtype), array.shape if shape is None else shape, bytes(encode_array(array)))


class Call:
    """One submission and what comes of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.results: list[StageResult] = []
        self._ended = asyncio.Event()

    def take(self, result: StageResult) -> None:
        self.results.append(result)
        if result.final:
            self._ended.set()

    @property
    def is_over(self) -> bool:
        return self._ended.is_set()

    async def result(self, within_s: float = 5.0) -> StageResult:
        async with asyncio.timeout(within_s):
            await self._ended.wait()
        return self.results[-1]


class Caller:
    """A gateway's end of one stream. What it places in its arena goes back with `release`."""

    def __init__(self, arena: Arena, reader: ArenaReader) -> None:
        self.arena = arena
        self.reader = reader
        self.models: list[HostedModel] = []
        self.told = 0
        """How many times models were announced."""
        self.ended: asyncio.Task[None] | None = None
        self._connection: StageConnection | None = None

    @property
    def connection(self) -> StageConnection:
        assert self._connection is not None
        return self._connection

    def on_open(self, connection: StageConnection) -> None:
        self._connection = connection

    def on_models(self, connection: StageConnection, models: list[HostedModel]) -> None:
        self.models = models
        self.told += 1

    def place(self, name: str, array: Array) -> Tensor:
        """`array` in our arena, for the stage to read."""
        inline = tensor(name, array)
        assert inline.data is not None
        block = self.arena.allocate(len(inline.data))
        block.view[:] = inline.data
        return Tensor(name, inline.datatype, inline.shape, None, block.handle)

    def start(
        self,
        model: str,
        *inputs: Tensor,
        outputs: tuple[str, ...] = (),
        timeout_s: float | None = None,
        request_id: str = "",
        version: str = "",
        parameters: Mapping[str, ParameterValue] | None = None,
        window: int = 0,
    ) -> Call:
        call = Call(0)
        work = Submission(
            model,
            version,
            list(inputs),
            outputs,
            request_id=request_id,
            timeout_s=timeout_s,
            parameters=parameters or {},
            window=window,
        )
        call.number = self.connection.submit(work, call.take)
        return call

    async def call(self, model: str, *inputs: Tensor, timeout_s: float | None = None, **more: str) -> StageResult:
        return await self.start(model, *inputs, timeout_s=timeout_s, **more).result()  # type: ignore[arg-type]

    def read(self, result: StageResult, *, is_release: bool = True) -> dict[str, Array]:
        """Copies of the outputs; what they hold in the stage's arena goes back."""
        assert result.status == 0, result.error
        arrays: dict[str, Array] = {}
        for each in result.outputs:
            if each.handle is None:
                array = decode_array(each.datatype, each.shape, each.data or b"")
            else:
                array = self.reader.array(each).copy()
                self.reader.check(each.handle)
            arrays[each.name] = np.array(array)
        if is_release:
            self.release(result)
        return arrays

    def release(self, result: StageResult) -> None:
        own = {t.handle.block: t.handle for t in result.outputs if t.handle and t.handle.arena == self.connection.arena}
        self.connection.release(own.values())


@asynccontextmanager
async def open_caller(
    stage: Stage,
    *,
    expected_id: str | None = None,
    is_near: bool = True,
    target: str = "",
    inline_limit: int = 256 * MIB,
) -> AsyncIterator[Caller]:
    """
    Args:
        is_near: In the stage's directory; else on another host, as far as the two can tell.
    """
    async with AsyncExitStack() as stack:
        directory = stage.directory if is_near else open_directory(stack.enter_context(mesh_directory()))
        arena = stack.enter_context(Arena(directory, 64 * MIB, first_segment_bytes=MIB))
        reader = ArenaReader(directory)
        stack.callback(reader.close)
        reader.attach(arena)
        stack.callback(stage.reader.forget, arena.id)  # as `directory_sweeps` does once the file has gone
        local = LocalPeer("gateway-1", directory.nonce, arena.id, inline_limit)
        caller = Caller(arena, reader)
        expected = stage.identity.instance_id if expected_id is None else expected_id
        caller.ended = await connection_to(target or stage.target, expected, local, caller)
        stack.push_async_callback(_stop, caller.ended)
        yield caller


async def connection_to(target: str, expected_id: str, local: LocalPeer, caller: Caller) -> "asyncio.Task[None]":
    """The task of a stream that has been opened and has told its models; what refused it is raised."""
    running = asyncio.create_task(connect_stage(target, expected_id, local, caller.on_open, caller.on_models))
    async with asyncio.timeout(5):
        while not caller.told:
            if running.done():
                await running
                raise UnavailableError("the stream ended before the models were told")
            await asyncio.sleep(0.002)
    return running


async def _stop(running: "asyncio.Task[None]") -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
