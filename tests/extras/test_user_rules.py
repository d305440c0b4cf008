"""Rules in users' files: what they see and return, what fails, their alarms and processes."""

import asyncio
import contextlib
import os
import pickle
import re
import sys
import time
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from itertools import chain
from pathlib import Path

import numpy
import pytest

import rewards
from config import Config
from extras import worker
from extras.rules import UserRule
from inputs import tokenization
from runtime.errors import UserError
from sample import Sample
from tests import ROOT
from tests.root.test_rewards import score
from tests.support.fakes import FakeSource, simulate, to_text, trained
from tests.support.in_process import InProcess
from tests.support.models import save_tokenizer
from tests.support.patience import LIMIT_S, run_process


def load(spec, signal="reward"):
    return rewards.load(signal, spec, LIMIT_S)


def rule_of(function, signal="reward"):
    """Make a rule of a function, in this process."""
    return rewards.Rule(signal, UserRule(InProcess("--rule", function)).judge)


def write(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return str(path)


def test_a_rule_says_any_real_number():
    for said, reward in ((True, 1), (0, 0), (numpy.float32(0.5), 0.5), (Fraction(1, 4), 0.25)):
        sample = score([], [rule_of(lambda _: said), rule_of(lambda _: said, "cost")])  # noqa: B023
        assert (sample.reward, sample.cost) == (reward, reward) and type(sample.reward) is float


NEVER = {
    "it awaits": "async def reward(sample):\n    await asyncio.Event().wait()\n",
    "it is in C code": "def reward(sample):\n    re.match('(a+)+$', 'a' * 28 + 'b')\n",
    "it catches all": """
def reward(sample):
    while True:
        try:
            time.sleep(9)
        except:
            pass
""",
    "it sets an alarm of its own": """
def reward(sample):
    signal.alarm(0)
    time.sleep(99)
""",
    "it holds the loop later": """
async def reward(sample):
    await asyncio.sleep(0.01)
    time.sleep(4)
""",
}


ASK = """
import asyncio
import sys

from config import Config
from genrm import Judgement
import extras
from rewards import Rewards, Rule, load
from runtime import shutdown
from runtime.errors import UserError
from sample import Sample

async def one(sample):
    return Judgement("one", 1.0)

async def work():
    to_text = lambda tokens, **_: "".join(map(chr, tokens))
    listed = Rewards(config, [], [*rules, Rule("reward", one), *rules * 9], to_text)
    sample = Sample(0, 0, [1], question="3+9=", response=[53], finish="stop")
    await listed.score(sample, None)
    await asyncio.sleep(0.1)  # for a signal to be heard
    return sample.reward

if __name__ == "__main__":
    extras.load()
    rules = [load("reward", sys.argv[1], float(sys.argv[2]))]
    config = Config(model="m", rule=("right",), judge_format=("chat",))
    stop = shutdown.Stop(graceful=True)
    try:
        print(shutdown.run(work(), stop), stop.asked, flush=True)
    except UserError as error:
        shutdown.exit_on_error(2, f"error: {error}")
    shutdown.leave(0)
"""


def rank_of(rule, timeout_s):
    """Return the command and environment of a process that calls a rule often, as a rank does.

    It prints the reward and the signal that it got.
    """
    program = Path(rule).with_name("program.py")
    program.write_text(ASK)
    return [sys.executable, program, rule, str(timeout_s)], os.environ | {"PYTHONPATH": str(ROOT)}


def asked(rule, timeout_s=0.5, **how):
    command, env = rank_of(rule, timeout_s)
    return run_process(*command, env=env, **how)


@pytest.mark.parametrize("text", NEVER.values(), ids=NEVER.keys())
def test_a_rule_that_doesn_t_answer_ends_the_run(tmp_path, text):
    """It must after 0.9 of --timeout-s, whatever it catches: none of these returns within seconds."""
    ran = asked(write(tmp_path, "import asyncio, re, signal, time\n" + text))
    late = r"error: --rule \S+mine.py on the prompt '3\+9=' returned nothing for 0.45 s \(0.9 --timeout-s\)\n"
    assert re.fullmatch(late, ran.stderr) and ran.returncode == 2


def test_a_rule_has_its_own_time(tmp_path):
    """Those that wait for their turn in the process aren't late."""
    rule = write(
        tmp_path, "import time\ndef reward(sample):\n    time.sleep(0.3)\n    return 1.0\n"
    )
    rules = [rewards.load("reward", rule, 1.0)] * 4
    assert score([], rules).reward == 1.0


def test_a_rule_s_own_alarm_stays_its_own(tmp_path):
    """Libraries that compare formulas set one: in the main thread, for less time than the rule has."""
    rule = """
import signal

def late(number, frame):
    raise TimeoutError("too hard")

def reward(sample):
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(1)
    try:
        while True:
            pass
    except TimeoutError:
        return 0.25
    finally:
        signal.signal(signal.SIGALRM, before)
"""
    assert score([], [load(write(tmp_path, rule))]).reward == 0.25


ALARMS = {
    "when it is loaded": ("signal.setitimer(signal.ITIMER_REAL, 0.1)", "time.sleep(0.01)"),
    "in a call, for later": ("", "signal.setitimer(signal.ITIMER_REAL, 0.05)"),
}


@pytest.mark.parametrize("loaded, called", ALARMS.values(), ids=ALARMS.keys())
def test_an_alarm_that_comes_when_no_rule_runs_does_nothing(tmp_path, loaded, called):
    rule = f"""
import signal, time

def late(number, frame):
    raise TimeoutError("too hard")

signal.signal(signal.SIGALRM, late)
{loaded}

def reward(sample):
    {called}
    return 1.0
"""
    rules = [load(write(tmp_path, rule))]
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        time.sleep(0.01)
    assert score([], rules).reward == 1.0
    while time.monotonic() < end + 0.3:
        time.sleep(0.01)


CHILDREN = {
    "a process that is ended": """
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(99,))
    child.start()
    child.terminate()
    child.join()
    return child.exitcode == -signal.SIGTERM
""",
    "a pool, forked": """
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(half, [2])[0]
""",
    "a pool of a fork server": """
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        return pool.map(half, [2])[0]
""",
    "os.fork": """
    pid = os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        time.sleep(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGALRM
""",
    "a process that comes out of the rule": """
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return 0.0
""",
    "a process that fails": """
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    raise ValueError("in the child")
""",
    "a process that says how it ends": """
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    raise SystemExit(7)
""",
    "a process with a handler": """
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
""",
    "a process of a thread": """
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        child = executor.submit(subprocess.Popen, ["sleep", "99"], preexec_fn=os.setsid).result()
    try:
        child.communicate(timeout=0.1)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGTERM)
    return child.wait() == -signal.SIGTERM
""",
}


@pytest.mark.parametrize("body", CHILDREN.values(), ids=CHILDREN.keys())
def test_a_rule_may_run_code_in_processes_and_threads(tmp_path, body):
    """The run keeps receiving signals: a child's own handlers must affect nobody else."""
    modules = "concurrent.futures, multiprocessing, os, signal, subprocess, time"
    half = "def half(number):\n    return number / 2\n"
    rule = write(tmp_path, f"import {modules}\n{half}\ndef reward(sample):{body}")
    ran = asked(rule, LIMIT_S)
    assert ran.stdout == "1.0 0\n", ran.stderr


def test_a_rule_changes_only_its_own_copy():
    def spoil(sample):
        sample.turns[0]["content"] += "!"
        sample.row["tests"].append(3)
        sample.response.clear()
        sample.prompt.append(9)
        return 1.0

    turns = [{"role": "user", "content": "3+9="}]
    row = {"tests": [1, 2]}
    rule = rule_of(spoil)
    sample = score([], [rule, rule], turns=turns, row=row)
    assert turns == [{"role": "user", "content": "3+9="}] and row == {"tests": [1, 2]}
    assert (sample.prompt, sample.response) == ([1], list(b"It is 5"))


SEES = """
import dataclasses, pickle
def score(sample):
    with open(f"{__file__}.seen", "ab") as file:
        pickle.dump(dataclasses.replace(sample, media=()), file)
    return float(sample.answer == sample.answer_key)
"""


def seen_by(rule):
    """Return the samples that the rule in this file has seen."""
    found = []
    with Path(f"{rule}.seen").open("rb") as file, contextlib.suppress(EOFError):
        while True:
            found.append(pickle.load(file))
    return found


def test_a_rule_sees_the_question_the_text_the_final_answer_and_the_key(tmp_path):
    """It must judge while others are generated; the reward is the weighted mean of judge's and rules'."""
    rule = write(tmp_path, SEES)
    named = dict(rule=(f"{rule}:score", "length:100"), reward_weights=(1.0, 2.0, 1.0))
    controllers, _ = simulate("partial", 2, **named)
    for sample in trained(controllers, 0).values():
        right = float(to_text(sample.response).split(">")[1] == sample.answer_key)
        assert sample.reward == pytest.approx((3 * right + len(sample.response) / 100) / 4)
        assert sample.verdict == (right == 1.0), "the verdict is the judges'"
        assert sample.cost is None and f"--rule {rule}:score: {right}" in sample.critique
    seen = seen_by(rule)
    assert seen and all(sample.reward is None and sample.question for sample in seen)
    assert all(sample.text.endswith(f">{sample.answer}") for sample in seen)


def test_a_rule_sees_special_tokens_and_others_don_t(tmp_path):
    tokenizer = tokenization.load_tokenizer(str(save_tokenizer(tmp_path)))
    prompt = tokenization.encode(tokenizer, [{"role": "user", "content": "3+9="}])
    response = tokenizer("It is 12<|im_end|>")["input_ids"]
    config = Config(model="m", rule=("right",), judge_format=("number",))
    rule = write(tmp_path, SEES)
    rules = [load(f"{rule}:score"), load("forbidden:im_", "cost")]
    listed = rewards.Rewards(config, [], rules, partial(tokenization.decode, tokenizer))
    sample = Sample(0, 0, prompt, "3+9=", response=response, finish="stop", row={"level": [1]})
    asyncio.run(listed.score(sample, None))
    (seen,) = seen_by(rule)
    assert (seen.text, seen.plain_text, seen.answer) == ("It is 12<|im_end|>", "It is 12", "12")
    assert seen.prompt_text.startswith("<|im_start|>user\n3+9=<|im_end|>\n<|im_start|>assistant")
    assert (seen.row, sample.cost) == ({"level": [1]}, 0.0)


class WithRows(FakeSource):
    """A source whose prompt k comes from a row with the columns `number`, k, and `secret`."""

    def training(self, draw):
        return replace(super().training(draw), row={"number": draw, "secret": "XYZZY"})


def test_rules_see_the_columns_of_the_row_and_no_file_does(tmp_path):
    """This includes answers that are continued in a later step, and after a resume."""
    rule = """
def reward(sample):
    assert sample.question == f"{sample.row['number']}+0=" and sample.row["secret"] == "XYZZY"
    return float(sample.answer == sample.answer_key)
"""

    def give_rows(c):
        c.prompts.source = WithRows()

    named = dict(rule=(write(tmp_path, rule),), steps=4, over_dispatch=1.5)
    named |= dict(prepare_controller=give_rows, save_every=2)
    for seed in range(9):  # which answers are late depends on how fast the rule's real process is
        out = tmp_path / str(seed)
        controllers, _ = simulate("partial", 2, seed=seed, out=out, **named)
        if any(group for c in controllers for groups in c.report.carried for group in groups):
            break
    else:
        pytest.fail("no answer was continued in a later step")
    batches = [batch for c in controllers for _, batch, *_ in c.report.steps]
    samples = [s for b in batches for s in chain(b.kept, b.dropped, *b.filtered, *b.carried)]
    assert samples and not any(sample.row for sample in samples)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert files and not any(b"XYZZY" in path.read_bytes() for path in files)
    resumed = out / "checkpoints" / "step_2"
    again, _ = simulate("partial", 2, seed=seed, resumed=resumed, out=tmp_path / "again", **named)
    assert trained(again, 1).keys() == trained(controllers, 3).keys()


DEF = "def reward(sample):\n    "
HELPED = f"{DEF}helper()\ndef helper():\n    raise ValueError('two\\nlines')\n"
MUTE = "class Mute(Exception):\n    def __str__(self): return self.args\n"  # not a text
ONES = r"tensor\(\[\[1\.\], \[1\.\]\]\)"  # torch writes it on two lines
ERRORS = [
    (f"{DEF}return 1 / 0\n", r"\(.*mine\.py:2\): ZeroDivisionError: .* zero$"),
    (HELPED, r"py:4\): ValueError: two lines$"),
    (f"async {DEF}return sample.nothing\n", r"mine\.py:2\): AttributeError"),
    (f"{DEF}return [1.0]\n", r"py returned \[1\.0\]: a number or None is needed, at most 1e\+30$"),
    (f"{DEF}return -1e31\n", r"py returned -1e\+31: a number or None is needed"),
    (f"{DEF}return float('nan')\n", r"py returned nan: a number or None is needed"),
    (f"{MUTE}{DEF}raise Mute(1)\n", r"py:4\): Mute: <exception str\(\) failed>$"),
    (f"{MUTE}raise Mute(1)\n", r"py:3\): Mute: <exception str\(\) failed>$"),
    (f"{DEF}return 10 ** 400\n", r"mine\.py: OverflowError: int too large.*$"),
    (f"import torch\n{DEF}return torch.ones(2, 1)\n", rf"py returned {ONES}: a number or"),
    ("x = 1\n\ndef reward(sample:\n", r"--rule .*mine\.py: SyntaxError: .* \(mine\.py, line 3\)$"),
    ("def other(sample):\n    return 1.0\n", r"has no function reward\(sample\)$"),
]


@pytest.mark.parametrize("text, wrong", ERRORS)
def test_an_error_of_the_user_s_is_one_line_that_says_where(tmp_path, text, wrong):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=wrong) as caught:
        score([], [load(path)])
    assert "\n" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_two_files_may_not_import_files_of_one_name(tmp_path, monkeypatch):
    """The second would get the first one's; files that nobody has imported may have any name."""
    monkeypatch.setattr(worker, "worker", cache(worker.Worker))
    one, two = (tmp_path / "one", tmp_path / "two")
    for folder in (one, two):
        folder.mkdir()
        (folder / "its_helper.py").write_text("VALUE = 0.5")
        (folder / "other.py").touch()
    rule = write(one, f"import its_helper\n{DEF}return its_helper.VALUE\n")
    assert score([], [load(rule)]).reward == 0.5
    wrong = r"^--rule \S+two/mine\.py: \S+one/its_helper\.py has been imported: rename \S+two/its_h"
    with pytest.raises(UserError, match=wrong):
        load(write(two, f"{DEF}return 7\n"))
    (two / "its_helper.py").unlink()
    assert score([], [load(f"{two}/mine.py")]).reward == 7


def test_a_file_that_never_ends_is_named(tmp_path, monkeypatch):
    # a process of its own: after this file no other test's could load
    monkeypatch.setattr(worker, "worker", cache(worker.Worker))
    path = write(tmp_path, f"import time\ntime.sleep({9 * LIMIT_S})\n{DEF}return 1\n")
    with pytest.raises(
        UserError, match=r"^--rule .*mine\.py returned nothing for 0\.9 s \(0\.9 --timeout"
    ):
        rewards.load("reward", path, 1)


@pytest.mark.parametrize("spec", ["nothing.py", "length:0", "forbidden:"])
def test_a_rule_that_isn_t_there_is_refused(spec):
    with pytest.raises(ValueError, match=f"^--rule {spec}: no such file; use FILE.py, .*length:40"):
        load(spec)
