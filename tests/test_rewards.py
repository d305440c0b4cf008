"""Rewards: the list of judges and rules, what a rule sees and says, what fails; Safe-RLHF's lambda."""

import asyncio
import math
import os
import re
import sys
import time
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import genrm
import rewards
from algorithms import algorithm_of, lagrange_multiplier, update_multiplier
from config import Config
from inputs import tokenization
from sample import Sample
from tests import ROOT
from tests.support.fakes import FakeSource, simulate, to_text, trained
from tests.support.models import save_tokenizer
from tests.support.patience import LIMIT_S, run_process


def write(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return str(path)


class StubJudge:
    """A judge that says `value` of every answer, whatever pool it is given."""

    format, failed, parsed = genrm.FORMATS["chat"], 0, 0

    def __init__(self, value, signal="reward"):
        self.value, self.signal, self.says_verdict = value, signal, signal == "reward"

    async def ask(self, prompt, answer, pool, images=(), is_cut=False):
        return genrm.Judgement(f"says {self.value}", self.value)


def says(value, signal="reward"):
    """A rule that says `value` of every answer."""
    return rewards.Rule(signal, lambda sample: value, rewards.UserCode(f"--{signal} {value}"))


def score(judges=(), rules=(), weights=(), timeout_s=LIMIT_S, **fields):
    """An answer that is finished, as these judges and rules score it."""
    config = Config(model="m", rule=("right",) * max(1, len(weights)), reward_weights=weights)
    config = replace(config, judge_format=("chat",), timeout_s=timeout_s)
    listed = rewards.Rewards(config, list(judges), list(rules), to_text)
    sample = Sample(0, 0, [1], response=list(b"It is 5"), finish="stop", **fields)
    asyncio.run(listed.score(sample, None))
    return sample


TENTHS = st.integers(0, 10).map(lambda tenths: Fraction(tenths, 10))
QUARTERS = st.integers(0, 4).map(lambda quarters: Fraction(quarters, 4))
WEIGHTED = st.lists(st.tuples(TENTHS, QUARTERS, QUARTERS), min_size=1, max_size=5)


# in floats 0.3 / 0.6 twice, whose last digits differ
@example([(Fraction(1, 10), 1, 0), (Fraction(2, 10), 1, 0), (Fraction(3, 10), 0, 1)])
@given(WEIGHTED.filter(lambda rows: any(row[0] for row in rows)))
def test_the_weighted_mean(rows):
    """Against exact fractions; equal exactly where those are, or a group would seem to have variance."""
    weights, *columns = (list(column) for column in zip(*rows, strict=True))
    in_floats = list(map(float, weights))
    means, found = [], []
    for values in columns:
        products = [w * x for w, x in zip(weights, values, strict=True)]
        means.append(sum(products) / sum(weights))
        found.append(rewards.weighted_mean(list(map(float, values)), in_floats))
    assert found == pytest.approx(list(map(float, means)), abs=1e-9)
    assert (found[0] == found[1]) == (means[0] == means[1])


NUMBERS = st.floats(-5, 5)
WITH_WEIGHTS = st.tuples(NUMBERS, st.floats(0.1, 3))


@given(
    judged=st.lists(WITH_WEIGHTS, min_size=1, max_size=3),
    ruled=st.lists(WITH_WEIGHTS, max_size=3),
    cost_judges=st.lists(NUMBERS, max_size=2),
    cost_rules=st.lists(NUMBERS, max_size=3),
)
def test_rewards_are_averaged_and_costs_added(judged, ruled, cost_judges, cost_rules):
    """By weight, over judges and rules alike; the verdict is the judges' alone."""
    judges = [StubJudge(value) for value, _ in judged]
    judges += [StubJudge(value, "cost") for value in cost_judges]
    rules = [says(value) for value, _ in ruled] + [says(value, "cost") for value in cost_rules]
    weights = tuple(weight for _, weight in judged + ruled)
    sample = score(judges, rules, weights)
    expected = sum(value * weight for value, weight in judged + ruled) / sum(weights)
    assert sample.reward == pytest.approx(expected, abs=1e-8)
    costs = cost_judges + cost_rules
    assert sample.cost == (pytest.approx(sum(costs), abs=1e-9) if costs else None)
    mean = math.fsum(value for value, _ in judged) / len(judged)
    assert sample.verdict == (mean > 0.5) or mean == pytest.approx(0.5)


def test_a_rule_says_any_real_number():
    for said, reward in ((True, 1), (0, 0), (numpy.float32(0.5), 0.5), (Fraction(1, 4), 0.25)):
        sample = score([], [says(said), says(said, "cost")])
        assert (sample.reward, sample.cost) == (reward, reward) and type(sample.reward) is float


def test_what_says_none_isn_t_weighed():
    """By hand: (1 * 1 + 0 * 3) / 4, its 4 left out; the cost is what is said of it."""
    rules = [says(None), says(0.0), says(None, "cost"), says(0.25, "cost")]
    sample = score([StubJudge(1.0)], rules, (1.0, 4.0, 3.0))
    assert (sample.reward, sample.cost, sample.verdict) == (0.25, 0.25, True)
    assert sample.critique == "says 1.0\n--reward 0.0: 0.0\n--cost 0.25: 0.25"


NOBODY = [([], [says(None), says(None)], ()), ([], [says(0.5), says(None)], (0.0, 1.0))]
NOBODY += [([StubJudge(1.0)], [says(None, "cost")], ())]


@pytest.mark.parametrize("judges, rules, weights", NOBODY)
def test_an_answer_that_nobody_scores_is_dropped(judges, rules, weights):
    sample = score(judges, rules, weights)
    assert (sample.reward, sample.cost) == (None, None)


def test_a_verdict_that_can_t_be_read_drops_a_sample_of_which_no_rule_speaks():
    assert score([StubJudge(None)], [says(None)]).reward is None


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
from rewards import Rewards, load
from runtime import shutdown
from runtime.errors import UserError
from sample import Sample
from tests.support.fakes import to_text
from tests.test_rewards import says

async def work():
    listed = Rewards(config, [], [*rules, says(1.0), *rules * 9], to_text)
    sample = Sample(0, 0, [1], question="3+9=", response=[53], finish="stop")
    await listed.score(sample, None)
    await asyncio.sleep(0.1)  # for a signal to be heard
    return sample.reward

if __name__ == "__main__":
    rules = [load("reward", sys.argv[1])]
    config = Config(model="m", rule=("right",), judge_format=("chat",), timeout_s=float(sys.argv[2]))
    stop = shutdown.Stop(graceful=True)
    try:
        print(shutdown.run(work(), stop), stop.asked, flush=True)
    except UserError as error:
        shutdown.exit_on_error(2, f"error: {error}")
    shutdown.leave(0)
"""


def asked(rule, timeout_s=0.5):
    """A process that asks a rule often, as a rank does, and prints the reward and what signal it got."""
    program = Path(rule).with_name("program.py")
    program.write_text(ASK)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return run_process(sys.executable, program, rule, timeout_s, env=env)


@pytest.mark.parametrize("text", NEVER.values(), ids=NEVER.keys())
def test_a_rule_that_doesn_t_answer_ends_the_run(tmp_path, text):
    """After 0.9 of --timeout-s, whatever it catches: none of these answers in less than some seconds."""
    ran = asked(write(tmp_path, "import asyncio, re, time\n" + text))
    late = r"error: --rule \S+mine\.py said nothing for 0\.45 s \(0\.9 --timeout-s\) of the prompt '3\+9='\n"
    assert re.fullmatch(late, ran.stderr) and ran.returncode == 2


def test_a_rule_s_own_alarm_stays_its_own(tmp_path):
    """As libraries set that compare formulas: in the main thread, in less time than the rule has."""
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
    assert score([], [rewards.load("reward", write(tmp_path, rule))]).reward == 0.25


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
    rules = [rewards.load("reward", write(tmp_path, rule))]
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        time.sleep(0.01)
    assert score([], rules).reward == 1.0
    while time.monotonic() < end + 0.3:
        time.sleep(0.01)


def test_a_rule_that_sets_an_alarm_and_hangs_ends_the_run(tmp_path):
    """Its own alarm isn't ours."""
    text = "import signal, time\ndef reward(sample):\n    signal.alarm(0)\n    time.sleep(99)\n"
    ran = asked(write(tmp_path, text))
    assert "said nothing for 0.45 s" in ran.stderr and ran.returncode == 2


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
    "a pool, spawned": """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(half, [2])[0]
""",
    "a pool of a fork server": """
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        return pool.map(half, [2])[0]
""",
    "an executor": """
    with concurrent.futures.ProcessPoolExecutor(1) as executor:
        return executor.submit(half, 2).result()
""",
    "threads": """
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(half, 2).result()
""",
    "os.fork": """
    pid = os.fork()
    if pid == 0:
        signal.alarm(1)
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
    """While the run hears signals: what a child does with its own reaches nobody else."""
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
    rule = rewards.Rule("reward", spoil, rewards.UserCode("--rule"))
    sample = score([], [rule, rule], turns=turns, row=row)
    assert turns == [{"role": "user", "content": "3+9="}] and row == {"tests": [1, 2]}
    assert (sample.prompt, sample.response) == ([1], list(b"It is 5"))


@pytest.mark.parametrize("judges, rules", [([None, 1.0], []), ([None], [1.0])])
@pytest.mark.parametrize("key", ["reward", "cost"])
def test_a_sample_that_one_has_no_number_for_is_dropped(judges, rules, key):
    """No part is taken for the whole: neither a reward nor a cost, nor a verdict. The words are kept."""
    judges = [StubJudge(1.0), *(StubJudge(value, key) for value in judges)]
    sample = score(judges, [says(value, key) for value in rules])
    assert (sample.reward, sample.cost, sample.verdict) == (None, None, None)
    assert "judge 1:\nsays None" in sample.critique


SEES = """
seen = []
def score(sample):
    seen.append(sample)
    return float(sample.answer == sample.answer_key)
"""


def seen_by(rule):
    return rule.function.__globals__["seen"]


def test_a_rule_sees_the_question_the_text_the_final_answer_and_the_key(tmp_path):
    """All judged while others are written; the reward is the weighted mean of the judge's and the rules'."""
    rule = write(tmp_path, SEES)
    named = dict(rule=(f"{rule}:score", "length:100"), reward_weights=(1.0, 2.0, 1.0))
    controllers, _ = simulate("partial", 2, **named)
    for sample in trained(controllers, 0).values():
        right = float(to_text(sample.response).split(">")[1] == sample.answer_key)
        assert sample.reward == pytest.approx((3 * right + len(sample.response) / 100) / 4)
        assert sample.verdict == (right == 1.0), "the verdict is the judges'"
        assert sample.cost is None and f"--rule {rule}:score: {right}" in sample.critique
    seen = [sample for c in controllers for sample in seen_by(c.rewards.rules[0])]
    assert seen and all(sample.reward is None and sample.question for sample in seen)
    assert all(sample.text.endswith(f">{sample.answer}") for sample in seen)


def test_a_rule_sees_special_tokens_and_others_don_t(tmp_path):
    tokenizer = tokenization.load_tokenizer(str(save_tokenizer(tmp_path)))
    prompt = tokenization.encode(tokenizer, [{"role": "user", "content": "3+9="}])
    response = tokenizer("It is 12<|im_end|>")["input_ids"]
    config = Config(model="m", rule=("right",), judge_format=("number",))
    rule = write(tmp_path, SEES)
    rules = [rewards.load("reward", f"{rule}:score"), rewards.load("cost", "forbidden:im_")]
    listed = rewards.Rewards(config, [], rules, partial(tokenization.decode, tokenizer))
    sample = Sample(0, 0, prompt, "3+9=", response=response, finish="stop", row={"level": [1]})
    asyncio.run(listed.score(sample, None))
    (seen,) = seen_by(rules[0])
    assert (seen.text, seen.plain_text, seen.answer) == ("It is 12<|im_end|>", "It is 12", "12")
    assert seen.prompt_text.startswith("<|im_start|>user\n3+9=<|im_end|>\n<|im_start|>assistant")
    assert (seen.row, sample.cost) == ({"level": [1]}, 0.0)


class WithRows(FakeSource):
    """Prompt k comes from a row with the columns `number`, k, and `secret`."""

    def training(self, draw):
        return replace(super().training(draw), row={"number": draw, "secret": "XYZZY"})


def test_rules_see_the_columns_of_the_row_and_no_file_does(tmp_path):
    """Also of answers that are continued in a later step, and after a resume."""
    rule = """
def reward(sample):
    assert sample.question == f"{sample.row['number']}+0=" and sample.row["secret"] == "XYZZY"
    return float(sample.answer == sample.answer_key)
"""

    def give_rows(c):
        c.prompts.source = WithRows()

    named = dict(rule=(write(tmp_path, rule),), steps=4, over_dispatch=1.5)
    named |= dict(prepare_controller=give_rows, save_every=2, out=tmp_path)
    controllers, _ = simulate("partial", 2, **named)
    assert any(group for c in controllers for groups in c.report.carried for group in groups)
    batches = [batch for c in controllers for _, batch, *_ in c.report.steps]
    samples = [s for b in batches for s in chain(b.kept, b.dropped, *b.filtered, *b.carried)]
    assert samples and not any(sample.row for sample in samples)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".py"]
    assert files and not any(b"XYZZY" in path.read_bytes() for path in files)
    resumed = tmp_path / "checkpoints" / "step_2"
    again, _ = simulate("partial", 2, resumed=resumed, **named | {"out": tmp_path / "again"})
    assert trained(again, 1).keys() == trained(controllers, 3).keys()


def test_rules_alone_reward_where_there_is_no_judge():
    """Rollout has all ranks in every mode."""
    named = dict(model="MODEL", rule=("right", "length:100"), cost_rule=("length:50",))
    controllers, _ = simulate("full", 2, reward_weights=(0.9, 0.1), **named)
    for sample in trained(controllers, 0).values():
        right = to_text(sample.response).endswith(f">{sample.answer_key}")
        assert sample.reward == pytest.approx(0.9 * right + 0.001 * len(sample.response))
        assert sample.verdict is None and sample.cost == len(sample.response) / 50
    for c in controllers:
        assert c.devices.genrm.all_engines == []
        assert [engine.rank for engine in c.devices.rollout.engines] == [0, 1]
        assert "genrm" not in {span.name for *_, spans in c.report.steps for span in spans}


DEF = "def reward(sample):\n    "
HELPED = f"{DEF}helper()\ndef helper():\n    raise ValueError('two\\nlines')\n"
ONES = r"tensor\(\[\[1\.\], \[1\.\]\]\)"  # which torch writes on two lines
ERRORS = [
    (f"{DEF}return 1 / 0\n", r"\(.*mine\.py:2\): ZeroDivisionError: .* zero$"),
    (HELPED, r"py:4\): ValueError: two lines$"),
    (f"async {DEF}return sample.nothing\n", r"mine\.py:2\): AttributeError"),
    (f"{DEF}return [1.0]\n", r"py returned \[1\.0\]: a finite number or None is needed$"),
    (f"{DEF}return 10 ** 400\n", r"mine\.py: OverflowError: int too large.*$"),
    (f"import torch\n{DEF}return torch.ones(2, 1)\n", rf"py returned {ONES}: a finite number"),
    ("x = 1\n\ndef reward(sample:\n", r"--rule .*mine\.py: SyntaxError: .* \(mine\.py, line 3\)$"),
    ("def other(sample):\n    return 1.0\n", r"has no function reward\(sample\)$"),
]


@pytest.mark.parametrize("text, wrong", ERRORS)
def test_an_error_of_the_user_s_is_one_line_that_says_where(tmp_path, text, wrong):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=wrong) as caught:
        score([], [rewards.load("reward", path)])
    assert "\n" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize("spec", ["nothing.py", "length:0", "forbidden:"])
def test_a_rule_that_isn_t_there_is_refused(spec):
    with pytest.raises(ValueError, match=f"^--rule {spec}: no such file; say FILE.py, .*length:40"):
        rewards.load("reward", spec)


def test_the_rules_that_are_there():
    fields = dict(text="3+9=12;>12<8>", plain_text="3+9=12;>12", answer="12", answer_key="12")
    sample = rewards.TextSample(0, 0, [1], response=[2] * 10, **fields)
    cut_off = rewards.TextSample(0, 0, [1], answer_key="12", text=">", answer=None)
    say = lambda spec, sample: rewards.load("cost", spec).function(sample)  # noqa: E731
    assert say("right", sample) == 1.0 and say("right", cut_off) == 0.0
    assert say("length:40", sample) == 0.25
    assert [say(f"forbidden:{text}", sample) for text in ("9", "8", ";>")] == [1.0, 0.0, 1.0]


def test_the_rule_number_compares_last_numbers():
    def says(text, key="12", finish="stop"):
        fields = dict(text=text + "<|9|>", plain_text=text, answer=text, finish=finish)
        sample = rewards.TextSample(0, 0, [1], answer_key=key, **fields)
        return rewards.load("reward", "number").function(sample)

    assert says("3+9=12") and says("It is 12.0, I'd say", "$12")
    assert not says("It is 13") and not says("No idea") and not says("3+9=12", finish="length")


@pytest.mark.parametrize("rule, key", [("right", None), ("number", None), ("number", "Paris")])
def test_what_has_no_answer_key_can_t_be_compared(rule, key):
    with pytest.raises(ValueError, match=rf"^--rule {rule}: .*prompt '3\+9=' has no `answer`"):
        score([], [rewards.load("reward", rule)], question="3+9=", answer_key=key)


def safe_rlhf(**settings):
    return ("safe_rlhf", *(f"{name}={value}" for name, value in settings.items()))


def constraint(**changes):
    settings = {"cost_limit": 0.2, "lagrange_init": 0.5} | changes
    return algorithm_of(Config(algorithm=safe_rlhf(**settings), cost_rule=("length:50",)))


COSTS = st.lists(st.floats(-3, 3), min_size=1, max_size=12)


@given(COSTS, st.integers(1, 4), st.floats(0, 5), st.floats(-1, 1))
@example([1e16, 1.0, -1e16], 2, 1.0, 0.0)  # added in another order, floats would give another sum
def test_the_multiplier_is_the_same_on_any_split_and_goes_the_right_way(costs, ranks, init, limit):
    algorithm = constraint(lagrange_init=init, cost_limit=limit)
    results = []
    for gathered in (costs, [cost for rank in range(ranks) for cost in costs[rank::ranks]]):
        state = SimpleNamespace(step=0, log_multiplier=0.3)
        before = lagrange_multiplier(state, algorithm)
        update_multiplier(state, gathered, algorithm)
        results.append(state.log_multiplier)
        after, broken = lagrange_multiplier(state, algorithm), math.fsum(costs) / len(costs) > limit
        assert after >= 0 and (after >= before if broken else after <= before)
    assert results[0] == results[1]


def test_the_multiplier_waits_for_the_critic_s_warm_up():
    """Violation 0.5 in each step: it is reported from the first, and counts from the third on."""
    algorithm = constraint(critic_warmup=2, lagrange_init=1.0, cost_limit=0.5)
    state, reported = SimpleNamespace(step=0, log_multiplier=0.0), []
    for state.step in range(4):
        reported.append(update_multiplier(state, [1.0], algorithm))
    third = math.exp(0.1 * 0.5)
    multipliers = [1.0, 1.0, third, third * math.exp(0.1 * third * 0.5)]
    assert [row["cost/multiplier"] for row in reported] == pytest.approx(multipliers)
    assert {(row["cost/mean"], row["cost/violation"]) for row in reported} == {(1.0, 0.5)}
    assert update_multiplier(state, [], algorithm) == {}


def test_a_large_multiplier_stops_at_100_and_finds_back():
    """A constraint that can't be met for a while, then a step of slack: lambda falls by e, not to nothing."""
    algorithm = constraint(cost_limit=0.0, lagrange_lr=1.0)
    state = SimpleNamespace(step=0, log_multiplier=0.0)
    for _ in range(50):
        update_multiplier(state, [1.0], algorithm)
    assert lagrange_multiplier(state, algorithm) == pytest.approx(100)
    update_multiplier(state, [-1.0], algorithm)
    assert lagrange_multiplier(state, algorithm) == pytest.approx(100 / math.e)


def test_safe_rlhf_in_the_real_loop():
    """Two critics, by name; lambda from all samples, the same on every controller; nothing is filtered."""

    def play(algorithm):
        return simulate("full", 4, tp=2, algorithm=algorithm)[0]

    controllers, log_multiplier = play(safe_rlhf(cost_limit=0.1, lagrange_lr=0.5)), 0.0
    for step in range(3):
        samples = trained(controllers, step).values()
        assert len(samples) == 32
        mean = math.fsum(sample.cost for sample in samples) / len(samples)
        log_multiplier += 0.5 * math.exp(log_multiplier) * (mean - 0.1)
        for sample in samples:
            length = len(sample.response)
            assert sample.cost == length / 50
            assert sample.returns["reward"] == pytest.approx([sample.reward] * length)
            assert sample.returns["cost"] == pytest.approx([sample.cost] * length)
    assert log_multiplier > 0
    for c in controllers:
        assert c.state.log_multiplier == controllers[0].state.log_multiplier
        assert c.state.log_multiplier == pytest.approx(log_multiplier)
        assert not any(c.report.steps[step][1].filtered for step in range(3))
        assert [critic.name for critic in c.devices.critics] == ["reward", "cost"]
        assert all(critic.version == 3 for critic in c.devices.critics)
    off, ppo = play(safe_rlhf(cost_limit=0.1, lagrange_init=0.0)), play(("ppo",))
    first, second = ({s.key: s.advantages for s in trained(run, 2).values()} for run in (off, ppo))
    assert first == second, "with lambda 0 it is PPO"
