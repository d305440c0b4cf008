"""Running a command to its end, for the benchmarks: in a process group that ends with it or with us."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCHRUN = Path(sys.executable).with_name("torchrun")


def run_to_its_end(
    command: list,
    log: Path | None = None,
    limit_s: float | None = None,
    environment: dict | None = None,
) -> None:
    """Run a command from the project's folder, with one thread a process. SystemExit if it fails.

    A program that uses this turns SIGTERM into SystemExit (`end_with_us`), so that what it started is ended
    then, too.
    """
    output = log.open("wb") if log else None
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
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
        end = ""
        if log:
            end = f"; the end of {log}:\n" + "\n".join(
                log.read_text(errors="replace").splitlines()[-15:]
            )
        sys.exit(f"exit status {status} of {' '.join(map(str, command[:6]))} ...{end}")


def die_with_parent() -> None:
    """SIGTERM once the process that started this one ends, even if that is killed hard (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def end_with_us() -> None:
    """Have SIGTERM end this program as an exit does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
