"""Ways out of a rank: told to stop, a user's error, a launcher that died; each leaves one line and no process behind."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import warnings

PR_SET_PDEATHSIG = 1


async def until_told(work) -> None:
    """Run the work; SIGINT and SIGTERM cancel it, so that every `finally` on the way out runs."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await task


def prepare() -> None:
    """At the very start of a rank: it ends when its launcher is killed, and libraries keep their warnings to themselves."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, lambda *_: give_up("interrupted", 130))  # until the event loop takes over
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)


def give_up(message: str, status: int) -> None:
    """Leave with one line. Called on every rank: a user's error and Ctrl-C reach all of them.

    torchrun answers a failed rank with a page of its own traceback, which would bury that line, and --max-restarts would try what
    can't succeed. So the last rank out ends the launcher too. os._exit: a thread may still wait in a collective for a rank that left.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # torchrun passes Ctrl-C on a second time
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)
        end_launcher()
    os._exit(status)


def end_launcher() -> None:
    """Once the other ranks of this machine are gone, end torchrun."""
    import psutil

    launcher = psutil.Process(os.getppid())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        siblings = [child for child in launcher.children() if child.pid != os.getpid()]
        psutil.wait_procs(siblings, timeout=30)
        launcher.kill()
