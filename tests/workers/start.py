"""Starts a module of tests/ as a process; forks ranks from one that has the imports they need."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests import ROOT
from tests.support.patience import LIMIT_S

SETTINGS = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def run_worker(module: str, *arguments: str | Path) -> None:
    run_command([sys.executable, "-m", module, *arguments])


@cache
def forks() -> subprocess.Popen:
    """Return parallel.py's process. It ends with this one, or by `close`."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True)
    command = [sys.executable, "-m", "tests.workers.parallel"]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | SETTINGS, **pipes)


def close() -> None:
    """End the process of `forks`, and whatever it forked."""
    if forks.cache_info().currsize:
        os.killpg(forks().pid, signal.SIGKILL)
        forks().communicate()
        forks.cache_clear()


def train_layouts(module: str, path: Path, layouts: dict[str, tuple], references: dict) -> dict:
    """Train the layouts, (reference, ranks, sizes) each, with a test file's `train`; return named results."""
    import torch

    sizes = list(dict.fromkeys(ranks for _, ranks, _ in layouts.values()))
    case = {"references": references, "layouts": layouts, "sizes": sizes}
    torch.save(case, path / "case.pt")
    (path / "log").touch()
    print(module, path, file=forks().stdin, flush=True)
    said = select.select([forks().stdout], (), (), LIMIT_S)[0] and forks().stdout.readline()
    if said != "0\n":
        close()
    assert said == "0\n", (path / "log").read_text()[-4000:]
    found = {}
    for size in sizes:
        found |= torch.load(f"{path}/result.{size}", weights_only=False)
    return found


def trained_by_tier(module: str, factory, first: dict, others: dict, references: dict) -> Callable:
    """Return a function from a layout's name to its training result; a tier's layouts train together."""

    @cache
    def trained(are_first: bool) -> dict:
        layouts = first if are_first else others
        return train_layouts(module, factory.mktemp("layouts"), layouts, references)

    return lambda name: trained(name in first)[name]


def run_command(command: list[str | Path]) -> None:
    """Run it until it ends and its group is gone. Raises AssertionError with its last output if it failed."""
    how = dict(cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = subprocess.Popen([*map(str, command)], env=os.environ | SETTINGS, **how)
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output.decode()[-4000:]
