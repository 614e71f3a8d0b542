"""The server that the suite talks to: an address, and what its kind is."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Answer", "Server", "own_server"]

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """Of an HTTP request."""

    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(self.json["error"])


@dataclass(frozen=True)
class Server:
    """
    Args:
        grpc, http, metrics: "host:port" of each front end.
        is_triton: It is a Triton on the repository of `tests.compat.repository`, else a mesh of ours.
    """

    grpc: str
    http: str
    metrics: str
    is_triton: bool = False

    def either(self, *, ours: T, triton: T) -> T:
        """Where the two differ on purpose; every use is a row of docs/triton-compatibility.md."""
        return triton if self.is_triton else ours

    def fetch(
        self, path: str, body: Any = None, *, method: str = "", headers: Mapping[str, str] | None = None, port: str = ""
    ) -> Answer:
        """A plain HTTP request; a body that is not bytes goes as JSON, and makes it a POST."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://{port or self.http}{path}", data, dict(headers or {}))
        request.method = method or ("GET" if data is None else "POST")
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return Answer(answer.status, _lower(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, _lower(error.headers), error.read())


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@contextmanager
def own_server() -> Iterator[Server]:
    """A mesh of real processes, run by a process beside the tests; at the end it must have ended well."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.compat.serve"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise ChildProcessError(f"the mesh did not start: exit status {process.wait(START_S)}")
        yield Server(**json.loads(line))
        process.stdin.close()
        # S2 and S3 of the standing checks are that program's: no leak, no alarm in any log.
        assert process.wait(START_S) == 0, "the mesh did not end well: see its words on standard error"
    finally:
        process.stdin.close()
        process.stdout.close()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
