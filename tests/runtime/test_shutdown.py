"""Shutdown: a first signal, torchrun's echo of it, a second one; errors in one line; under torchrun."""

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2
from types import SimpleNamespace

import psutil
import pytest

from runtime import shutdown
from tests import ROOT
from tests.support.fakes import VirtualClock, run_on
from tests.support.launched import TORCHRUN_S_OWN
from tests.support.patience import LIMIT_S, run_process


async def signalled(stop, times, clock, cleaned):
    """Run a rank's program with a cleanup, send signals {at this time: number}, and let it end."""
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
        (True, {1.0: SIGINT, 3.9: SIGINT}, True),  # torchrun's echo; it stops by itself
        (True, {1.0: SIGINT, 4.1: SIGINT}, False),  # a second request
        (True, {1.0: SIGINT, 4.1: SIGTERM}, False),  # torchrun's, at a second Ctrl-C
        (True, {1.0: SIGHUP, 3.9: SIGHUP}, True),  # the terminal was closed
        (False, {1.0: SIGINT, 3.9: SIGTERM}, False),  # the cleanup isn't cut short
    ],
)
def test_signals(monkeypatch, trains, times, is_done):
    """The cleanup must always run to its end; the first signal is remembered."""
    stop, clock, cleaned = shutdown.Stop(graceful=trains), [0.0], []
    monkeypatch.setattr(shutdown, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with contextlib.nullcontext() if is_done else pytest.raises(asyncio.CancelledError):
        assert asyncio.run(signalled(stop, times, clock, cleaned)) == "done"
    assert cleaned == [True] and stop.asked == times[1.0]


@pytest.mark.parametrize("left_s, is_cancelled", [(0.9, False), (1.1, True)])
def test_a_rank_that_is_through_may_leave_before_others_know_that_they_are(left_s, is_cancelled):
    """If a rank is gone at two checks it was killed, and nobody will agree to the stop."""

    async def watched():
        work = asyncio.ensure_future(asyncio.sleep(left_s))
        await asyncio.wait([work, asyncio.create_task(shutdown.cancel_if_one_is_gone(work, stop))])
        return work.cancelled()

    stop = shutdown.Stop(neighbours={0: os.getpid(), 1: 2**22 + 1})  # no process has that id
    assert run_on(VirtualClock(), watched()) == [is_cancelled]
    assert stop.reason == "interrupted: rank 1 of this machine is gone"


LEAVE = """
import asyncio, os, sys, time
from runtime.errors import RunLost, UserError
from runtime import shutdown
shutdown.prepare()
print(os.getpid(), flush=True)
{}
"""


def leave(code, error_file="", program=LEAVE):
    """Return the end of a process that runs `code`: its status and what it printed on stderr."""
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(error_file)}
    ran = run_process(sys.executable, "-c", program.format(code), env=environment)
    return ran.returncode, ran.stderr


MAIN = """
import os, run, sys
from runtime.errors import RunLost, UserError
run.shutdown.leave = lambda status: os._exit(10 * ("torch" in sys.modules) + status)
run.main([], lambda *_: exec("raise {}"))
"""


@pytest.mark.parametrize(
    "error, status", [("UserError('gone')", 2), ("RunLost('gone')", 1), ("OSError('gone')", 1)]
)
def test_an_error_is_said_by_one_rank_and_quoted_by_torchrun(tmp_path, error, status):
    """It must be one line, except for ours. After a user's error ranks exit before they import torch."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    for attempt in range(2):
        for rank in range(2):
            path = tmp_path / f"attempt_{attempt}" / str(rank) / "error.json"
            path.parent.mkdir(parents=True)
            left, said = leave(error, path, MAIN)
            assert left == status, said
            if error.startswith("OSError"):
                assert said.startswith("Traceback") and said.endswith("OSError: gone\n")
                continue
            is_first = rank == 0 and (attempt == 0 or status == 1)
            assert said == ("error: gone\n" if is_first else "")
            failure = ProcessFailure(0, 1, status, str(path))
            assert failure.message["message"] == "error: gone"
            assert abs(failure.timestamp - time.time()) < LIMIT_S


ROWS = """
import json, sys
sys.path.insert(0, {root!r})
import torch.distributed as dist
import build, placement, run

def mine(everyone, config):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    {row}

placement.PLACEMENTS["mine"] = mine
def begin():
    run.main(["--placement", "mine"])
{last}
begin()
"""
IN_ROWS = [  # a row's last line, a line before the start -> the last line printed
    ("everyone['a']", "", r"error: (\S+):9: TypeError: tuple indices must be .*, not str"),
    ("json.loads('{')", "", r"error: (\S+):9: JSONDecodeError: .* \(\S+json/decoder\.py:\d+\)"),
    ("", "build.placed = int", "TypeError: .*, not 'Config'"),
]


@pytest.mark.parametrize("row, last, said", IN_ROWS)
def test_an_error_in_a_user_s_row_is_one_line_with_its_place(tmp_path, row, last, said):
    """torch captures what is printed then; an error outside of rows keeps its traceback."""
    path = tmp_path / "mine.py"
    path.write_text(ROWS.format(root=str(ROOT), row=row, last=last))
    ran = run_process(sys.executable, str(path), env=os.environ | {"WORLD_SIZE": "2"})
    lines = ran.stderr.splitlines()
    found = re.fullmatch(said, lines[-1])
    assert found, ran.stderr
    assert (ran.returncode, len(lines) == 1) == (1 if "json" in row or not row else 2, bool(row))
    assert found.groups() == ((str(path),) if row else ())


QUIET = {  # what rank 1 does -> the status, and all that is printed
    "sys.exit('error: why')": (1, "error: why"),
    "os.kill(os.getpid(), signal.SIGKILL)": (
        128 + signal.SIGKILL,
        "error: rank 1 was ended by SIGKILL",
    ),
    "os.kill(os.getppid(), signal.SIGTERM)": (128 + SIGTERM, "stopped, saved"),
    "print('all is done', file=sys.stderr) or os._exit(0)": (0, "all is done"),
}
RANK = """
import os, signal, sys, time
is_last = os.environ["RANK"] == "1"
def stop(*_):
    sys.exit(is_last and print("stopped, saved", file=sys.stderr))
signal.signal(signal.SIGTERM, stop)
if is_last:
    time.sleep(1)  # a launcher that is still starting ranks passes no signal on
    {}
time.sleep(0 if "done" in {!r} else 600)
"""


LAUNCHER = """
import sys
from examples import quiet_torchrun
from extras.fast_cpu import forked, ranks
ranks.import_module = lambda name: None  # it takes seconds
forked.FORKS = (sys.executable, "-c", "import time; time.sleep(600)")
if sys.argv.pop(1) == "started":
    ranks.has_devices = lambda: True
quiet_torchrun.shutdown.leave(quiet_torchrun.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("act", QUIET)
@pytest.mark.parametrize("ranks", ["forked", "started"])
def test_nothing_of_torchrun_s_follows_the_run_s_line(tmp_path, act, ranks):
    """torchrun ends with a traceback and a table, and has status 1."""
    status, line = QUIET[act]
    (tmp_path / "rank.py").write_text(RANK.format(act, act))
    command = [sys.executable, "-c", LAUNCHER, ranks, "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    ran = run_process(*command, tmp_path / "rank.py", env=environment)
    assert (ran.returncode, ran.stderr.strip()) == (status, line)


def test_a_launcher_s_own_error_is_one_line(tmp_path):
    """Somebody else may enter the folder where ranks would meet."""
    program = "import os; from runtime import rendezvous; os.umask(0)"
    program += "; rendezvous.launcher_folder().mkdir(0o777)"
    command = [sys.executable, "-c", program + LAUNCHER, "forked", "--nproc-per-node", "1", "x.py"]
    ran = run_process(*command, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert ran.returncode == 2
    assert re.fullmatch(r"error: .* is open to others, .*: remove it\n", ran.stderr)


@pytest.mark.parametrize("number", [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2])
def test_a_signal_before_the_event_loop(number):
    assert leave(f"os.kill(os.getpid(), {int(number)})") == (128 + number, "interrupted\n")


JOINED = """(lambda *_: dist.init_process_group(
    "gloo", store=dist.HashStore(), rank=0, world_size=1) or 1 / 0)"""  # torch changes sys.excepthook


@pytest.mark.parametrize("start,status", [("lambda *_: ''", 0), (JOINED, 1)])
def test_a_rank_never_comes_to_pythons_own_end(start, status):
    """With an NCCL group that took minutes on an H100, because its thread looked for a removed file."""
    program = "import atexit, run; import torch.distributed as dist; atexit.register(print, 'late')"
    program += f"; print('done'); run.main([], {start})"
    ran = run_process(sys.executable, "-c", program)
    assert (ran.returncode, ran.stdout) == (status, "done\n")
    assert ("ZeroDivisionError" in ran.stderr) == bool(status)


@pytest.mark.parametrize("launched", [False, True])
def test_nohup_is_obeyed_unless_torchrun_passes_the_signal_on(launched):
    """torchrun has handlers of its own, and ends where nohup should prevent it."""
    environment = {name: os.environ[name] for name in os.environ if "TORCHELASTIC" not in name}
    environment |= {"TORCHELASTIC_RUN_ID": "1"} if launched else {}
    program = LEAVE.format("os.kill(os.getpid(), 1); print('goes on')")
    ran = run_process("nohup", sys.executable, "-c", program, env=environment)
    assert ran.returncode == (129 if launched else 0)
    assert ("goes on" in ran.stdout) != launched


def test_a_thread_of_the_users_code_holds_nothing_up():
    """Closing an event loop would wait for it."""
    program = """
async def work():
    waits = asyncio.create_task(asyncio.to_thread(time.sleep, 1000))
    await asyncio.sleep(0.1)
    return "its rule is late"
shutdown.exit_now(7, shutdown.run(work(), shutdown.Stop()))
"""
    assert leave(program) == (7, "its rule is late\n")


def test_lines_that_nobody_can_read_any_more_end_no_run():
    """A closed terminal refuses them while the step is given up and saved."""
    program = """
import pty
from reporting.progress import Progress
terminal, shown = pty.openpty()
os.dup2(shown, 1)
os.dup2(shown, 2)
os.close(shown)
os.close(terminal)
Progress(5, True).line("step 1")
shutdown.exit_now(7, "stopped")
"""
    assert leave(program) == (7, "")


def test_a_rank_may_open_as_many_files_as_the_system_allows():
    """Each request needs a connection."""
    limits = "resource.getrlimit(resource.RLIMIT_NOFILE)"
    program = f"import resource; hard = {limits}[1]\n"
    program += "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
    program += f"shutdown.prepare(); assert {limits} == (hard, hard)"
    assert leave(program) == (0, "")


RANKS = """
import asyncio, os, sys, time
sys.path.insert(0, {root!r})
import run
from config import Config
from runtime.errors import UserError
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

async def one_is_killed_elsewhere(world, stop):
    if rank == 1:
        os.kill(os.getpid(), 9)
    stop.neighbours = {{}}  # as on another machine
    await world.barrier()

async def work(stop):
    async with run.joined(Config(command="sft", timeout_s={limit_s}, out=sys.argv[1])) as (world, _):
        try:
            await stop.until_all_are_ready(world)
            return await {program}(world, stop)
        finally:
            await asyncio.sleep(0.1)
            print("cleaned up", flush=True)

run.main([], lambda _, stop: asyncio.run(shutdown.run_until_signal(work(stop), stop)))
"""


@contextlib.contextmanager
def torchrun(tmp_path, program, ranks):
    """Run it in ranks between run.py's own beginning and end; check that nothing is left."""
    text = RANKS.format(root=str(ROOT), program=program, limit_s=LIMIT_S)
    (tmp_path / "ranks.py").write_text(text)
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
    ours = [line for line in stderr.splitlines() if "File" in line and "torch/" not in line]
    assert not [line for line in ours if "torchrun" not in line], stderr


@pytest.mark.parametrize(
    "program, cleaned, line",
    [
        ("one_rank_fails", 2, "error: one of the samples"),
        ("one_is_killed", 1, "interrupted: rank 1 of this machine is gone"),
        ("one_is_killed_elsewhere", 1, f"rank 0 waited in vain for the others, for {LIMIT_S:g} s"),
    ],
)
def test_one_ranks_end_is_that_of_all(tmp_path, program, cleaned, line):
    """The others wait for it in a collective: one line must appear, except for an unexpected error."""
    with torchrun(tmp_path, program, ranks=2) as run:
        stdout, stderr = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 1 and stdout.count("cleaned up") == cleaned, stderr
    assert line in stderr
    if program == "one_is_killed_elsewhere":
        return
    check_no_traceback_of_ours(stderr)
    ours, _, report = stderr.partition("Traceback")
    assert [each for each in ours.splitlines() if not TORCHRUN_S_OWN.match(each)] == [line]
    assert (line in report) == (program == "one_rank_fails")  # torchrun quotes it
    assert not [*tmp_path.glob("nanoyatt-*")]  # where they met: the last rank removes it


@pytest.mark.parametrize("asked, status", [("torchrun", 1), ("a rank", 0)])
def test_a_stop_that_was_asked_for(tmp_path, asked, status):
    """If only torchrun gets Ctrl-C it forwards it: the ranks must agree and end, and one prints it."""
    with torchrun(tmp_path, "until_a_stop", ranks=2) as run:
        assert run.stdout.readline() == "serving\n"
        lock = (tmp_path / "out" / "lock").open()  # nobody else may write there meanwhile
        with lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        ranks = psutil.Process(run.pid).children()
        (run if asked == "torchrun" else ranks[0]).send_signal(SIGINT)
        stdout, stderr = run.communicate(timeout=LIMIT_S)
    assert stdout.count("cleaned up") == 2 and stderr.count("stopped after 3 steps\n") == 1, stderr
    assert "interrupted" not in stderr and run.returncode == status
    assert len(ranks) == 2 and not any(rank.is_running() for rank in ranks)
    check_no_traceback_of_ours(stderr)


def test_the_process_of_shared_memory_is_deaf_to_what_stops_a_run():
    """Otherwise a signal to every process would end it, and break the push of the step to be saved."""
    code = """if True:
        import psutil, torch
        from engines import wire
        wire.serialize_bucket([("weight", torch.zeros(3))], 1)
        for child in psutil.Process().children():
            status = open(f"/proc/{child.pid}/status").read()
            print(child.name(), status.split("SigBlk:")[1].split()[0])
    """
    name, blocked = run_process(sys.executable, "-c", code).stdout.split()
    assert name == "torch_shm_manager"
    held = {number for number in range(1, 65) if int(blocked, 16) >> (number - 1) & 1}
    assert held == set(shutdown.SIGNALS)
