"""The published perf_analyzer for tests: its wheel, run with the C library that it wants.

The wheel is made for glibc 2.38. On an older host it runs through the loader and libraries of Debian 13, unpacked into
.cache/perf_analyzer; nothing is installed.
"""

import csv
import fcntl
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.debian import CACHE, fetch_packages

__all__ = ["Measured", "fetch_perf_analyzer", "run_perf_analyzer"]

VERSION = "2.60.0"
PLATFORM = "manylinux_2_38_x86_64"
LIBRARIES = ("libc6", "libstdc++6", "libgcc-s1", "zlib1g", "libssl3t64", "libzstd1")
FETCH_S = 180.0
RUN_S = 120.0


@dataclass(frozen=True)
class Measured:
    """The last load level of a run."""

    output: str
    requests_per_s: float


def fetch_perf_analyzer() -> list[str]:
    """The command to run it with.

    Raises:
        subprocess.CalledProcessError, OSError: it cannot be fetched. Tests then fail; they never skip.
    """
    libraries = fetch_packages("perf_analyzer", "trixie", LIBRARIES) / "usr/lib/x86_64-linux-gnu"
    cache = CACHE / "perf_analyzer"
    program = cache / "wheel/perf_analyzer/bin/perf_analyzer"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _fetch_wheel(cache)
    return [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries), str(program)]


def _fetch_wheel(cache: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--platform={PLATFORM}", "--python-version=3.12", f"--dest={cache}", f"perf-analyzer=={VERSION}"]
    subprocess.run(command, check=True, timeout=FETCH_S, capture_output=True)
    (wheel,) = cache.glob("perf_analyzer-*.whl")
    unpacked = cache / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    (unpacked / "perf_analyzer/bin/perf_analyzer").chmod(0o755)
    unpacked.rename(cache / "wheel")  # last: it is there whole or not at all
    wheel.unlink()


def run_perf_analyzer(target: str, model: str, report: Path, *options: str, protocol: str = "grpc") -> Measured:
    """Run it against `target` until its measurement is done. Blocks.

    Args:
        report: Where it writes its table.
    Raises:
        AssertionError: it failed; with what it said.
    """
    command: Sequence[str] = [
        *fetch_perf_analyzer(),
        *("-m", model, "-u", target, "-i", protocol, "-f", str(report)),
        *options,
    ]
    done = subprocess.run(command, timeout=RUN_S, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    with report.open() as table:
        *_, row = csv.DictReader(table)
    return Measured(said, float(row["Inferences/Second"]))
