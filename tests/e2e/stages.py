"""A stage service for tests: `python tests/e2e/stages.py [name]` serves backends whose behaviour shows from outside.

Their models are in `tests/e2e/models.py`.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from opentelemetry import trace

from tensorline.errors import BackendError
from tensorline.stage.backend import Backends, Batch, Device, Instance, ModelDirectory
from tensorline.stage.main import run_stage
from tensorline.tensor import Array

SLICE_S = 0.01


class Stage:
    """Reads its parameters; keeps nothing."""

    def __init__(self, model: ModelDirectory, device: Device) -> None:
        self.model = model
        self.parameters = model.config.parameters
        self.output = model.config.outputs[0].name

    def close(self) -> None:
        pass


class Add(Stage):
    """Every output is the sum of the inputs plus `by`; a second output is the sum doubled."""

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        by = float(self.parameters.get("by", "1"))
        total: NDArray[np.float64] = np.add.reduce([array.astype(np.float64) for array in batch.inputs.values()]) + by
        outputs = self.model.config.outputs
        return {spec.name: (total * (1 + at)).astype(np.float32) for at, spec in enumerate(outputs)}


class Boom(Stage):
    """Passes its rows on; a negative value is an error, 13 and 14 raise what no model should."""

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        (array,) = batch.inputs.values()
        values = array.reshape(-1).astype(np.float64)
        if (values == -2).any():
            raise RuntimeError(f"canary {__file__} {os.getpid()}")
        if (values == 13).any():
            raise KeyboardInterrupt
        if (values == 14).any():
            raise SystemExit(3)
        if (values < 0).any() or (values == 7).any():
            raise BackendError("bad row")
        return {self.output: array}


class Coop(Stage):
    """Sleeps `ms` in slices, and says on the log when nobody waits any more."""

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        (ms,) = batch.inputs.values()
        until = time.monotonic() + int(ms.reshape(-1)[0]) / 1000
        print(f"begun {batch.request_ids[0]}", file=sys.stderr, flush=True)
        while time.monotonic() < until:
            if batch.is_cancelled():
                print(f"cancelled {batch.request_ids[0]}", file=sys.stderr, flush=True)
                break
            time.sleep(SLICE_S)
        return {self.output: ms}


class Slow(Stage):
    """Sleeps `ms`, deaf to everything; counts on the log what it ran."""

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        (ms,) = batch.inputs.values()
        print(f"ran {batch.request_ids[0]}", file=sys.stderr, flush=True)
        time.sleep(int(ms.reshape(-1)[0]) / 1000)
        return {self.output: ms}


class Echo(Stage):
    """What reaches a stage beside tensors, as JSON in a BYTES tensor: the stages before it, then itself."""

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        (before,) = batch.inputs.values()
        span = trace.get_current_span().get_span_context()
        said = {
            "pid": os.getpid(),
            "model": self.model.config.name,
            "version": self.model.version,
            "id": batch.request_ids[0],
            "parameters": dict(batch.parameters[0]),
            "kinds": {key: type(value).__name__ for key, value in batch.parameters[0].items()},
            "trace_id": f"{span.trace_id:032x}",
            "trace_flags": int(span.trace_flags),
            "wanted": sorted(batch.requested_outputs),
        }
        story = json.loads(bytes(before.reshape(-1)[0]) or b"[]")
        story = json.dumps([*story, said]).encode()
        return {self.output: np.array([story], dtype=object).reshape(before.shape)}


class Spans(Stage):
    """Opens a span of its own, as a team's code would."""

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        (array,) = batch.inputs.values()
        with trace.get_tracer("team").start_as_current_span("look up prices") as span:
            span.set_attribute("rows", batch.rows)
            return {self.output: array}


class Die(Stage):
    """A value of 9 kills the process in the middle of the request."""

    def execute(self, batch: Batch) -> Mapping[str, Array]:
        (array,) = batch.inputs.values()
        if (array == 9).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return {self.output: array}


def refusing(model: ModelDirectory, device: Device) -> Instance:
    """Does not load."""
    raise FileNotFoundError(2, "No such file or directory", str(Path(__file__).resolve() / "weights.bin"))


BACKENDS: Backends = {
    "add": Add,
    "boom": Boom,
    "coop": Coop,
    "die": Die,
    "echo": Echo,
    "refusing": refusing,
    "slow": Slow,
    "spans": Spans,
}

if __name__ == "__main__":
    run_stage(sys.argv[1] if len(sys.argv) > 1 else "stages", BACKENDS)
