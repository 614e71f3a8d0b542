"""`make bench`: one table of what the mesh does on this machine, written to bench/README.md.

Every figure of one row comes from the same few seconds; compare rows of one run, not runs.
"""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.mesh import BenchMesh, running_mesh
from bench.models import STEP_SERVICES, write_chains
from bench.report import CHAIN, FLOOR, Report
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb

ROOT = Path(__file__).resolve().parent
EXAMPLES = ROOT.parent / "examples"
SIZES = {"64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    options.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default 5)")
    options.add_argument("--no-write", action="store_true", help="print only")
    options.add_argument("--only", choices=["floor", "classify", "chain", "sizes", "tracing", "start"], action="append")
    arguments = options.parse_args()
    wanted = arguments.only or ["floor", "classify", "chain", "sizes", "tracing", "start"]
    report = Report(
        f"{platform.processor() or platform.machine()}, {psutil.cpu_count()} cores, Python {platform.python_version()}",
        datetime.date.today().isoformat(),
    )
    with tempfile.TemporaryDirectory() as scratch:
        chains = write_chains(Path(scratch))
        if "floor" in wanted:
            floor(report, arguments.seconds)
        if "classify" in wanted:
            classify(report, arguments.seconds)
        if {"chain", "sizes"} & set(wanted):
            with running_mesh(_spread(chains), settings={"TENSORLINE_ARENA_BYTES": "1GiB"}) as mesh:
                if "chain" in wanted:
                    chain(report, mesh, arguments.seconds)
                if "sizes" in wanted:
                    sizes(report, mesh)
        if "tracing" in wanted:
            tracing(report, chains, arguments.seconds)
        if "start" in wanted:
            start(report)
    print(report.text())
    if not arguments.no_write and not arguments.only:
        report.write(ROOT / "README.md")


def _spread(chains: Path) -> dict[str, list[Path]]:
    """Each service hosts its own step; the gateway knows the pipelines and, to be ready only then, the steps."""
    return {
        **{service: [chains / service] for service in STEP_SERVICES},
        "gateway": [chains / service for service in (*STEP_SERVICES, "gateway")],
    }


def _request(model: str, name: str, datatype: str, shape: list[int], raw: bytes) -> bytes:
    message = pb.ModelInferRequest(model_name=model)
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    message.raw_input_contents.append(raw)
    return message.SerializeToString()


def load(target: str, in_flight: int, seconds: float, request: bytes) -> dict[str, float]:
    """One run of the load client, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "bench.client", target, str(in_flight), str(seconds)],
        input=request,
        stdout=subprocess.PIPE,
        check=True,
    )
    result: dict[str, float] = json.loads(run.stdout)
    return result


def floor(report: Report, seconds: float) -> None:
    """What the machine and grpc.aio give before there is any mesh: an empty unary call, in Python at both ends."""
    with subprocess.Popen([sys.executable, "-m", "bench.floor"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        try:
            for in_flight in (1, 16):
                result = load(f"127.0.0.1:{port}", in_flight, seconds, _request("x", "INPUT", "FP32", [1], b"0000"))
                report.load(FLOOR, in_flight, result)
        finally:
            server.terminate()


def classify(report: Report, seconds: float) -> None:
    photo = (EXAMPLES / "photos" / "china.jpg").read_bytes()
    raw = len(photo).to_bytes(4, "little") + photo
    request = _request("classify", "image", "BYTES", [1, 1], raw)
    repository = [EXAMPLES / "models"]
    with running_mesh(dict.fromkeys(("preprocess", "model", "postprocess", "gateway"), repository)) as mesh:
        for in_flight in (1, 4, 16):
            result = load(mesh.target, in_flight, seconds, request)
            report.load("(a) classify: photo in, labels out", in_flight, result, outside=_outside(mesh, "classify"))


def _outside(mesh: BenchMesh, model: str) -> float:
    """Median share of a request's time that no step computed, of the traces kept; queues count as outside."""
    shares: list[float] = []
    for row in mesh.get(f"/api/traces?which=list&model={model}&limit=200"):
        (trace,) = mesh.get(f"/api/traces?which={row['trace_id']}")
        shares.append(1 - _computed_ns(trace) / trace["duration_ns"])
    return statistics.median(shares)


def _computed_ns(trace: dict[str, Any]) -> int:
    return sum(s["end_ns"] - s["start_ns"] for s in trace["spans"] if s["name"] == "compute_infer")


def chain(report: Report, mesh: BenchMesh, seconds: float) -> None:
    request = _request("chain", "INPUT", "FP32", [16], bytes(64))
    for in_flight in (1, 4, 16):
        cpu, began = mesh.cpu_s(), time.perf_counter()
        result = load(mesh.target, in_flight, seconds, request)
        cores = (mesh.cpu_s() - cpu) / (time.perf_counter() - began)
        report.load(CHAIN, in_flight, result, cores=cores)


def sizes(report: Report, mesh: BenchMesh) -> None:
    """One request at a time, so that a latency is a latency: the tensor is made by the first step."""
    for title, model in (("pass it on", "pass_on"), ("each writes anew", "write_anew")):
        for label, size in SIZES.items():
            request = _request(model, "SIZE", "INT64", [1], size.to_bytes(8, "little"))
            load(mesh.target, 1, 1.0, request)  # arenas grow, pages become warm
            before = mesh.socket_bytes()
            result = load(mesh.target, 1, 3.0, request)
            moved = (mesh.socket_bytes() - before) / (result["count"] * 4 / 3)
            made = _median_ms(mesh, model, "make")
            report.size(title, label, result, made_ms=made, moved=moved)


def _median_ms(mesh: BenchMesh, model: str, step: str) -> float:
    """Median time of one step's computing, of the last traces."""
    times: list[int] = []
    for row in mesh.get(f"/api/traces?which=list&model={model}&limit=30"):
        (trace,) = mesh.get(f"/api/traces?which={row['trace_id']}")
        spans = {span["span_id"]: span for span in trace["spans"]}
        times += [
            span["end_ns"] - span["start_ns"]
            for span in trace["spans"]
            if span["name"] == "compute_infer" and spans[span["parent_id"]]["name"] == step
        ]
    return statistics.median(times) / 1e6


def tracing(report: Report, chains: Path, seconds: float) -> None:
    """All traces exported to a collector against none, in turns, so that a change of the machine's mood hits both."""
    request = _request("chain", "INPUT", "FP32", [16], bytes(64))
    with subprocess.Popen([sys.executable, "-m", "bench.floor", "sink"], stdout=subprocess.PIPE) as sink:
        assert sink.stdout is not None
        port = int(sink.stdout.readline())
        everything = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_TRACES_SAMPLER": "always_on",
            "OTEL_BSP_MAX_QUEUE_SIZE": "200000",
        }
        try:
            with running_mesh(_spread(chains)) as off, running_mesh(_spread(chains), settings=everything) as on:
                rates: dict[str, list[float]] = {"off": [], "on": []}
                for _ in range(4):
                    for name, mesh in (("off", off), ("on", on)):
                        rates[name].append(load(mesh.target, 16, seconds / 2, request)["rate"])
        finally:
            sink.terminate()
    report.tracing(statistics.median(rates["off"]), statistics.median(rates["on"]))


def start(report: Report) -> None:
    repository = [EXAMPLES / "models"]
    names = ("gateway", "preprocess", "model", "postprocess")
    with running_mesh(dict.fromkeys(names, repository)) as mesh:
        photo = (EXAMPLES / "photos" / "china.jpg").read_bytes()
        raw = len(photo).to_bytes(4, "little") + photo
        load(mesh.target, 4, 2.0, _request("classify", "image", "BYTES", [1, 1], raw))
        report.start(mesh.ready_s, mesh.rss_mb())


if __name__ == "__main__":
    main()
