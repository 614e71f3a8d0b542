"""Whether a decoded request fits the model's configuration. Pure; a checker is made once for each model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from tensorline.config.model import ModelConfig, TensorSpec
from tensorline.errors import InvalidTensorError
from tensorline.protocol.elements import check_elements
from tensorline.protocol.infer import InferRequest, shown
from tensorline.tensor import BYTES, DATATYPES, ELEMENT_LIMIT, RANK_LIMIT, Tensor, element_count

__all__ = ["HEAVY_ELEMENTS", "RequestChecker"]

HEAVY_ELEMENTS: Final = 1 << 14
"""String elements of one input from which a check may take 5 ms."""


@dataclass(frozen=True, slots=True)
class _Input:
    """What is asked of one input, computed once."""

    spec: TensorSpec
    expected: tuple[int, ...]
    """The shape wanted, with -1 for the batch dimension where there is one."""
    rank: int
    is_batched: bool
    fixed: tuple[tuple[int, int], ...]
    """Positions and sizes of the dimensions that are not -1."""
    itemsize: int
    """Bytes of one element; 0 for BYTES."""
    place: str


class RequestChecker:
    """Checks requests to one model.

    The first failure is the answer, in Triton's order: requested outputs, number and names of inputs, batch size, then
    for each input datatype, shape and byte size.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._max_batch_size = config.max_batch_size
        self._inputs = {spec.name: _input(spec, config) for spec in config.inputs}
        self._required = [spec.name for spec in config.inputs if not spec.optional]
        self._outputs = frozenset(spec.name for spec in config.outputs)

    def is_heavy(self, request: InferRequest) -> bool:
        """Whether `check` should run in a thread: BYTES inputs of many elements are walked one by one."""
        return any(
            tensor.datatype == BYTES
            and tensor.byte_size > 4 * HEAVY_ELEMENTS  # each has at least its length
            and len(tensor.shape) <= RANK_LIMIT  # else refused by its shape
            and element_count(tensor.shape) > HEAVY_ELEMENTS
            for tensor in request.inputs
        )

    def check(self, request: InferRequest) -> int:
        """The request's rows: its batch size, 1 for a model without batching.

        Raises:
            InvalidTensorError: what came and what was wanted.
        Source: protocol.md §5.2, §5.4, §5.5; errors.md §3, §4.
        """
        if request.outputs:
            self._check_outputs(request)
        tensors = request.inputs
        inputs = self._inputs
        if len(tensors) != len(self._required) or len(tensors) != len(inputs):
            self._check_number(request)
        elif len(tensors) > 1:
            self._check_duplicates(request)
        for tensor in tensors:
            if tensor.name not in inputs:
                raise InvalidTensorError(
                    f"unexpected inference input '{shown(tensor.name)}' for model '{self._model}', "
                    f"it has {_names(inputs)}"
                )
        if len(tensors) < len(inputs):
            self._check_required(request)
        rows = self._rows(request) if self._max_batch_size else 1
        for tensor in tensors:
            self._check_tensor(request, tensor, inputs[tensor.name])
        return rows

    def _check_outputs(self, request: InferRequest) -> None:
        seen: set[str] = set()
        for output in request.outputs:
            if output.name not in self._outputs:
                raise InvalidTensorError(
                    f"unexpected inference output '{shown(output.name)}' for model '{self._model}', "
                    f"it has {_names(sorted(self._outputs))}"
                )
            if output.name in seen:
                _refuse(request, f"output '{output.name}' already exists in request")
            seen.add(output.name)

    def _check_duplicates(self, request: InferRequest) -> None:
        seen: set[str] = set()
        for tensor in request.inputs:
            if tensor.name in seen:
                _refuse(request, f"input '{shown(tensor.name)}' already exists in request")
            seen.add(tensor.name)

    def _check_number(self, request: InferRequest) -> None:
        self._check_duplicates(request)
        if not len(self._required) <= len(request.inputs) <= len(self._inputs):
            self._refuse_number(request)

    def _check_required(self, request: InferRequest) -> None:
        """The number may fit while an optional input stands where a required one is missing."""
        given = {tensor.name for tensor in request.inputs}
        if not given.issuperset(self._required):
            self._refuse_number(request)

    def _refuse_number(self, request: InferRequest) -> NoReturn:
        least, most, got = len(self._required), len(self._inputs), len(request.inputs)
        wanted = f"{most} inputs" if least == most else f"number of inputs between {least} and {most}"
        given = [tensor.name for tensor in request.inputs]
        missing = [name for name in self._required if name not in given]
        advice = (
            "Please provide all required input(s)."
            if missing or got < least
            else f"Please provide only input(s) {_names(self._inputs)}."
        )
        _refuse(
            request,
            f"expected {wanted} but got {got} inputs for model '{self._model}'. Got input(s) {_names(given)}, but "
            f"missing required input(s) {_names(missing)}. {advice}",
        )

    def _rows(self, request: InferRequest) -> int:
        first: Tensor | None = None
        for tensor in request.inputs:
            if not self._inputs[tensor.name].is_batched:
                continue
            if not tensor.shape:
                _refuse(
                    request,
                    f"input '{tensor.name}' has no shape but model requires batch dimension for '{self._model}'",
                )
            if first is None:
                first = tensor
            elif tensor.shape[0] != first.shape[0]:
                _refuse(
                    request,
                    f"input '{tensor.name}' batch size does not match other inputs for '{self._model}': "
                    f"'{first.name}' has {first.shape[0]}, '{tensor.name}' has {tensor.shape[0]}",
                )
        rows = 1 if first is None else first.shape[0]
        if rows > self._max_batch_size:
            limit = f"inference request batch-size must be <= {self._max_batch_size} for '{self._model}'"
            _refuse(request, f"{limit}, got {rows}")
        return rows

    def _check_tensor(self, request: InferRequest, tensor: Tensor, wanted: _Input) -> None:
        if tensor.datatype != wanted.spec.datatype:
            got = tensor.datatype if tensor.datatype in DATATYPES else "<invalid>"
            _refuse(
                request,
                f"inference input '{tensor.name}' data-type is '{got}', but model '{self._model}' expects "
                f"'{wanted.spec.datatype}'",
            )
        shape = tensor.shape
        count = 1
        if len(shape) != wanted.rank:
            self._refuse_shape(request, tensor, wanted)
        for size in shape:
            if size < 0:
                self._refuse_shape(request, tensor, wanted)
            count *= size
        for position, size in wanted.fixed:
            if shape[position] != size:
                self._refuse_shape(request, tensor, wanted)
        if wanted.is_batched and shape[0] == 0:
            self._refuse_empty_batch(request, tensor, wanted)
        if not wanted.itemsize:
            self._check_elements(request, tensor, count, wanted)
        elif count * wanted.itemsize != (_given_bytes(request, tensor)):
            self._refuse_size(request, tensor, count * wanted.itemsize)

    def _check_elements(self, request: InferRequest, tensor: Tensor, count: int, wanted: _Input) -> None:
        if tensor.data is not None:  # else `check_text`, once it has been read out of shared memory
            self._check_text(request, tensor.data, count, wanted)

    def check_text(self, request: InferRequest, tensor: Tensor, data: memoryview) -> None:
        """The bytes of a BYTES input of a checked request, that were in a client's shared memory.

        Raises:
            InvalidTensorError: they are not as many elements as its shape has.
        """
        self._check_text(request, data, element_count(tensor.shape), self._inputs[tensor.name])

    def _check_text(self, request: InferRequest, data: bytes | memoryview, count: int, wanted: _Input) -> None:
        try:
            check_elements(data, count, wanted.place)
        except InvalidTensorError as err:
            _refuse(request, str(err))

    def _refuse_shape(self, request: InferRequest, tensor: Tensor, wanted: _Input) -> NoReturn:
        if any(size < 0 for size in tensor.shape):
            _refuse(
                request,
                f"All input dimensions should be specified for input '{tensor.name}' for model '{self._model}', got "
                f"{_shape(tensor.shape)}",
            )
        note = ""
        if wanted.is_batched:
            note = f"Note: max_batch_size is {self._max_batch_size}, so that inputs begin with a batch dimension."
        _refuse(
            request,
            f"unexpected shape for input '{tensor.name}' for model '{self._model}'. Expected "
            f"{_shape(wanted.expected)}, got {_shape(tensor.shape)}. {note}".rstrip(),
        )

    def _refuse_empty_batch(self, request: InferRequest, tensor: Tensor, wanted: _Input) -> NoReturn:
        row = element_count(tensor.shape[1:]) * wanted.itemsize
        _refuse(
            request,
            f"input byte size mismatch for input '{tensor.name}' for model '{self._model}'. Expected {row}, got "
            f"{_given_bytes(request, tensor)}: a batch has at least one row, shape is "
            f"{_shape(tensor.shape)}",
        )

    def _refuse_size(self, request: InferRequest, tensor: Tensor, want: int) -> NoReturn:
        if element_count(tensor.shape) > ELEMENT_LIMIT:
            _refuse(
                request,
                f"input '{tensor.name}' for model '{self._model}' has shape {_shape(tensor.shape)}, whose elements "
                f"exceed maximum size {ELEMENT_LIMIT}",
            )
        _refuse(
            request,
            f"input byte size mismatch for input '{tensor.name}' for model '{self._model}'. Expected {want}, got "
            f"{_given_bytes(request, tensor)}",
        )


def _input(spec: TensorSpec, config: ModelConfig) -> _Input:
    is_batched = config.max_batch_size > 0 and not spec.is_shape_tensor
    expected = (-1, *spec.dims) if is_batched else spec.dims
    return _Input(
        spec=spec,
        expected=expected,
        rank=len(expected),
        is_batched=is_batched,
        fixed=tuple((position, size) for position, size in enumerate(expected) if size != -1),
        itemsize=0 if spec.datatype == BYTES else DATATYPES[spec.datatype].itemsize,
        place=f"for inference input '{spec.name}' for model '{config.name}'",
    )


def _given_bytes(request: InferRequest, tensor: Tensor) -> int:
    """Of the tensor's data, be they in the request or in a region."""
    use = request.regions.get(tensor.name)
    return tensor.byte_size or (0 if use is None else use.byte_size)


def _refuse(request: InferRequest, reason: str) -> NoReturn:
    raise InvalidTensorError(f"[request id: {shown(request.id, 256) or '<id_unknown>'}] {reason}")


def _names(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{shown(name)}'" for name in names) + "]"


def _shape(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
