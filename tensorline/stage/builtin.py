"""What every stage service brings along: reading parameters, checking inputs, and three backends for tests and benches.

`identity` passes its inputs on and `generate` makes a tensor of any size, so a chain of them costs what the mesh costs;
`repeat` answers with any number of responses.
"""

import difflib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

import numpy as np

from tensorline.config.model import ModelConfig, TensorSpec
from tensorline.errors import BackendError, ConfigError, InvalidTensorError
from tensorline.stage.backend import Backends, Batch, Device, ModelDirectory
from tensorline.tensor import BYTES, DATATYPES, Array

__all__ = [
    "BUILTIN",
    "GenerateInstance",
    "IdentityInstance",
    "Parameters",
    "RepeatInstance",
    "batched",
    "input_array",
    "is_wanted",
    "only",
]

T = TypeVar("T")


class Parameters:
    """A model's `parameters`, each read under the name, the kind and the bounds that its backend gives.

    Every method raises ConfigError with the parameter, its value and what is allowed.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._backend = config.backend
        self._values = config.parameters
        self._known: list[str] = []

    def __contains__(self, name: str) -> bool:
        self._known.append(name)
        return name in self._values

    def text(self, name: str, default: str) -> str:
        self._known.append(name)
        return self._values.get(name, default).strip()

    def choice(self, name: str, allowed: Mapping[str, T], default: str) -> T:
        """What the value stands for in `allowed`."""
        value = self.text(name, default)
        if value not in allowed:
            raise self.refused(name, ", ".join(allowed))
        return allowed[value]

    def boolean(self, name: str, *, default: bool) -> bool:
        return self.choice(name, {"true": True, "false": False}, str(default).lower())

    def integer(self, name: str, default: int, minimum: int, maximum: int) -> int:
        try:
            value = int(self.text(name, str(default)))
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise self.refused(name, f"whole numbers from {minimum} to {maximum}")
        return value

    def numbers(self, name: str, default: float, count: int, *, zero: bool = True) -> tuple[float, ...]:
        """`count` finite numbers, separated by commas; a single one stands for all. `zero`: whether 0 is allowed."""
        try:
            values = tuple(float(part) for part in self.text(name, str(default)).split(","))
        except ValueError:
            values = ()
        if len(values) not in (1, count) or not all(math.isfinite(v) and (zero or v) for v in values):
            many = f"one number or {count} of them, separated by commas" if count > 1 else "a number"
            raise self.refused(name, many + ("" if zero else ", not 0"))
        return values * count if len(values) == 1 else values

    def refused(self, name: str, allowed: str) -> ConfigError:
        return ConfigError(f"parameter '{name}' is '{self._values.get(name, '')[:64]}'; allowed: {allowed}")

    def unknown(self) -> list[str]:
        """Names in the configuration that nobody has read."""
        return [name for name in self._values if name not in self._known]

    def refuse_unknown(self) -> None:
        """Call it when all are read: a misspelt name must not pass for a default."""
        for name in self.unknown():
            close = [known for known in self._known if name in known]
            close += difflib.get_close_matches(name, self._known, n=1, cutoff=0.5)
            hint = f"did you mean '{close[0]}'?" if close else f"it knows {', '.join(sorted(self._known))}"
            raise ConfigError(f"parameter '{name[:64]}' is not one of backend '{self._backend}'; {hint}")


def only(specs: tuple[TensorSpec, ...], what: str, backend: str) -> TensorSpec:
    """The single input or output that the backend works with, else ConfigError."""
    if len(specs) != 1:
        raise ConfigError(f"backend '{backend}' needs exactly one {what}, the configuration has {len(specs)}")
    return specs[0]


def batched(config: ModelConfig, spec: TensorSpec) -> tuple[int, ...]:
    """Shape of a tensor as the instance sees it: reshaped, with a leading -1 when the model batches."""
    dims = spec.dims if spec.reshape is None else spec.reshape
    return (-1, *dims) if config.max_batch_size > 0 else dims


def input_array(batch: Batch, name: str, datatype: str, shape: tuple[int, ...]) -> Array:
    """Input `name`, refused with InvalidTensorError unless it is there with this datatype and shape (-1: any size)."""
    array = batch.inputs.get(name)
    if array is None:
        raise InvalidTensorError(f"input '{name}' is missing")
    if array.dtype != DATATYPES[datatype]:
        got = next((key for key, dtype in DATATYPES.items() if dtype == array.dtype), str(array.dtype))
        raise InvalidTensorError(f"input '{name}' has datatype {got}, model takes {datatype}")
    if len(shape) != array.ndim or any(w not in (-1, g) for w, g in zip(shape, array.shape, strict=True)):
        raise InvalidTensorError(f"input '{name}' has shape {list(array.shape)}, model takes {list(shape)}")
    return array


def is_wanted(batch: Batch, output: str) -> bool:
    """Whether a request asked for `output`; none named at all means every one."""
    return not batch.requested_outputs or output in batch.requested_outputs


class IdentityInstance:
    """Backend `identity`: each output is an input, any datatype and shape.

    An output takes the input of its name with INPUT for OUTPUT; failing that for any, all are paired in config order.
    Parameters: `mode` pass (hand on the input itself: no copy) or copy; `execute_delay_ms`.
    """

    def __init__(self, model: ModelDirectory, device: Device) -> None:
        config, parameters = model.config, Parameters(model.config)
        self._copy = parameters.choice("mode", {"pass": False, "copy": True}, "pass")
        (delay_ms,) = parameters.numbers("execute_delay_ms", 0.0, 1)
        if not 0 <= delay_ms <= 3_600_000:
            raise parameters.refused("execute_delay_ms", "0 to 3600000")
        self._delay_s = delay_ms / 1000
        parameters.refuse_unknown()
        self._pairs = _pairs(config)
        self.instant_bytes = 0 if self._delay_s else 1 << 16 if self._copy else 1 << 62
        """Passing on takes a microsecond, whatever the size; copying 64 KiB a few: less than a thread's turn."""

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        if self._delay_s:
            time.sleep(self._delay_s)
        inputs = batch.inputs
        try:
            passed = {output: inputs[name] for output, name in self._pairs}
        except KeyError as missing:
            raise InvalidTensorError(f"input '{missing.args[0]}' is missing") from None
        if not self._copy:
            return passed
        return {output: _copied(batch, output, array) for output, array in passed.items() if is_wanted(batch, output)}

    def close(self) -> None:
        pass


def _pairs(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    inputs, outputs = config.inputs, config.outputs
    if not outputs or len(outputs) > len(inputs):
        raise ConfigError(
            f"backend 'identity' needs an input for each output; {len(inputs)} for {len(outputs)} are given"
        )
    pairs = [(output, config.input(output.name.replace("OUTPUT", "INPUT"))) for output in outputs]
    if any(source is None for _, source in pairs):
        pairs = list(zip(outputs, inputs, strict=False))
    for output, source in pairs:
        if source is not None and source.datatype != output.datatype:
            raise ConfigError(
                f"output '{output.name}' is {output.datatype}, its input '{source.name}' is {source.datatype}"
            )
    return tuple((output.name, source.name) for output, source in pairs if source is not None)


def _copied(batch: Batch, name: str, array: Array) -> Array:
    if array.dtype == np.object_:
        return array.copy()
    datatype = next(key for key, dtype in DATATYPES.items() if dtype == array.dtype)
    out = batch.empty(name, datatype, array.shape)
    np.copyto(out, array)
    return out


class GenerateInstance:
    """Backend `generate`: one output with one dimension of any size (-1), filled with a number.

    Its size comes from the only input, INT64 `byte_size` of one element per row, or from the parameter of that name.
    Parameters: `byte_size`; `max_byte_size` (1 GiB), the most a request may ask for; `fill` (1).
    """

    def __init__(self, model: ModelDirectory, device: Device) -> None:
        config, parameters = model.config, Parameters(model.config)
        self._output = output = only(config.outputs, "output", "generate")
        if output.datatype == BYTES or output.dims.count(-1) != 1:
            raise ConfigError(f"output '{output.name}' must have one dimension of -1, and not be BYTES")
        self._dtype = DATATYPES[output.datatype]
        self._shape = batched(config, output)
        self._batches = config.max_batch_size > 0
        self._limit = parameters.integer("max_byte_size", 1 << 30, 1, 1 << 40)
        self._byte_size = parameters.integer("byte_size", 0, 0, self._limit)
        (self._fill,) = parameters.numbers("fill", 1.0, 1)
        parameters.refuse_unknown()
        self._input = config.inputs[0].name if config.inputs else None
        if len(config.inputs) > 1 or any(spec.datatype != "INT64" for spec in config.inputs):
            raise ConfigError("backend 'generate' takes one INT64 input, the byte size, or none")

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        byte_size = self._byte_size if self._input is None else self._asked(batch, self._input)
        fixed = math.prod(size for size in self._output.dims if size > 0) * self._dtype.itemsize
        if byte_size % fixed:
            raise InvalidTensorError(f"byte_size is {byte_size}, not a multiple of {fixed}")
        shape = tuple(byte_size // fixed if size == -1 else size for size in self._output.dims)
        full = (batch.rows, *shape) if self._batches else shape
        out = batch.empty(self._output.name, self._output.datatype, full)
        out.fill(self._dtype.type(self._fill))
        return {self._output.name: out}

    def _asked(self, batch: Batch, name: str) -> int:
        array = batch.inputs.get(name)
        if array is None or array.dtype != np.int64 or array.size != batch.rows:
            raise InvalidTensorError(f"input '{name}' must be INT64, one number for each row")
        sizes = {int(size) for size in array.reshape(-1).tolist()}
        if len(sizes) > 1:
            raise InvalidTensorError(f"input '{name}' asks for rows of different sizes, which are no one tensor")
        (byte_size,) = sizes or {0}
        if not 0 <= byte_size <= self._limit:
            raise InvalidTensorError(f"input '{name}' is {byte_size}, allowed are 0 to {self._limit}")
        return byte_size

    def close(self) -> None:
        pass


class RepeatInstance:
    """Backend `repeat`, decoupled: a response for each element of `IN`: the element as `OUT` and its place as `IDX`.

    Inputs: `IN`, INT32 [-1]; optional `DELAY`, UINT32 [-1]: milliseconds before each response, for all of them or one
    for each; optional `WAIT`, UINT32 [1]: milliseconds before the first. Outputs, of which one may be left out: `OUT`,
    INT32; `IDX`, UINT32 [1]. Parameters: `elements` (1), how often `OUT` holds the element; `max_streams` (16), what
    one instance serves at once; `fail_at` (-1), the place at which it fails instead.
    """

    def __init__(self, model: ModelDirectory, device: Device) -> None:
        config, parameters = model.config, Parameters(model.config)
        self._elements = parameters.integer("elements", 1, 0, 1 << 28)
        self._fail_at = parameters.integer("fail_at", -1, -1, 1 << 31)
        self.max_streams = parameters.integer("max_streams", 16, 1, 256)
        parameters.refuse_unknown()
        if config.max_batch_size:
            raise ConfigError(f"backend 'repeat' does not batch, max_batch_size is {config.max_batch_size}")
        for specs, known in ((config.inputs, _REPEAT_INPUTS), (config.outputs, _REPEAT_OUTPUTS)):
            for spec in specs:
                if known.get(spec.name) != spec.datatype:
                    wanted = ", ".join(f"{name} ({datatype})" for name, datatype in known.items())
                    raise ConfigError(f"backend 'repeat' knows {wanted}; '{spec.name}' is {spec.datatype}")
        if config.input("IN") is None:
            raise ConfigError("backend 'repeat' needs the input 'IN'")

    def stream(self, request: Batch) -> Iterator[Mapping[str, Array]]:
        values = input_array(request, "IN", "INT32", (-1,))
        delays, (wait,) = _milliseconds(request, "DELAY", len(values)), _milliseconds(request, "WAIT", 1)
        _pause(request, wait)
        for index, value in enumerate(values):
            _pause(request, delays[index])
            if index == self._fail_at:
                raise BackendError(f"told to fail at {index}")
            out = request.empty("OUT", "INT32", (self._elements,))
            out.fill(value)
            made = {"OUT": out, "IDX": np.array([index], np.uint32)}
            yield {name: array for name, array in made.items() if is_wanted(request, name)}

    def close(self) -> None:
        pass


_REPEAT_INPUTS: Final = {"IN": "INT32", "DELAY": "UINT32", "WAIT": "UINT32"}
_REPEAT_OUTPUTS: Final = {"OUT": "INT32", "IDX": "UINT32"}
_SLICE_S: Final = 0.01


def _milliseconds(request: Batch, name: str, count: int) -> list[int]:
    if name not in request.inputs:
        return [0] * count
    given: list[int] = input_array(request, name, "UINT32", (-1,)).tolist()
    if len(given) not in (1, count):
        raise InvalidTensorError(f"input '{name}' has {len(given)} numbers, one or {count} are wanted")
    return given * count if len(given) != count else given


def _pause(request: Batch, milliseconds: int) -> None:
    """Unless nobody waits any more."""
    until = time.monotonic() + milliseconds / 1000
    while (left := until - time.monotonic()) > 0 and not request.is_cancelled():
        time.sleep(min(left, _SLICE_S))


BUILTIN: Final[Backends] = {"identity": IdentityInstance, "generate": GenerateInstance, "repeat": RepeatInstance}
