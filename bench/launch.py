"""Running a command to its end, for the benchmarks: in a process group of its own, which ends with it or with us."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCHRUN = Path(sys.executable).with_name("torchrun")


def run_to_its_end(command: list, log: Path | None = None, limit_s: float | None = None, environment: dict | None = None) -> None:
    """Run a command from the project's folder, with one thread a process. SystemExit with the log's end if it
    fails.

    A program that uses this turns SIGTERM into SystemExit (`end_with_us`), so that what it started is ended
    then, too.
    """

    def die_with_us() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: even if this program is killed hard

    output = log.open("wb") if log else None
    process = subprocess.Popen(
        [str(part) for part in command], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        stdout=output, stderr=output, start_new_session=True, preexec_fn=die_with_us,
    )
    try:
        status = process.wait(limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, a rank its engines
            process.wait()
    if status:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:]) if log else ""
        sys.exit(f"exit status {status} of {' '.join(map(str, command[:6]))} ...{f'; the end of {log}:' if log else ''}\n{tail}")


def end_with_us() -> None:
    """Have SIGTERM end this program as an exit does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
