"""A process forked from a rank: it writes what was in the rank's memory, while the rank continues."""

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

BEGIN_S = 2.0  # time that a forked process has to start; it usually takes milliseconds
FORKS = 20


class BackgroundWriter:
    """Runs `work` in a process forked from this rank as it is now. It dies with the forking thread."""

    def __init__(self, work: Callable[[], Any]):
        for _ in range(FORKS):
            self._fork(work)
            if self._result or self._begins():
                return
            self.close()
        self._result = (None, f"none of {FORKS} forked processes started")

    def _begins(self) -> bool:
        """True if the process starts: before 3.11.10 it may hang (python/cpython#112275)."""
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
        except OSError as error:  # not enough memory, or too many processes: this save fails
            self._result = (None, f"no writing process could be started: {error}")
        sender.close()

    def result(self) -> tuple[Any, str] | None:
        """Return None while it writes, then (what `work` returned, "") or (None, why it failed)."""
        if self._result is None and self._receiver.poll():  # also true at the end of the pipe
            try:
                self._result = self._receiver.recv()
            except (EOFError, OSError):  # it ended, before or while it sent its result
                self._process.join()
                why = f"the writing process ended with status {self._process.exitcode}"
                self._result = (None, why)
        return self._result

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self._result is None:
            self._process.kill()
        if self._process.pid:  # it was started
            self._process.join()
        self._receiver.close()


def run_writer(work: Callable[[], Any], sender: Connection, parent: int) -> None:
    """Run `work` in the forked process and send what it returns, or why it failed."""
    sender.send(None)  # it has begun
    drop_files(keep=sender.fileno())
    import torch

    # keep the rank's objects: freeing those with threads, which weren't forked, would crash
    gc.freeze()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the rank has just died
    os.nice(10)  # engines have priority
    # OpenMP's other threads weren't forked: a parallel operation would wait for them forever
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as executor:
        future = executor.submit(work)
    error = future.exception()
    failure = f"{type(error).__name__}: {error}".splitlines()[0] if error else ""
    sender.send((None if error else future.result(), failure))
    os._exit(0)  # exit handlers are the rank's


def drop_files(keep: int) -> None:
    """Release the rank's files and sockets: a lock or connection lasts while any process holds it."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in (0, 1, 2, keep, null):
            os.dup2(null, descriptor, inheritable=False)  # the rank's objects may still close it
