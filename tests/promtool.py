"""Prometheus's own judge of a metrics page, `promtool check metrics`: fetched once into .cache/prometheus."""

import subprocess
from pathlib import Path

from tests.debian import fetch_packages

__all__ = ["check_metrics", "fetch_promtool"]

INSTALLED = Path("/usr/bin/promtool")
CHECK_S = 60.0
LINT = 3
"""Exit status when the page can be read and a habit of Prometheus's is not kept."""


def fetch_promtool() -> Path:
    """The program: the installed one, else that of Debian's package `prometheus`.

    Raises:
        subprocess.CalledProcessError, OSError: it cannot be fetched. Tests then fail; they never skip.
    """
    if INSTALLED.exists():
        return INSTALLED
    return fetch_packages("prometheus", "bookworm", ["prometheus"]) / "usr/bin/promtool"


def check_metrics(page: bytes) -> dict[str, list[str]]:
    """What promtool has to say about the families of a page, by their names.

    Raises:
        AssertionError: the page is no metrics page.
    """
    done = subprocess.run([fetch_promtool(), "check", "metrics"], input=page, capture_output=True, timeout=CHECK_S)
    told = (done.stderr + done.stdout).decode()
    assert done.returncode in (0, LINT), told
    found: dict[str, list[str]] = {}
    for line in told.splitlines():
        name, _, text = line.partition(" ")
        found.setdefault(name, []).append(text)
    return found
