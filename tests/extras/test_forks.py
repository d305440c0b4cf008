"""The fork server: its engines end with it and with their owners; otherwise they are like any program."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from unittest.mock import Mock

import psutil
import pytest

from extras.fast_cpu import forks
from extras.fast_cpu.forked import ForkedServer
from tests import ROOT
from tests.support.patience import LIMIT_S

ENDED = "the fork server ended, or no more processes may run (ulimit -u)"
# without what engines need of SGLang, whose import takes seconds
SERVER = """
import runpy, sys
from unittest.mock import Mock

names = "cpu.sglang extras.fast_cpu.windows sglang.srt.entrypoints.http_server sglang.srt.models.registry"
sys.modules |= dict.fromkeys(names.split(), Mock())
runpy.run_module("extras.fast_cpu.forks", run_name="__main__", alter_sys=True)
"""
OWNER = """
import sys
from pathlib import Path
from extras.fast_cpu import forked

forked.FORKS = (sys.executable, "-c", sys.argv[2])
sleep = ["timeit", "-n1", "-r1", "import os, time; print('pid', os.getpid(), flush=True); time.sleep(9999)"]
process = forked.ForkedServer(sleep, "a key", Path(sys.argv[1]), "cpu", {})
for line in sys.stdin:
    process.start()
    process._process.wait()
    print(process.exit_status(), process.log_tail().splitlines()[-1], flush=True)
    process._process = None
"""


@contextmanager
def owner_of(log):
    """Start a rank that starts a process for each line that it receives, and prints how it ended."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    environment = os.environ | {"TMPDIR": str(log.parent), "TORCHELASTIC_RUN_ID": "1"}
    command = [sys.executable, "-c", OWNER, log, SERVER]
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as owner:
        try:
            yield owner
        finally:
            owner.kill()


def start(owner, log):
    """Have the owner start a process; once it runs, return it and its fork server."""
    had = log.read_text().count("pid") if log.exists() else 0
    owner.stdin.write("\n")
    owner.stdin.flush()
    while not log.exists() or log.read_text().count("pid") == had:
        assert owner.poll() is None
    found = psutil.Process(int(log.read_text().split()[-1]))
    return found, found.parent()


def run(log, *command, **environment):
    """Run a module's main in a process to its end; return how it ended and its output."""
    process = ForkedServer(list(command), "a key", log, "cpu", environment)
    process.start()
    process._process.wait()
    return process.exit_status(), process.log_tail().splitlines()[1:]


def test_ranks_share_a_fork_server_and_die_apart(tmp_path):
    """Two ranks of one launcher share it. If it dies all end, and the next start makes another."""
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    with owner_of(logs[0]) as first, owner_of(logs[1]) as second:
        kept, forks = start(first, logs[0])
        lost, same = start(second, logs[1])
        assert same == forks and forks.ppid() == first.pid
        second.kill()  # -9
        assert psutil.wait_procs([lost], LIMIT_S)[0]
        assert kept.is_running() and kept.status() != psutil.STATUS_ZOMBIE
        forks.kill()
        assert psutil.wait_procs([kept], LIMIT_S)[0]
        assert first.stdout.readline() == f"exit status 1 {ENDED}\n"
        again, other = start(first, logs[0])
        assert other != forks
        again.kill()
        assert first.stdout.readline().startswith("signal 9: ")
        last, _ = start(first, logs[0])
        first.kill()
        assert not psutil.wait_procs([last, other], LIMIT_S)[1]


def test_a_fork_server_outlives_its_owner_while_an_engine_does(tmp_path):
    """When a launcher is killed, its ranks still finish their step with their engines, and save."""
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    with owner_of(logs[0]) as launcher, owner_of(logs[1]) as rank:
        lost, forks = start(launcher, logs[0])
        kept, _ = start(rank, logs[1])
        launcher.kill()
        assert psutil.wait_procs([lost], LIMIT_S)[0]
        assert kept.is_running() and kept.status() != psutil.STATUS_ZOMBIE
        rank.kill()
        assert not psutil.wait_procs([kept, forks], LIMIT_S)[1]


def test_a_forked_process_is_as_one_that_was_started(tmp_path):
    """It must have its own session, variables, folder and name; its status and log are reported."""
    program = "import os, tempfile; command = open('/proc/self/cmdline').read()\n"
    program += "own = tempfile.gettempdir() == os.environ['TMPDIR'], os.getsid(0) == os.getpid()\n"
    program += "print(*own, os.environ['WORD'], "
    program += "os.environ['MKL_CBWR'], command.split()[1:4], os.getcwd())"
    log = tmp_path / "log"
    many = {f"SERVICE_{i}": "x" * 100_000 for i in range(4)}  # more than fits into one message
    status, (line, *_) = run(log, "timeit", "-n1", "-r1", program, WORD="first", **many)
    assert status == "exit status 0" and log.stat().st_mode & 0o777 == 0o600
    assert line == f"True True first AUTO,STRICT ['-m', 'timeit', '-n1'] {ROOT}"
    status, lines = run(log, "py_compile", "second")
    assert status == "exit status 1" and len(lines) == 1 and "'second'" in lines[0]
    assert run(log, "timeit", "import os; os.kill(os.getpid(), 9)")[0].startswith("signal 9: ")


def test_a_fork_that_fails_fails_its_asker_alone(tmp_path, monkeypatch):
    """As many processes must run as allowed, and the next starter must fail, despite a silent client before.

    A request to a server that ended must fail with a message."""
    socket.setdefaulttimeout(LIMIT_S)  # timeout of what the server accepts
    sequence = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server, silent, first, second = (socket.socket(*sequence) for _ in range(4))
    server.bind(str(tmp_path / "forks"))
    server.listen()
    silent.connect(str(tmp_path / "forks"))  # connects and sends nothing
    for asker in (first, second):
        asker.connect(str(tmp_path / "forks"))
        socket.send_fds(asker, [b"fork"], [0, 1])
    monkeypatch.setattr("os.fork", Mock(side_effect=[BlockingIOError, 0]))
    monkeypatch.setattr(forks, "become", lambda request, log: "a child")
    owner = os.pidfd_open(os.getpid())
    assert forks.serve(server, owner) == "a child" and first.recv(64) == b""
    os.close(owner)
    socket.setdefaulttimeout(None)
    monkeypatch.setattr(sys, "argv", ["", os.devnull])
    with pytest.raises(SystemExit, match="the fork server ended"):
        forks.ask(first, [])
