"""Programs and libraries of another Debian release, fetched once and unpacked in a cache; nothing is installed."""

import fcntl
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["CACHE", "fetch_packages"]

CACHE = Path(__file__).resolve().parents[1] / ".cache"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
FETCH_S = 180.0


def fetch_packages(name: str, release: str, packages: Sequence[str]) -> Path:
    """A root directory with the packages' files, in `.cache/<name>`.

    They come from the machine's own mirror, checked against Debian's keyring by apt.

    Raises:
        subprocess.CalledProcessError, OSError: they cannot be fetched. Tests then fail; they never skip.
    """
    cache = CACHE / name
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers start together
        if not (cache / "root").exists():
            _fetch(cache, release, packages)
    return cache / "root"


def _fetch(cache: Path, release: str, packages: Sequence[str]) -> None:
    (cache / "lists/partial").mkdir(parents=True, exist_ok=True)
    (cache / "archives/archives/partial").mkdir(parents=True, exist_ok=True)
    sources = cache / f"{release}.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {_mirror()} {release} main\n")
    apt = [
        "apt-get",
        "-qq",
        f"-oDir::State::Lists={cache / 'lists'}",
        f"-oDir::Cache={cache / 'archives'}",
        f"-oDir::Etc::SourceList={sources}",
        "-oDir::Etc::SourceParts=/dev/null",
        "-oAPT::Sandbox::User=root",
        "-oAcquire::Languages=none",
        "-oAcquire::Check-Valid-Until=false",
    ]
    for command in ([*apt, "update"], [*apt, "download", *packages]):
        subprocess.run(command, cwd=cache, check=True, timeout=FETCH_S, capture_output=True)
    unpacked = cache / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    for package in cache.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True, timeout=FETCH_S, capture_output=True)
        package.unlink()
    unpacked.rename(cache / "root")  # last: it is there whole or not at all


def _mirror() -> str:
    """The machine's own package mirror, from either form of apt's sources."""
    found = [*sorted(Path("/etc/apt/sources.list.d").glob("*.sources")), Path("/etc/apt/sources.list")]
    for line in (line for path in found if path.exists() for line in path.read_text().splitlines()):
        words = [word for word in line.split() if not word.startswith("[")]
        if words[:1] in (["URIs:"], ["deb"]) and "security" not in line:
            return words[1]
    raise FileNotFoundError("no package mirror in /etc/apt/sources.list or /etc/apt/sources.list.d")
