"""A server that is forked from a process that has imported SGLang, once for a machine: without CUDA.

With CUDA the imports ask for the devices, after which a process must not be forked; a way round that couldn't
be tried.
"""

import os
import socket
import subprocess
import sys
from typing import Any

from engines.server import ROOT, ServerProcess, for_us_alone, server_environment
from runtime import rendezvous
from runtime.shutdown import starting_deaf

FORKS = (sys.executable, "-m", "cpu.fast.forks")


def forks_path() -> str:
    """The fork server's socket, in the run's own folder: its ranks share it."""
    # by a short name of the folder: a socket's path has 107 characters at most, and $TMPDIR may be long
    return f"/proc/self/fd/{rendezvous.hold(rendezvous.private_folder())}/forks"


def start_forks() -> None:
    """Start a fork server for the run's ranks on this machine. It ends with the calling thread."""
    own = f"{forks_path()}.{os.getpid()}"
    environment = server_environment("", str(rendezvous.private_folder()), "cpu")
    how = {"cwd": ROOT, "env": environment, "start_new_session": True}
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        open(f"{forks_path()}.log", "wb", opener=for_us_alone) as log,
    ):
        listener.bind(own)
        listener.listen()
        os.rename(own, forks_path())  # over that of one that is gone
        with starting_deaf():
            subprocess.Popen(FORKS, stdin=listener, stdout=log, stderr=log, **how)


def ask_forks() -> socket.socket:
    """Connect to the fork server. Who finds none starts it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if connection.connect_ex(forks_path()) != 0:
        start_forks()
        connection.connect(forks_path())
    return connection


class ForkedServer(ServerProcess):
    """A server that is the fork server's child. The process that asks for it ends as it does."""

    def _popen(self, **how: Any) -> subprocess.Popen:
        command = [*FORKS, os.path.realpath(f"{forks_path()}.log"), *self._command]
        with ask_forks() as server:
            return subprocess.Popen(command, stdin=server, **how)
