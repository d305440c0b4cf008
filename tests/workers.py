"""Starts a script of tests/ as a process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_worker(script: str, *arguments: str | Path, timeout_s: float = 300) -> None:
    run_command([sys.executable, str(HERE / script), *map(str, arguments)], timeout_s)


def train_layouts(script: str, path: Path, layouts: dict[str, tuple], **case) -> dict:
    """By name what the layouts, (what, ranks, sizes) each, made in a script of parallel_worker.py's kind."""
    import torch

    sizes = list(dict.fromkeys(ranks for _, ranks, _ in layouts.values()))
    torch.save(case | {"layouts": layouts, "sizes": sizes}, path / "case.pt")
    run_worker(script, path / "case.pt", path / "result")
    found = {}
    for size in sizes:
        found |= torch.load(f"{path}/result.{size}", weights_only=False)
    return found


def run_command(command: list[str], timeout_s: float) -> None:
    """Until it ends; its group is gone afterwards. AssertionError with the end of its output if it failed."""
    settings = {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    how = dict(start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = subprocess.Popen(command, env=os.environ | settings, **how)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output.decode()[-4000:]
