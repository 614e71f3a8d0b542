"""perf_analyzer, as people measure with it: sync, async, streamed, with batches, with a decoupled model."""

from pathlib import Path

import pytest

from tests.compat.server import Server
from tests.perf_analyzer import run_perf_analyzer

SHORT = ("--request-count", "60")  # and not until the latency is stable: on a busy machine it never is


@pytest.mark.parametrize(
    ("protocol", "model", "options"),
    [
        ("grpc", "simple", ("-b", "4")),
        ("grpc", "simple", ("--async", "--concurrency-range", "4")),
        ("grpc", "simple", ("--streaming", "--async")),
        ("http", "simple", ("-b", "4")),
        ("http", "simple", ("--async", "--concurrency-range", "4")),
        ("grpc", "chain", ("--shape", "x:100")),
        ("grpc", "line_BYTES", ("--shape", "x:3", "--string-length", "16")),
        ("grpc", "repeat", ("--streaming", "--async", "--shape", "IN:3", "--shape", "DELAY:1", "--input-data", "zero")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_measures(server: Server, tmp_path: Path, protocol: str, model: str, options: tuple[str, ...]) -> None:
    address = server.grpc if protocol == "grpc" else server.http
    measured = run_perf_analyzer(address, model, tmp_path / "table.csv", *SHORT, *options, protocol=protocol)
    assert measured.requests_per_s > 0
    assert "Failed" not in measured.output
