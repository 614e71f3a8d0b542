"""A request with any number of responses on its way: what the service reads them from."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gateway.ledger import Ledger
from gateway.mesh import Mesh
from gateway.plane import GatewayPlane
from gateway.regions import RequestRegions
from gateway.runner import place_inputs
from gateway.stream_step import Patience, StreamStep
from tensorline.rpc.frames import ParameterValue
from tensorline.telemetry.record import RequestRecord
from tensorline.tensor import Tensor

__all__ = ["ModelStream", "ResponseStream", "StreamWork"]


@dataclass(slots=True)
class StreamWork:
    """What is asked for, by whom and until when."""

    mesh: Mesh
    plane: GatewayPlane
    record: RequestRecord
    """Filled with each step as it ends."""
    patience: Patience
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    priority: int = 0
    regions: RequestRegions | None = None

    def step(self, target: tuple[str, str], wanted: tuple[str, ...], ledger: Ledger) -> StreamStep:
        """A call of a decoupled model for this request; arguments as of `StreamStep`."""
        return StreamStep(
            self.mesh,
            self.plane,
            target,
            wanted,
            self.record,
            self.patience,
            self.parameters,
            self.priority,
            ledger,
        )


class ResponseStream(Protocol):
    """Responses of one request, made as they are asked for, a few ahead at most."""

    async def start(self, inputs: list[Tensor]) -> None:
        """Once, before `next`."""

    async def next(self) -> tuple[list[Tensor], bool]:
        """The next response with its bytes, and whether it is the last; a last one without tensors is the end alone.
        With this call the client has the response before.

        Raises:
            TensorlineError: the request failed; nothing follows.
        """

    @property
    def version(self) -> str:
        """That answers, as responses name it."""

    def close(self) -> None:
        """Nothing of the request runs on or is held."""


class ModelStream:
    """A request to one decoupled model."""

    def __init__(self, work: StreamWork, target: tuple[str, str], wanted: tuple[str, ...]) -> None:
        self._work = work
        self._ledger = Ledger(work.plane.give_back)
        self._step = work.step(target, wanted, self._ledger)

    async def start(self, inputs: list[Tensor]) -> None:
        work = self._work
        if work.regions is not None or work.plane.needs_placing(inputs):
            patience_s = work.patience.ends_at - time.monotonic()
            inputs = await place_inputs(work.plane, self._ledger, inputs, work.regions, patience_s)
        self._step.start(inputs)

    async def next(self) -> tuple[list[Tensor], bool]:
        outputs, is_last = await self._step.next()
        fetched = await self._work.plane.fetch(outputs, self._work.regions)
        self._step.let_go()
        return fetched, is_last

    @property
    def version(self) -> str:
        return self._step.version

    def close(self) -> None:
        self._step.close()
