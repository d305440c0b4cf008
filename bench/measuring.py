"""The tools of all measurements: a command that is run to its end, a meter of processes, tables, pictures.

The standard library and psutil are all that it needs, because it also runs in TRL's environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import psutil

ROOT = Path(__file__).parent.parent
TORCHRUN = Path(sys.executable).with_name("torchrun")


def parser_of(doc: str, **numbers: int) -> ArgumentParser:
    """A parser whose --help is `doc`, with a flag of each number; its default."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser


def run_to_its_end(
    command: list, log: Path | None = None, limit_s: float | None = None, env: dict | None = None
) -> None:
    """Run a command from the project's folder, with one thread a process. SystemExit if it fails.

    It has a process group of its own, which ends when this program does: by an exception, by SIGTERM, which
    becomes SystemExit here, or killed hard.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    words = [str(part) for part in command]
    output = log.open("wb") if log else None
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        status = process.wait(limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, a rank its engines
            process.wait()
    if status:
        message = f"exit status {status} of {' '.join(words[:6])} ..."
        if log:
            last_lines = log.read_text(errors="replace").splitlines()[-15:]
            message += f"; the end of {log}:\n" + "\n".join(last_lines)
        sys.exit(message)


def run_ranks(ranks: int, words: list, log: Path | None = None, env: dict | None = None) -> None:
    """Run a program on so many ranks to its end, on a port that is free."""
    run_to_its_end([TORCHRUN, "--standalone", "--nproc-per-node", ranks, *words], log, env=env)


def die_with_parent() -> None:
    """Get a SIGTERM once the parent ends, even if it is killed hard (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class Meter:
    """One ruler for both sides of vs_trl.py: seconds and memory of a rank and all that it started.

    vs_trl.py says in METER_FOLDER where to write, and in METER_LAUNCHED when (time.monotonic) it started the
    run. rows: one a step, which the caller fills.
    """

    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.launched = float(os.environ["METER_LAUNCHED"])
        self.path = Path(os.environ["METER_FOLDER"], f"rank{self.rank}.json")
        self.rows: list[dict] = []
        self.pids: list[int] = []

    def start(self) -> None:
        """End the start-up: every process of this rank is there. Rank 0 also answers for the launcher."""
        tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
        self.pids = [process.pid for process in tree]
        if self.rank == 0:
            self.pids.append(os.getppid())
        self.startup_s = time.monotonic() - self.launched

    def write(self) -> None:
        """Leave a file for vs_trl.py: after the last step, while every process still lives."""
        found = {"rows": self.rows, "startup_s": self.startup_s}
        found["pss_mb"] = sum(pss_mb(pid) for pid in self.pids)
        self.path.write_text(json.dumps(found))


def peak_rss_mb(pid: int) -> float:
    """The most resident memory that the process ever had, shared pages included."""
    return _kilobytes(pid, "status", "VmHWM") / 1024


def pss_mb(pid: int) -> float:
    """The resident memory now; a page that n processes share counts 1/n in each."""
    return _kilobytes(pid, "smaps_rollup", "Pss") / 1024


def _kilobytes(pid: int, file: str, name: str) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def column(rows: Iterable[dict], name: str) -> list:
    return [row[name] for row in rows]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median (smallest-largest)."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def quartiles(values: Sequence[float], digits: int = 2) -> str:
    """Median (lower quartile-upper quartile)."""
    return spread(quantiles(values, n=4) if len(values) > 1 else values, digits)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print Markdown, after an empty line."""
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


@contextmanager
def picture(path: Path, panels: int, width: float) -> Iterator[list]:
    """The axes of panels side by side, each so many inches wide; a PNG once they are drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (width * panels, 3.6)
    figure, axes = pyplot.subplots(1, panels, figsize=size, squeeze=False, constrained_layout=True)
    yield list(axes[0])
    figure.savefig(path, dpi=110)
