"""A process forked from a rank: it writes what the rank had in memory then, while the rank goes on."""

import contextlib
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from runtime.parent import die_with_parent
from runtime.shutdown import starting_deaf

BEGIN_S = 2.0  # for a forked process to begin; milliseconds are usual
FORKS = 20


class BackgroundWriter:
    """Runs `work` in a process forked from this rank as it is now. It dies with the forking thread."""

    def __init__(self, work: Callable[[], Any]):
        for _ in range(FORKS):
            self._fork(work)
            if self._result or self._begins():
                return
            self.close()
        self._result = (None, f"of {FORKS} forked processes none began")

    def _begins(self) -> bool:
        """Tell if the process begins: before 3.11.10 it may wait without end (python/cpython#112275)."""
        begins = self._receiver.poll(BEGIN_S)
        with contextlib.suppress(EOFError, OSError):
            if begins:
                self._receiver.recv()
        return begins

    def _fork(self, work: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=run_writer, args=(work, sender, os.getpid()))
        self._result: tuple[Any, str] | None = None
        try:
            with starting_deaf():
                self._process.start()
        except OSError as error:  # no memory, or too many processes: this save fails
            self._result = (None, f"no writing process could be started: {error}")
        sender.close()

    def result(self) -> tuple[Any, str] | None:
        """Return None while it writes; then what `work` returned and "", or None and why it failed."""
        if self._result is None and self._receiver.poll():  # true at the end of the pipe, too
            try:
                self._result = self._receiver.recv()
            except (EOFError, OSError):  # at its end, or in the middle of what it sends
                self._process.join()
                why = f"the writing process ended with status {self._process.exitcode}"
                self._result = (None, why)
        return self._result

    def close(self) -> None:
        """End it, if it hasn't ended."""
        if self._result is None:
            self._process.kill()
        if self._process.pid:  # none, if it could not be started
            self._process.join()
        self._receiver.close()


def run_writer(work: Callable[[], Any], sender: Connection, parent: int) -> None:
    """Run `work` in the forked process and send what it returns, or why it failed."""
    sender.send(None)  # it has begun
    drop_files(keep=sender.fileno())
    import torch

    # what the rank left is its own: freed here, what had threads, which were not forked, crashes
    gc.freeze()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the rank died a moment ago
    os.nice(10)  # the engines go first
    # OpenMP's other threads weren't forked, and a parallel operation would wait for them without end
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as executor:
        future = executor.submit(work)
    error = future.exception()
    failure = f"{type(error).__name__}: {error}".splitlines()[0] if error else ""
    sender.send((None if error else future.result(), failure))
    os._exit(0)  # what else runs at the end of a process is the rank's


def drop_files(keep: int) -> None:
    """Let go of the rank's files and sockets: a lock or a connection lasts while any process holds it."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in (0, 1, 2, keep, null):
            os.dup2(null, descriptor, inheritable=False)  # objects of the rank may still close it
