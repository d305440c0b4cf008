"""How a rank exits with its engines closed: after an error, a signal, or its launcher's death.

A user's error prints one line, whatever the number of ranks, and exits with status 2; a rank that torchrun
restarts after one exits at once. A lost engine or a full disk prints one line, with status 1. torchrun ends
the other ranks with SIGTERM. During training, the first of SIGNALS requests a stop: the controllers agree,
save and exit with status 0. A second one, one before training, or one while a rank of this machine is gone,
ends all work: status 128 + its number. torchrun kills ranks after 30 s, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT.
"""

import asyncio
import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

import psutil

from runtime.errors import RunLost, printable
from runtime.parent import die_with_parent
from runtime.world import World, is_alive

# clusters send SIGUSR1 or SIGUSR2 before a job's time is over
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# nohup is respected, except under torchrun, which ignores it and forwards the signal
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and "TORCHELASTIC_RUN_ID" not in os.environ:
    SIGNALS = SIGNALS[:-1]
USER_ERROR = "user_error"  # the first error file, in the folder of all attempts of a torchrun
QUIET = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
ECHO_S = 3.0  # torchrun may forward a signal that ranks already received: it isn't a second one
LOOK_S = 0.5  # interval between checks of the other ranks after a signal


class Stopped(Exception):
    """All controllers have agreed to stop; each raises it in the same meeting."""


@dataclass
class Stop:
    """Stop requests by signals to this process. Controllers share them when they meet."""

    graceful: bool = False  # whether there is a training loop that will stop by itself
    asked: int = 0  # the first signal
    time: float = 0.0  # when it arrived
    neighbours: dict[int, int] = field(default_factory=dict)  # process ids of this machine's ranks
    reason: str = "interrupted"  # printed if the process exits before it is done

    async def until_all_are_ready(self, world: World) -> None:
        """Meet before training (collective: all ranks): no rank continues before all can stop gracefully."""
        self.graceful = True
        first = world.rank - int(os.environ["LOCAL_RANK"])
        pids = await world.gather(os.getpid())
        ranks = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
        self.neighbours = {rank: pids[rank] for rank in ranks}

    def has_lost_a_rank(self) -> bool:
        """True if a rank of this machine is gone; then `reason` names it."""
        for rank, pid in self.neighbours.items():
            if not is_alive(pid):
                self.reason = f"interrupted: rank {rank} of this machine is gone"
                return True
        return False


def prepare() -> None:
    """Set up a rank's process. If torchrun restarted it after a user's error, exit as before."""
    die_with_parent(signal.SIGTERM)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and (error := Path(path).parents[2] / USER_ERROR).exists():
        shutil.copy(error, path)
        leave(2)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # connections are open files
    for number in SIGNALS:  # until the event loop takes over
        signal.signal(number, lambda number, _: exit_now(128 + number, "interrupted"))
    quiet_libraries()
    # TensorBoard's thread raises if a disk is full; so does its flush, and we catch that error
    threading.excepthook = lambda args: args.exc_type is OSError or threading.__excepthook__(args)
    sys.excepthook = leave_with_traceback


def quiet_libraries() -> None:
    """Keep libraries that are imported later from printing and from asking the network."""
    os.environ |= dict.fromkeys(QUIET, "1")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.filterwarnings("ignore")
    # a build for CUDA warns that there is no device
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def starting_deaf() -> Iterator[None]:
    """Start processes with SIGNALS blocked: a signal to the whole job is for the ranks, which save."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(work: Coroutine, stop: Stop) -> Any:
    """Run `work` on an event loop that stays open: closing it would wait for the user's threads."""
    return asyncio.new_event_loop().run_until_complete(run_until_signal(work, stop))


async def run_until_signal(work: Coroutine, stop: Stop) -> Any:
    """Return the result of `work`. A signal is noted in `stop`, or cancels `work` with every `finally`."""
    task = asyncio.ensure_future(work)
    watches = []  # otherwise they may be garbage-collected while they run

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
    except (RuntimeError, RunLost):  # the cause may be another rank, which has reported it
        await asyncio.sleep(LOOK_S)
        reported = reported_file()
        if stop.has_lost_a_rank() or (reported and reported.exists()):
            raise asyncio.CancelledError from None
        raise


async def cancel_if_one_is_gone(task: asyncio.Future, stop: Stop) -> None:
    """Cancel `task` if a rank is gone: it never agrees to the stop, and NCCL raises no error."""
    looks = 0  # consecutive: a finished rank may exit before this one knows that all have finished
    while looks < 2:
        looks = looks + 1 if stop.has_lost_a_rank() else 0
        await asyncio.sleep(LOOK_S)
    task.cancel()


def exit_on_error(status: int, line: str) -> NoReturn:
    """Exit with a one-line error, which torchrun reads from its error file."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": message}))
        if status == 2:
            with contextlib.suppress(OSError):  # another rank has, or the disk has no links
                os.link(path, Path(path).parents[2] / USER_ERROR)
    exit_now(status, line)


def exit_now(status: int, line: str) -> NoReturn:
    """Print why, unless another rank of this machine has, and exit even if threads wait for other ranks."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # the terminal is gone, or another rank has reported
        if reported := reported_file():
            reported.touch(exist_ok=False)
        print(line, file=sys.stderr)
    leave(status)


def leave_with_line(program: CodeType, kind: type, error: Exception, trace: Any) -> NoReturn:
    """Exit after an error in a row of the user's file with one line, after any other with a traceback.

    program: run.main's code, which the file calls; what it calls later are its rows. An error that was raised
    deeper may be another rank's end: torchrun may restart after it.
    """
    calls = [(frame.f_code, line) for frame, line in traceback.walk_tb(trace)]
    begin = [code for code, _ in calls].index(program)
    places = [(Path(code.co_filename).resolve(), line) for code, line in calls[begin:]]
    lines = [line for path, line in places if path == Path(sys.argv[0]).resolve()]
    if not lines:
        leave_with_traceback(kind, error, trace)
    sys.stderr = sys.__stderr__ or sys.stderr  # torch captures it while it calls this hook
    path, line = places[-1]
    status, inside = (2, "") if line == lines[-1] else (1, f" ({path}:{line})")
    text = f"{sys.argv[0]}:{lines[-1]}: {kind.__name__}: {' '.join(str(error).split())}"
    exit_on_error(status, printable(f"error: {text}{inside}"))


def leave_with_traceback(*error: Any) -> NoReturn:
    """Exit after an error in our own code; `error`: sys.excepthook's arguments."""
    # torch captures sys.stderr while it calls this hook
    traceback.print_exception(*error, file=sys.__stderr__)
    leave(1)


def leave(status: int) -> NoReturn:
    """Exit, and kill what the user's code left running. Python's normal exit would wait for NCCL."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal is gone
            stream.flush()
    os._exit(status)


def reported_file() -> Path | None:
    """Return the file, in torchrun's folder for this attempt, that marks a run whose end was reported."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path).parents[1] / "reported" if path else None
