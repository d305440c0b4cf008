"""Whole runs of the command: torchrun under guard.py, so that all processes of a run can be found."""

import contextlib
import errno
import itertools
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests import ROOT
from tests.support.columns import timing_free
from tests.support.patience import LIMIT_S

TORCHRUN_S_OWN = re.compile(r"[WE]\d{4} .*torch/distributed/")  # torchrun's own log lines
IN_OUR_CODE = re.compile(rf'File "{ROOT}/(?!\.venv)')  # a line of a traceback
PORTS = 20  # ports of a run from --port on; the last is torchrun's own
BASES = itertools.count(20_000 + os.getpid() % 300 * PORTS, PORTS)
HELD: list[
    socket.socket
] = []  # for each base that this process has: no other test process takes it


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def hold(base: int) -> bool:
    """Hold a base for this process until it ends. Return False if another test process holds it."""
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0nanoyatt-tests-{base}")
    except OSError as error:
        holder.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    HELD.append(holder)
    return True


def free_ports() -> int:
    """Return the first of PORTS free ports in a row, below those that the system gives to connections.

    Two test processes that start a run at once must not get the same ports, so each holds its own.
    """
    return next(
        base for base in BASES if hold(base) and not any(map(is_taken, range(base, base + PORTS)))
    )


class Run:
    """One `torchrun run.py` on a few ranks. `again` repeats the same command."""

    program = "run.py"

    def __init__(self, folder, *arguments, ranks=2, launch=(), under=(), out=None):
        self.folder, self.ranks, self.out = folder, ranks, out or folder / "out"
        self.port, self._arguments = free_ports(), arguments
        self._launch, self._under, self._seen = launch, under, set()
        self.status: int | None = None
        self.left: list[str] = []  # command lines of processes that outlived it
        self.bystander_spared = False  # True unless it killed somebody else's process

    def start(self) -> "Run":
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.support.guard", self.folder / "result.json"]
        command += [*self._under, Path(sys.executable).with_name("torchrun")]
        command += ["--nproc-per-node", self.ranks]
        command += ["--master-port", self.port + PORTS - 1, *self._launch]
        command += [self.program, *self._arguments, "--out", self.out, "--port", self.port]
        # seconds for a save after a signal, as in the Makefile
        settings = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}
        with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("wb") as err:
            how = dict(cwd=ROOT, env=os.environ | settings, start_new_session=True)
            self.guard = psutil.Popen([*map(str, command)], stdout=out, stderr=err, **how)
        return self

    def again(self) -> "Run":
        """Run the same command from start to end, with a folder of its own for its output."""
        how = dict(ranks=self.ranks, launch=self._launch, out=self.out)
        return Run(self.folder / "again", *self._arguments, **how).start().finish()

    def struck(self, *strikes) -> "Run":
        """Start it; each time a condition holds, do its strike; wait for the end."""
        self.start()
        try:
            for condition, strike in strikes:
                self.wait_for(condition)
                strike(self)
        finally:
            self.finish()
        return self

    def ended(self) -> "Run":
        """Run it from start to end, and check that it succeeds."""
        self.start().finish()
        assert self.status == 0, self.stderr + self.stdout
        return self

    def finish(self) -> "Run":
        """Wait for the end. Leave no process running, whatever happens."""
        try:
            self.guard.wait(LIMIT_S)
            if (result := self.folder / "result.json").is_file():
                vars(self).update(json.loads(result.read_text()))
        finally:
            for process in (*self.family(), self.guard):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        return self

    def wait_for(self, condition: Callable[["Run"], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            is_over = time.monotonic() > deadline or not self.is_running()
            if condition(self):
                return
            assert not is_over, f"never came so far: {self.stderr}{self.stdout}"
            time.sleep(0.02)

    # ---- its processes

    def is_running(self) -> bool:
        return self.guard.is_running() and self.guard.status() != psutil.STATUS_ZOMBIE

    def family(self) -> set[psutil.Process]:
        """Return all processes that it ever started and that were seen."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen.update(self.guard.children(recursive=True))
        return self._seen

    def processes(self) -> Iterator[tuple[psutil.Process, str]]:
        """Return the running processes with their command lines."""
        for process in list(self.family()):
            with contextlib.suppress(psutil.NoSuchProcess):
                yield process, " ".join(process.cmdline())

    def launcher(self) -> psutil.Process:
        [found] = [p for p, command in self.processes() if "bin/torchrun" in command]
        return found

    def rank_processes(self) -> list[psutil.Process]:
        """Return torchrun's children: a rank's child that writes a checkpoint has the same command line."""
        children = self.launcher().children()
        return [process for process in children if "run.py" in " ".join(process.cmdline())]

    def engine(self, role: str, rank: int, name: str) -> psutil.Process:
        """Return the process called `name` of a role's server on a rank."""
        everything = list(self.processes())
        port = f"--port {self.port + 2 * rank + (role == 'genrm')} "
        servers = [(p, command) for p, command in everything if port in command]
        [server] = [p for p, command in servers if "-m engines.server_main" in command]
        near = [(p, command) for p, command in everything if server.pid in (p.pid, p.ppid())]
        [found] = [p for p, command in near if name in command]
        return found

    def press_ctrl_c(self) -> None:
        """Send SIGINT to the foreground process group, as a terminal does."""
        self.family()
        os.killpg(self.guard.pid, signal.SIGINT)

    def kill_all(self) -> None:
        """Send kill -9 to every process at one moment."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process, _ in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    # ---- its output and files

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def rows(self, name: str = "metrics.jsonl") -> list[dict]:
        """Return a file's complete rows so far."""
        path = self.out / name
        *lines, _ = path.read_text().split("\n") if path.exists() else [""]
        return [json.loads(line) for line in lines]

    def numbers(self) -> list[dict]:
        """Return every step's metrics without those that depend on timing, on the mode, or on faults."""
        return [timing_free(row) for row in self.rows()]

    # ---- what is asserted of every run

    def check_as(self, other: "Run") -> None:
        """Check that it ended well and trained on the same samples, to the last digit."""
        assert self.status == 0, self.stderr + self.stdout
        self.check_nothing_is_left()
        assert self.numbers() == other.numbers()
        assert self.rows("samples.jsonl") == other.rows("samples.jsonl")

    def check_nothing_is_left(self) -> None:
        """Check that no process and no port is left, and that nobody else's process was touched."""
        assert self.bystander_spared and not self.left, self.left
        assert not any(map(is_taken, range(self.port, self.port + PORTS)))

    @property
    def ours(self) -> list[str]:
        """Return the lines on stderr that aren't torchrun's log, traceback or report."""
        before = self.stderr.partition("Traceback (most recent call last):")[0]
        return [line for line in before.splitlines() if not TORCHRUN_S_OWN.match(line)]

    def check_no_traceback_of_ours(self) -> None:
        assert "Traceback" not in self.stdout and not IN_OUR_CODE.search(self.stderr), self.stderr

    def check_one_line(self, *needles: str, status: int = 2) -> None:
        """Check that the error appears once, in one line; ranks exit with `status`, torchrun with 1."""
        assert self.status == 1 and len(self.ours) == 1, self.stderr
        for needle in ("error: ", *needles):
            assert needle in self.ours[0], f"{needle!r} not in: {self.stderr}"
        assert f"exitcode  : {status} " in self.stderr, self.stderr
        assert f"traceback : {self.ours[0]}" in self.stderr, self.stderr
        self.check_no_traceback_of_ours()


def rows_done(count: int) -> Callable[[Run], bool]:
    """Return a condition that holds after `count` steps."""
    return lambda run: len(run.rows()) >= count


def saved(step: int) -> Callable[[Run], bool]:
    """Return a condition that holds once the checkpoint after `step` steps is there."""
    return lambda run: (run.out / "checkpoints" / f"step_{step}").is_dir()
