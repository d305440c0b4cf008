"""The process of a server, from its start to its end: forked without CUDA, with it a program of its own.

CUDA can't be used in the child of a process that has used it, and SGLang asks for the devices while it is
imported. What it would take to fork there couldn't be tried: so each engine imports for itself there.
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from engines.server import server_environment
from runtime import rendezvous

ROOT = Path(__file__).parents[1]
MOST_COLUMNS = 300  # of a line of its log that is quoted
LOG_START = "---- a server starts"  # a line of its log begins so
LOST = 256  # no process ends with this status
for_us_alone = partial(os.open, mode=0o600)


def forks_address() -> str:
    """The fork server's socket: one for the ranks of a launcher; a process without launcher has its own."""
    own = "" if "TORCHELASTIC_RUN_ID" in os.environ else f"-{os.getpid()}"
    # a socket's path has 107 characters at most, and $TMPDIR may be long
    return f"/proc/self/fd/{rendezvous.hold(rendezvous.private_folder())}/forks{own}"


def start_forks() -> None:
    """Start a fork server, which dies with this thread, for all on this machine that ask from now on."""
    address = forks_address()
    own = f"{address}.{os.getpid()}"
    environment = server_environment("", str(rendezvous.private_folder()), "cpu")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(own)
        listener.listen()
        os.rename(own, address)  # over that of one that is gone
        command = [sys.executable, "-m", "cpu.forks", str(listener.fileno())]
        how = {"cwd": ROOT, "env": environment, "pass_fds": [listener.fileno()]}
        with open(f"{address}.log", "wb", opener=for_us_alone) as log:
            how |= {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            subprocess.Popen(command, start_new_session=True, **how)


class Forked:
    """A process that the fork server made for us, used as a subprocess.Popen is. It dies with us.

    pid: 0 until it is there. Nothing here waits for the fork server, which may be importing.
    """

    def __init__(self, command: list[str], log: int, environment: dict[str, str]):
        self.pid = 0
        self._pidfd = -1
        self._status: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address = forks_address()
        if self._connection.connect_ex(address) != 0:  # nobody has started one, or it is gone
            start_forks()
            self._connection.connect(address)
        request = json.dumps([command, environment]).encode()
        socket.send_fds(self._connection, [request], [log])
        self._connection.setblocking(False)

    def poll(self) -> int | None:
        """Return its exit status, or less the signal that killed it. None while it runs, LOST: see there."""
        with contextlib.suppress(BlockingIOError):
            while self._status is None:
                try:
                    word, descriptors, _, _ = socket.recv_fds(self._connection, 64, 1)
                except ConnectionResetError:
                    word = b""
                if word and not self.pid:
                    self.pid = int(word)
                    [self._pidfd] = descriptors
                else:
                    self._status = int(word or LOST)
        return self._status

    def kill(self) -> None:
        """End it, whether the fork server, which sees that the connection is closed, does so or hangs."""
        self.poll()
        self._connection.close()
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self) -> None:
        """Return when it is gone, or at once if it was never there."""
        if self.pid:
            end = select.poll()
            end.register(self._pidfd, select.POLLIN)
            end.poll()
            os.close(self._pidfd)


class ServerProcess:
    """A server on this machine: a group of processes, a log, a private folder.

    command: a module with a `main` and its flags.
    """

    def __init__(self, command: list[str], key: str, log: Path, device: str, environment: dict):
        self._command = command
        self._log = log
        self._device = device
        self.folder = tempfile.TemporaryDirectory(prefix="nanoyatt-", ignore_cleanup_errors=True)
        self._environment = server_environment(key, self.folder.name, device) | environment
        self._process: subprocess.Popen | Forked | None = None
        log.parent.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Start the server. What earlier ones said stays in the log: it may say why they ended."""
        assert self._process is None, f"{self._log.stem} still runs"
        Path(self.folder.name, "store").unlink(missing_ok=True)  # with what a killed server wrote
        with open(self._log, "ab", buffering=0, opener=for_us_alone) as log:
            log.write(f"{LOG_START}, {time.strftime('%F %T')}\n".encode())
            if self._device == "cuda":
                command = [sys.executable, "-m", *self._command]
                how = {"cwd": ROOT, "env": self._environment, "start_new_session": True}
                self._process = subprocess.Popen(command, stdout=log, stderr=log, **how)
            else:
                self._process = Forked(self._command, log.fileno(), self._environment)

    def exit_status(self) -> str:
        """Return how it ended; empty while it runs."""
        if self._process is None:
            return "killed"
        status = self._process.poll()
        if status is None:
            return ""
        if status == LOST:
            return "the fork server ended"
        return f"signal {-status}" if status < 0 else f"exit status {status}"

    async def kill(self) -> None:
        """End the group, and return when it is gone."""
        process = self._process
        if process is None:
            return
        self._process = None
        # it holds nothing worth saving, and its children die with it; SIGTERM would take 5 s
        process.kill()
        process.wait()
        try:
            # multiprocessing's tracker, the last of them, removes the semaphores
            await asyncio.sleep(0.5)
        finally:
            if process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        newest = self._log.read_text(errors="replace").rpartition(LOG_START)[2]
        if self._process and self._process.poll() == LOST:
            newest += Path(f"{forks_address()}.log").read_text(errors="replace")
        lines = [line[:MOST_COLUMNS] for line in newest.splitlines()[1:][-15:]]
        return "\n".join((f"the end of {self._log}:", *lines))
