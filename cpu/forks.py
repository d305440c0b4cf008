"""The fork server: it imports SGLang once for all engines of a machine, and forks each of them.

    python -m cpu.forks DESCRIPTOR   (a listening socket that it inherits; engines/process.py starts it)

An asker sends a command, [module, flag, ...], and variables, as JSON, and the log's descriptor. It gets the
process id and a pidfd, and at the engine's end the status. An engine lives while its asker is connected and
the fork server lives: the kernel kills what a killed one had forked.
"""

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from typing import NamedTuple

import setproctitle

MOST_BYTES = 1 << 20  # of a request; Linux takes a fifth of that


def import_engines():
    """Import what engines need, before any of them is forked. Keep what it returns, as `prepare` says."""
    gc.disable()  # it would take 2 of 7 s, as every object stays
    from cpu import sglang

    kept = sglang.prepare()
    from sglang.srt.entrypoints import http_server  # noqa: F401
    from sglang.srt.models import registry  # noqa: F401

    from cpu import windows  # noqa: F401

    gc.freeze()  # a collection would write to each object, whose page would be shared no more
    gc.enable()
    return kept


class Child(NamedTuple):
    """An engine's first process, and the connection of who asked for it."""

    pid: int
    pidfd: int
    asker: socket.socket


def serve(listener: socket.socket) -> list[str]:
    """Fork what is asked for. Never returns in this process; in each child its command."""
    server = os.getpid()
    watched = selectors.DefaultSelector()
    watched.register(listener, selectors.EVENT_READ)
    while True:
        key, _ = watched.select()[0]  # one alone: the others' descriptors may be closed then
        child = key.data
        if child is None:
            asker, _ = listener.accept()
            request, descriptors, _, _ = socket.recv_fds(asker, MOST_BYTES, 1)
            if not request:  # it is gone
                continue
            command, environment = json.loads(request)
            [log] = descriptors
            pid = os.fork()
            if pid == 0:
                become(command, environment | {"NANOYATT_PARENT": str(server)}, log)
                return command
            os.close(log)
            child = Child(pid, os.pidfd_open(pid), asker)
            watched.register(asker, selectors.EVENT_READ, child)
            watched.register(child.pidfd, selectors.EVENT_READ, child)
            with suppress(BrokenPipeError):
                socket.send_fds(asker, [str(pid).encode()], [child.pidfd])
        elif key.fileobj is child.asker:  # gone, or it wants the end
            watched.unregister(child.asker)
            os.kill(child.pid, signal.SIGKILL)
        else:
            bury(child, watched)


def become(command: list[str], environment: dict[str, str], log: int):
    """Make a child look like a program that was started by itself."""
    os.setsid()
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    # before the variables, among which it finds the old name
    setproctitle.setproctitle(f"{sys.executable} -m {' '.join(command)}")
    os.environ |= environment
    tempfile.tempdir = None  # found anew, by TMPDIR
    sys.argv = command


def bury(child: Child, watched: selectors.BaseSelector):
    """Tell who asked for it how a child ended."""
    _, status = os.waitpid(child.pid, 0)
    watched.unregister(child.pidfd)
    os.close(child.pidfd)
    if child.asker in watched.get_map():
        watched.unregister(child.asker)
    with suppress(BrokenPipeError):
        child.asker.send(str(os.waitstatus_to_exitcode(status)).encode())
    child.asker.close()


if __name__ == "__main__":
    kept = import_engines()
    module = serve(socket.socket(fileno=int(sys.argv[1])))[0]
    # in a child, which ends as a program does: an exception is printed in its log
    from cpu import sglang

    sglang.die_with_parent()
    importlib.import_module(module).main()
