"""The process of users' code: what is done in it harms only it, and nothing of it outlives the rank."""

import asyncio
import contextlib
import json
import re
import subprocess
from pathlib import Path

import psutil
import pytest

import rewards
from extras import worker
from reporting.progress import Progress
from runtime import shutdown
from runtime.errors import UserError
from sample import Image, TextSample
from tests.extras.test_environment import HEAD, STEP, answered, ended, load
from tests.extras.test_user_rules import asked, rank_of, write
from tests.root.test_rewards import score
from tests.support.patience import LIMIT_S, wait_for

REWARD = "import asyncio, os, signal, time\ndef reward(sample):\n    "
LINE = r"error: --rule \S+mine.py"
HARMS = {  # what a rule does -> the line that ends the run, or "" if it does no harm
    "os.chdir('/')": "",
    "os.kill = os._exit = os.getpid = os.unlink = os.fork = None": "",
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)": "",
    "asyncio.get_running_loop().stop()": "",
    "raise asyncio.CancelledError": rf"{LINE} \(\S+mine.py:3\): CancelledError: ",
    "raise KeyboardInterrupt": rf"{LINE} \(\S+mine.py:3\): KeyboardInterrupt: ",
    "reward(sample)": rf"{LINE} \(\S+mine.py:3\): RecursionError: .*",
    "os._exit(3)": rf"{LINE} on the prompt '3\+9=' ended its process: status 3",
    "os.abort()": rf"{LINE} on the prompt '3\+9=' ended its process: SIGABRT",
}


@pytest.mark.parametrize("body, line", HARMS.items(), ids=HARMS)
def test_a_rule_harms_only_its_process(tmp_path, body, line):
    ran = asked(write(tmp_path, f"{REWARD}{body}\n    return 1.0\n"), LIMIT_S)
    assert ran.stdout == ("" if line else "1.0 0\n"), ran.stderr
    assert ran.returncode == (2 if line else 0)
    assert re.fullmatch(line and f"{line}\n", ran.stderr)


WAITS = f"""{REWARD}open(__file__ + ".runs", "w").close()
    while not os.path.exists(__file__ + ".go"):
        time.sleep(0.01)
    return 1.0
"""


def test_a_rule_that_blocks_holds_up_no_other_work(tmp_path):
    """The rank's event loop must go on: only it lets the rule go on."""
    rule = write(tmp_path, WAITS)

    async def let_go():
        while not Path(f"{rule}.runs").exists():
            await asyncio.sleep(0.01)
        Path(f"{rule}.go").touch()

    async def both():
        code = rewards.load("reward", rule, LIMIT_S)
        sample = ended()
        seen = rewards.seen_by_rules(sample, lambda tokens, **_: "")
        return await asyncio.gather(code.judge(seen), let_go())

    assert asyncio.run(both())[0].value == 1.0


FAMILY = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

POOL = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))

def daemon():
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            time.sleep(999)
        os._exit(0)
    return int(os.read(read, 99))

def family():
    sleep = subprocess.Popen(["sleep", "999"], start_new_session=True).pid
    return os.getpid(), os.getppid(), POOL.submit(os.getpid).result(), sleep, daemon()
"""
NOTES = "with open(__file__ + '.pids', 'w') as file:\n        file.write(str([*family()]))\n    "
STAYS = FAMILY + WAITS.replace("import asyncio", "import subprocess, asyncio").replace(
    "open(", f"{NOTES}open(", 1
)


@contextlib.contextmanager
def running(rule):
    """Start a rank that calls this rule; yield it and the processes of the rule, once it runs."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    command, env = rank_of(rule, LIMIT_S)
    with subprocess.Popen(command, env=env, **pipes) as rank:
        wait_for(Path(f"{rule}.runs").exists)
        pids = json.loads(Path(f"{rule}.pids").read_text())
        yield rank, [psutil.Process(pid) for pid in pids]


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("how", ["kill -9", "its end"])
def test_nothing_of_it_outlives_the_rank(tmp_path, how):
    """This includes what left its session or its parent."""
    rule = write(tmp_path, STAYS)
    with running(rule) as (rank, family):
        assert len(family) == 5 and not any(map(is_gone, family))
        rank.kill() if how == "kill -9" else Path(f"{rule}.go").touch()
        wait_for(lambda: all(map(is_gone, family)))
        rank.communicate(timeout=LIMIT_S)


def test_a_signal_to_every_process_of_a_job_is_for_the_ranks(tmp_path):
    rule = write(tmp_path, STAYS)
    with running(rule) as (rank, [own, watcher, *_]):
        for number in shutdown.SIGNALS:
            own.send_signal(number)
            watcher.send_signal(number)
        Path(f"{rule}.go").touch()
        assert rank.communicate(timeout=LIMIT_S) == ("1.0 0\n", "")


def test_what_is_called_after_its_end_is_refused_with_the_same_line(tmp_path):
    """The episodes' ends are called then, and must not replace the line."""
    process = worker.Worker()
    text = f"{STEP}import os; os._exit(3)"
    path = write(tmp_path, text)
    process.ask("load", "E", path, "Environment", "class {}", what="E").result()
    sample = TextSample(0, 0, [])
    process.ask("begin", "E", sample, 5, what="begin").result()
    for verb in ("step", "close"):
        given = (sample.key, "text")[: 1 + (verb == "step")]
        with pytest.raises(UserError, match=r"^step ended its process: status 3$"):
            process.ask(verb, "E", *given, what=verb).result()


def test_a_debugger_stops_in_a_rule(tmp_path):
    """It must read what is typed for the rank."""
    rule = write(tmp_path, f"{REWARD}breakpoint()\n    return 1.0\n")
    ran = asked(rule, LIMIT_S, input="p sample.question * 2\nc\n" * 10)
    assert ran.stdout.count("'3+9=3+9='") == 10 and "1.0 0\n" in ran.stdout, ran.stderr


def image(name, read):
    return Image(name.encode(), (1, 1, 1), 0, read)


def test_a_rule_gets_the_images_that_it_reads(tmp_path):
    """Others aren't read. One that can't be read is an error of the rule's."""
    read = []

    def content(name):
        read.append(name)
        if name == "gone":
            raise OSError("no such file")
        return name.encode() * 1000

    images = [image(name, lambda name=name: content(name)) for name in ("one", "two", "gone")]
    text = f"{REWARD}return len(sample.media[PLACE].read()) / 1000 + sample.media[0].features\n"
    rule = write(tmp_path, text.replace("PLACE", "1"))
    assert score([], [rewards.load("reward", rule, LIMIT_S)], media=tuple(images)).reward == 4
    assert read == ["two"]
    rule = write(tmp_path, text.replace("PLACE", "2"))
    with pytest.raises(UserError, match=r"mine\.py:3\): OSError: no such file$"):
        score([], [rewards.load("reward", rule, LIMIT_S)], media=tuple(images))


DEVICES = [(None, "1"), ("", ""), ("4,6", "6"), ("GPU-a,MIG-b", "MIG-b"), ("4", "")]


@pytest.mark.parametrize("visible, own", DEVICES)
def test_it_sees_its_rank_s_gpu(monkeypatch, visible, own):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert worker.own_device() == own


# ---------------------------------------------------------------------------------- episodes

ALARM = """signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(5)
        signal.alarm(0)
        return 1.0"""
WITH_ALARM = STEP.replace("import asyncio,", "import signal, asyncio,") + ALARM


def test_an_async_step_may_set_an_alarm_and_another_is_told_how(tmp_path):
    sample = ended()
    answered(load(tmp_path, WITH_ALARM.replace("def step", "async def step")), sample)
    assert sample.earned == [1.0]
    line = r"mine\.py:13\): ValueError: signal only works in main thread.*: make `step` async, "
    with pytest.raises(UserError, match=line):
        answered(load(tmp_path, WITH_ALARM), ended())


class OfALibrary(ValueError):
    """Of no module of Python's."""


FATES = [  # an error's expression, whether it is a mistake
    ("ValueError('x')", True),
    ("KeyError('x')", True),
    ("FileNotFoundError('x')", True),
    ("RecursionError('x')", True),
    ("AssertionError('x')", True),
    ("OSError('x')", True),
    ("SystemExit(1)", True),
    ("KeyboardInterrupt()", True),
    ("asyncio.CancelledError()", True),
    ("ConnectionResetError('x')", False),
    ("BrokenPipeError('x')", False),
    ("TimeoutError('x')", False),
    ("OfALibrary('x')", False),
    ("json.JSONDecodeError('x', '', 0)", True),
    ("statistics.StatisticsError('x')", True),
    ("ssl.SSLCertVerificationError('x')", False),
    ("subprocess.TimeoutExpired('x', 1)", False),
    ("subprocess.CalledProcessError(1, 'x')", False),
    ("urllib.error.HTTPError('x', 503, 'x', None, None)", False),
    ("urllib.error.URLError('x')", False),
    ("socket.gaierror('x')", False),
]


@pytest.mark.parametrize("error, mistake", FATES)
def test_a_mistake_ends_the_run_and_any_other_error_loses_the_episode(tmp_path, error, mistake):
    """In the first __init__, any error is a mistake."""
    head = "import json, socket, ssl, statistics, subprocess, urllib.error\n"
    head += "class OfALibrary(ValueError): pass\n"
    name = re.split(r"[.(]", error.split("(")[0])[-1]
    sample = ended()
    episodes = load(tmp_path, f"{head}{STEP}raise {error}")
    if mistake:
        with pytest.raises(UserError, match=rf"mine\.py:15\): {name}: .*Python's own errors end"):
            answered(episodes, sample)
    else:
        answered(episodes, sample)
        assert sample.finish == "lost" and re.match(rf"{name} \(\S+mine.py:15\)", episodes.why)
    text = f"{head}{HEAD}    step = print\n".replace(
        "self.sample,", f"raise {error}\n        self.sample,"
    )
    with pytest.raises(UserError, match=rf"mine\.py:10\): {name}: "):
        answered(load(tmp_path, text), ended())


GROUP = f"""{STEP}async def fail(error): raise error
        async def all():
            async with asyncio.TaskGroup() as group:
                for error in errors: group.create_task(fail(error))
        errors = {{}}
        asyncio.run(all())
"""


def test_the_first_mistake_in_a_group_of_errors_counts(tmp_path):
    episodes, sample = load(tmp_path, GROUP.format("[ConnectionError('gone')] * 2")), ended()
    answered(episodes, sample)
    assert sample.finish == "lost" and re.match(r"ConnectionError .*: gone", episodes.why)
    with pytest.raises(UserError, match=r"mine\.py:13\): KeyError: 'x' .*Python's own errors end"):
        answered(load(tmp_path, GROUP.format("[ConnectionError('gone'), KeyError('x')]")), ended())


def test_a_call_that_would_never_be_answered_ends_the_process(capfd):
    with pytest.raises(UserError, match=r"^a call ended its process: status 1$"):
        worker.Worker().ask("of no such name", what="a call").result(LIMIT_S)
    assert "KeyError: 'of no such name'" in capfd.readouterr().err


LOST = [("environment/lost_frac", "lost episodes"), ("genrm/failed_frac", "failed judgements")]


@pytest.mark.parametrize("name, words", LOST)
def test_the_line_of_a_step_names_what_it_lost_above_a_tenth(capsys, name, words):
    names = "reward/unfiltered_mean rollout/response_len_mean rollout/waves perf/tokens_per_s"
    names += " time/step_s time/serve_s time/train_s"
    for lost, line in ((0.1, "reward 1.000  length"), (0.12, f"reward 1.000  {words} 12%  ")):
        metrics = dict.fromkeys(names.split(), 1.0) | {name: lost}
        Progress(5, True).step(0, metrics)
        assert line in capsys.readouterr().out
