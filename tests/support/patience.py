"""How long a test waits: so long that even on a very busy machine only a hang exceeds it."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests import ROOT

PATIENCE = float(os.environ.get("NANOYATT_TEST_PATIENCE", "1"))
LIMIT_S = 1800.0 * PATIENCE


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. Raises AssertionError after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "never came so far"
        time.sleep(0.01)


def run_process(*command: str | Path | float, **how) -> subprocess.CompletedProcess[str]:
    """Run a process; return its status, stdout and stderr. Raises subprocess.TimeoutExpired after LIMIT_S."""
    how = dict(cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S) | how
    return subprocess.run([*map(str, command)], **how)
