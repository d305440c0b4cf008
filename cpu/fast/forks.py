"""The fork server: it imports SGLang once for all engines of a machine, and forks each of them.

    python -m cpu.fast.forks                          the server; stdin: a socket that listens
    python -m cpu.fast.forks LOG MODULE [--flag ...]  has MODULE.main() run; stdin: a connection to the server

An engine is the fork server's child and ends with it. Its owner's child is the second process, in its place:
when one of the two ends, so does the other. LOG is the server's.
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
from pathlib import Path

from runtime.parent import PARENT, die_with_owner


def ask(server, command):
    """Have a process forked that runs the command with this one's variables and output; end as it does."""
    request = os.memfd_create("request")  # the variables may be more than a message has room for
    os.write(request, json.dumps([command, dict(os.environ)]).encode())
    status = b""
    with suppress(ConnectionError):  # it ended before it knew of us
        socket.send_fds(server, [b"fork"], [request, sys.stdout.fileno()])
        status = server.recv(64)
    if not status:
        problem = "the fork server ended, or as many processes run as may (ulimit -u)"
        sys.exit(f"{Path(sys.argv[1]).read_text(errors='replace')}{problem}")
    if int(status) < 0:
        os.kill(os.getpid(), -int(status))
    sys.exit(int(status))


def import_engines():
    """Import what engines need, before any of them is forked. Keep what it returns, as `install` says."""
    os.environ["HF_MODULES_CACHE"] = os.devnull  # as engines/server_main.py does
    # SGLang and transformers import these if they are there, in half a second; no engine here uses them
    sys.modules |= {"megatron": None, "scipy": None}
    gc.disable()  # it would take 2 of 7 s, as what is imported stays
    kept = importlib.import_module("cpu.sglang").install()
    importlib.import_module("sglang.srt.entrypoints.http_server")
    importlib.import_module("sglang.srt.models.registry")
    importlib.import_module("cpu.fast.windows")
    gc.freeze()  # a collection would write to each object, whose page would be shared no more
    gc.enable()
    return kept


def serve(listener):
    """Fork what is asked for. Never returns in this process; in each child its command."""
    watched = selectors.DefaultSelector()
    watched.register(listener, selectors.EVENT_READ)
    while True:
        key, _ = watched.select()[0]  # the first alone: `bury` may close what others are about
        if key.data:
            bury(watched, *key.data)
            continue
        if key.fileobj is listener:  # who connects may stay silent: nobody waits for his request
            asker, _ = listener.accept()
            watched.register(asker, selectors.EVENT_READ)
            continue
        asker = key.fileobj
        watched.unregister(asker)
        _, descriptors, _, _ = socket.recv_fds(asker, 64, 2)
        pid = None
        with suppress(OSError):  # as many processes run as may: then this asker alone gets none
            pid = os.fork() if descriptors else None  # without any it is gone
        if pid == 0:
            return become(*descriptors)
        for each in descriptors:
            os.close(each)
        if pid is None:
            asker.close()
            continue
        pidfd = os.pidfd_open(pid)
        for each in (asker, pidfd):
            watched.register(each, selectors.EVENT_READ, (asker, pid, pidfd))


def become(request, log):
    """Make this child look like a program of its own. Returns its command."""
    os.setsid()
    for standard in range(3):
        os.dup2(log, standard)
    command, environment = json.loads(Path(f"/proc/self/fd/{request}").read_text())
    # before the variables change: the old name lies in front of them, and it is found by them
    setproctitle.setproctitle(f"{sys.executable} -m {' '.join(command)}")
    os.environ |= environment | {PARENT: os.environ[PARENT]}
    die_with_owner()
    tempfile.tempdir = None  # found anew, by TMPDIR
    return command


def bury(watched, asker, pid, pidfd):
    """End a child, if it hasn't ended: then its asker has. Tell the asker, if it is there, how."""
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    for each in (asker, pidfd):
        watched.unregister(each)
    os.close(pidfd)
    with suppress(BrokenPipeError):
        asker.send(str(os.waitstatus_to_exitcode(status)).encode())
    asker.close()


if __name__ == "__main__":
    die_with_owner()
    stdin = socket.socket(fileno=0)
    if len(sys.argv) > 1:
        ask(stdin, sys.argv[2:])
    import setproctitle

    kept = import_engines()
    sys.argv = serve(stdin)
    # a child, which ends as any program does: an exception is printed in its log
    importlib.import_module(sys.argv[0]).main()
