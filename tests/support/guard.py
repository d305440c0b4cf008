"""Runs a command and keeps all that it starts in the family: orphans come to this process instead of init.

    python -m tests.support.guard RESULT.json COMMAND ...

The result has the command's exit status, the processes that outlived it (they are then killed), and whether a
bystander, a child of this process that has nothing to do with the command, is alive.
"""

import ctypes
import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.patience import LIMIT_S

PR_SET_CHILD_SUBREAPER = 36


def family(but: int) -> dict[int, str]:
    """Return living descendants: process id -> command line."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.pid != but and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
    return found


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Ctrl-C is for the command; a handler, because exec would inherit SIG_IGN
    signal.signal(signal.SIGINT, lambda *_: None)
    bystander = subprocess.Popen(["sleep", str(2 * LIMIT_S)], start_new_session=True)
    status = subprocess.Popen(sys.argv[2:]).wait()
    deadline = time.monotonic() + LIMIT_S
    while (left := family(bystander.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    result = {"status": status, "left": list(left.values())}
    result["bystander_spared"] = bystander.poll() is None
    for pid in (*family(bystander.pid), bystander.pid):
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
