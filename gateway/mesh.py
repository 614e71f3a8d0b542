"""The stage instances as a gateway knows them: found by discovery, believed only while their stream stands."""

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from gateway.balancing import RetryBudget, choose
from tensorline.config import ModelConfig, config_from_encoded, is_model_name
from tensorline.discovery import Registry, ServiceInstance
from tensorline.errors import ConfigError, OverloadedError, TensorlineError, UnavailableError
from tensorline.rpc.connecting import connect_stage
from tensorline.rpc.connection import LocalPeer, StageConnection
from tensorline.rpc.hosted import LOADING, READY, UNLOADED, UNLOADING, HostedModel
from tensorline.shm import ArenaReader

__all__ = ["InstanceView", "Mesh"]

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.1
RETRY_LIMIT_S = 1.0
VERSION = re.compile("[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class InstanceView:
    """What an operator sees of one instance."""

    id: str
    service: str
    state: str
    in_flight: int
    queued: int
    arena_bytes: int
    is_colocated: bool
    models: tuple[str, ...]
    host: str


class Mesh:
    """Keeps one stream to every instance that the registry names, and the table of who serves what.

    Args:
        on_change: Called on the loop after the table changed.
    """

    def __init__(
        self, registry: Registry, local: LocalPeer, reader: ArenaReader, on_change: Callable[[], None]
    ) -> None:
        self._registry = registry
        self._local = local
        self._reader = reader
        self._on_change = on_change
        self._instances: dict[ServiceInstance, asyncio.Task[None]] = {}
        self._wanted: set[tuple[str, str, str]] = set()
        self._streams: dict[tuple[str, str, str], StageConnection] = {}
        self._hosted: dict[StageConnection, list[HostedModel]] = {}
        self._spoken: set[StageConnection] = set()
        """Those that have told what they host."""
        self._by_arena: dict[bytes, StageConnection] = {}
        self._table: dict[tuple[str, str], list[StageConnection]] = {}
        self._ready: dict[str, list[int]] = {}
        self._configs: dict[tuple[str, int], ModelConfig] = {}
        self._decoded: dict[bytes, ModelConfig] = {}
        self._unheard: set[tuple[str, str, str]] | None = None
        self._is_settled = asyncio.Event()
        self._turn = 0
        self.budgets: dict[str, RetryBudget] = {}

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                async for instances in self._registry.watch():
                    self._follow(instances, tasks)
        finally:
            self._instances.clear()

    async def wait_settled(self, timeout_s: float) -> None:
        """Until every instance that the registry named at first has said what it serves or could not be reached, at
        most `timeout_s`: a gateway that took requests sooner would refuse what its neighbours serve."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_settled.wait()

    def _hear(self, place: tuple[str, str, str]) -> None:
        if self._unheard:
            self._unheard.discard(place)
        if not self._unheard:
            self._is_settled.set()

    def _follow(self, instances: Iterable[ServiceInstance], tasks: asyncio.TaskGroup) -> None:
        # An entry that only lists other models now is the same instance: its stream tells us about models.
        known = {_place(instance): instance for instance in self._instances}
        wanted = {_place(instance): instance for instance in instances}
        self._wanted = set(wanted)
        if self._unheard is None:
            self._unheard = set(wanted)
            if not wanted:
                self._is_settled.set()
        for place in wanted.keys() - known.keys():
            instance = wanted[place]
            self._instances[instance] = tasks.create_task(self._keep_connected(instance))
        for place in known.keys() - wanted.keys():
            # Direct evidence decides: a stream that stands and answers outlives its entry until it ends itself. One
            # that drains has left the registry first, and has our requests to finish.
            stream = self._streams.get(place)
            if stream is None or not stream.is_open or not stream.is_responsive:
                self._instances.pop(known[place]).cancel()

    async def _keep_connected(self, instance: ServiceInstance) -> None:
        delay, place = RETRY_FIRST_S, _place(instance)
        while True:
            opened: StageConnection | None = None

            def on_open(connection: StageConnection) -> None:
                nonlocal opened
                self._check_single(connection)
                opened = self._streams[place] = connection
                self._add(connection)

            def on_models(connection: StageConnection, models: list[HostedModel]) -> None:
                self._models(connection, models)
                self._hear(place)

            target = self._target(instance)
            connection_lost = "stream ended"
            try:
                await connect_stage(target, instance.id, self._local, on_open, on_models)
            except TensorlineError as error:
                connection_lost = str(error)
            except Exception as error:  # one instance's trouble must not end the watch over the others
                log.exception("stage stream failed", extra={"stage": instance.id})
                connection_lost = type(error).__name__
            finally:
                if self._streams.get(place) is opened:
                    self._streams.pop(place, None)
                self._drop_closed()
                self._hear(place)
            if opened is not None:
                delay = RETRY_FIRST_S
                log.info("stage left", extra={"stage": instance.id, "cause": connection_lost})
            else:
                log.debug("stage not reached", extra={"stage": instance.id, "cause": connection_lost})
            if place not in self._wanted:
                self._instances.pop(instance, None)
                return
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            delay = min(RETRY_LIMIT_S, delay * 2)

    def _target(self, instance: ServiceInstance) -> str:
        is_near = instance.nonce == self._local.nonce.hex()
        if instance.local_address and (is_near or not instance.address):
            return instance.local_address
        return instance.address

    def _check_single(self, connection: StageConnection) -> None:
        """
        Raises:
            UnavailableError: a stream to this instance stands already, by another entry. Blocks are leased to a stream:
                those of the one could not be given back by the other.
        """
        for other in self._hosted:
            if other.is_open and (other.instance_id == connection.instance_id or other.arena == connection.arena):
                raise UnavailableError(f"it is instance '{other.instance_id}', to which another entry has led")

    def _add(self, connection: StageConnection) -> None:
        self._hosted[connection] = []
        self._by_arena[connection.arena] = connection
        log.info(
            "stage joined",
            extra={"stage": connection.instance_id, "near": connection.is_colocated},
        )

    def _models(self, connection: StageConnection, models: list[HostedModel]) -> None:
        self._hosted[connection] = models
        self._spoken.add(connection)
        self._rebuild()

    def _drop_closed(self) -> None:
        gone = [connection for connection in self._hosted if not connection.is_open]
        for connection in gone:
            del self._hosted[connection]
            self._spoken.discard(connection)
            self._by_arena.pop(connection.arena, None)
            self._reader.forget(connection.arena)
        if gone:
            self._rebuild()

    def _rebuild(self) -> None:
        table: dict[tuple[str, str], list[StageConnection]] = {}
        versions: dict[str, set[int]] = {}
        for connection, models in self._hosted.items():
            for model in models:
                if model.state == READY and not connection.is_draining and self._learn(model):
                    table.setdefault((model.name, model.version), []).append(connection)
                    versions.setdefault(model.name, set()).add(int(model.version))
        hosted = {model.config for models in self._hosted.values() for model in models}
        self._decoded = {encoded: config for encoded, config in self._decoded.items() if encoded in hosted}
        self._ready = {name: sorted(numbers) for name, numbers in versions.items()}
        for name, numbers in self._ready.items():
            table[name, ""] = table[name, str(numbers[-1])]
        self._table = table
        self._on_change()

    def _learn(self, model: HostedModel) -> bool:
        """Whether it can be called: its configuration and its version can be read."""
        try:
            config = self._decoded.get(model.config) or config_from_encoded(model.config)
            _check_hosted(model, config)
        except ConfigError as error:
            log.error("a stage's model configuration is unusable", extra={"model": model.name, "cause": str(error)})
            return False
        self._decoded[model.config] = config
        self._configs[model.name, int(model.version)] = config
        return True

    def config(self, model: str, version: int) -> ModelConfig | None:
        """As its stage completed it; also of one that is away at present. Version -1: the newest ready, else known."""
        if version < 0:
            ready = self.ready_versions(model)
            known = [number for name, number in self._configs if name == model]
            if not ready and not known:
                return None
            version = max(ready or known)
        return self._configs.get((model, version))

    def known_versions(self, model: str) -> list[int]:
        return sorted(number for name, number in self._configs if name == model)

    def ready_versions(self, model: str) -> list[int]:
        return list(self._ready.get(model, ()))

    def newest(self, model: str) -> str:
        """The version that "" stands for at present; "" when none is ready."""
        ready = self._ready.get(model)
        return str(ready[-1]) if ready else ""

    @property
    def model_names(self) -> set[str]:
        return {name for name, _ in self._configs}

    @property
    def has_near(self) -> bool:
        """Some stage can read our arena."""
        return any(connection.is_colocated for connection in self._hosted)

    def serving(self, model: str, version: str) -> list[StageConnection]:
        return self._table.get((model, version), [])

    def is_served(self, model: str, version: str) -> bool:
        return any(c.is_open and not c.is_draining for c in self._table.get((model, version), ()))

    def pick(self, model: str, version: str, exclude: Container[object] = ()) -> StageConnection:
        """The instance to run `model`; version "" is the newest.

        Raises:
            UnavailableError: none is there.
            OverloadedError: each has all that it accepts.
        """
        candidates = self._table.get((model, version), [])
        self._turn += 1
        chosen = choose(candidates, self._turn, exclude)
        if chosen is not None:
            return chosen
        if any(c.is_open and not c.is_draining and c not in exclude for c in candidates):
            raise OverloadedError(f"every instance of model '{model}' has as many requests in flight as it accepts")
        raise UnavailableError(f"model '{model}' has no instance ready at present")

    def owner(self, arena: bytes) -> StageConnection | None:
        return self._by_arena.get(arena)

    def budget(self, model: str) -> RetryBudget:
        budget = self.budgets.get(model)
        if budget is None:
            budget = self.budgets[model] = RetryBudget()
        return budget

    def is_unloaded(self, model: str) -> bool:
        """Whether every version that the stages tell of was unloaded, and is not just away or on its way."""
        told = [hosted for models in self._hosted.values() for hosted in models if hosted.name == model]
        return bool(told) and all(hosted.reason == UNLOADED or hosted.state == UNLOADING for hosted in told)

    @property
    def backends(self) -> set[str]:
        """What the instances that are there can run, as far as they say."""
        return {backend for connection in self._hosted for backend in connection.backends}

    def reason(self, model: str) -> str:
        """Why a stage that should host `model` does not, in the stage's words; "" when none says anything."""
        reasons = (hosted.reason for models in self._hosted.values() for hosted in models if hosted.name == model)
        return next((reason for reason in reasons if reason), "")

    @property
    def hosted(self) -> list[tuple[StageConnection, list[HostedModel]]]:
        """What each instance with a stream says it hosts, in whatever state."""
        return list(self._hosted.items())

    def has_spoken(self, connection: StageConnection) -> bool:
        """Whether it has told what it hosts; that may be nothing."""
        return connection in self._spoken

    def _is_loading(self, connection: StageConnection) -> bool:
        is_silent = connection not in self._spoken
        return is_silent or any(model.state == LOADING for model in self._hosted[connection])

    @property
    def connections(self) -> list[StageConnection]:
        return list(self._hosted)

    @property
    def instances(self) -> list[InstanceView]:
        live = {connection.instance_id for connection in self._hosted}
        views = [
            InstanceView(
                id=connection.instance_id,
                service=connection.service,
                state="DRAINING" if connection.is_draining else LOADING if self._is_loading(connection) else READY,
                in_flight=connection.in_flight,
                queued=connection.queued,
                arena_bytes=connection.arena_bytes,
                is_colocated=connection.is_colocated,
                models=tuple(f"{model.name}/{model.version} {model.state}" for model in models),
                host=connection.process.host,
            )
            for connection, models in self._hosted.items()
        ]
        away = [
            InstanceView(i.id or i.address, i.service, "UNREACHABLE", 0, 0, 0, False, i.models, i.host)
            for i in self._instances
            if i.id and i.id not in live
        ]
        return sorted([*views, *away], key=lambda view: (view.service, view.id))


def _check_hosted(model: HostedModel, config: ModelConfig) -> None:
    """
    Raises:
        ConfigError: no name, no version, or another model's configuration.
    """
    if not is_model_name(model.name):
        raise ConfigError("a served model's name is none")
    if not VERSION.fullmatch(model.version):
        raise ConfigError("a served model's version is no number above 0")
    if config.name != model.name:
        raise ConfigError("a served model's configuration is of another name")


def _place(instance: ServiceInstance) -> tuple[str, str, str]:
    return instance.id, instance.address, instance.local_address
