"""The supervisor with real processes: small scripts that crash, linger, or start others."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tensorline.cli import supervisor as module
from tensorline.cli.backoff import Backoff
from tensorline.cli.lines import KeptOutput
from tensorline.cli.supervisor import Program, open_supervisor

MakeScript = Callable[[str, str], str]

FOREVER = "import time; print('up', flush=True); time.sleep(60)"
STOP_NOTED = """
    import pathlib, signal, sys, time
    def stop(number, frame):
        time.sleep({drain_s})
        with open({log!r}, "a") as log:
            log.write("{name}\\n")
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    print("up", flush=True)
    while True:
        time.sleep(0.01)
"""


def fast() -> Backoff:
    return Backoff(first_s=0.02, most_s=0.05)


def program(name: str, target: str, tier: int = 1) -> Program:
    return Program(name, target, dict(os.environ), tier)


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_what_crashes_is_started_again(script: MakeScript, output: KeptOutput, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    crashing = script("crashing", f"open({str(starts)!r}, 'a').write('x'); print('out of luck'); raise SystemExit(3)")
    async with open_supervisor([program("model", crashing)], output, 1.0, fast) as supervisor:
        ended = await asyncio.wait_for(supervisor.wait_ended(), 10)
        await until(lambda: len(starts.read_text()) >= 3)
    assert (ended.name, ended.code, ended.said) == ("model", 3, "out of luck")
    told = [line for line in output.lines if "starts again" in line]
    assert "out of luck; starts again in 0.02 s" in told[0]
    assert "starts again in 0.04 s" in told[1]


async def test_a_signal_is_told_by_its_name(script: MakeScript, output: KeptOutput) -> None:
    async with open_supervisor([program("model", script("up", FOREVER))], output, 1.0, fast) as supervisor:
        await until(lambda: "model: up" in output.lines)
        os.kill(supervisor.pids["model"], signal.SIGKILL)
        ended = await asyncio.wait_for(supervisor.wait_ended(), 10)
    assert "model ended with signal SIGKILL" in str(ended)


async def test_the_gateway_has_drained_before_a_stage_is_asked(
    script: MakeScript, output: KeptOutput, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    programs = [
        program(name, script(name, STOP_NOTED.format(name=name, log=str(log), drain_s=drain_s)), tier)
        for name, tier, drain_s in (("preprocess", 1, 0), ("gateway", 0, 0.3), ("model", 1, 0.1))
    ]
    async with open_supervisor(programs, output, 5.0) as supervisor:
        await until(lambda: len([line for line in output.lines if line.endswith(": up")]) == 3)
        pids = supervisor.pids
    assert log.read_text().split() == ["gateway", "preprocess", "model"]
    assert not [pid for pid in pids.values() if psutil.pid_exists(pid)]
    assert not [line for line in output.lines if "exit code" in line]


async def test_what_ignores_the_stop_is_killed_after_its_time(
    script: MakeScript, output: KeptOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KILL_AFTER_S", 0.2)
    stubborn = script("stubborn", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER)
    async with open_supervisor([program("model", stubborn)], output, 0.1) as supervisor:
        await until(lambda: "model: up" in output.lines)
        pid, asked = supervisor.pids["model"], time.monotonic()
    assert 0.3 <= time.monotonic() - asked < 12
    assert not psutil.pid_exists(pid)
    assert "model: did not stop in 0.3 s: killed" in output.lines


async def test_a_stop_ends_the_wait_for_the_next_start(script: MakeScript, output: KeptOutput) -> None:
    crashing = script("crashing", "raise SystemExit(1)")
    async with open_supervisor([program("model", crashing)], output, 1.0, lambda: Backoff(first_s=30)) as supervisor:
        await asyncio.wait_for(supervisor.wait_ended(), 10)
        await until(lambda: output.lines)
        asked = time.monotonic()
    assert time.monotonic() - asked < 4


async def test_what_a_process_started_goes_with_it(script: MakeScript, output: KeptOutput) -> None:
    """Also when it still holds the pipe of the log."""
    leaving = script("leaving", "import subprocess; print(subprocess.Popen(['sleep', '60']).pid); raise SystemExit(1)")
    async with open_supervisor([program("model", leaving)], output, 1.0, lambda: Backoff(first_s=30)) as supervisor:
        await asyncio.wait_for(supervisor.wait_ended(), 10)
        grandchild = int(output.lines[0].removeprefix("model: "))
        await until(lambda: not is_running(grandchild), 3)


async def test_a_target_that_is_not_there_is_an_end_like_others(output: KeptOutput) -> None:
    async with open_supervisor([program("embed", "no.such.module")], output, 1.0, fast) as supervisor:
        ended = await asyncio.wait_for(supervisor.wait_ended(), 10)
    assert ended.code == 1
    assert "No module named 'no'" in ended.said


async def test_the_directory_is_on_the_path_of_a_teams_own_module_alone(
    script: MakeScript, output: KeptOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the user's that is called like one of our packages must not stand in for it."""
    script("lookalike", "print('from the directory')")
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    own = Program("own", "lookalike", environment, uses_directory=True)
    ours = Program("ours", "lookalike", environment)
    async with open_supervisor([own, ours], output, 1.0, fast):
        await until(lambda: {"own: from the directory"} < set(output.lines) and "No module" in str(output.lines))
    assert "ours: from the directory" not in output.lines


async def test_nothing_of_the_supervisor_is_left(script: MakeScript, output: KeptOutput) -> None:
    me, crashing = psutil.Process(), script("crashing", "raise SystemExit(1)")
    async with open_supervisor([program("first", crashing)], output, 1.0, fast):
        await until(lambda: output.lines)  # uvloop opens a descriptor of its own with its first pipe
    descriptors, tasks = me.num_fds(), len(asyncio.all_tasks())
    async with open_supervisor([program(f"p{i}", crashing) for i in range(3)], output, 1.0, fast):
        await until(lambda: len(output.lines) > 8)
    await until(lambda: len(asyncio.all_tasks()) == tasks and me.num_fds() <= descriptors, 3)
    assert not [child for child in me.children(recursive=True) if "crashing" in " ".join(child.cmdline())]


PARENT = """
import asyncio, os, sys
from tensorline.cli.lines import KeptOutput
from tensorline.cli.supervisor import Program, open_supervisor

async def main():
    output = KeptOutput()
    async with open_supervisor([Program("model", sys.argv[1], dict(os.environ))], output, 5.0) as supervisor:
        while "model: up" not in output.lines:
            await asyncio.sleep(0.01)
        print(supervisor.pids["model"], flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


DRAINING = """
    import asyncio, signal, uvloop
    async def main():
        asked = asyncio.Event()
        def ask():
            with open({log!r}, "a") as log:
                log.write("asked\\n")
            asked.set()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ask)
        print("up", flush=True)
        await asked.wait()
        await asyncio.sleep(0.5)
    uvloop.run(main())
"""


async def test_a_killed_supervisor_takes_its_processes_with_it(script: MakeScript, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    stage = script("stage", DRAINING.format(log=str(asked)))
    command = [sys.executable, "-c", PARENT, stage]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 - killed, not waited for
    with parent:
        assert parent.stdout is not None
        child = int(await asyncio.to_thread(parent.stdout.readline))
        assert os.getsid(child) == child, "the terminal's Ctrl-C must not reach it"
        parent.kill()
        await until(lambda: not is_running(child), 5)
    assert asked.read_text() == "asked\n", "an orphan drains: it is asked, and only once"


QUICK = "import tensorline.cli.child as child; child.KILL_AFTER_S = 0.2; child.main()"
LEAVING = """
import os, subprocess, sys, time
process = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]], stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(60)
"""


async def test_an_orphan_that_is_stuck_ends_all_the_same(script: MakeScript) -> None:
    stuck = script("stuck", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER)
    command = [sys.executable, "-c", LEAVING, QUICK, stuck]
    environment = {**os.environ, "TENSORLINE_DRAIN_S": "0.1"}
    parent = subprocess.Popen(  # noqa: ASYNC220 - killed, not waited for
        command, env=environment, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        child = int(await asyncio.to_thread(parent.stdout.readline))
        parent.kill()
        await until(lambda: not is_running(child), 5)


async def test_a_child_whose_parent_is_gone_already_does_not_start(script: MakeScript) -> None:
    command = [sys.executable, "-m", "tensorline.cli.child", "1", script("up", FOREVER)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert "is gone" in done.stderr
