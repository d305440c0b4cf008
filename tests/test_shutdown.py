"""Leaving: a first signal, torchrun's echo of it, a second one; a user's error; both under torchrun."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from runtime import rendezvous, shutdown

ROOT = Path(__file__).parent.parent


# ---------------------------------------------------------------- signals


async def signalled(stop, times, seconds, cleaned):
    """A rank's program of so many seconds, with a cleanup, that gets signals: {after seconds: number}."""

    async def work():
        try:
            await asyncio.sleep(seconds)
            return "done"
        finally:
            await asyncio.sleep(0.1)
            cleaned.append(True)

    for after, number in times.items():
        asyncio.get_running_loop().call_later(after, os.kill, os.getpid(), number)
    return await shutdown.run_until_signal(work(), stop)


@pytest.mark.parametrize(
    "graceful,times,ends",
    [
        (True, {0.05: signal.SIGTERM}, "done"),  # asked to stop, and does so by itself
        (True, {0.05: signal.SIGINT, 0.1: signal.SIGINT}, "done"),  # torchrun passes it on again
        (True, {0.05: signal.SIGINT, 0.3: signal.SIGINT}, "cancelled"),  # somebody means it
        (
            True,
            {0.05: signal.SIGINT, 0.3: signal.SIGTERM},
            "cancelled",
        ),  # torchrun's, at a second Ctrl-C
        (False, {0.05: signal.SIGTERM}, "cancelled"),
        (
            False,
            {0.05: signal.SIGINT, 0.1: signal.SIGTERM},
            "cancelled",
        ),  # the cleanup isn't cut short
    ],
)
def test_signals(monkeypatch, graceful, times, ends):
    """Whatever comes, the cleanup runs to its end; the first signal is remembered."""
    monkeypatch.setattr(shutdown, "ECHO_S", 0.15)
    stop, cleaned = shutdown.Stop(graceful=graceful), []
    if ends == "done":
        assert asyncio.run(signalled(stop, times, 0.5, cleaned)) == "done"
    else:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(signalled(stop, times, 0.5, cleaned))
    assert cleaned == [True] and stop.asked == next(iter(times.values()))


async def broken():
    raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("reported,error", [(True, asyncio.CancelledError), (False, RuntimeError)])
def test_a_collective_that_another_ranks_error_broke(monkeypatch, tmp_path, reported, error):
    """It is that rank's affair, which has said why; any other one is raised as it is."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    if reported:
        (tmp_path / "reported").touch()
    with pytest.raises(error):
        asyncio.run(shutdown.run_until_signal(broken(), shutdown.Stop()))


# ---------------------------------------------------------------- the end of a process

LEAVE = """
import sys
from runtime import shutdown
shutdown.prepare()
print("on stdout")
{}
"""


def leave(code, error_file=""):
    """The end of a process that runs `code`: its status and what it printed."""
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(error_file)}
    command = [sys.executable, "-c", LEAVE.format(code)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


def test_an_error_is_said_by_one_rank_and_quoted_by_torchrun(tmp_path):
    """Status 2 of each; every rank leaves the line in its own error file, as torchrun reads it."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    files = [tmp_path / str(rank) / "error.json" for rank in (0, 1)]
    ends = [leave("shutdown.exit_on_error('error: --steps 0')", path) for path in files]
    assert [end.returncode for end in ends] == [2, 2] and [end.stdout for end in ends] == [
        "on stdout\n"
    ] * 2
    assert [end.stderr for end in ends] == ["error: --steps 0\n", ""]
    for path in files:
        assert json.loads(path.read_text())["message"]["message"] == "error: --steps 0"
        failure = ProcessFailure(0, 1, 2, str(path))
        assert (
            failure.message["message"] == "error: --steps 0"
            and abs(failure.timestamp - time.time()) < 60
        )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_event_loop(number):
    """One line and the signal's status."""
    end = leave(f"import os; os.kill(os.getpid(), {int(number)})")
    assert (end.returncode, end.stderr, end.stdout) == (
        128 + number,
        "interrupted\n",
        "on stdout\n",
    )


CHILD = """
import os, sys, time
from runtime import shutdown
shutdown.prepare()
print(os.getpid(), flush=True)
time.sleep(60)
"""
LAUNCHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_a_rank_ends_with_its_launcher():
    """Even when that is killed hard."""
    command = [sys.executable, "-c", LAUNCHER]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    rank = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    gone, alive = psutil.wait_procs([rank], 10)
    assert gone and not alive


# ---------------------------------------------------------------- under torchrun

RANKS = """
import asyncio, os, shutil, sys
sys.path.insert(0, {root!r})
import run
from config import Config, UserError
from runtime import rendezvous, shutdown

rank = int(os.environ["RANK"])

async def one_rank_fails(world, stop):
    if rank == 1:
        raise UserError("one of the samples")
    await world.barrier()

async def one_rank_breaks(world, stop):
    world.doing(f"phase of rank {{rank}}")
    await world.barrier()
    assert rank != 1, "broken"
    await world.barrier()

async def the_notes_are_gone(world, stop):
    await world.barrier()
    if rank == 1:
        shutil.rmtree(rendezvous.launcher_folder())
        os._exit(1)
    await world.barrier()

async def until_a_stop(world, stop):
    if rank == 0:
        print("serving", flush=True)
    while not any(await world.gather(stop.asked)):
        await asyncio.sleep(0.05)
    return "stopped after 3 steps"

async def met(world):
    await world.barrier()
    await asyncio.sleep(rank)  # rank 1 comes out of the meeting later

async def work(stop):
    async with run.joined(Config(timeout_s=60)) as (world, _):
        try:
            await stop.until_all_are_ready(met(world))
            return await {program}(world, stop)
        finally:
            await asyncio.sleep(0.1)
            print("cleaned up", flush=True)

run.start = lambda arguments, stop: asyncio.run(shutdown.run_until_signal(work(stop), stop))
run.main([])
"""
FOLDERS = "nanoyatt-*-*-0"  # of ranks, where they meet


@contextlib.contextmanager
def torchrun(tmp_path, program, ranks=2):
    """Ranks that run it between run.py's own beginning and end; nothing of theirs stays behind."""
    (tmp_path / "ranks.py").write_text(RANKS.format(root=str(ROOT), program=program))
    flags = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--nproc-per-node"]
    command = [
        Path(sys.executable).with_name("torchrun"),
        *flags,
        str(ranks),
        tmp_path / "ranks.py",
    ]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, **pipes) as run:
        try:
            yield run
        finally:
            run.kill()  # the ranks end with it


def check_no_traceback_of_ours(stderr):
    """torchrun's own is none."""
    ours = [line for line in stderr.splitlines() if "File" in line and "torch/" not in line]
    assert not [line for line in ours if "torchrun" not in line], stderr


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_ranks_error_ends_all_of_them(tmp_path, ranks):
    """While the others wait for it in a collective: one line, then torchrun's page, which quotes it."""
    with torchrun(tmp_path, "one_rank_fails", ranks) as run:
        stdout, stderr = run.communicate(timeout=100)
    assert run.returncode == 1 and stdout.count("cleaned up") == ranks
    ranks_lines = [line for line in stderr.splitlines() if not re.match(r"W\d{4} ", line)]
    assert ranks_lines[0] == "error: one of the samples" and "exitcode  : 2 " in stderr, stderr
    assert stderr.count("one of the samples") == 2
    check_no_traceback_of_ours(stderr)
    assert not [*tmp_path.glob(FOLDERS)]  # the last one out removes it


@pytest.mark.parametrize(
    "program,told",
    [
        ("one_rank_breaks", "rank 1 didn't come, last seen in phase: phase of rank 1"),
        ("the_notes_are_gone", "the ranks' notes are gone, so who didn't come is unknown"),
    ],
)
def test_who_waited_in_vain_says_for_whom(tmp_path, program, told):
    """Also where that rank has left, and where the folder with its notes has gone with it."""
    with torchrun(tmp_path, program) as run:
        _, stderr = run.communicate(timeout=100)
    assert f"RuntimeError: rank 0 waited in vain, for 60 s at most: {told}\n" in stderr, stderr


def test_a_stop_that_was_asked_for(tmp_path):
    """Ctrl-C reaches torchrun alone, which passes it on: the ranks agree and end, and one says so.

    Also when one of them hasn't yet come out of the meeting in which all became ready for that.
    """
    with torchrun(tmp_path, "until_a_stop") as run:
        assert run.stdout.readline() == "serving\n"
        ranks = psutil.Process(run.pid).children()
        run.send_signal(signal.SIGINT)
        stdout, stderr = run.communicate(timeout=100)
    assert stdout.count("cleaned up") == 2 and stderr.count("stopped after 3 steps\n") == 1, stderr
    assert "interrupted" not in stderr
    assert len(ranks) == 2 and not any(rank.is_running() for rank in ranks)
    check_no_traceback_of_ours(stderr)


def test_the_last_rank_out_removes_the_folder_of_all(monkeypatch, tmp_path):
    monkeypatch.setattr(rendezvous, "launcher_folder", lambda: tmp_path / "met")
    other = rendezvous.hold.__wrapped__(rendezvous.private_folder())
    rendezvous.close()
    assert (tmp_path / "met").exists()
    os.close(other)
    rendezvous.close()
    assert not (tmp_path / "met").exists()
    rendezvous.close()
