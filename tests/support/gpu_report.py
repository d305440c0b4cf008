"""The file that `make test-gpu` writes: what to attach to a report of a failure."""

import subprocess
import sys
from pathlib import Path

from tests import ROOT
from tests.support.patience import LIMIT_S

PATH = ROOT / "runs" / "gpu-report.txt"
LOG_LINES, ERROR_LINES = 60, 40


def write(table: list[str], failures: list[tuple[str, str]], logs: list[Path]) -> Path:
    """Write the report. table: passed checks and figures. failures: each failed test's name and message."""
    sections = {
        "what passed": table,
        "machine": [*output_of("nvidia-smi"), *output_of(sys.executable, "run.py", "check")],
        "packages": output_of(sys.executable, "-m", "pip", "freeze"),
        "commit": output_of("git", "rev-parse", "HEAD"),
    }
    for name, text in failures:
        sections[f"failed: {name}"] = text.splitlines()[-ERROR_LINES:]
    for log in logs:
        lines = log.read_text(errors="replace").splitlines()
        sections[f"the end of {log.parent.name}/{log.name}"] = lines[-LOG_LINES:]
    PATH.parent.mkdir(exist_ok=True)
    text = "\n\n".join("\n".join([f"---- {name}", *lines]) for name, lines in sections.items())
    PATH.write_text(text + "\n")
    return PATH


def output_of(*command: str) -> list[str]:
    """Return the lines that a command prints, or why it can't be run."""
    how = dict(cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    try:
        done = subprocess.run(command, **how)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    return (done.stdout + done.stderr).splitlines()
