"""The fork server: it imports SGLang once for all engines of a machine, and forks each of them.

    python -m extras.fast_cpu.forks                          the server; stdin: a listening socket
    python -m extras.fast_cpu.forks LOG MODULE [--flag ...]  runs MODULE.main() there; stdin: a connection
    to it

An engine is the fork server's child and ends with it. The second command is its owner's child in its place:
when one of the two ends, so does the other. LOG is the server's. When the process that started the server has
ended, it forks no more, and ends with its last engine: ranks stop by themselves, and save first.
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

from runtime.parent import PARENT, die_with_owner, die_with_parent


def ask(server, command):
    """Request a process that runs the command with our variables and output; exit with its status."""
    request = os.memfd_create("request")  # the variables may not fit into a message
    os.write(request, json.dumps([command, dict(os.environ)]).encode())
    status = b""
    with suppress(ConnectionError):  # the server ended first
        socket.send_fds(server, [b"fork"], [request, sys.stdout.fileno()])
        status = server.recv(64)
    if not status:
        problem = "the fork server ended, or no more processes may run (ulimit -u)"
        sys.exit(f"{Path(sys.argv[1]).read_text(errors='replace')}{problem}")
    if int(status) < 0:
        os.kill(os.getpid(), -int(status))
    sys.exit(int(status))


def import_engines():
    """Import what engines need before any of them is forked. Keep the result, as `install` demands."""
    os.environ["HF_MODULES_CACHE"] = os.devnull  # as engines/server_main.py does
    # SGLang and transformers would import these, which takes half a second; no engine here uses them
    sys.modules |= {"megatron": None, "scipy": None}
    gc.disable()  # collections would take 2 of 7 s and free nothing
    kept = importlib.import_module("cpu.sglang").install()
    importlib.import_module("sglang.srt.entrypoints.http_server")
    importlib.import_module("sglang.srt.models.registry")
    importlib.import_module("extras.fast_cpu.windows")
    gc.freeze()  # a collection would write to each object and unshare its page
    gc.enable()
    return kept


def serve(listener, owner):
    """Fork requested processes until `owner`, a pidfd, is readable. Return its command in each child.

    In this process: exits once the owner and the last child have ended.
    """
    watched = selectors.DefaultSelector()
    for each in (listener, owner):
        watched.register(each, selectors.EVENT_READ)
    while watched.get_map():
        key, _ = watched.select()[0]  # only the first: `bury` may close the others' files
        if key.data:
            bury(watched, *key.data)
            continue
        if key.fileobj == owner:
            for each in (listener, owner):
                watched.unregister(each)
            continue
        if key.fileobj is listener:  # don't wait for its request: it may never come
            asker, _ = listener.accept()
            watched.register(asker, selectors.EVENT_READ)
            continue
        asker = key.fileobj
        watched.unregister(asker)
        _, descriptors, _, _ = socket.recv_fds(asker, 64, 2)
        pid = None
        with suppress(OSError):  # if no more processes may run, only this asker gets none
            pid = os.fork() if descriptors else None  # without any, the asker is gone
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
    sys.exit()


def become(request, log):
    """Make this child look like a program of its own. Return its command."""
    os.setsid()
    for standard in range(3):
        os.dup2(log, standard)
    command, environment = json.loads(Path(f"/proc/self/fd/{request}").read_text())
    # before the variables change: the old title precedes them in memory, and is found by them
    setproctitle.setproctitle(f"{sys.executable} -m {' '.join(command)}")
    os.environ |= environment | {PARENT: os.environ[PARENT]}
    die_with_owner()
    tempfile.tempdir = None  # recomputed from TMPDIR
    return command


def bury(watched, asker, pid, pidfd):
    """Kill a child if it still runs, as its asker has ended. Send the asker, if it exists, the status."""
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    for each in (asker, pidfd):
        watched.unregister(each)
    os.close(pidfd)
    with suppress(BrokenPipeError):
        asker.send(str(os.waitstatus_to_exitcode(status)).encode())
    asker.close()


if __name__ == "__main__":
    owner = os.getppid()
    die_with_owner()
    stdin = socket.socket(fileno=0)
    if len(sys.argv) > 1:
        ask(stdin, sys.argv[2:])
    import setproctitle

    kept = import_engines()
    owner = os.pidfd_open(owner)
    die_with_parent(0)  # from here on `serve` decides
    sys.argv = serve(stdin, owner)
    # a child ends like any program: an exception is printed to its log
    importlib.import_module(sys.argv[0]).main()
