"""Ranks forked from a launcher that has imported what they need: only without GPUs, which forbid a fork.

examples/quiet_torchrun.py calls `prepare`. To torchrun nothing changes: a rank is its child, in a session of
its own, with the arguments, the environment and the output that torchrun chose.
"""

import gc
import logging
import os
import runpy
import signal
import subprocess
import sys
from contextlib import ExitStack
from importlib import import_module
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import handlers

from extras.fast_cpu.forked import start_forks
from runtime import rendezvous
from runtime.devices import has_devices
from runtime.shutdown import quiet_libraries


class Rank(ForkProcess):
    """A forked rank, with those methods of a subprocess.Popen that torchrun calls."""

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout)
        return self.exitcode


class RankHandler(handlers.SubprocessHandler):
    """Forks a Python file's process; starts any other command as torchrun does."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Rank | subprocess.Popen:
        if args[:2] != (sys.executable, "-u") or not args[2].endswith(".py"):
            return super()._popen(args, env)
        rank = Rank(target=self._become, args=(args[2:], env))
        rank.start()
        return rank

    def _become(self, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        """Make this fork like a program of its own, and run its file."""
        os.setsid()
        logging.disable(logging.NOTSET)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        for standard, file in ((1, self._stdout), (2, self._stderr)):
            if file:
                os.dup2(file.fileno(), standard)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        rendezvous.hold.cache_clear()  # its descriptor is closed
        rendezvous.launcher_folder.cache_clear()
        os.environ.clear()
        os.environ |= environment
        sys.stdin = sys.__stdin__
        sys.stdout.reconfigure(line_buffering=True)
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        with ExitStack() as stack:
            stack.push(leave_by_hook)
            runpy.run_path(arguments[0], run_name="__main__")


def leave_by_hook(kind: type[BaseException] | None, *error: Any) -> None:
    """End this process after an error, as an interpreter does: multiprocessing wouldn't call the hook."""
    if kind and issubclass(kind, Exception):
        sys.excepthook(kind, *error)
        os._exit(1)


def prepare() -> None:
    """Import what ranks need while the fork server imports SGLang, and let torchrun fork ranks."""
    if has_devices():
        return
    start_forks()
    quiet_libraries()
    gc.disable()
    import_module("build")
    import_module("actor")
    gc.freeze()  # a collection would write to each object and unshare its page
    gc.enable()
    sys.stdin = None  # or multiprocessing would close it in a fork
    handlers.SubprocessHandler = RankHandler
