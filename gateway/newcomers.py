"""What instances that join should load, and what other gateways had loaded and unloaded."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from gateway.mesh import Mesh
from gateway.models import Models
from gateway.wishes import Wish, Wishes
from tensorline.errors import TensorlineError
from tensorline.rpc.connection import StageConnection
from tensorline.rpc.frames import LoadOrder
from tensorline.rpc.hosted import READY, UNLOADED, HostedModel

__all__ = ["Newcomers", "hosted_override"]

log = logging.getLogger(__name__)


class Newcomers:
    """Args:
    orders: What clients gave in place of the repository, by model, as far as it came by this worker.
    expect: Run for a model that was loaded by somebody else.
    """

    def __init__(
        self,
        mesh: Mesh,
        models: Models,
        wishes: Wishes,
        orders: Mapping[str, LoadOrder],
        expect: Callable[[str], Coroutine[Any, Any, None]],
    ) -> None:
        self._mesh = mesh
        self._models = models
        self._wishes = wishes
        self._orders = orders
        self._expect = expect
        self._told: dict[StageConnection, dict[str, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self) -> None:
        """To be called after the mesh's table changed."""
        hosted = [(connection, models) for connection, models in self._mesh.hosted if self._mesh.has_spoken(connection)]
        now = {connection: _states(models) for connection, models in hosted}
        for connection, models in hosted:
            states, before = now[connection], self._told.get(connection)
            if before is None:
                overrides = {model.name: model.override for model in models}
                self._run(self._welcome(connection, states, overrides))
                before = {}
            for name, state in states.items():
                self._learn(name, before.get(name, ""), state)
        self._told = now

    def _learn(self, name: str, before: str, state: str) -> None:
        wish = self._wishes.get(name)
        if state == READY and before != READY and (wish is None or (before and not wish.is_loaded)):
            self._wishes.learn(name, Wish(is_loaded=True, override=hosted_override(self._mesh, name)))
            self._run(self._expect(name))
        elif state == UNLOADED and before and before != UNLOADED and wish is not None and wish.is_loaded:
            self._wishes.unload(name)
            self._models.drop(name)

    async def _welcome(
        self, connection: StageConnection, states: Mapping[str, str], overrides: Mapping[str, str]
    ) -> None:
        work: list[Coroutine[Any, Any, None]] = []
        for name, wish in self._wishes:
            if wish.is_loaded and states.get(name) == READY and overrides.get(name) == wish.override:
                continue  # else it would look whether its folder has changed, which nobody asked for
            order = self._orders.get(name) or LoadOrder(name)
            if not wish.is_loaded and states.get(name, UNLOADED) != UNLOADED:
                work.append(_told(connection, name, connection.unload(name)))
            elif wish.is_loaded and not wish.pipeline and order.override == wish.override:
                # Of an override that came by another worker, or another gateway, that one tells.
                work.append(_told(connection, name, connection.load(order)))
        await asyncio.gather(*work)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _told(connection: StageConnection, model: str, work: Coroutine[Any, Any, object]) -> None:
    try:
        await work
    except TensorlineError as error:
        about = {"model": model, "stage": connection.instance_id, "cause": str(error)}
        log.warning("an instance that joined did not load or unload", extra=about)


def hosted_override(mesh: Mesh, name: str) -> str:
    """The digest that the stages tell of a model: a plain load may have left an override in force."""
    told = (hosted.override for _, models in mesh.hosted for hosted in models if hosted.name == name)
    return next((override for override in told if override), "")


def _states(models: Iterable[HostedModel]) -> dict[str, str]:
    """Of each model as a whole: READY if a version is, UNLOADED if all are that."""
    states: dict[str, str] = {}
    for model in models:
        state = UNLOADED if model.reason == UNLOADED else model.state
        known = states.get(model.name)
        if known is None or state == READY or known == UNLOADED:
            states[model.name] = state
    return states
