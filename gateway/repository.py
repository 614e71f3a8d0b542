"""Loading and unloading through the gateway: it asks the stages that can run a model; pipelines are its own."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gateway.load_calls import failed_load, load_at_stages
from gateway.mesh import Mesh
from gateway.models import Models
from gateway.newcomers import Newcomers, hosted_override
from gateway.plan import compile_plan
from gateway.siblings import Siblings
from gateway.wishes import WISHES_PATH, Wish, Wishes
from tensorline.config import (
    Footprint,
    ModelConfig,
    RepositoryEntry,
    config_from_encoded,
    config_from_override,
    find_entry,
    footprint,
    model_paths,
    scan,
    served_versions,
)
from tensorline.config.load import is_version_name
from tensorline.config.override import load_error, override_digest, refused
from tensorline.config.parse import parse_config_json
from tensorline.config.watch import RepositoryWatch
from tensorline.errors import ConfigError, InternalError, TensorlineError, UnavailableError, UnloadableError
from tensorline.rpc.frames import LoadOrder
from tensorline.settings import EXPLICIT

__all__ = ["Repository"]

log = logging.getLogger(__name__)

HEAR_S: Final = 1.5
"""How long a worker waits to hear from the stages what another one had loaded, before that one answers its client."""

Files = Mapping[str, bytes]


class Repository:
    """Args:
    paths: The gateway's own repositories: of pipelines and labels, and to know the backend of a model.
    mode: "none", "poll" or "explicit".
    names: Models to expect from the start in mode explicit; "*" is all of them.
    on_pipeline: Told name and version of a pipeline that was loaded anew, and whether it is there now.
    """

    def __init__(
        self,
        mesh: Mesh,
        models: Models,
        paths: Sequence[Path] = (),
        mode: str = "none",
        names: Iterable[str] = (),
        siblings: Siblings | None = None,
        worker: int = 0,
        on_pipeline: Callable[[str, int, bool], None] = lambda name, version, is_there: None,
    ) -> None:
        self.mode = mode
        self.paths = list(paths)
        self.wishes = Wishes(worker)
        self._mesh = mesh
        self._models = models
        self._names = frozenset(names)
        self._siblings = siblings or Siblings(())
        self._on_pipeline = on_pipeline
        self._watch = RepositoryWatch(self.paths)
        self._orders: dict[str, LoadOrder] = {}
        """What clients gave in place of the repository, as far as it came by this worker."""
        self._marks: dict[str, Footprint] = {}
        """What the directories of overridden pipelines looked like."""
        self._newcomers = Newcomers(mesh, models, self.wishes, self._orders, self._expect)
        self._late: dict[str, RepositoryEntry] = {}
        """Pipelines that changed on disk and do not fit the models that serve, while the old ones do."""

    async def start(self) -> None:
        """Expect what the mode says.

        Raises:
            ConfigError: a repository cannot be read.
        """
        if self.mode == "poll":
            await self._watch.begin()
        entries = await asyncio.to_thread(scan, self.paths)
        if self.mode == EXPLICIT and "*" not in self._names:
            entries = [entry for entry in entries if entry.name in self._names]
        for entry in entries:
            self._models.put(entry)
            if self.mode == EXPLICIT and entry.config is not None:
                self.wishes.learn(entry.name, _wish(entry, is_by_name=True))
        if self.mode == EXPLICIT:
            for entry in entries:  # its models are loaded with a pipeline
                for step in entry.config.steps if entry.config is not None else ():
                    self.wishes.learn(step.model, self.wishes.get(step.model) or Wish(is_loaded=True))

    async def catch_up(self) -> None:
        """What clients had loaded through the other workers before this one began."""
        for body in await self._siblings.ask(WISHES_PATH):
            await self._adopt(self.wishes.merge(body))

    async def merge(self, body: bytes) -> bytes:
        """Take what another worker tells, when the stages have told it, too; what is known here, for one that asks."""
        names = self.wishes.merge(body)
        await self._adopt(names)
        until = asyncio.get_running_loop().time() + HEAR_S
        while asyncio.get_running_loop().time() < until and not all(map(self._is_as_wished, names)):
            await asyncio.sleep(0.005)
        return self.wishes.everything()

    def _is_as_wished(self, name: str) -> bool:
        wish = self.wishes.get(name)
        return wish is None or not wish.is_loaded or bool(self._models.versions(name))

    async def _adopt(self, names: Iterable[str]) -> None:
        for name in names:
            wish = self.wishes.get(name)
            if wish is None:
                continue
            if not wish.is_loaded:
                self._drop(name)
            elif wish.pipeline:
                config = config_from_encoded(bytes.fromhex(wish.pipeline))
                self._put_pipeline(RepositoryEntry(name, Path(name), config, None, wish.versions))
            else:
                await self._expect(name)

    async def _expect(self, name: str) -> None:
        """A model was loaded, but not through this worker."""
        try:
            entry = await asyncio.to_thread(find_entry, self.paths, name)
        except ConfigError as error:
            log.error("model repositories not read", extra={"cause": str(error)})
            return
        wish = self.wishes.get(name)
        is_model = entry is not None and entry.config is not None and not entry.config.is_ensemble
        if entry is not None and is_model and wish is not None and wish.is_loaded:
            self._models.put(entry)

    async def load(self, name: str, config: str = "", files: Files | None = None, *, is_by_name: bool = True) -> None:
        """Load a model or pipeline, again if it has changed, and what a pipeline needs. Returns when it serves.

        Args:
            config: JSON of an inference.ModelConfig in place of config.pbtxt.
            files: In place of the model's directory, by path in it.
        Raises:
            UnavailableError: the control mode is another one, or the stage left.
            InternalError: no such model, or its configuration cannot be used.
            ConfigError: it cannot be loaded. What served before goes on.
        """
        given = files or {}
        await self._load(name, LoadOrder(name, config, given, override_digest(config, given)), (), is_by_name)

    async def _load(self, name: str, order: LoadOrder, path: tuple[str, ...], is_by_name: bool) -> None:
        self._check_explicit()
        try:
            seen = await asyncio.to_thread(self._footprint, name)
            if not order.override and self._marks.get(name) == seen:
                order = self._orders.get(name, order)  # an overridden pipeline stays so until its directory changes
            entry = await asyncio.to_thread(self._find, order)
        except ConfigError as error:  # its text has the place
            log.error("model repositories not read", extra={"cause": str(error)})
            raise InternalError(f"{refused(name)}: a repository cannot be read") from error
        if entry is not None and entry.error is not None:
            raise load_error(name, entry.error)
        if entry is not None and entry.config is not None and entry.config.is_ensemble:
            await self._load_parts(entry.config, (*path, name))
            self._check_plan(entry.config, entry.versions)
            self._put_pipeline(entry)
            self._marks.pop(name, None)
            if order.override:
                self._marks[name] = seen
        else:
            await load_at_stages(self._mesh, self._models, entry, order)
        known = self.wishes.get(name)
        if order.override:
            self._orders[name] = order
        wish = _wish(entry, is_by_name=is_by_name)
        override = order.override or (hosted_override(self._mesh, name) if known is not None and known.override else "")
        if not override:
            self._orders.pop(name, None)
        has_files = bool(order.files) if order.override else bool(override and known is not None and known.has_files)
        wish = replace(wish, override=override, has_files=has_files)
        await self._siblings.tell(WISHES_PATH, self.wishes.load(name, wish))

    def _check_explicit(self) -> None:
        if self.mode != EXPLICIT:
            # Triton's words, in every other mode; and then ours.
            raise UnavailableError(
                "explicit model load / unload is not allowed if polling is enabled; the model control mode is "
                f"'{self.mode}', and has to be 'explicit'"
            )

    def _footprint(self, name: str) -> Footprint:
        """
        Raises:
            ConfigError: a repository cannot be read.
        """
        paths = model_paths(self.paths).get(name, ())
        return footprint(paths[0]) if len(paths) == 1 else Footprint()

    def _find(self, order: LoadOrder) -> RepositoryEntry | None:
        """Of our own repositories, and what a client gave. None: only the stages can know."""
        if not order.files:
            return find_entry(self.paths, order.model, order.config)
        try:
            message = parse_config_json(order.config, f"{order.model}: config override")
            if message.platform != "ensemble" and not message.HasField("ensemble_scheduling"):
                return None
            config = config_from_override(order.config, order.model, None)
            versions = served_versions(config, _versions_in(order.files))
        except ConfigError as error:
            return RepositoryEntry(order.model, Path(order.model), None, error, ())
        return RepositoryEntry(order.model, Path(order.model), config, None, versions)

    async def _load_parts(self, config: ModelConfig, path: tuple[str, ...]) -> None:
        """
        Raises:
            UnloadableError: names the models that cannot be loaded, and why.
        """
        names = list(dict.fromkeys(step.model for step in config.steps))
        if any(name in path for name in names):
            raise UnloadableError(f"load failed for model '{config.name}': ensembles form a cycle")
        outcomes = await asyncio.gather(
            *(self._load(each, LoadOrder(each), path, False) for each in names), return_exceptions=True
        )
        failed: dict[str, TensorlineError] = {}
        for each, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, TensorlineError):
                failed[each] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        if failed:
            reasons = "; ".join(str(error).strip() for error in failed.values())
            raise UnloadableError(
                f"load failed for model '{config.name}': ensemble {config.name} contains models that are not available "
                f"or ambiguous: {', '.join(failed)} ({reasons})"
            )

    def _check_plan(self, config: ModelConfig, versions: Sequence[int]) -> None:
        """
        Raises:
            UnloadableError: the pipeline does not fit its models.
        """
        try:
            compile_plan(config, self._mesh.config)
        except ConfigError as error:
            raise failed_load(config.name, versions, str(error)) from error

    async def unload(self, name: str, *, takes_dependents: bool = False) -> None:
        """Take no more requests for a model or pipeline; an unknown one is no error.

        Args:
            takes_dependents: Unload with a pipeline the models that only it needs and nobody loaded by name.
        Raises:
            UnavailableError: the control mode is another one.
        """
        self._check_explicit()
        entry = self._models.entry(name)
        steps = entry.config.steps if entry is not None and entry.config is not None else ()
        wish = self.wishes.get(name)
        is_known = entry is not None or wish is not None or name in self._mesh.model_names
        self._orders.pop(name, None)
        self._marks.pop(name, None)
        if is_known:
            told = self.wishes.unload(name)
            self._drop(name)
            outcomes = await asyncio.gather(
                *(each.unload(name) for each in self._mesh.connections if each.is_open), return_exceptions=True
            )
            for outcome in outcomes:  # one that is gone has unloaded it, too
                if isinstance(outcome, BaseException) and not isinstance(outcome, TensorlineError):
                    raise outcome
                if isinstance(outcome, TensorlineError):
                    log.warning("a stage did not unload", extra={"model": name, "cause": str(outcome)})
            await self._siblings.tell(WISHES_PATH, told)
        if takes_dependents:
            for part in dict.fromkeys(step.model for step in steps):
                known = self.wishes.get(part)
                if known is not None and known.is_loaded and not known.is_by_name and not self._is_needed(part):
                    await self.unload(part, takes_dependents=True)

    def _is_needed(self, name: str) -> bool:
        entries = (self._models.entry(each) for each in self.wishes.loaded)
        return any(
            step.model == name
            for entry in entries
            if entry is not None and entry.config is not None
            for step in entry.config.steps
        )

    def _put_pipeline(self, entry: RepositoryEntry) -> None:
        old = self._models.entry(entry.name)
        if old is not None and old.config == entry.config and old.versions == entry.versions:
            return
        self._drop(entry.name)
        self._models.put(entry)
        for version in entry.versions:
            self._on_pipeline(entry.name, version, True)
        log.info("successfully loaded model", extra={"model": entry.name})

    def _drop(self, name: str) -> None:
        entry = self._models.entry(name)
        self._models.drop(name)
        if entry is not None and entry.config is not None and entry.config.is_ensemble:
            for version in entry.versions:
                self._on_pipeline(name, version, False)

    def follow(self) -> None:
        """To be called after the mesh's table changed."""
        for entry in list(self._late.values()):
            self._replace(entry)
        if self.mode == EXPLICIT:
            self._newcomers.follow()

    async def watch(self, every_s: float) -> None:
        """Follow what changes in our own repositories, until cancelled."""
        while self.mode == "poll":
            await asyncio.sleep(every_s)
            try:
                for name in await self._watch.changed():
                    await self._follow_one(name)
            except ConfigError as error:  # a repository is away: what serves goes on
                log.error("model repositories not polled", extra={"cause": str(error)})
        await asyncio.Event().wait()

    async def _follow_one(self, name: str) -> None:
        entry = await asyncio.to_thread(find_entry, self.paths, name)
        self._late.pop(name, None)
        if entry is None:
            self._drop(name)
        elif entry.config is not None and entry.config.is_ensemble:
            self._replace(entry)
        else:
            self._models.put(entry)

    def _replace(self, entry: RepositoryEntry) -> None:
        """The pipeline that serves by the one on disk, once that fits its models: they may have changed with it."""
        config = entry.config
        if config is None:
            return
        try:
            compile_plan(config, self._mesh.config)
        except ConfigError as error:
            if self._models.versions(entry.name):
                if entry.name not in self._late:
                    log.warning("changed pipeline waits", extra={"model": entry.name, "cause": str(error)})
                self._late[entry.name] = entry
                return
        self._late.pop(entry.name, None)
        self._put_pipeline(entry)

    async def aclose(self) -> None:
        await self._newcomers.aclose()


def _wish(entry: RepositoryEntry | None, *, is_by_name: bool) -> Wish:
    if entry is None or entry.config is None or not entry.config.is_ensemble:
        return Wish(is_loaded=True, is_by_name=is_by_name)
    return Wish(
        is_loaded=True, is_by_name=is_by_name, pipeline=entry.config.encoded.hex(), versions=tuple(entry.versions)
    )


def _versions_in(files: Iterable[str]) -> list[int]:
    first = {path.partition("/")[0] for path in files if "/" in path}
    return sorted(int(name) for name in first if is_version_name(name))
