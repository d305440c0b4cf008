"""Ways out of a rank with its engines closed: an error, a signal, a launcher that died.

A user's error is one line, whatever the number of ranks, and status 2; a rank that torchrun starts again
after one leaves at once. A lost engine or a full disk is one line and status 1. torchrun ends the other ranks
with SIGTERM. While a run trains, the first of SIGNALS asks for a stop: the controllers agree on it, save and
leave with status 0. A second one, one before training, or one where a rank of this machine is gone, ends all
work: 128 and its number. torchrun kills its ranks after 30 s, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil

from runtime.errors import RunLost
from runtime.parent import die_with_parent
from runtime.world import World, is_alive

# clusters send the last two before a job's time is over
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# nohup is obeyed, unless torchrun, which doesn't hear of it, passes the signal on
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and "TORCHELASTIC_RUN_ID" not in os.environ:
    SIGNALS = SIGNALS[:-1]
FORKING = threading.local()  # mask: the signals that were blocked before a fork
USER_ERROR = "user_error"  # in the folder of all attempts of a torchrun: the first error file
QUIET = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
ECHO_S = 3.0  # torchrun passes a signal on, which the ranks may have got already: no second one
LOOK_S = 0.5  # between two looks at the other ranks, after a signal


class Stopped(Exception):
    """All controllers have agreed to stop: it is raised on each, in the same meeting."""


@dataclass
class Stop:
    """The requests of signals to this process. Controllers tell each other of them when they meet."""

    graceful: bool = False  # whether there is a training loop that will stop by itself
    asked: int = 0  # the first signal
    time: float = 0.0  # when it came
    neighbours: dict[int, int] = field(default_factory=dict)  # process ids of this machine's ranks
    reason: str = "interrupted"  # what the process says if it leaves before it is done

    async def until_all_are_ready(self, world: World) -> None:
        """The last meeting before training (collective): no rank is past it before all stop by themselves."""
        self.graceful = True
        first = world.rank - int(os.environ["LOCAL_RANK"])
        pids = await world.gather(os.getpid())
        ranks = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
        self.neighbours = {rank: pids[rank] for rank in ranks}

    def has_lost_a_rank(self) -> bool:
        """Tell if a rank of this machine is gone; then `reason` names it."""
        for rank, pid in self.neighbours.items():
            if not is_alive(pid):
                self.reason = f"interrupted: rank {rank} of this machine is gone"
                return True
        return False


def prepare() -> None:
    """Begin a rank. If torchrun has started it again after a user's error, it leaves as the one before."""
    die_with_parent(signal.SIGTERM)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and (error := Path(path).parents[2] / USER_ERROR).exists():
        shutil.copy(error, path)
        leave(2)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # connections are open files
    for number in SIGNALS:  # until the event loop takes over
        signal.signal(number, lambda number, _: exit_now(128 + number, "interrupted"))
    os.environ |= dict.fromkeys(QUIET, "1")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    # TensorBoard's thread raises where a disk is full; so does its flush, where that is caught
    threading.excepthook = lambda args: args.exc_type is OSError or threading.__excepthook__(args)
    sys.excepthook = leave_with_traceback
    warnings.filterwarnings("ignore")
    # a build for CUDA says that there is no device
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


@functools.cache
def group_holder() -> subprocess.Popen:
    """Start a process that leads the group of all forked ones: signals to the rank's don't reach them."""
    # none leads a group of its own: it could not call setsid
    return subprocess.Popen("cat", stdin=subprocess.PIPE, process_group=0)


def before_fork() -> None:
    """Keep signals from a forked process until it has Python's own handlers."""
    group_holder()
    FORKING.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, FORKING.mask)


def after_fork() -> None:
    """Give the process Python's own handlers, and another group: it isn't a rank, whoever forked it."""
    with contextlib.suppress(OSError):  # it is in another session
        os.setpgid(0, group_holder().pid)
    signal.set_wakeup_fd(-1)  # the event loop of the rank would read its signals there
    for number in (*SIGNALS, signal.SIGALRM):
        if callable(signal.getsignal(number)):
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    unblock()


os.register_at_fork(before=before_fork, after_in_parent=unblock, after_in_child=after_fork)


@contextlib.contextmanager
def starting_deaf() -> Iterator[None]:
    """Let processes start deaf to SIGNALS: who signals a whole job means the ranks, which save."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(work: Coroutine, stop: Stop) -> Any:
    """Run the work, on an event loop that stays open: to close it would wait for the user's threads."""
    return asyncio.new_event_loop().run_until_complete(run_until_signal(work, stop))


async def run_until_signal(work: Coroutine, stop: Stop) -> Any:
    """Run the work and return its result. A signal is noted in `stop`, or cancels it with every `finally`."""
    task = asyncio.ensure_future(work)
    watches = []  # referred to, else they may be collected while they run

    def on_signal(number: int) -> None:
        now = time.monotonic()
        if not stop.asked:
            stop.asked = number
            stop.time = now
            if stop.graceful:
                watches.append(asyncio.ensure_future(cancel_if_one_is_gone(task, stop)))
                return
        elif now - stop.time <= ECHO_S:
            return
        task.cancel()

    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    try:
        return await task
    except (RuntimeError, RunLost):  # maybe only because another rank has gone, and has said why
        await asyncio.sleep(LOOK_S)
        reported = reported_file()
        if stop.has_lost_a_rank() or (reported and reported.exists()):
            raise asyncio.CancelledError from None
        raise


async def cancel_if_one_is_gone(task: asyncio.Future, stop: Stop) -> None:
    """Cancel a stop that can't be: a rank that is gone never agrees, and with NCCL nobody gets an error."""
    looks = 0  # in a row: a rank that is through leaves, maybe before this one knows that all are
    while looks < 2:
        looks = looks + 1 if stop.has_lost_a_rank() else 0
        await asyncio.sleep(LOOK_S)
    task.cancel()


def exit_on_error(status: int, line: str) -> NoReturn:
    """Leave because of an error that can be told in a line. torchrun reads it from its error file."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": message}))
        if status == 2:
            with contextlib.suppress(OSError):  # another rank has, or the disk knows no links
                os.link(path, Path(path).parents[2] / USER_ERROR)
    exit_now(status, line)


def exit_now(status: int, line: str) -> NoReturn:
    """Say why, unless another rank of this machine has, and end although threads may wait for other ranks."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # the terminal is gone, or the mark is there
        if reported := reported_file():
            reported.touch(exist_ok=False)
        print(line, file=sys.stderr)
    leave(status)


def leave_with_traceback(*error: Any) -> NoReturn:
    """End after an error that is nobody's but ours; `error` as sys.excepthook takes it."""
    # while it calls this hook, torch catches what is written to sys.stderr, to say it later
    traceback.print_exception(*error, file=sys.__stderr__)
    leave(1)


def leave(status: int) -> NoReturn:
    """End this process, and what the user's code left running. Python's own end would wait for NCCL."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal is gone
            stream.flush()
    os._exit(status)


def reported_file() -> Path | None:
    """The mark that a rank has said why the run ends: in the folder that torchrun made for this attempt."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path).parents[1] / "reported" if path else None
