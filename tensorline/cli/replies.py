"""What comes of the requests of `tensorline infer`: on the screen, as JSON, in files."""

import json
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from tensorline.cli.api import wait_trace
from tensorline.cli.client import Answer, RequestFailedError
from tensorline.cli.failure import CommandError
from tensorline.cli.infer import Reply
from tensorline.cli.outputs import json_of_answer, print_answer
from tensorline.cli.views import open_console, print_traces
from tensorline.tensor import Array

__all__ = ["NpzReplies", "Traces", "json_replies", "print_replies"]


class Traces:
    """Where the gateway's traces are asked for."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token

    def of(self, reply: Answer | RequestFailedError) -> list[Any]:
        """The requests of its trace.

        Raises:
            CommandError: as `wait_trace`.
        """
        return list(wait_trace(self._url, reply.trace_id, self._token)) if reply.trace_id else []


def print_replies(replies: Iterable[Reply], traces: Traces | None) -> CommandError | None:
    """Show each as it comes: what the command fails with, if any request did."""
    console, count = open_console(), 0
    failures: list[tuple[str, RequestFailedError]] = []
    open_trace: Answer | RequestFailedError | None = None
    for about, reply in replies:
        count += 1
        # The answers of a stream share one trace, which is whole when the last has come.
        if open_trace is not None and open_trace.trace_id != reply.trace_id:
            _print_traces(console, traces, open_trace)
        open_trace = reply
        if isinstance(reply, RequestFailedError):
            failures.append((about, reply))
            if about:
                print(f"tensorline: {about}: {reply}", file=sys.stderr)
        elif reply.outputs or not reply.is_final:
            print_answer(console, about, reply)
        elif count == 1:
            console.print(Text("no answer: the model ended the request without one", style="dim"))
    if open_trace is not None:
        _print_traces(console, traces, open_trace)
    return _failure(failures, count)


def _print_traces(console: Console, traces: Traces | None, reply: Answer | RequestFailedError) -> None:
    if traces is None:
        return
    try:
        print_traces(console, traces.of(reply))
    except CommandError as error:
        if not isinstance(reply, RequestFailedError):
            raise
        # The failure itself is what counts, and is told at the end.
        print(f"tensorline: the trace of the failed request cannot be shown: {error}", file=sys.stderr)


def _failure(failures: list[tuple[str, RequestFailedError]], count: int) -> CommandError | None:
    if not failures:
        return None
    about, first = failures[0]
    return CommandError(f"{len(failures)} of {count} requests failed") if about else first


def json_replies(replies: Iterable[Reply], traces: Traces | None) -> CommandError | None:
    """One document of a single answer, else a list of them: what the command fails with, if any request did."""
    documents: list[dict[str, Any]] = []
    failures: list[tuple[str, RequestFailedError]] = []
    told = list(replies)
    for (about, reply), (_, following) in zip(told, [*told[1:], ("", None)], strict=True):
        found = _of(traces, reply) if following is None or following.trace_id != reply.trace_id else []
        if isinstance(reply, RequestFailedError):
            failures.append((about, reply))
            documents.append({**({"file": about} if about else {}), "error": str(reply), **_traces(found)})
        elif reply.outputs or len(told) == 1 or found:
            documents.append(json_of_answer(about, reply, found))
    print(json.dumps(documents if len(documents) != 1 else documents[0], indent=2, ensure_ascii=False))
    return _failure(failures, len(documents))


def _of(traces: Traces | None, reply: Answer | RequestFailedError) -> list[Any]:
    try:
        return traces.of(reply) if traces is not None else []
    except CommandError:
        if isinstance(reply, RequestFailedError):
            return []
        raise


def _traces(traces: list[Any]) -> dict[str, Any]:
    return {"traces": traces} if traces else {}


class NpzReplies:
    """Writes the outputs of each answer: to `path`, with a number behind its name from the second answer on."""

    def __init__(self, path: Path) -> None:
        self._path = path if path.suffix == ".npz" else path.with_name(f"{path.name}.npz")

    def keep(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Pass the replies on.

        Raises:
            CommandError: the file cannot be written, or an output is of a kind that it does not hold.
        """
        number = 0
        for about, reply in replies:
            if isinstance(reply, Answer) and reply.outputs:
                number += 1
                path = self._path if number == 1 else self._path.with_stem(f"{self._path.stem}-{number}")
                _write(path, reply.outputs)
            yield about, reply


def _write(path: Path, outputs: Mapping[str, Array]) -> None:
    arrays = {name: _storable(name, array) for name, array in outputs.items()}
    try:
        # Not np.savez: to that, an output that is called "file" would be the file.
        with zipfile.ZipFile(path, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    except OSError as error:
        raise CommandError(f"--output-npz {path}: {error.strerror}") from None


def _storable(name: str, array: Array) -> Array:
    """BYTES become numpy's bytes, BF16 becomes FP32: without pickles the format holds nothing else."""
    if array.dtype.kind == "V":
        return array.astype(np.float32)
    if array.dtype.kind != "O":
        return array
    elements: list[bytes] = array.reshape(-1).tolist()
    if any(element.endswith(b"\0") for element in elements):
        raise CommandError(f"--output-npz: {name} has an element that ends with a zero byte, which .npz loses; --json")
    return array.astype(np.bytes_)
