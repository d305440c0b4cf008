"""Ways out of a rank: a user's error, Ctrl-C, a launcher that died. Each leaves one line on stderr and no process behind.

torchrun answers a failed rank with a page of its own traceback, which would bury the line, and --max-restarts would try again what
can't succeed. So ranks that leave take the launcher with them: nobody exits before everybody has cleaned up, then the rank with the
lowest process id ends the launcher, which is the sign for all to go. A crash (any other exception) is left to torchrun, and so is
what SIGTERM ends: torchrun sends it to the other ranks when one has died, and may start all of them again.

While the run trains, a first SIGINT or SIGTERM only asks for a stop: the controllers agree on it in their next meeting, save and end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
GRACE_S = 2.0  # most errors reach every rank by itself; after this the others are told
PATIENCE_S = 30.0  # for them to clean up
LEAVE = signal.SIGUSR1  # from one rank to the others: it can't go on, and neither can they
ECHO_S = 3.0  # torchrun passes a signal on that the ranks have got already: no second one


@dataclass
class Stop:
    """What signals have asked of this process. They set it, the training loop reads `asked`."""

    gently: bool = False  # whether there is a training loop that will stop by itself
    asked: int = 0  # the first signal
    time: float = 0.0  # when it came


def prepare() -> None:
    """At the very start of a rank: it ends when its launcher is killed, and libraries keep their warnings to themselves."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    launcher = psutil.Process(os.getppid())
    os.environ["NANOYATT_LAUNCHER"] = f"{launcher.pid} {launcher.create_time():.0f}"
    for number in (signal.SIGINT, LEAVE):  # until the event loop takes over
        signal.signal(number, lambda *_: give_up("interrupted", 130))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)


async def until_told(work, stop: Stop):
    """Run the work and return its result. A signal is noted in `stop`, or cancels it, so that every `finally` on the way out runs."""
    task = asyncio.ensure_future(work)

    def hear(number: int) -> None:
        now = time.monotonic()
        is_echo = stop.asked and now - stop.time < ECHO_S
        if number == LEAVE or not (is_echo or (stop.gently and not stop.asked)):
            task.cancel()
        if not stop.asked:
            stop.asked, stop.time = number, now

    for number in (signal.SIGINT, signal.SIGTERM, LEAVE):
        asyncio.get_running_loop().add_signal_handler(number, hear, number)
    return await task


def leave(message: str, status: int, number: int) -> None:
    """Leave as signal `number` wants it: SIGTERM ends ranks, any other the launcher, too. Engines must be closed already."""
    if number != signal.SIGTERM:
        give_up(message, status)
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)
    go(status)


def give_up(message: str, status: int) -> None:
    """Leave with one line and a status, and have the other ranks of this machine leave too. Engines must be closed already."""
    for number in (signal.SIGINT, signal.SIGTERM, LEAVE):
        signal.signal(number, signal.SIG_IGN)  # torchrun passes Ctrl-C on a second time
    launcher, born = map(int, os.environ["NANOYATT_LAUNCHER"].split())
    leaving = Path(tempfile.gettempdir(), f"nanoyatt-{launcher}-{born}")  # a file in it for each rank that has cleaned up
    if is_first(leaving):
        print(message, file=sys.stderr, flush=True)
    if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() == launcher:  # an orphan's new parent isn't its to end
        with contextlib.suppress(psutil.NoSuchProcess):
            leave_together(psutil.Process(launcher), leaving)
    shutil.rmtree(leaving, ignore_errors=True)
    go(status)


def go(status: int) -> None:
    """End this process now: a thread may still wait in a collective for a rank that left."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_first(leaving: Path) -> bool:
    """Whether no rank has left before: most errors reach every rank, and one line is enough."""
    try:
        leaving.mkdir()
    except FileExistsError:
        return False
    return True


def leave_together(launcher: psutil.Process, leaving: Path) -> None:
    """Return once every rank of this launcher has cleaned up and the launcher is gone."""
    (leaving / str(os.getpid())).touch()
    siblings = [child for child in launcher.children() if child.pid != os.getpid()]
    start, told = time.monotonic(), False
    while os.getppid() == launcher.pid and time.monotonic() < start + PATIENCE_S:
        alive = [sibling for sibling in siblings if is_alive(sibling)]
        busy = [sibling for sibling in alive if not (leaving / str(sibling.pid)).exists()]
        if busy and not told and time.monotonic() > start + GRACE_S:
            told = True
            for sibling in busy:
                sibling.send_signal(LEAVE)
        if not busy and all(os.getpid() < sibling.pid for sibling in alive):
            launcher.kill()
            break
        time.sleep(0.02)
    while any(is_alive(sibling) for sibling in siblings if sibling.pid > os.getpid()) and time.monotonic() < start + PATIENCE_S:
        time.sleep(0.02)


def is_alive(process: psutil.Process) -> bool:
    """Running, and not a zombie."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
