"""The process that writes a checkpoint: it sees the state at the fork, disturbs nobody, always reports."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import torch  # noqa: F401  as in a rank: else every writer would import it

from runtime import background_writer
from runtime.background_writer import BackgroundWriter
from tests import ROOT
from tests.support.patience import LIMIT_S, run_process, wait_for


def ended(writer: BackgroundWriter):
    try:
        wait_for(writer.result)
        return writer.result()
    finally:
        writer.close()


def test_a_writer_sees_what_was_there_when_it_was_forked():
    """What it sees must not change as the rank continues; results larger than a pipe must come back whole."""
    value = bytearray(200_000)
    writer = BackgroundWriter(lambda: (time.sleep(0.2), bytes(value))[1])
    assert writer.result() is None
    value[:] = b"x" * len(value)
    assert ended(writer) == (bytes(200_000), "")


def test_a_process_that_does_not_begin_is_forked_again(monkeypatch):
    """A writer that deadlocks on a lock of a thread that wasn't forked must be replaced."""
    hangs = iter([True, True, False])
    run = background_writer.run_writer

    def fork(writer, work, fork=BackgroundWriter._fork):
        hung = lambda *_: signal.pause()  # noqa: E731
        monkeypatch.setattr(background_writer, "run_writer", hung if next(hangs, False) else run)
        fork(writer, work)
        pids.append(writer._process.pid)

    pids = []
    monkeypatch.setattr(BackgroundWriter, "_fork", fork)
    monkeypatch.setattr(background_writer, "BEGIN_S", 0.5)
    assert ended(BackgroundWriter(lambda: 7)) == (7, "")
    assert len(pids) >= 3 and not any(map(psutil.pid_exists, pids))
    hangs = iter([True] * 3)
    monkeypatch.setattr(background_writer, "FORKS", 3)
    assert ended(BackgroundWriter(lambda: 7)) == (None, "none of 3 forked processes started")


def test_a_writer_holds_no_file_of_the_rank(tmp_path):
    ours, theirs = socket.socketpair()
    locked = (tmp_path / "rows").open("w")
    fcntl.flock(locked, fcntl.LOCK_EX)
    writer = BackgroundWriter(lambda: time.sleep(LIMIT_S))
    locked.close()
    ours.close()
    try:
        # its second thread shows that it works
        wait_for(lambda: len(os.listdir(f"/proc/{writer._process.pid}/task")) == 2)
        with (tmp_path / "rows").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert theirs.recv(1) == b""
    finally:
        writer.close()
        theirs.close()


def test_how_a_writer_fails():
    """An error of any kind, and a death, must reach the rank."""
    missing = ended(BackgroundWriter(lambda: Path("/nowhere/file").write_text("x")))
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/file'"
    assert missing == (None, error)
    assert ended(BackgroundWriter(lambda: {}["key"])) == (None, "KeyError: 'key'")
    assert ended(BackgroundWriter(lambda: sys.exit("two\nlines"))) == (None, "SystemExit: two")
    # more than a pipe holds: it is killed while sending
    cut = BackgroundWriter(lambda: bytes(1 << 20))
    sent = bytes(4)  # the number of bytes waiting in the pipe
    while int.from_bytes(sent, sys.byteorder) < 1000:
        sent = fcntl.ioctl(cut._receiver, termios.FIONREAD, sent)
        time.sleep(0.01)
    cut._process.kill()
    assert ended(cut) == (None, "the writing process ended with status -9")
    killed = ended(BackgroundWriter(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    assert killed == (None, "the writing process ended with status -9")


def test_a_fork_that_fails(monkeypatch):
    """It must count as the writer's failure, and signals must arrive as before."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    monkeypatch.setattr(os, "fork", lambda: os.listdir("/nowhere"))
    result, problem = ended(BackgroundWriter(lambda: 1))
    assert problem.startswith("no writing process could be started: [Errno 2] ") and not result
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


def test_a_writer_dies_with_its_rank(tmp_path):
    program = (
        "import os, sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from runtime.background_writer import BackgroundWriter\n"
        "work = lambda: (Path(sys.argv[2]).write_text(str(os.getpid())), time.sleep(9999))\n"
        "writer = BackgroundWriter(work)\n"
        "time.sleep(9999)"
    )
    rank = subprocess.Popen([sys.executable, "-c", program, str(ROOT), str(tmp_path / "pid")])
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    writer = psutil.Process(int((tmp_path / "pid").read_text()))
    rank.kill()
    rank.wait()
    wait_for(lambda: not writer.is_running() or writer.status() == psutil.STATUS_ZOMBIE)


def test_a_writer_computes_where_the_rank_had_several_threads():
    """OpenMP's other threads aren't forked, so a parallel operation would wait for them forever."""
    program = (
        "import sys, torch; sys.path.insert(0, sys.argv[1])\n"
        "from tests.runtime.test_background_writer import ended\n"
        "from runtime.background_writer import BackgroundWriter\n"
        "torch.set_num_threads(2)\n"
        "numbers = torch.ones(400, 400)\n"
        "product = lambda: (numbers @ numbers)[0, 0].item()\n"
        "compute = lambda: ((numbers * 2).sum().item(), product(), torch.get_num_threads())\n"
        "compute()\n"
        "print(ended(BackgroundWriter(compute)))"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    said = run_process(sys.executable, "-c", program, ROOT, env=environment)
    assert said.stdout == "((320000.0, 400.0, 1), '')\n", said.stderr[-2000:]
