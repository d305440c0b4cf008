"""Tools for all measurements: run a command to its end, measure processes, print tables, draw pictures.

Needs only the standard library and psutil (pictures also matplotlib), as it also runs in TRL's environment.
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

ROOT = Path(__file__).parents[2]
TORCHRUN = Path(sys.executable).with_name("torchrun")


def parser_of(doc: str, **numbers: int) -> ArgumentParser:
    """Return a parser whose --help shows `doc`. numbers: a flag for each, with its default."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser


def run_to_its_end(
    command: list, log: Path | None = None, limit_s: float | None = None, env: dict | None = None
) -> None:
    """Run a command in the project's folder, with one thread per process. Raises SystemExit if it fails.

    The command has its own process group, which ends with this program: on an exception, on SIGTERM (which
    becomes SystemExit here) or on SIGKILL.
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
    """Run a program to its end on `ranks` ranks, with a free port."""
    run_to_its_end([TORCHRUN, "--standalone", "--nproc-per-node", ranks, *words], log, env=env)


def die_with_parent() -> None:
    """Ask for a SIGTERM when the parent ends, even by SIGKILL (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


class Meter:
    """Measures both sides of vs_trl.py alike: seconds of a rank, and the memory of all.

    vs_trl.py sets METER_FOLDER to the output folder, and METER_LAUNCHED to the start of the run
    (time.monotonic). rows: one per step, filled by the caller.
    """

    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.launched = float(os.environ["METER_LAUNCHED"])
        self.path = Path(os.environ["METER_FOLDER"], f"rank{self.rank}.json")
        self.rows: list[dict] = []

    def start(self) -> None:
        """End the startup, when all processes of this rank exist."""
        self.startup_s = time.monotonic() - self.launched

    def write(self) -> None:
        """Write the file that vs_trl.py reads, after the last step. Rank 0 measures the launcher's memory and
        that of all processes below it; until then the other ranks stay."""
        found = {"rows": self.rows, "startup_s": self.startup_s, "pss_mb": 0.0}
        if self.rank:
            while not self.path.with_name("rank0.json").exists():
                time.sleep(0.05)
        else:
            launcher = psutil.Process().parent()
            for process in (launcher, *launcher.children(recursive=True)):
                found["pss_mb"] += pss_mb(process.pid)
        self.path.write_text(json.dumps(found))


def peak_rss_mb(pid: int) -> float:
    """Return a process's peak resident memory in MB, including shared pages."""
    return _kilobytes(pid, "status", "VmHWM") / 1024


def pss_mb(pid: int) -> float:
    """Return a process's resident memory in MB. A page shared by n processes counts as 1/n in each."""
    return _kilobytes(pid, "smaps_rollup", "Pss") / 1024


def _kilobytes(pid: int, file: str, name: str) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def column(rows: Iterable[dict], name: str) -> list:
    return [row[name] for row in rows]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return "median (smallest-largest)"."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def quartiles(values: Sequence[float], digits: int = 2) -> str:
    """Return "median (lower quartile-upper quartile)"."""
    return spread(quantiles(values, n=4) if len(values) > 1 else values, digits)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print an empty line and a Markdown table."""
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


@contextmanager
def picture(path: Path, panels: int, width: float) -> Iterator[list]:
    """Yield axes of panels side by side, each `width` inches wide, then save them as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (width * panels, 3.6)
    figure, axes = pyplot.subplots(1, panels, figsize=size, squeeze=False, constrained_layout=True)
    yield list(axes[0])
    figure.savefig(path, dpi=110)
