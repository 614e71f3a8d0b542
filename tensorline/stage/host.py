"""The models of one stage service: loaded and unloaded while others serve, found by name and version."""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tensorline.config import ModelConfig, RepositoryEntry
from tensorline.config.values import config_from_message, config_to_message
from tensorline.errors import NotFoundError, TensorlineError, UnavailableError
from tensorline.rpc.hosted import LOADING, READY, UNAVAILABLE, UNLOADED, UNLOADING, HostedModel
from tensorline.stage.backend import Backends
from tensorline.stage.batch import Plane
from tensorline.stage.execution import Executed
from tensorline.stage.loading import REASON_LIMIT, Loader, reason_of
from tensorline.stage.request import StageRequest
from tensorline.stage.version import ModelVersion
from tensorline.telemetry.logs import one_line

__all__ = ["ModelHost"]

log = logging.getLogger(__name__)

NAME_LIMIT = 128

QUEUES_LIMIT = 64
"""Of which a beat tells."""

_VERSION = re.compile(r"[1-9][0-9]{0,18}")


@dataclass(slots=True)
class _Slot:
    config: ModelConfig
    state: str
    reason: str = ""
    served: ModelVersion | None = None


@dataclass(slots=True)
class _Model:
    """What is known of one model."""

    versions: dict[int, _Slot] = field(default_factory=dict)
    newest: ModelVersion | None = None
    """That requests without a version go to."""
    override: str = ""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def settle(self) -> None:
        served = [slot.served for slot in self.versions.values() if slot.served is not None]
        self.newest = max(served, key=lambda version: version.version, default=None)


class ModelHost:
    """Args:
    backends: What this service can run; entries of other backends are not its business.
    on_change: Called on the loop when a version's state changed.
    load_threads: So many instances are made at once.
    """

    def __init__(
        self,
        backends: Backends,
        plane: Plane,
        max_queue: int,
        on_executed: Callable[[Executed], None],
        on_change: Callable[[], None],
        load_threads: int = 4,
    ) -> None:
        self.backends = backends
        self._loader = Loader(backends, plane, max_queue, asyncio.Semaphore(load_threads), on_executed)
        self.is_listed = False
        """Whether it is known what there is: before that nothing is said, not even that there is nothing."""
        self._on_change = on_change
        self._models: dict[str, _Model] = {}
        self._broken: dict[str, str] = {}
        self._leaving: dict[ModelVersion, asyncio.Task[None]] = {}

    @property
    def models(self) -> list[HostedModel]:
        """Every version that this service hosts, hosted or failed to, for the gateways."""
        return [
            _hosted(name, version, slot, model.override)
            for name, model in sorted(self._models.items())
            for version, slot in sorted(model.versions.items())
        ] + [HostedModel(name, "", UNAVAILABLE, reason, b"") for name, reason in sorted(self._broken.items())]

    @property
    def queued(self) -> int:
        return sum(version.queued for version in self.versions)

    @property
    def queues(self) -> list[tuple[str, str, int]]:
        """Model, version and requests waiting: the longest of the queues that are not empty."""
        waiting = [(each.config.name, str(each.version), each.queued) for each in self.versions if each.queued]
        return sorted(waiting, key=lambda queue: -queue[2])[:QUEUES_LIMIT]

    @property
    def versions(self) -> Iterable[ModelVersion]:
        slots = [slot for model in self._models.values() for slot in model.versions.values()]
        return [slot.served for slot in slots if slot.served is not None]

    def ready_versions(self, name: str) -> list[int]:
        model = self._models.get(name)
        return sorted(number for number, slot in model.versions.items() if slot.served) if model is not None else []

    def expect(self, entries: Iterable[RepositoryEntry]) -> None:
        """Say of what will be loaded that it is LOADING, before the first load begins. To be called once, also where
        that is nothing."""
        self.is_listed = True
        for entry in entries:
            if entry.config is not None:
                self._mark(self._models.setdefault(entry.name, _Model()), entry.config, entry.versions)
        self._on_change()

    def refuse(self, name: str, reason: str) -> None:
        """A model that cannot be loaded, and why. What serves under its name goes on."""
        # A directory may be called anything, and what is no text breaks the stream of every gateway.
        log.error("model configuration refused", extra={"model": name, "cause": reason})
        if not self.ready_versions(name):
            self._broken[one_line(name, NAME_LIMIT)] = one_line(reason, REASON_LIMIT)
            self._on_change()

    async def load(
        self, entry: RepositoryEntry, *, keeps: Iterable[int] = (), is_partial: bool = False, override: str = ""
    ) -> dict[int, Exception]:
        """Load what `entry` serves beside what is there, then switch; what is no longer wanted drains and goes.

        Args:
            keeps: Versions to leave as they are if they serve.
            is_partial: Where nothing served before, the versions that can be loaded serve although others cannot. Else
                all of them serve, or what served before.
            override: What the gateways are told of the configuration's origin.
        Returns:
            Why versions could not be loaded; empty: all are READY.
        """
        config = entry.config
        if config is None:
            raise AssertionError("an entry with an error is for `refuse`")
        model = self._models.setdefault(entry.name, _Model())
        async with model.changing:
            self._broken.pop(entry.name, None)
            kept = {version for version in keeps if version in entry.versions and _is_served(model, version)}
            if self._mark(model, config, set(entry.versions) - kept):
                self._on_change()
            made, failed = await self._make(config, entry, sorted(set(entry.versions) - kept))
            if failed and not (is_partial and model.newest is None):
                self._take_back(model, made, failed)
            else:
                for version in kept:
                    model.versions[version].config = _with_policy_of(model.versions[version].config, config)
                self._switch(model, made, failed, {*entry.versions})
                model.override = override
            self._on_change()
        return failed

    def _mark(self, model: _Model, config: ModelConfig, versions: Iterable[int]) -> bool:
        """Whether a state changed: a version that serves is READY until another takes its place."""
        is_new = False
        for version in versions:
            slot = model.versions.get(version)
            if slot is None or (slot.served is None and slot.state != LOADING):
                model.versions[version] = _Slot(config, LOADING)
                is_new = True
        return is_new

    async def _make(
        self, config: ModelConfig, entry: RepositoryEntry, versions: list[int]
    ) -> tuple[dict[int, ModelVersion], dict[int, Exception]]:
        made: dict[int, ModelVersion] = {}
        failed: dict[int, Exception] = {}

        async def make(version: int) -> None:
            try:
                made[version] = await self._loader.load(config, entry.path, version)
            except Exception as error:
                failed[version] = error
                log.error(
                    "failed to load model",
                    exc_info=None if isinstance(error, TensorlineError) else error,
                    extra={"model": entry.name, "version": version, "cause": reason_of(error)},
                )

        try:
            async with asyncio.TaskGroup() as loads:
                for version in versions:
                    loads.create_task(make(version))
        except BaseException:
            for each in made.values():
                self._retire(each)
            raise
        return made, failed

    def _switch(
        self, model: _Model, made: Mapping[int, ModelVersion], failed: Mapping[int, Exception], wanted: set[int]
    ) -> None:
        for version, each in made.items():
            slot = model.versions[version]
            if slot.served is not None:
                self._retire(slot.served)
            model.versions[version] = _Slot(each.config, READY, "", each)
            log.info("successfully loaded model", extra={"model": each.config.name, "version": version})
        for version, error in failed.items():
            slot = model.versions[version]
            slot.state, slot.reason = UNAVAILABLE, reason_of(error)
        for version in set(model.versions) - wanted:
            self._unload(model, version)
        model.settle()

    def _take_back(self, model: _Model, made: Mapping[int, ModelVersion], failed: Mapping[int, Exception]) -> None:
        for each in made.values():
            self._retire(each)
        for version in (*made, *failed):
            slot = model.versions[version]
            if slot.served is None:
                slot.state, slot.reason = UNAVAILABLE, reason_of(failed[version]) if version in failed else UNLOADED

    async def unload(self, name: str) -> None:
        """Take no more requests for `name`. Returns when that is so: what is in flight finishes by itself."""
        model = self._models.get(name)
        if self._broken.pop(name, None) is not None:
            self._on_change()
        if model is None:
            return
        async with model.changing:
            for version in model.versions:
                self._unload(model, version)
            model.settle()
            model.override = ""
            self._on_change()

    async def forget(self, name: str) -> None:
        """As `unload`, and tell no more of it once what is in flight has finished."""
        await self.unload(name)
        model = self._models.get(name)
        if model is None:
            return
        leaving = [task for version, task in self._leaving.items() if version.config.name == name]
        await asyncio.gather(*leaving, return_exceptions=True)
        async with model.changing:
            if model.newest is None:
                self._models.pop(name, None)
                self._on_change()

    def _unload(self, model: _Model, version: int) -> None:
        slot = model.versions[version]
        served, slot.served = slot.served, None
        if served is None:
            slot.state, slot.reason = UNAVAILABLE, UNLOADED
            return
        slot.state, slot.reason = UNLOADING, ""

        def gone() -> None:
            if slot.state == UNLOADING:
                slot.state, slot.reason = UNAVAILABLE, UNLOADED
                self._on_change()

        self._retire(served, gone)

    def _retire(self, version: ModelVersion, then: Callable[[], None] = lambda: None) -> None:
        """Let it finish what it has, however long that takes, and end."""

        async def leave() -> None:
            try:
                await version.aclose(None)
            except Exception:
                log.exception("model version did not close", extra={"model": version.config.name})
            finally:
                self._leaving.pop(version, None)
            log.info("unloaded model", extra={"model": version.config.name, "version": version.version})
            then()

        self._leaving[version] = asyncio.create_task(leave())

    async def wait_left(self, name: str) -> None:
        """Until no version of `name` that was replaced or unloaded so far runs any more."""
        leaving = [task for version, task in self._leaving.items() if version.config.name == name]
        await asyncio.gather(*leaving, return_exceptions=True)

    def find(self, model: str, version: str) -> ModelVersion:
        """
        Raises:
            NotFoundError: no such model or version here.
            UnavailableError: it is here and not ready.
        """
        known = self._models.get(model)
        if known is not None:
            if not version and known.newest is not None:
                return known.newest
            slot = known.versions.get(int(version) if _VERSION.fullmatch(version) else -1)
            if slot is not None:
                if slot.served is not None:
                    return slot.served
                raise UnavailableError(f"Request for unknown model: '{model}' version {version} is not at ready state")
        if model not in self._broken and known is None:
            raise NotFoundError(f"Request for unknown model: '{model}' is not found")
        if version:
            raise NotFoundError(f"Request for unknown model: '{model}' version {version} is not found")
        raise UnavailableError(f"Request for unknown model: '{model}' has no available versions")

    def submit(self, request: StageRequest) -> ModelVersion:
        """Admit a request at its model; the version that will answer it."""
        version = self.find(request.model, request.version)
        version.submit(request)
        return version

    async def aclose(self, timeout_s: float) -> None:
        leaving = dict(self._leaving)
        await asyncio.gather(*(version.aclose(timeout_s) for version in (*self.versions, *leaving)))
        for model in self._models.values():
            for slot in model.versions.values():
                slot.served = None
                slot.state = UNAVAILABLE
            model.settle()
        for task in leaving.values():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _is_served(model: _Model, version: int) -> bool:
    slot = model.versions.get(version)
    return slot is not None and slot.served is not None


def _hosted(name: str, version: int, slot: _Slot, override: str) -> HostedModel:
    load = (slot.served.load_id, slot.served.load_ns) if slot.served is not None else (0, 0)
    return HostedModel(name, str(version), slot.state, slot.reason, slot.config.encoded, *load, override)


def _with_policy_of(config: ModelConfig, other: ModelConfig) -> ModelConfig:
    """The completed `config` with the version policy that the model has now."""
    message = config_to_message(config)
    message.version_policy.CopyFrom(config_to_message(other).version_policy)
    return config_from_message(message)
