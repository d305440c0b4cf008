"""Starts a module of tests/ as a process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests import ROOT
from tests.support.patience import LIMIT_S


def run_worker(module: str, *arguments: str | Path) -> None:
    run_command([sys.executable, "-m", module, *arguments])


def train_layouts(module: str, path: Path, layouts: dict[str, tuple], references: dict) -> dict:
    """By name what the layouts, (reference, ranks, sizes) each, made in `train` of a test file."""
    import torch

    sizes = list(dict.fromkeys(ranks for _, ranks, _ in layouts.values()))
    case = {"references": references, "layouts": layouts, "sizes": sizes}
    torch.save(case, path / "case.pt")
    run_worker("tests.workers.parallel", module, path / "case.pt", path / "result")
    found = {}
    for size in sizes:
        found |= torch.load(f"{path}/result.{size}", weights_only=False)
    return found


def trained_by_tier(module: str, factory, first: dict, others: dict, references: dict) -> Callable:
    """Of a layout's name what training made of it; the layouts of a tier are trained together."""

    @cache
    def trained(are_first: bool) -> dict:
        layouts = first if are_first else others
        return train_layouts(module, factory.mktemp("layouts"), layouts, references)

    return lambda name: trained(name in first)[name]


def run_command(command: list[str | Path]) -> None:
    """Until it ends; its group is gone afterwards. AssertionError with the end of its output if it failed."""
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    how = dict(cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = subprocess.Popen([*map(str, command)], env=os.environ | settings, **how)
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output.decode()[-4000:]
