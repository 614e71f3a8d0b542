"""The published KServe client, in a folder of its own: fetched once into .cache/kserve.

Not in the environment of the tests: it pins an older psutil, brings 40 packages of which its client needs 20, and its
messages collide with tritonclient's in one process. So these 20 are laid beside our own packages, for a process of its
own.
"""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["fetch_kserve"]

PACKAGES = (
    "kserve==0.21.0",
    "cloudevents==1.13.0",
    "deprecation==2.1.0",
    "durationpy==0.11",
    "fastapi==0.165.0",
    "grpc-interceptor==0.15.4",
    "httpcore==1.0.9",
    "httpx==0.28.1",
    "kubernetes==37.0.1",
    "oauthlib==4.0.1",
    "pandas==2.3.3",
    "python-dateutil==2.9.0.post0",
    "python-multipart==0.0.34",
    "pytz==2026.6",
    "requests-oauthlib==2.0.0",
    "six==1.17.0",
    "tabulate==0.10.0",
    "timing-asgi==0.3.2",
    "tzdata==2026.6",
    "watchfiles==1.3.0",
    "websocket-client==1.9.2",
)
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "kserve"
FETCH_S = 160.0  # under the limit of a test


def fetch_kserve() -> Path:
    """The folder for PYTHONPATH.

    Raises:
        subprocess.CalledProcessError: it cannot be fetched. Tests then fail; they never skip.
    """
    folder = CACHE / PACKAGES[0]
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            half = CACHE / "half"
            shutil.rmtree(half, ignore_errors=True)
            subprocess.run(
                # Modules are compiled when they are used: most never are.
                [
                    *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
                    *("--no-deps", "--no-compile", "--target", half, *PACKAGES),
                ],
                check=True,
                timeout=FETCH_S,
                capture_output=True,
            )
            half.rename(folder)  # last: it is there whole or not at all
    return folder
