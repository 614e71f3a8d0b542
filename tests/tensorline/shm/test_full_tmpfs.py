import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("full_tmpfs.py")
MOUNT = 'mount -t tmpfs -o size=16m,mode=0700 tmpfs "$1" && echo mounted && exec "$2" "$3" "$1"'


def test_a_full_tmpfs_is_an_error_and_never_a_signal(tmp_path: Path) -> None:
    command = ["unshare", "-m", "sh", "-c", MOUNT, "sh", str(tmp_path), sys.executable, str(SCRIPT)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        mounted = run.stdout.startswith("mounted")
    except FileNotFoundError:
        mounted = False
    if not mounted and os.environ.get("CI") != "true":
        pytest.skip("needs unshare -m and the right to mount; the arena's own limit is tested in test_arena.py")
    assert mounted, "CI must be able to mount a tmpfs of its own"
    assert (run.stdout, run.returncode) == ("mounted\nalive\n", 0), run.stderr
