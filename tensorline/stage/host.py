"""The models of one stage service: loaded from the repository, found by name and version, unloaded at the end."""

import asyncio
import contextlib
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from tensorline.config import ModelConfig, scan, with_devices
from tensorline.config.model import QueuePolicy
from tensorline.config.values import config_to_message
from tensorline.errors import BackendError, ConfigError, NotFoundError, TensorlineError, UnavailableError
from tensorline.rpc.connection import HostedModel
from tensorline.stage.backend import Backends, Device, Instance, ModelDirectory
from tensorline.stage.execution import Executed, Plane
from tensorline.stage.request import StageRequest
from tensorline.stage.version import ModelVersion
from tensorline.telemetry.logs import one_line

__all__ = ["ModelHost"]

log = logging.getLogger(__name__)

READY, LOADING, UNAVAILABLE = "READY", "LOADING", "UNAVAILABLE"

REASON_LIMIT = 512
"""Characters of why a model is not there."""

NAME_LIMIT = 128

_VERSION = re.compile(r"[1-9][0-9]{0,18}")

T = TypeVar("T")


@dataclass(slots=True)
class _Slot:
    config: ModelConfig
    state: str
    reason: str = ""
    served: ModelVersion | None = None


class ModelHost:
    """Args:
    backends: What this service can run; entries of other backends are not its business.
    on_change: Called on the loop when a version's state changed.
    """

    def __init__(
        self,
        backends: Backends,
        plane: Plane,
        max_queue: int,
        on_executed: Callable[[Executed], None],
        on_change: Callable[[], None],
    ) -> None:
        self._backends = backends
        self._plane = plane
        self._max_queue = max_queue
        self._on_executed = on_executed
        self._on_change = on_change
        self._slots: dict[tuple[str, int], _Slot] = {}
        self._broken: dict[str, str] = {}
        self._newest: dict[str, int] = {}

    @property
    def models(self) -> list[HostedModel]:
        """Every version that this service hosts or failed to, for the gateways."""
        return [
            HostedModel(name, str(version), slot.state, slot.reason, slot.config.encoded)
            for (name, version), slot in sorted(self._slots.items())
        ] + [HostedModel(name, "", UNAVAILABLE, reason, b"") for name, reason in sorted(self._broken.items())]

    @property
    def queued(self) -> int:
        return sum(slot.served.queued for slot in self._slots.values() if slot.served is not None)

    @property
    def versions(self) -> Iterable[ModelVersion]:
        return [slot.served for slot in self._slots.values() if slot.served is not None]

    async def load_all(self, repositories: list[Path], threads: int) -> None:
        """Load what the repositories have for our backends. A version that fails is UNAVAILABLE with its reason."""
        entries = await asyncio.to_thread(scan, repositories)
        mine: list[tuple[ModelConfig, Path, int]] = []
        for entry in entries:
            config = entry.config
            if config is None:
                # A directory may be called anything, and what is no text breaks the stream of every gateway.
                self._broken[one_line(entry.name, NAME_LIMIT)] = one_line(str(entry.error), REASON_LIMIT)
                log.error("model configuration refused", extra={"model": entry.name, "cause": str(entry.error)})
            elif config.backend in self._backends:
                mine.extend((config, entry.path, version) for version in entry.versions)
        for config, _, version in mine:
            self._slots[config.name, version] = _Slot(config, LOADING)
        self._on_change()
        slots = asyncio.Semaphore(threads)
        async with asyncio.TaskGroup() as loads:
            for one in mine:
                loads.create_task(self._load(*one, slots))

    async def _load(self, config: ModelConfig, path: Path, version: int, slots: asyncio.Semaphore) -> None:
        slot = self._slots[config.name, version]
        directory = ModelDirectory(config, version, path, path / str(version))
        factory = self._backends[config.backend]
        instances: list[tuple[str, Instance]] = []
        try:
            _check_supported(config)
            # This host has no GPU that a backend of this release could use.
            for name, device in _placements(with_devices(config, gpus=())):
                async with slots:
                    instance = await _on_thread(functools.partial(factory, directory, device))
                instances.append((name, instance))
            served = ModelVersion(config, version, instances, self._plane, self._max_queue, self._on_executed)
        except Exception as error:
            for name, instance in instances:  # without the version there are no threads of their own yet
                try:
                    await _on_thread(instance.close)
                except Exception:
                    log.exception("instance did not close", extra={"model_instance": name})
            slot.state, slot.reason = UNAVAILABLE, _reason(error)
            log.error(
                "failed to load model",
                exc_info=None if isinstance(error, TensorlineError) else error,
                extra={"model": config.name, "version": version, "cause": slot.reason},
            )
        else:
            slot.served, slot.state = served, READY
            self._newest[config.name] = max(version, self._newest.get(config.name, 0))
            log.info("successfully loaded model", extra={"model": config.name, "version": version})
        self._on_change()

    def find(self, model: str, version: str) -> ModelVersion:
        """
        Raises:
            NotFoundError: no such model or version here.
            UnavailableError: it is here and not ready.
        """
        newest = self._newest.get(model)
        if newest is not None and not version:
            found = self._slots[model, newest].served
            if found is not None:
                return found
        slot = self._slots.get((model, int(version) if _VERSION.fullmatch(version) else -1))
        if slot is not None:
            if slot.served is not None:
                return slot.served
            raise UnavailableError(f"Request for unknown model: '{model}' version {version} is not at ready state")
        if model not in self._broken and not any(name == model for name, _ in self._slots):
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
        await asyncio.gather(*(version.aclose(timeout_s) for version in self.versions))
        for slot in self._slots.values():
            slot.served = None
            slot.state = UNAVAILABLE
        self._newest.clear()


async def _on_thread(work: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`, on a thread that the end of the process does not wait for: a load may take minutes.

    Raises:
        BackendError: in place of what is no Exception: a model's code may exit.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failure: Exception | None = None
        try:
            result = work()
        except StopIteration:  # no future takes one
            failure = BackendError("StopIteration while loading")
        except Exception as error:
            failure = error
        except BaseException as error:
            failure = BackendError(f"{type(error).__name__} while loading")
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await done


def _check_supported(config: ModelConfig) -> None:
    """
    Raises:
        ConfigError: the model counts on a scheduler of a later release; running it otherwise would be wrong in silence.
    """
    batching, message = config.dynamic_batching, config_to_message(config)
    missing = {
        "sequence_batching": config.sequence_batching is not None,
        "model_transaction_policy { decoupled: true }": config.decoupled,
        "response_cache": config.response_cache,
        "dynamic_batching.preserve_ordering": batching is not None and batching.preserve_ordering,
        "dynamic_batching.priority_levels": batching is not None and batching.priority_levels > 0,
        "dynamic_batching.default_queue_policy": batching is not None
        and replace(batching.default_queue_policy, max_queue_size=0) != QueuePolicy(),
        "dynamic_batching.priority_queue_policy": batching is not None and bool(batching.priority_queue_policy),
        "batch_input": bool(message.batch_input),
        "batch_output": bool(message.batch_output),
        "allow_ragged_batch": any(spec.allow_ragged_batch for spec in config.inputs),
        "is_shape_tensor": any(spec.is_shape_tensor for spec in (*config.inputs, *config.outputs)),
    }
    for name, is_used in missing.items():
        if is_used:
            raise ConfigError(f"model '{config.name}' uses {name}, which this release does not offer yet")


def _placements(config: ModelConfig) -> list[tuple[str, Device]]:
    """Name and device of each instance."""
    placements = [
        (f"{group.name}_{number}", Device("cpu"))
        for group in config.instance_groups
        if not group.is_passive
        for number in range(group.count)
    ]
    return placements or [(f"{config.name}_0", Device("cpu"))]


def _reason(error: Exception) -> str:
    if isinstance(error, TensorlineError):
        return one_line(str(error), REASON_LIMIT)
    if isinstance(error, OSError):
        # A file's place on this machine is not for clients; its name within the model's folder is.
        return f"{type(error).__name__}: {error.strerror or 'failed'}: {os.path.basename(str(error.filename or ''))}"
    return f"{type(error).__name__} while loading"
