"""How busy the host is, read from files like those of /proc."""

from pathlib import Path

import pytest

from tensorline.telemetry.host import Host


def write(proc: Path, *ticks: int) -> None:
    (proc / "stat").write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 1 1\n")
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 250 kB\nHugePages_Total: 0\n")


def test_busy_is_what_is_neither_idle_nor_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tensorline.telemetry.host.time.monotonic", lambda: now[0])
    write(tmp_path, 10, 0, 10, 100, 20, 0, 0, 0, 5, 0)
    host = Host(tmp_path)
    assert host.cpu_utilization() == 0
    write(tmp_path, 25, 0, 20, 160, 35, 0, 0, 0, 15, 0)  # a guest's ticks are among the first already
    assert host.cpu_utilization() == 0  # too soon
    now[0] += 1
    assert host.cpu_utilization() == 0.25
    assert host.memory_bytes() == (1000 << 10, 750 << 10)


def test_the_real_one() -> None:
    host = Host()
    total, used = host.memory_bytes()
    assert 0 < used < total
    assert 0 <= host.cpu_utilization() <= 1
