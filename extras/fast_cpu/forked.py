"""A server forked from a process that has imported SGLang: only without CUDA, whose imports forbid a fork."""

import os
import socket
import subprocess
import sys
from typing import Any

from config import Config
from engines.server import ROOT, ServerProcess, for_us_alone, server_environment
from extras.fast_cpu import compiler
from runtime import rendezvous
from runtime.shutdown import starting_deaf

FORKS = (sys.executable, "-m", "extras.fast_cpu.forks")


def forks_path() -> str:
    """Return the path of the fork server's socket, in the private folder that the run's ranks share."""
    # a short name of the folder: a socket's path has at most 107 characters, and $TMPDIR may be long
    return f"/proc/self/fd/{rendezvous.hold(rendezvous.private_folder())}/forks"


def start_forks() -> None:
    """Start a fork server for the run's ranks on this machine. It ends after the calling process."""
    own = f"{forks_path()}.{os.getpid()}"
    environment = server_environment("", str(rendezvous.private_folder()), "cpu")
    how = {"cwd": ROOT, "env": environment, "start_new_session": True}
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        open(f"{forks_path()}.log", "wb", opener=for_us_alone) as log,
    ):
        listener.bind(own)
        listener.listen()
        os.rename(own, forks_path())  # replaces a dead fork server's
        with starting_deaf():
            subprocess.Popen(FORKS, stdin=listener, stdout=log, stderr=log, **how)


def ask_forks() -> socket.socket:
    """Connect to the fork server; start one if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if connection.connect_ex(forks_path()) != 0:
        start_forks()
        connection.connect(forks_path())
    return connection


class ForkedServer(ServerProcess):
    """A server that the fork server forks. The process that requests it exits with the server's status."""

    patches = ("extras.fast_cpu.windows:install",)

    @classmethod
    def prepare(cls) -> None:
        ask_forks().close()  # if there is none, one imports in parallel

    @classmethod
    def describe(cls, config: Config) -> str:
        program = compiler.program_for(config.model, config.dtype, config.rollout_tp)
        return f"rollout engines run {program}"

    def _popen(self, **how: Any) -> subprocess.Popen:
        command = [*FORKS, os.path.realpath(f"{forks_path()}.log"), *self._command]
        with ask_forks() as server:
            return subprocess.Popen(command, stdin=server, **how)
