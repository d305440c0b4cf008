"""A server's process: forked from a fork server of its machine, with which it ends, and with its owner."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from engines.process import ServerProcess
from launched import ROOT

SLEEP = "import time; time.sleep(100)"
OWNER = """
import sys, time
from pathlib import Path
from engines.process import ServerProcess

process = ServerProcess(["timeit", "-n1", "-r1", sys.argv[2]], "a key", Path(sys.argv[1]), "cpu", {})
for line in sys.stdin:
    process.start()
    while not process._process.pid and not process.exit_status():
        time.sleep(0.05)
    print(process._process.pid, flush=True)
    while not process.exit_status():
        time.sleep(0.05)
    print(process.exit_status(), flush=True)
    process._process = None
"""


def until_over(process):
    while not (status := process.exit_status()):
        time.sleep(0.05)
    return status


def run(log, *command, **environment):
    """A process that runs a module's main, up to its end: how it ended, and what it said."""
    process = ServerProcess(list(command), "a key", log, "cpu", environment)
    process.start()
    return until_over(process), process.log_tail().splitlines()[1:]


def start_once_more(owner):
    owner.stdin.write("\n")
    owner.stdin.flush()
    return psutil.Process(int(owner.stdout.readline()))


@contextmanager
def owner_of(log, **variables):
    """A program that starts a process for each line that it is sent: it says its id, and how it ended."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    environment = os.environ | {"TMPDIR": str(log.parent)} | variables
    command = [sys.executable, "-c", OWNER, log, SLEEP]
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as owner:
        try:
            yield owner
        finally:
            owner.kill()


def test_ranks_share_a_fork_server_and_die_apart(tmp_path):
    """Two of one launcher. With the fork server all end, and who starts again makes another."""
    with (
        owner_of(tmp_path / "0.log", TORCHELASTIC_RUN_ID="1") as first,
        owner_of(tmp_path / "1.log", TORCHELASTIC_RUN_ID="1") as second,
    ):
        kept, lost = start_once_more(first), start_once_more(second)
        forks = kept.parent()
        assert lost.parent() == forks and forks.ppid() == first.pid
        second.kill()  # -9
        assert psutil.wait_procs([lost], 20)[0]
        assert kept.is_running() and kept.status() != psutil.STATUS_ZOMBIE
        forks.kill()
        assert psutil.wait_procs([kept], 20)[0]
        assert first.stdout.readline() == "the fork server ended\n"
        again = start_once_more(first)
        assert again.parent() != forks
        again.kill()
        assert first.stdout.readline() == "signal 9\n"
        last = start_once_more(first)
        family = [last, last.parent()]
        first.kill()
        assert not psutil.wait_procs(family, 20)[1]


def test_a_forked_process_is_as_one_that_was_started(tmp_path):
    """Of its own session, with its own variables, folder and name; its status and its log are told."""
    program = "import os, tempfile; command = open('/proc/self/cmdline').read()\n"
    program += "print(os.getsid(0) == os.getpid(), os.environ['WORD'], tempfile.gettempdir(), "
    program += "os.environ['MKL_CBWR'], command.split()[1:4], os.getcwd())"
    log = tmp_path / "log"
    status, (line, *_) = run(log, "timeit", "-n1", "-r1", program, WORD="first")
    assert status == "exit status 0" and log.stat().st_mode & 0o777 == 0o600
    assert line.startswith("True first /") and "/nanoyatt-" in line.split()[2]
    assert line.endswith(f"AUTO,STRICT ['-m', 'timeit', '-n1'] {ROOT}")
    assert not Path(line.split()[2]).exists()
    status, lines = run(log, "py_compile", "second")
    assert status == "exit status 1" and len(lines) == 1 and "'second'" in lines[0]
    assert log.read_text().count("---- a server starts, 20") == 2


def test_a_killed_process_is_gone_at_once_whatever_its_fork_server_does(tmp_path):
    """One that hangs; and one that is still importing has nothing to wait for."""
    process = ServerProcess(["timeit", SLEEP], "a key", tmp_path / "log", "cpu", {})
    process.start()
    while not process._process.pid:
        assert not process.exit_status()
        time.sleep(0.05)
    forked = psutil.Process(process._process.pid)
    assert "a key" not in "".join([*forked.cmdline(), *forked.environ().values()])
    forks = forked.parent()
    forks.suspend()
    try:
        asyncio.run(process.kill())
        assert forked.status() == psutil.STATUS_ZOMBIE
        process.start()
        assert process.exit_status() == ""
        asyncio.run(process.kill())
    finally:
        forks.resume()
    assert process.exit_status() == "killed" and run(tmp_path / "log", "py_compile")[0]


def test_a_fork_server_that_can_not_import_says_why(tmp_path, monkeypatch):
    """In the end of the engine's log."""
    (tmp_path / "fastapi.py").write_text("raise ImportError('a broken installation')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # another server than the other tests'
    status, lines = run(tmp_path / "log", "timeit")
    assert (status, lines[-1]) == ("the fork server ended", "ImportError: a broken installation")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_log_keeps_what_earlier_servers_said(tmp_path, device):
    """Also those of an earlier run; a message quotes the newest's own lines."""
    log = tmp_path / "logs" / "rollout-0.log"
    for word in ("first", "second"):
        process = ServerProcess(["py_compile", word], "a key", log, device, {})
        process.start()
        assert until_over(process) == "exit status 1"
    [line] = process.log_tail().splitlines()[1:]
    assert "'second'" in line and "'first'" in log.read_text()
    assert log.read_text().count("---- a server starts, 20") == 2
