"""Run a module as `python -m` would, in a process that gets SIGTERM when its parent dies, however it dies.

    python -m tensorline.cli.child PARENT_PID MODULE|FILE.py [ARGUMENT…]

It is asked for here, in the child's own first lines: a `preexec_fn` in the parent is unsafe beside threads, and a
second interpreter in front of the module would cost each service another start. SIGTERM and not SIGKILL, so that an
orphan drains and takes its registration and its arena with it, and a gateway takes its workers.
"""

import os
import runpy
import signal
import sys
import threading
import time

__all__ = ["die_with", "main"]

PR_SET_PDEATHSIG = 1
DRAIN_S = 20.0
KILL_AFTER_S = 5.0


def die_with(parent: int, drain_s: float) -> None:
    """Get one SIGTERM when the process `parent` ends; ends this one at once when that has happened already.

    Called by the main thread before any other exists. What still runs five seconds after `drain_s` is killed.
    """
    if sys.platform == "linux":
        import ctypes

        # A signal of its own, which a thread waits for: the kernel sends it once for each thread that the parent had,
        # and to a process that drains a second SIGTERM says "at once". A Python handler that passes it on would run
        # inside uvloop's own handling of signals, which then tells of SIGTERM twice.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
        threading.Thread(target=_wait_orphaned, args=[drain_s], name="parent", daemon=True).start()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGRTMIN), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(f"the process {parent} that started this one is gone")


def _wait_orphaned(drain_s: float) -> None:
    signal.sigwait({signal.SIGRTMIN})
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(drain_s + KILL_AFTER_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _drain_s(text: str) -> float:
    try:
        return max(float(text), 0.0)
    except ValueError:
        return DRAIN_S  # not given; or wrong, as the module itself will say better


def main() -> None:
    parent, target, *arguments = sys.argv[1:]
    die_with(int(parent), _drain_s(os.environ.get("TENSORLINE_DRAIN_S", "")))
    sys.argv = [target, *arguments]
    if target.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
