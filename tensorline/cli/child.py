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

__all__ = ["die_with", "main"]

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Get SIGTERM when the process `parent` ends; ends this one at once when that has happened already."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(f"the process {parent} that started this one is gone")


def main() -> None:
    parent, target, *arguments = sys.argv[1:]
    die_with(int(parent))
    sys.argv = [target, *arguments]
    if target.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
