"""One ruler for both sides of vs_trl.py: wall and CPU seconds and memory of a rank and all that it started.

Needs the standard library and psutil only, because it also runs in TRL's environment.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import psutil


class Mark(NamedTuple):
    """A moment, in seconds: of the monotonic clock, and of the CPU time of all watched processes."""

    wall: float
    cpu: float

    def to(self, later: Mark) -> dict[str, float]:
        return {"wall": later.wall - self.wall, "cpu": later.cpu - self.cpu}


class Meter:
    """What one rank measured, a row a step; `write` leaves it in a file for vs_trl.py, which adds them up.

    `launched`: time.monotonic() of when vs_trl.py started this run.
    """

    def __init__(self, folder: Path, rank: int, launched: float):
        self.path, self.rank, self.launched = folder / f"rank{rank}.json", rank, launched
        self.rows: list[dict] = []
        self.startup_s = self.startup_cpu_s = 0.0
        self.pids: list[int] = []

    def start(self) -> None:
        """Start-up is over: every process of this rank is there. Rank 0 also answers for the launcher."""
        tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
        self.pids = [process.pid for process in tree] + ([os.getppid()] if self.rank == 0 else [])
        self.startup_s = time.monotonic() - self.launched
        self.startup_cpu_s = self.mark().cpu

    def mark(self) -> Mark:
        """Now."""
        return Mark(time.monotonic(), sum(cpu_seconds(pid) for pid in self.pids))

    def write(self) -> None:
        """Call it while every process still lives, after the last step."""
        memory = {
            "peak_rss_mb": sum(map(peak_rss_mb, self.pids)),
            "pss_mb": sum(map(pss_mb, self.pids)),
        }
        startup = {"startup_s": self.startup_s, "startup_cpu_s": self.startup_cpu_s}
        self.path.write_text(
            json.dumps({"rows": self.rows, "processes": len(self.pids)} | startup | memory)
        )


def cpu_seconds(pid: int) -> float:
    """CPU time of a process with all its threads, those that ended, too.

    From its POSIX CPU-time clock: /proc counts in steps of 10 ms.
    """
    # clock_getcpuclockid(3), as Linux numbers these clocks
    return time.clock_gettime((~pid << 3) | 2)


def peak_rss_mb(pid: int) -> float:
    """The most resident memory that the process ever had, shared pages included."""
    return _kilobytes(pid, "status", "VmHWM") / 1024


def pss_mb(pid: int) -> float:
    """Resident memory now; a page that n processes share counts 1/n in each."""
    return _kilobytes(pid, "smaps_rollup", "Pss") / 1024


def _kilobytes(pid: int, file: str, name: str) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
