"""One request on its way through a plan: a state machine without clock, task or socket."""

from collections.abc import Sequence

from gateway.plan_graph import ADD, KEEP, Plan, Port
from tensorline.errors import InvalidTensorError, TensorlineError
from tensorline.tensor import Tensor

__all__ = ["Run"]


class Run:
    """The caller runs the steps that `start` and `complete` name, in any order, and reports each with `complete` or
    `fail`; after every such call it sends what `released` holds.

    An input of the pipeline that the request leaves out is absent, and so is an output that its step did not make. A
    step runs without an absent input. If its model requires that input, and it goes back to one that the request left
    out, then the step is skipped instead and its outputs are absent too; so is a step of which nothing is there. A
    requested output that ends absent is left out of the answer.

    One response for each step. Of a plan that is decoupled one run goes up to the decoupled step, and a `fork` of it
    from there on for each response.
    """

    __slots__ = (
        "_absent",
        "_flying",
        "_left",
        "_plan",
        "_readers",
        "_selection",
        "_tensors",
        "_waits",
        "error",
        "released",
    )

    def __init__(self, plan: Plan, outputs: frozenset[str] = frozenset()) -> None:
        self._plan = plan
        self._selection = selection = plan.select(outputs)
        self._waits = list(selection.waits)
        self._readers = dict(selection.readers)
        self._tensors: dict[str, Tensor] = {}
        self._absent: dict[str, bool] = {}  # by pipeline tensor: whether the request chose so
        self._left = len(selection.steps)
        self._flying: set[int] = set()
        self.released: list[Tensor] = []
        """Tensors, as they came, that nobody reads any more since the last call; each is listed once in a run.

        Several may share an arena block: whoever frees blocks counts them. Those of the answer are the caller's.
        """
        self.error: TensorlineError | None = None
        """The first failure, as the client is told; no step starts after it."""

    @property
    def is_finished(self) -> bool:
        """Nothing is in flight and nothing will start."""
        return not self._flying and (self._left == 0 or self.error is not None)

    def is_at(self, index: int) -> bool:
        """This step is in flight, and nothing else is or could be before it has ended."""
        return self._flying == {index}

    def fork(self) -> "Run":
        """Another run that goes on from here. What this one holds is read by both; the other one names it as released,
        too, and whoever frees blocks must know that it is this one's."""
        other = Run.__new__(Run)
        other._plan, other._selection, other._left, other.error = self._plan, self._selection, self._left, self.error
        other._waits, other._flying, other.released = list(self._waits), set(self._flying), []
        other._readers, other._tensors = dict(self._readers), dict(self._tensors)
        other._absent = dict(self._absent)
        return other

    @property
    def outputs(self) -> list[Tensor]:
        """The answer of a finished run, in the order of the configuration.

        Raises:
            InvalidTensorError: not one requested output was made.
        """
        wanted, tensors = self._selection.outputs, self._tensors
        found = [
            _entering(tensors[port.tensor], port)
            for port in self._plan.outputs
            if port.tensor in wanted and port.tensor in tensors
        ]
        if not found:
            raise InvalidTensorError(
                f"in ensemble '{self._plan.name}', unexpected deadlock: no requested output was produced"
            )
        return found

    def start(self, tensors: Sequence[Tensor]) -> list[int]:
        """Take the request's checked inputs; the steps that may run now."""
        self.released = []
        given = {tensor.name: tensor for tensor in tensors}
        known: list[str] = []
        for spec in self._plan.config.inputs:
            tensor = given.get(spec.name)
            if tensor is None:
                self._absent[spec.name] = True
            else:
                self._hold(spec.name, tensor)
            known.append(spec.name)
        return self._advance(known)

    def step_inputs(self, index: int) -> list[Tensor]:
        """What the step's model is sent: under its own input names, with the batch dimension that it expects."""
        tensors = self._tensors
        return [
            _entering(tensors[port.tensor], port) for port in self._plan.steps[index].ports if port.tensor in tensors
        ]

    def step_outputs(self, index: int) -> tuple[str, ...]:
        """The model outputs to ask for; others are released as they come."""
        return self._selection.wanted[index]

    def complete(self, index: int, outputs: Sequence[Tensor]) -> list[int]:
        """Take the response of a step in flight; the steps that may run now."""
        self.released = []
        self._flying.remove(index)
        step = self._plan.steps[index]
        for tensor in outputs:
            name = step.writes.get(tensor.name)
            if self.error is not None or name is None or name in self._tensors:
                self.released.append(tensor)
            else:
                self._hold(name, tensor)
        self._finish_reading(index)
        if self.error is not None:
            return []
        self._left -= 1
        known = list(step.writes.values())
        for name in known:
            if name not in self._tensors:
                self._absent.setdefault(name, False)
        return self._advance(known)

    def fail(self, index: int, error: TensorlineError) -> TensorlineError:
        """Take the failure of a step in flight; the error that the client gets once `is_finished`.

        What no step in flight reads is released, the answer's tensors too.
        """
        self.released = []
        self._flying.remove(index)
        if self.error is None:
            text = f"in ensemble '{self._plan.name}', model '{self._plan.steps[index].model}': {error}"
            self.error = type(error)(text)
            self._readers = dict.fromkeys(self._tensors, 0)
            for flying in self._flying:
                for name in self._plan.steps[flying].reads & self._tensors.keys():
                    self._readers[name] += 1
            for name in [name for name, count in self._readers.items() if not count]:
                self.released.append(self._tensors.pop(name))
        else:
            self._finish_reading(index)
        return self.error

    def _advance(self, known: list[str]) -> list[int]:
        """Steps that became ready, now that these pipeline tensors are here or known to be absent."""
        ready: list[int] = []
        waits, consumers, steps = self._waits, self._selection.consumers, self._plan.steps
        while known:
            for index in consumers[known.pop()]:
                waits[index] -= 1
                if waits[index]:
                    continue
                if self._absent and self._is_skipped(index):
                    self._left -= 1
                    self._finish_reading(index)
                    for name in steps[index].writes.values():
                        self._absent[name] = True
                        known.append(name)
                else:
                    self._flying.add(index)
                    ready.append(index)
        ready.sort()
        return ready

    def _is_skipped(self, index: int) -> bool:
        is_any_here, wants = False, []
        for port in self._plan.steps[index].ports:
            by_choice = self._absent.get(port.tensor)
            if by_choice is None:
                is_any_here = True
            elif port.is_required:
                wants.append(by_choice)
        # What a step before should have made and did not, its model is left to refuse.
        return any(wants) if wants else not is_any_here

    def _hold(self, name: str, tensor: Tensor) -> None:
        if name in self._readers:
            self._tensors[name] = tensor
        else:
            self.released.append(tensor)

    def _finish_reading(self, index: int) -> None:
        readers, tensors = self._readers, self._tensors
        for name in self._plan.steps[index].reads:
            if name in tensors:
                readers[name] -= 1
                if not readers[name]:
                    self.released.append(tensors.pop(name))


def _entering(tensor: Tensor, port: Port) -> Tensor:
    shape = tensor.shape
    if port.bridge != KEEP:
        shape = _bridged(shape, port)
    return Tensor(port.name, tensor.datatype, shape, tensor.data, tensor.handle)


def _bridged(shape: tuple[int, ...], port: Port) -> tuple[int, ...]:
    """Between a model with and one without a batch dimension.

    Source: scheduling.md §13.10.
    """
    dims = port.dims
    if port.bridge == ADD:
        fits = len(shape) == len(dims) and all(want in (-1, got) for want, got in zip(dims, shape, strict=True))
        return (1, *shape) if fits else shape
    return shape[1:] if len(shape) == len(dims) + 1 and shape[0] == 1 else shape
