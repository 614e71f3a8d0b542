"""Asking the stages to load a model, and one answer of all theirs."""

import asyncio
from collections.abc import Iterable, Sequence

from gateway.mesh import Mesh
from gateway.models import Models
from tensorline.config import RepositoryEntry
from tensorline.config.override import refused
from tensorline.errors import InternalError, TensorlineError, UnavailableError, UnloadableError
from tensorline.rpc.connection import StageConnection
from tensorline.rpc.frames import LoadOrder

__all__ = ["failed_load", "load_at_stages"]


async def load_at_stages(mesh: Mesh, models: Models, entry: RepositoryEntry | None, order: LoadOrder) -> None:
    """Have every instance that hosts the model's backend load it.

    Args:
        entry: As the gateway's own repository has it; None: only the stages can know.
    Raises:
        InternalError: no such model, or its configuration cannot be used.
        TensorlineError: of a stage that could not load it.
        UnloadableError: nobody hosts its backend; the text names those that are hosted.
    """
    backend = entry.config.backend if entry is not None and entry.config is not None else ""
    asked = [each for each in mesh.connections if _may_host(each, backend)]
    outcomes = await asyncio.gather(*(each.load(order) for each in asked), return_exceptions=True)
    errors: list[TensorlineError] = []
    for outcome in outcomes:
        if isinstance(outcome, TensorlineError):
            errors.append(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
    is_loaded = True in outcomes
    # One that is shutting down, or was killed, is no obstacle as long as another has it.
    if grave := [error for error in errors if not (is_loaded and isinstance(error, UnavailableError))]:
        if grave[0].status is UnloadableError.status and entry is not None and not models.versions(order.model):
            models.put(entry)  # asked for and not there: the gateway is not ready
        raise grave[0]
    if is_loaded:
        if entry is not None:
            models.put(entry)
    elif missing := models.missing_backend(backend):
        versions = entry.versions if entry is not None else (1,)
        raise failed_load(order.model, versions, f"unable to find backend library for backend '{backend}'{missing}")
    else:
        raise InternalError(f"{refused(order.model)}: {_nobody(backend, asked, mesh.backends)}")


def _may_host(connection: StageConnection, backend: str) -> bool:
    is_there = connection.is_open and not connection.is_draining
    return is_there and (not backend or not connection.backends or backend in connection.backends)


def _nobody(backend: str, asked: Sequence[StageConnection], backends: Iterable[str]) -> str:
    if not asked:
        there = ", ".join(sorted(backends)) or "none"
        return (
            f"no instance is there{f' for backend {backend!r}' if backend else ''}; backends that are hosted: {there}"
        )
    return "no instance that is there has it in its repositories, with a backend that it hosts"


def failed_load(model: str, versions: Iterable[int], cause: str) -> UnloadableError:
    """As Triton says it, with one part for each version."""
    parts = [f"version {version} is at UNAVAILABLE state: Invalid argument: {cause};\n" for version in versions]
    return UnloadableError(f"load failed for model '{model}': {''.join(parts)}")
