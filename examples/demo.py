"""`make demo`: a photo in, labels out, across four processes, and where the time went.

Everything runs on this machine, in a mesh directory of its own, and is gone when it ends.
"""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop
from rich import box
from rich.console import Console
from rich.table import Table

from examples.prepare import EXAMPLES, PrepareError, prepare_labels, prepare_model, prepare_photos
from tensorline.cli.api import wait_trace
from tensorline.cli.environment import PREFIX
from tensorline.cli.failure import CommandError
from tensorline.cli.lines import KeptOutput
from tensorline.cli.mesh import SERVICES, Mesh, Plan, open_mesh, plan_mesh
from tensorline.cli.ports import Listener, check_free
from tensorline.directories import default_mesh_directory

__all__ = ["Answer", "classify", "leftovers", "main", "plan_demo"]

PORTS: Final = ("grpc", "http", "metrics")
READY_S: Final = 60.0
TRIES: Final = 3
"""A port that was free when it was chosen may be another's when the gateway opens it."""

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """The five best classes of a photo, the best first, and the trace of the request that found them."""

    classes: list[int]
    labels: list[str]
    scores: list[float]
    trace_id: str


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="Classify a photo through a mesh.")
    parser.add_argument("photo", nargs="?", type=Path, help="JPEG, PNG or WebP; one of the examples unless given")
    photo = parser.parse_args(arguments).photo
    output = KeptOutput()
    try:
        prepare_model()
        prepare_labels()
        photo = photo or next(path for path in prepare_photos() if path.name == "coffee.png")
        uvloop.run(_demo(photo.name, photo.read_bytes(), output))
    except (CommandError, PrepareError, OSError) as error:
        for line in output.lines:
            console.print(f"  {line}", style="dim", markup=False)
        console.print(f"the demo failed: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _demo(name: str, image: bytes, output: KeptOutput) -> None:
    home = default_mesh_directory()
    for attempt in range(1, TRIES + 1):
        directory = Path(tempfile.mkdtemp(prefix=f"{home.name}-demo-", dir=home.parent))
        plan = plan_demo(directory)
        try:
            left = await _run(plan, name, image, output)
        except CommandError:
            if attempt == TRIES or all(_is_free(listener) for listener in plan.listeners):
                raise
            output.lines.clear()
            console.print("Another program was faster with a port: once more, with others.")
        else:
            break
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    if left:
        raise CommandError(f"something was left behind: {'; '.join(left)}")
    console.print("[green]Nothing is left:[/] no process, no open port, no socket, no shared-memory file.")
    console.print("Keep a mesh running with [bold]make up[/], and ask it from another terminal:")
    console.print("  .venv/bin/tensorline infer classify examples/photos/chelsea.png --trace")


async def _run(plan: Plan, name: str, image: bytes, output: KeptOutput) -> list[str]:
    """Start the mesh, show an answer and its trace, and stop it: what it left behind."""
    async with open_mesh(plan, output) as mesh:
        await _wait_ready(mesh)
        _show_endpoints(plan)
        answer = await asyncio.to_thread(classify, plan.grpc.target, image)
        _show_labels(name, answer)
        _show_trace((await asyncio.to_thread(wait_trace, plan.http_url, answer.trace_id))[0])
        with _step("\nStopping the gateway, then the services"):
            await mesh.supervisor.stop()
    return leftovers(plan, plan.directory)


def _is_free(listener: Listener) -> bool:
    try:
        check_free([listener])
    except CommandError:
        return False
    return True


def plan_demo(directory: Path) -> Plan:
    """A mesh on ports that are free: another demo, or a mesh, may hold the usual ones."""
    values = {f"{name}_address": "127.0.0.1" for name in PORTS} | {f"{name}_port": "0" for name in PORTS}
    values |= {"mesh_directory": str(directory), "model_repository": str(EXAMPLES / "models"), "drain_s": "10"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return plan_mesh(values, SERVICES, inherited)


async def _wait_ready(mesh: Mesh) -> None:
    with _step("Starting a gateway and three services"):
        try:
            async with asyncio.timeout(READY_S):
                state = await mesh.wait_ready(lambda text: None, patience_s=READY_S)
        except TimeoutError:
            raise CommandError(f"the mesh was not ready after {READY_S:g} s") from None
    for model, why in state.unready:
        raise CommandError(f"the model {model} is not ready: {why}")


def classify(target: str, image: bytes) -> Answer:
    """One photo through the gateway at `target`, with the client that is published for Triton."""
    import numpy as np
    import tritonclient.grpc as triton

    photo = triton.InferInput("image", [1, 1], "BYTES")
    photo.set_data_from_numpy(np.array([[image]], dtype=np.object_))
    trace_id = uuid.uuid4().hex
    with triton.InferenceServerClient(target) as client:
        client.infer("classify", [photo])  # the first request warms everything up; the second one is shown
        traced = {"traceparent": f"00-{trace_id}-{uuid.uuid4().hex[:16]}-01"}
        result = client.infer("classify", [photo], headers=traced)
    classes, labels, scores = (result.as_numpy(name)[0] for name in ("class", "label", "score"))
    return Answer(classes.tolist(), [label.decode() for label in labels], scores.tolist(), trace_id)


def leftovers(plan: Plan, directory: Path) -> list[str]:
    """What a stopped mesh still holds: processes, ports, files; each in a few words."""
    left = []
    mark = f"{PREFIX}MESH_DIRECTORY={directory}\0".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environment.read_bytes() + b"\0":
                left.append(f"process {environment.parent.name}")
        except OSError:  # another user's, or it has just ended
            continue
    for listener in plan.listeners:
        try:
            check_free([listener])
        except CommandError as error:
            left.append(str(error))
    # The nonce says which directory this is; it holds nothing of any process.
    left += [f"file {path.name}" for path in directory.rglob("*") if not path.is_dir() and path.name != "nonce"]
    return left


def _show_endpoints(plan: Plan) -> None:
    console.print(f"While it runs it answers at  gRPC {plan.grpc.target}  HTTP {plan.http_url}  ", end="")
    console.print(f"metrics http://{plan.metrics.target}/metrics")


def _show_labels(name: str, answer: Answer) -> None:
    table = Table(title=name, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("class", justify="right", style="dim")
    table.add_column("label", no_wrap=True, max_width=36)
    table.add_column("score", justify="right", style="cyan")
    table.add_column("", no_wrap=True)
    for index, label, score in zip(answer.classes, answer.labels, answer.scores, strict=True):
        table.add_row(str(index), label, f"{score:.4f}", "█" * round(score * 20))
    console.print()
    console.print(table)


def _show_trace(trace: Any) -> None:
    from tensorline.telemetry.waterfall import waterfall

    console.print(waterfall(trace, console.width), soft_wrap=True)


@contextmanager
def _step(text: str) -> Iterator[None]:
    """A spinner on a terminal, one line when it is done anywhere."""
    began = time.monotonic()
    with console.status(f"{text} …"):
        yield
    console.print(f"{text}: {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
