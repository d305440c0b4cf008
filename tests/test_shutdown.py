"""Leaving: a first signal, torchrun's echo of it, a second one; a user's error; both under torchrun."""

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM
from types import SimpleNamespace

import psutil
import pytest

from runtime import shutdown

ROOT = Path(__file__).parent.parent


async def signalled(stop, times, clock, cleaned):
    """A rank's program, with a cleanup, that gets signals and then ends: {at this time: number}."""
    strikes_are_over = asyncio.Event()

    async def work():
        try:
            await strikes_are_over.wait()
            return "done"
        finally:
            await asyncio.sleep(0.1)
            cleaned.append(True)

    async def strike():
        for clock[0], number in times.items():
            signal.raise_signal(number)
            for _ in range(5):  # until the loop has called its handler
                await asyncio.sleep(0)
        strikes_are_over.set()

    return (await asyncio.gather(shutdown.run_until_signal(work(), stop), strike()))[0]


@pytest.mark.parametrize(
    "trains,times,is_done",
    [
        (True, {1.0: SIGINT, 3.9: SIGINT}, True),  # torchrun passes it on again; stops by itself
        (True, {1.0: SIGINT, 4.1: SIGINT}, False),  # somebody means it
        (True, {1.0: SIGINT, 4.1: SIGTERM}, False),  # torchrun's, at a second Ctrl-C
        (True, {1.0: SIGHUP, 3.9: SIGHUP}, True),  # the terminal was closed
        (False, {1.0: SIGINT, 3.9: SIGTERM}, False),  # the cleanup isn't cut short
    ],
)
def test_signals(monkeypatch, trains, times, is_done):
    """Whatever comes, the cleanup runs to its end; the first signal is remembered."""
    stop, clock, cleaned = shutdown.Stop(graceful=trains), [0.0], []
    monkeypatch.setattr(shutdown, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with contextlib.nullcontext() if is_done else pytest.raises(asyncio.CancelledError):
        assert asyncio.run(signalled(stop, times, clock, cleaned)) == "done"
    assert cleaned == [True] and stop.asked == times[1.0]


LEAVE = """
import os, time
from runtime import shutdown
shutdown.prepare()
print(os.getpid(), flush=True)
{}
"""


def leave(code, error_file=""):
    """The end of a process that runs `code`: its status and what it printed on stderr."""
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(error_file)}
    command = [sys.executable, "-c", LEAVE.format(code)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    return ran.returncode, ran.stderr


def test_an_error_is_said_by_one_rank_and_quoted_by_torchrun(tmp_path):
    """Status 2 of each; every rank leaves the line in its own error file, as torchrun reads it."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    for rank, said in enumerate(("error: --steps 0\n", "")):
        path = tmp_path / "attempt_0" / str(rank) / "error.json"
        path.parent.mkdir(parents=True)
        assert leave("shutdown.exit_on_error('error: --steps 0')", path) == (2, said)
        assert json.loads(path.read_text())["message"]["message"] == "error: --steps 0"
        failure = ProcessFailure(0, 1, 2, str(path))
        assert failure.message["message"] == "error: --steps 0"
        assert abs(failure.timestamp - time.time()) < 60


@pytest.mark.parametrize("error, status", [("UserError('gone')", 2), ("OSError('gone')", 1)])
def test_a_users_error_is_not_tried_again(tmp_path, error, status):
    """The ranks that torchrun starts again leave with it, before they import torch; it was said."""
    program = f"""
import os, run, sys
from config import UserError
run.start = lambda *_: exec("raise {error}")
run.shutdown.leave = lambda status: os._exit(10 * ("torch" in sys.modules) + status)
run.main([])
"""
    how = dict(cwd=ROOT, capture_output=True, text=True)
    for attempt in range(3):
        path = tmp_path / f"attempt_{attempt}" / "0" / "error.json"
        path.parent.mkdir(parents=True)
        how["env"] = os.environ | {"TORCHELASTIC_ERROR_FILE": str(path)}
        ran = subprocess.run([sys.executable, "-c", program], **how)
        assert ran.returncode == status, ran.stderr
        assert ("gone" in ran.stderr) == (attempt == 0 or status == 1)
        assert status == 1 or "error: gone" in path.read_text()


@pytest.mark.parametrize("number", [SIGINT, SIGTERM, SIGHUP])
def test_a_signal_before_the_event_loop(number):
    """One line and the signal's status."""
    assert leave(f"os.kill(os.getpid(), {int(number)})") == (128 + number, "interrupted\n")


JOINED = """(lambda *_: dist.init_process_group(
    "gloo", store=dist.HashStore(), rank=0, world_size=1) or 1 / 0)"""  # torch changes sys.excepthook


@pytest.mark.parametrize(
    "start,status", [("lambda *_: ''", 0), ("lambda *_: 1 / 0", 1), (JOINED, 1)]
)
def test_a_rank_never_comes_to_pythons_own_end(start, status):
    """With a group of NCCL that took minutes on an H100: its thread looked for a file that was removed."""
    program = "import atexit, run; import torch.distributed as dist; atexit.register(print, 'late')"
    program += f"; run.start = {start}"
    command = [sys.executable, "-c", f"{program}; print('done'); run.main([])"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (status, "done\n")
    assert ("ZeroDivisionError" in ran.stderr) == bool(status)


@pytest.mark.parametrize("launched", [False, True])
def test_nohup_is_obeyed_unless_torchrun_passes_the_signal_on(launched):
    """torchrun has handlers of its own, and ends where nohup asked it not to."""
    environment = {name: os.environ[name] for name in os.environ if "TORCHELASTIC" not in name}
    environment |= {"TORCHELASTIC_RUN_ID": "1"} if launched else {}
    program = LEAVE.format("os.kill(os.getpid(), 1); print('goes on')")
    how = dict(cwd=ROOT, capture_output=True, text=True, env=environment)
    ran = subprocess.run(["nohup", sys.executable, "-c", program], **how)
    assert ran.returncode == (129 if launched else 0)
    assert ("goes on" in ran.stdout) != launched


def test_a_thread_of_the_users_code_holds_nothing_up():
    """Closing an event loop would wait for it."""
    program = """
async def work():
    waits = asyncio.create_task(asyncio.to_thread(time.sleep, 1000))
    await asyncio.sleep(0.1)
    raise UserError("its rule is late")
try:
    shutdown.run(work(), shutdown.Stop())
except UserError as error:
    shutdown.exit_on_error(str(error))
"""
    imports = (
        "import asyncio, sys, time\nfrom config import UserError\nfrom runtime import shutdown\n"
    )
    how = dict(cwd=ROOT, capture_output=True, text=True, timeout=60)
    ran = subprocess.run([sys.executable, "-c", imports + program], **how)
    assert (ran.returncode, ran.stderr) == (2, "its rule is late\n")


def test_lines_that_nobody_can_read_any_more_end_no_run():
    """A closed terminal refuses them, while the step is given up and saved."""
    program = "import pty, sys; from reporting.progress import Progress; terminal, shown = pty.openpty()\n"
    program += "os.dup2(shown, 1); os.dup2(shown, 2); os.close(shown); os.close(terminal)\n"
    program += "Progress(5, True).line('step 1'); shutdown.exit_now(7, 'stopped')"
    assert leave(program) == (7, "")


def test_a_rank_may_open_as_many_files_as_the_system_allows():
    """Each request is a connection."""
    limits = "resource.getrlimit(resource.RLIMIT_NOFILE)"
    program = f"import resource; from runtime import shutdown; hard = {limits}[1]\n"
    program += "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
    program += f"shutdown.prepare(); assert {limits} == (hard, hard)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_a_rank_ends_with_its_launcher():
    """Even when that is killed hard."""
    rank = LEAVE.format("time.sleep(60)")
    launch = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    command = [sys.executable, "-c", launch]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        rank = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
    gone, alive = psutil.wait_procs([rank], 10)
    assert gone and not alive


RANKS = """
import asyncio, os, sys, time
sys.path.insert(0, {root!r})
import run
from config import Config, UserError
from runtime import shutdown

rank = int(os.environ["RANK"])

async def one_rank_fails(world, stop):
    if rank == 1:
        raise UserError("one of the samples")
    await world.barrier()

async def until_a_stop(world, stop):
    if rank == 0:
        print("serving", flush=True)
    while not any(await world.gather(stop.asked)):
        await asyncio.sleep(0.05)
    return "stopped after 3 steps"

async def one_is_killed(world, stop):
    if rank == 1:
        os.kill(os.getpid(), 9)
    await world.run(time.sleep, 1000)  # as in a kernel of NCCL's, where no error comes

def come_out_later(world):
    gather = world.gather

    async def gather_late(value):
        values = await gather(value)
        await asyncio.sleep(rank)  # rank 1 comes out of the meeting later
        return values

    world.gather = gather_late

async def work(stop):
    shutdown.GONE_S = 1.0
    async with run.joined(Config(command="sft", timeout_s=60, out=sys.argv[1])) as (world, _):
        try:
            come_out_later(world)
            await stop.until_all_are_ready(world)
            del world.gather
            return await {program}(world, stop)
        finally:
            await asyncio.sleep(0.1)
            print("cleaned up", flush=True)

run.start = lambda arguments, stop: asyncio.run(shutdown.run_until_signal(work(stop), stop))
run.main([])
"""


@contextlib.contextmanager
def torchrun(tmp_path, program, ranks):
    """Ranks that run it between run.py's own beginning and end; nothing of theirs stays behind."""
    (tmp_path / "ranks.py").write_text(RANKS.format(root=str(ROOT), program=program))
    command = [Path(sys.executable).with_name("torchrun"), "--rdzv-backend", "c10d"]
    command += ["--rdzv-conf", "store_type=file", "--nproc-per-node", str(ranks)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    command += [tmp_path / "ranks.py", tmp_path / "out"]
    with subprocess.Popen(command, env=environment, **pipes) as run:
        try:
            yield run
        finally:
            run.kill()  # the ranks end with it


def check_no_traceback_of_ours(stderr):
    """torchrun's own is none."""
    ours = [line for line in stderr.splitlines() if "File" in line and "torch/" not in line]
    assert not [line for line in ours if "torchrun" not in line], stderr


def test_one_ranks_error_ends_all_of_them(tmp_path):
    """While the others wait for it in a collective: one line, then torchrun's page, which quotes it."""
    with torchrun(tmp_path, "one_rank_fails", ranks=3) as run:
        stdout, stderr = run.communicate(timeout=100)
    assert run.returncode == 1 and stdout.count("cleaned up") == 3
    ranks_lines = [line for line in stderr.splitlines() if not re.match(r"W\d{4} ", line)]
    assert ranks_lines[0] == "error: one of the samples" and "exitcode  : 2 " in stderr, stderr
    assert stderr.count("one of the samples") == 2
    check_no_traceback_of_ours(stderr)
    assert not [*tmp_path.glob("nanoyatt-*")]  # where they met: the last one out removes it


def test_a_stop_that_was_asked_for(tmp_path):
    """Ctrl-C reaches torchrun alone, which passes it on: the ranks agree and end, and one says so.

    Also when one of them hasn't yet come out of the meeting in which all became ready for that.
    """
    with torchrun(tmp_path, "until_a_stop", ranks=2) as run:
        assert run.stdout.readline() == "serving\n"
        with (tmp_path / "out" / "lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(
                file, fcntl.LOCK_SH | fcntl.LOCK_NB
            )  # nobody else may write there meanwhile
        ranks = psutil.Process(run.pid).children()
        run.send_signal(signal.SIGINT)
        stdout, stderr = run.communicate(timeout=100)
    assert stdout.count("cleaned up") == 2 and stderr.count("stopped after 3 steps\n") == 1, stderr
    assert "interrupted" not in stderr
    assert len(ranks) == 2 and not any(rank.is_running() for rank in ranks)
    check_no_traceback_of_ours(stderr)


def test_a_rank_whose_collective_broke_says_in_which_phase(tmp_path):
    with torchrun(tmp_path, "(lambda *_: os._exit(1) if rank else world.barrier())", 2) as run:
        _, stderr = run.communicate(timeout=100)
    assert "rank 0 waited in vain for the others, for 60 s at most (starting)\n" in stderr


def test_a_rank_that_waits_for_one_that_was_killed_leaves_in_order(tmp_path):
    """torchrun tells it to stop, which needs all ranks: it closes its engines before torchrun kills it."""
    with torchrun(tmp_path, "one_is_killed", ranks=2) as run:
        stdout, stderr = run.communicate(timeout=100)
    assert run.returncode == 1 and "Signal 9 (SIGKILL) received" in stderr
    assert stdout.count("cleaned up") == 1, stderr
    assert "interrupted: rank 1 of this machine is gone\n" in stderr
