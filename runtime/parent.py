"""Make a process end with the one that started it. Imports almost nothing, as engines begin with it."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PARENT = "NANOYATT_PARENT"  # id of the process that started this server


def die_with_parent(number: int) -> None:
    """Ask Linux for this signal, or 0 for none, when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Ask Linux to make this process the parent of its descendants whose parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_owner() -> None:
    """Ask for a SIGKILL when the thread that started this process ends; exit if it already has."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(os.environ.get(PARENT, os.getppid())):
        print("the process that started this one is gone", file=sys.stderr, flush=True)
        os._exit(1)  # an exception would be swallowed after a fork
    os.environ[PARENT] = str(os.getpid())
