"""Which models and versions there are, in which state, and why: what RepositoryIndex says."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.mesh import Mesh
from gateway.models import Models
from gateway.repository import Repository
from tensorline.config import model_paths
from tensorline.errors import ConfigError
from tensorline.rpc.hosted import LOADING, READY, UNAVAILABLE, UNLOADED, UNLOADING, HostedModel

__all__ = ["IndexRow", "list_models"]

RANKS = (READY, LOADING, UNLOADING, UNAVAILABLE)
"""Of several instances' states for one version, the first of these is told."""


@dataclass(frozen=True, slots=True)
class IndexRow:
    name: str
    version: str = ""
    state: str = ""
    """"": the model was never loaded."""
    reason: str = ""


async def list_models(repository: Repository, models: Models, mesh: Mesh) -> list[IndexRow]:
    """A row for each version that is known, and one for each directory of the gateway's repositories without any.

    Source: protocol.md §11.1.
    """
    try:
        paths = await asyncio.to_thread(model_paths, repository.paths)
    except ConfigError:  # away at present: what is loaded is told nevertheless
        paths = {}
    hosted: dict[str, list[HostedModel]] = {}
    for _, told in mesh.hosted:
        for model in told:
            hosted.setdefault(model.name, []).append(model)
    hidden = {name for name, wish in repository.wishes if wish.has_files and name not in paths}
    names = sorted(({*paths, *hosted} | {*models.expected} | {entry.name for entry in models.unloaded}) - hidden)
    unloaded = {entry.name: entry.versions for entry in models.unloaded if entry.name in paths or not paths}
    return [row for name in names for row in _rows(name, models, hosted.get(name, ()), paths, unloaded)]


def _rows(
    name: str,
    models: Models,
    hosted: Sequence[HostedModel],
    paths: Mapping[str, list[Path]],
    unloaded: Mapping[str, Sequence[int]],
) -> list[IndexRow]:
    entry = models.entry(name)
    ready = models.versions(name)
    if len(paths.get(name, ())) > 1 and not ready:
        return [IndexRow(name, "", UNAVAILABLE, f"model '{name}' is in more than one repository; names must be unique")]
    if hosted:
        return _hosted_rows(name, hosted)
    if entry is not None and entry.error is not None:
        return [IndexRow(name, "", UNAVAILABLE, str(entry.error))]
    if entry is not None:
        rows = []
        for version in entry.versions:
            state, reason = (READY, "") if version in ready else (UNAVAILABLE, models.reason(name))
            rows.append(IndexRow(name, str(version), state, reason))
        return rows
    if name in unloaded:
        return [IndexRow(name, str(version), UNAVAILABLE, UNLOADED) for version in unloaded[name]]
    return [IndexRow(name)] if name in paths else []


def _hosted_rows(name: str, hosted: Sequence[HostedModel]) -> list[IndexRow]:
    by_version: dict[str, list[HostedModel]] = {}
    for model in hosted:
        by_version.setdefault(model.version, []).append(model)
    rows = []
    for version in sorted(by_version, key=lambda version: (len(version), version)):
        told = by_version[version]
        state = min((model.state for model in told), key=lambda state: RANKS.index(state) if state in RANKS else 9)
        # A reason that a failure left is told rather than that another instance was asked to unload.
        reasons = sorted(
            (model.reason for model in told if model.state == state), key=lambda reason: reason == UNLOADED
        )
        rows.append(IndexRow(name, version, state, next(filter(None, reasons), "") if state != READY else ""))
    return rows
