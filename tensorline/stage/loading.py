"""Making one version of a model ready to serve: its instances, what they must agree with, its warm-up."""

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

from tensorline.config import ModelConfig, read_model_labels, with_devices
from tensorline.config.model import QueuePolicy
from tensorline.config.values import config_to_message
from tensorline.errors import BackendError, ConfigError, TensorlineError
from tensorline.stage.backend import Backends, Device, Instance, ModelDirectory, StreamInstance
from tensorline.stage.batch import Plane
from tensorline.stage.execution import Executed
from tensorline.stage.version import ModelVersion
from tensorline.stage.warmup import warmup_requests, warmup_tensors
from tensorline.telemetry.logs import one_line

__all__ = ["REASON_LIMIT", "Loader", "reason_of"]

log = logging.getLogger(__name__)

REASON_LIMIT = 512
"""Characters of why a model is not there."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loader:
    """What versions are made with.

    Args:
        threads: So many instances are made at once.
        on_executed: Of each version.
    """

    backends: Backends
    plane: Plane
    max_queue: int
    threads: asyncio.Semaphore
    on_executed: Callable[[Executed], None]

    async def load(self, config: ModelConfig, path: Path, version: int) -> ModelVersion:
        """A version that has run its warm-up; its configuration says where the instances are.

        Args:
            path: The model's directory.
        Raises:
            Exception: whatever the backend raised; nothing is left of the version then.
        """
        began_ns = time.monotonic_ns()
        _check_supported(config)
        completer: Callable[[ModelDirectory], ModelConfig] | None = getattr(
            self.backends[config.backend], "complete", None
        )
        if completer is not None:
            directory = ModelDirectory(config, version, path, path / str(version))
            config = await _on_thread(functools.partial(completer, directory))
        # This host has no GPU that a backend of this release could use.
        config = with_devices(config, gpus=())
        await _on_thread(functools.partial(read_model_labels, path, config))  # the gateway's to use, ours to miss
        directory = ModelDirectory(config, version, path, path / str(version))
        instances: list[tuple[str, Instance | StreamInstance]] = []
        try:
            for name, device in _placements(config):
                async with self.threads:
                    factory = functools.partial(self.backends[config.backend], directory, device)
                    instances.append((name, await _on_thread(factory)))
                _check_kind(config, instances[-1][1])
        except Exception:
            for name, instance in instances:  # without the version there are no threads of their own yet
                try:
                    await _on_thread(instance.close)
                except Exception:
                    log.exception("instance did not close", extra={"model_instance": name})
            raise
        made = ModelVersion(config, version, instances, self.plane, self.max_queue, self.on_executed)
        try:
            await _warm_up(made, path)
        except BaseException:
            await made.aclose(0.0)
            raise
        made.load_ns = time.monotonic_ns() - began_ns
        return made


async def _warm_up(made: ModelVersion, path: Path) -> None:
    """
    Raises:
        ConfigError: a sample that cannot be made, or that a request failed.
    Source: scheduling.md §12.
    """
    config = made.config
    for sample in config.warmups:
        if not sample.batch_size:
            continue
        tensors = await _on_thread(functools.partial(warmup_tensors, config, sample, path))
        make = functools.partial(warmup_requests, config, made.version, tensors, sample.batch_size)
        for _ in range(sample.count):
            failed = [result.error for result in await made.run_on_each(make) if result.status]
            if failed:
                raise ConfigError(f"failed to run warmup sample '{sample.name}': {'; '.join(dict.fromkeys(failed))}; ")


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
            done.set_result(cast(T, result))

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


def _check_kind(config: ModelConfig, instance: Instance | StreamInstance) -> None:
    """
    Raises:
        ConfigError: the backend answers in another way than the configuration says.
    """
    if config.decoupled and not hasattr(instance, "stream"):
        raise ConfigError(
            f"model '{config.name}' has model_transaction_policy {{ decoupled: true }}, but backend '{config.backend}' "
            "gives one response for each request"
        )
    if not config.decoupled and not hasattr(instance, "execute"):
        raise ConfigError(
            f"backend '{config.backend}' gives any number of responses: model '{config.name}' needs "
            "model_transaction_policy { decoupled: true }"
        )


def _placements(config: ModelConfig) -> list[tuple[str, Device]]:
    """Name and device of each instance."""
    placements = [
        (f"{group.name}_{number}", Device("cpu"))
        for group in config.instance_groups
        if not group.is_passive
        for number in range(group.count)
    ]
    return placements or [(f"{config.name}_0", Device("cpu"))]


def reason_of(error: Exception) -> str:
    """What a client may read of a load that failed: no place on this machine."""
    if isinstance(error, TensorlineError):
        return one_line(str(error), REASON_LIMIT)
    if isinstance(error, OSError):
        # A file's place on this machine is not for clients; its name within the model's folder is.
        return f"{type(error).__name__}: {error.strerror or 'failed'}: {os.path.basename(str(error.filename or ''))}"
    return f"{type(error).__name__} while loading"
