"""Episodes of several turns: an environment's returns, rewards and failures; a seed is a run."""

import asyncio
import json
import math
import tempfile
import threading
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy
import pytest

import algorithms
import rewards
import rollout
from config import Config
from extras.environment import OWN_METRICS, Step, read_step
from extras.environment import episodes as user_episodes
from inputs import tokenization
from runtime.errors import UserError
from sample import Outcome, Reply, Sample, sample_from_json
from tests.root.test_rewards import says, score
from tests.support.episodes import END
from tests.support.fakes import (
    FakeTokenizer,
    to_text,
)
from tests.support.lines import Lines
from training.packing import Sequence, make_micro_batches


def turn(role, content, **more):
    return {"role": role, "content": content} | more


# ---------------------------------------------------------------------------------- a step's returns

TOLD = turn("tool", "7", name="add")
GO_ON = [
    ("7", [turn("user", "7")]),
    ("", [turn("user", "")]),
    (TOLD, [TOLD]),
    ([TOLD, turn("user", "Well?")], [TOLD, turn("user", "Well?")]),
    (Step("7"), [turn("user", "7")]),
    (Step(reply=TOLD, done=False), [TOLD]),
    (Step([turn("system", "Be brief."), TOLD]), [turn("system", "Be brief."), TOLD]),
]
LAST = [(None, 0.0), (1, 1.0), (0.5, 0.5), (Fraction(1, 4), 0.25), (Step(done=True), 0.0)]
LAST += [(kind(2), 2.0) for kind in (numpy.float32, numpy.float64, numpy.int64)]
LAST += [(Step(reward=numpy.float32(0.5), done=True), 0.5), (Step("not shown", -1.0, True), -1.0)]


def test_what_a_step_returns_is_a_reply_or_the_end():
    for value, turns in GO_ON:
        assert read_step(value) == Step(turns)
    for value, reward in LAST:
        assert read_step(value) == Step(reward=reward, done=True)
    assert read_step(Step("7", 0.5, metrics={"tries": 2})) == Step(
        [turn("user", "7")], 0.5, False, {"tries": 2}
    )


BAD = [True, False, numpy.bool_(True), 1j, 3j, b"7", ("7", 0.5), ["7"], [], {}]
BAD += [math.nan, math.inf, numpy.float32("inf"), 10**400]
BAD += [turn("robot", "7"), turn("assistant", "7"), turn("system", "7")]
BAD += [turn("user", 7), turn("user", None), turn("user", [{"type": "text", "text": "7"}])]
BAD += [[turn("user", "7"), turn("assistant", "8"), TOLD], [turn("assistant", "8"), TOLD]]
BAD += [Step(), Step(7), Step(True), Step("7", True), Step("7", "1")]
BAD += [Step("7", math.nan), Step(None, 1.0)]
BAD += [Step("7", 10**400), Step("7", done=1), Step("7", done=None), Step(Step("7"))]
BAD += [Step("7", metrics=each) for each in (None, 3, ["tries"], {1: 2.0}, {"tries": True})]
BAD += [Step("7", metrics={"tries": each}) for each in ("2", math.nan, None, [1.0])]
BAD += [Step("7", metrics={name: 1.0}) for name in OWN_METRICS]


@pytest.mark.parametrize("value", BAD, ids=lambda value: repr(value)[:50])
def test_anything_else_is_refused(value):
    with pytest.raises(ValueError, match=r"^\S.{5,99}$"):
        read_step(value)


# ---------------------------------------------------------------------------------- tokens to learn


def test_an_episode_by_hand():
    """Its reply must be between its turns, count against the limit, and survive a file."""
    sample = Sample(0, 0, [1, 2], response=[3, 4, 5], finish="stop")
    sample.replies = [Reply(2, [8, 9], [turn("user", "hm")])]
    assert sample.tokens == [1, 2, 3, 4, 8, 9, 5] and sample.last_turn == [5] and sample.begun == 5
    [batch] = make_micro_batches([[Sequence([1, 2], [3, 4, 5], (), sample.replies)]], 1)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 8, 9]]
    assert batch.reads.tolist() == [1, 2, 5] and batch.slots.tolist() == [0, 1, 2]
    assert sample_from_json(json.loads(json.dumps(vars(sample)))) == sample


def test_lengths_penalties_and_the_kl_count_the_policy_s_tokens():
    sample = Sample(0, 0, [1], response=[3, 4, 5, 6], finish="stop", reward=1.0)
    sample.replies = [Reply(2, [8] * 30, [])]
    [outcome] = rollout.outcomes_of([sample])
    assert outcome.length == 4
    config = Config(model="m", rule=("right",), max_new_tokens=40, judge_format=("chat",))
    long = replace(config, algorithm=("reinforce++", "overlong_from=4"))
    assert algorithms.group_scores([outcome], "reward", algorithms.algorithm_of(long)) == {0: 1.0}
    kl = replace(config, algorithm=("reinforce++", "kl_coef=0.5", "kl_in=reward"))
    sample.policy_logprobs, sample.reference_logprobs = [-1.0] * 4, [-2.0, -1.0, -1.0, -3.0]
    found = algorithms.token_rewards(sample, "reward", 1.0, algorithms.algorithm_of(kl))
    assert found == [-0.5, 0.0, 0.0, 0.0]


# ---------------------------------------------------------------------------------- rewards


def two_turns(**fields):
    """Return a response of two tokens, a reply of two, and two more tokens."""
    replies = [Reply(2, [8, 9], [turn("user", "hm")])]
    fields = {"response": [3, 4, 5, 6], "finish": "stop", "replies": replies} | fields
    return Sample(0, 0, [1], **fields)


def test_a_reward_is_the_weighted_sum_of_all_turns_not_the_last():
    fields = dict(earned=[1.0, 0.5], replies=two_turns().replies)
    assert score([], [rewards.ENVIRONMENT], **fields).reward == 1.5
    sample = score([], [says(1.0), rewards.ENVIRONMENT], (1.0, 3.0), **fields)
    assert sample.reward == (1 + 3 * 1.5) / 4 and sample.turn_rewards == [0.75, 0.375]
    lost = two_turns(finish="lost", earned=[1.0, 0.0])
    config = Config(model="m", environment="e.py", judge_format=("chat",))
    listed = rewards.Rewards(config, [], [rewards.ENVIRONMENT], to_text)
    asyncio.run(listed.score(lost, None))
    assert lost.reward is None


def estimated(name, *given, turn_rewards=(0.5, 0.25), score=1.0, others=()):
    config = Config(model="m", rule=("right",), algorithm=(name, *given), judge_format=("chat",))
    sample = two_turns(turn_rewards=list(turn_rewards))
    sample.values = {"reward": [0.1, 0.2, 0.3, 0.4]}
    sample.outcomes = [Outcome(0, 4, score, None, False), *others]
    algorithms.set_advantages([sample], algorithms.algorithm_of(config))
    return sample


def test_a_turn_s_reward_is_at_its_last_token_by_hand():
    """GAE over two turns must not lose the reward before a reply, and a reply isn't a step of it."""
    # rewards 0, 0.5, 0, 0.5 (0.25 of it by a judge); half of what the next token knows is believed
    sample = estimated("ppo", "gae_lambda=0.5")
    last, third, second = 0.5 - 0.4, 0.4 - 0.3, 0.5 + 0.3 - 0.2
    third += 0.5 * last
    second += 0.5 * third
    by_hand = [0.2 - 0.1 + 0.5 * second, second, third, last]
    assert sample.advantages == pytest.approx(by_hand)
    values = sample.values["reward"]
    returns = [a + v for a, v in zip(by_hand, values, strict=True)]
    assert sample.returns["reward"] == pytest.approx(returns)
    assert estimated("reinforce++").advantages == pytest.approx([1.0, 1.0, 0.5, 0.5])
    greedy = Outcome(8, 4, 0.25, None, True)
    remax = estimated("remax", others=[greedy])
    assert remax.advantages == pytest.approx([0.75, 0.75, 0.25, 0.25])


def test_a_group_compares_sums():
    other = Outcome(1, 4, 0.0, None, False)
    for name in ("grpo", "rloo", "reinforce++_baseline"):
        found = [
            estimated(name, turn_rewards=each, others=[other]).advantages
            for each in ([0.5, 0.25], [])
        ]
        assert found[0] == found[1] and len({*found[0]}) == 1


# ---------------------------------------------------------------------------------- a reply's tokens


# ---------------------------------------------------------------------------------- the user's class

HEAD = """
import asyncio, threading, time; from tests.support.lines import Lines
from extras.environment import Step
both = threading.Barrier(2, timeout=20)
shown, threads = Lines(__file__ + ".shown"), Lines(__file__ + ".threads")
class Environment:
    def __init__(self, sample, *, seed):
        self.sample, self.seed = sample, seed
    def close(self):
        shown.append("closed")
"""
STEP = f"{HEAD}    def step(self, text):\n        shown.append(text)\n        "


def load(tmp_path, text, **given):
    path = Path(tempfile.mkdtemp(dir=tmp_path), "mine.py")
    path.write_text(text)
    how = dict(environment=str(path), model="m", judge_format=("chat",), max_new_tokens=20)
    episodes = user_episodes.build(Config(**how | given), FakeTokenizer(), {ord(END)})
    episodes.path = path
    return episodes


def noted(episodes, name):
    """Return the lines that the file of its class has noted."""
    return Lines(f"{episodes.path}.{name}").read()


def ended(response="ab.", index=1, **fields):
    return Sample(
        3, index, [ord("?")], "q", response=[*map(ord, response)], finish="turn", **fields
    )


def answered(episodes, *samples):
    """Answer these turns at the same time. Return what the file's `shown` holds then."""

    async def answer_all():
        await asyncio.gather(*map(episodes.answer, samples))
        await episodes.close()

    asyncio.run(answer_all())
    return noted(episodes, "shown")


SCORE = "\n    def score(self):\n        return 0.5"
X17 = "'x' * 17"  # after 3 tokens it leaves the next turn no room for 20
ENDS = [
    ("return 'go on'", "ab.", "", [0.0], "go on"),
    ("return Step('go on', 1.0)" + SCORE, "ab.", "", [1.0], "go on"),
    ("return 'x' * 16", "ab.", "", [0.0], "x" * 16),
    (f"return Step({X17}, 1.0)", "ab.", "length", [1.0], None),
    (f"return Step({X17}, 1.0)" + SCORE, "ab.", "length", [1.5], None),
    ("return 1", "ab.", "stop", [1.0], None),
    ("return None" + SCORE, "ab.", "stop", [0.5], None),
    ("return 1" + SCORE, "a" * 20, "length", [0.5], None),  # cut off, so never shown
    ("return 1" + SCORE, "a" * 19 + END, "stop", [1.5], None),  # its end came in time
    ("return 'no room'" + SCORE, "a" * 19 + END, "length", [0.5], None),
]


@pytest.mark.parametrize("body, response, finish, earned, reply", ENDS)
def test_a_limit_is_the_episode_s_and_what_was_earned_counts(
    tmp_path, body, response, finish, earned, reply
):
    """A reply that doesn't fit isn't cut; a turn that a limit cut off isn't shown; score() is called."""
    sample = ended(response)
    shown = answered(load(tmp_path, STEP + body), sample)
    assert (sample.finish, sample.earned, to_text(sample.response)) == (finish, earned, response)
    assert [to_text(each.tokens) for each in sample.replies] == ([reply] if reply else [])
    was_cut = not response.endswith(END)
    assert shown == [*[response[:-1]] * (not was_cut), "closed"]


def test_metrics_are_kept_by_turn(tmp_path):
    sample = ended()
    turn = "return Step('go on', len(text), metrics={'n': len(text)} if len(text) > 1 else {})"
    episodes = load(tmp_path, f"{STEP}{turn}")

    async def play():
        for text in ("", "c.", "def."):
            sample.response += [*map(ord, text)]
            await episodes.answer(sample)
        await episodes.close()

    asyncio.run(play())
    assert sample.earned == [2.0, 1.0, 3.0] and sample.noted == [{"n": 2.0}, {}, {"n": 3.0}]
    assert episodes.means([sample])["environment/n"] == [2.0, 3.0]


FAILS = {
    "__init__": HEAD.replace(
        "self.sample,", "if sample.index: raise OSError_\n        self.sample,"
    ),
    "step": f"{STEP}raise OSError_",
    "an async step": f"{HEAD}    async def step(self, text):\n        raise OSError_",
    "score": f"{STEP}return 1.0\n    def score(self):\n        raise OSError_",
    "close": f"{STEP}raise OSError_".replace("shown.append('closed')", "raise OSError_"),
}


@pytest.mark.parametrize("error", ["ConnectionResetError('gone')", "TimeoutError"])
@pytest.mark.parametrize("text", FAILS.values(), ids=FAILS.keys())
def test_a_world_out_of_reach_is_no_answer_worth_0(tmp_path, text, error):
    text = text.replace("OSError_", error)
    text += "" if "def step" in text else "    def step(self, text):\n        return 1.0\n"
    episodes, first, sample = load(tmp_path, text), ended("a" * 20, 0), ended()
    shown = answered(episodes, first, sample)  # the first object has to be made
    lost = [each.finish == "lost" for each in (first, sample)]
    assert lost[1] and (episodes.failed, episodes.succeeded) == (sum(lost), 2 - sum(lost))
    fails = text.partition("def close")
    made = 2 - ("raise" in fails[0])
    assert shown.count("closed") == made * ("raise" not in fails[2].partition("def")[0])
    means = episodes.means([sample])
    assert means["environment/lost_frac"] == [True] and means["environment/reward_mean"] == []


NESTED = f"{STEP}deep = []\n        for _ in range(5000): deep = [deep]\n        return "
DEEP = r": step returned .+: .*(needed|deeply)"
ERRORS = [  # test_worker.py has errors that are raised
    (f"{STEP}return True", r": step returned True: a bool isn't a reward; Step\(done=True\) ends"),
    (f"{STEP}return b'x'", r": step returned b'x': a Step, a text, chat turns"),
    (
        f"{STEP}return 1{SCORE[:-3]}True",
        r": score returned True: a number is needed, at most 1e\+30$",
    ),
    (f"{STEP}return 1e31", r": step returned 1e\+31: a reward is a number, at most 1e\+30$"),
    (f"{NESTED}dict(role='user', content='1', x=deep)", DEEP),
    (f"{NESTED}Step([dict(role='user', x=deep)])", DEEP),
    (f"{NESTED}deep", DEEP),
    (
        f"{STEP}return {{'role': 'tool', 'content': '7', 'tool_calls': [{{}}]}}",
        r": .*and tool calls are",
    ),
    (f"{STEP}return Step('x', metrics={{'\\ud800': 1}})", r": .* metrics map names to numbers"),
    (
        f"{HEAD}    @property\n    def step(self): return self.nothing",
        r" \(\S+:12\): AttributeError: .*",
    ),
    (
        f"{STEP}return 1\n    @property\n    def score(self): return {{}}['x']",
        r" \(\S+:15\): KeyError: 'x'",
    ),
]


@pytest.mark.parametrize("text, line", ERRORS)
def test_an_error_of_the_user_s_is_one_line_that_says_where(tmp_path, text, line):
    with pytest.raises(UserError, match=rf"^--environment \S+mine\.py{line}") as caught:
        answered(load(tmp_path, text), ended("ab.", 0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("characters", [19, 21, 10**6])
def test_a_reply_is_bounded_before_it_is_encoded(tmp_path, monkeypatch, characters):
    """One that can't fit is never encoded; another in a thread, where it doesn't block the controller."""
    encode, encoded = tokenization.encode_reply, []

    def recorded(tokenizer, prompt, reply, where):
        encoded.append((len(reply[0]["content"]), threading.current_thread()))
        return encode(tokenizer, prompt, reply, where)

    monkeypatch.setattr(tokenization, "encode_reply", recorded)
    sample = ended("a.")
    answered(load(tmp_path, f"{STEP}return 'x' * {characters}"), sample)
    assert (sample.finish, sample.replies) == ("length", [])
    assert [length for length, _ in encoded] == [19] * (characters == 19)
    assert threading.main_thread() not in {thread for _, thread in encoded}


NOT_LOADED = [
    ("class Other: pass", r"has no class Environment$"),
    ("Environment = print", r"has no class Environment$"),
    ("class Environment: pass", r"the class has no step\(self, text\)$"),
]
NOT_LOADED += [
    (f"{STEP}pass\n    {name} = 1", rf"{name} is reserved: .")
    for name in ("reset", "start", "tools")
]


@pytest.mark.parametrize("text, line", NOT_LOADED)
def test_a_class_that_can_t_be_used_is_refused_at_the_start(tmp_path, text, line):
    with pytest.raises(UserError, match=rf"^--environment \S+mine\.py.*{line}"):
        load(tmp_path, text)


def test_settings_that_don_t_go_together_are_refused():
    with pytest.raises(
        UserError, match=r"^--answer-tokens 9: with --environment turns end by themselves"
    ):
        Config(environment="e.py", answer_tokens=9, max_new_tokens=9)
    config = Config(environment="nothing.py", model="m", judge_format=("chat",))
    with pytest.raises(
        UserError, match=r"^--environment nothing.py: no such file; use FILE.py or FILE.py:Class"
    ):
        user_episodes.build(config, FakeTokenizer(), ())


HANGS = {
    "step": f"{STEP}time.sleep(1)",
    "an async step": f"{HEAD}    async def step(self, text):\n        await asyncio.sleep(1)",
    "score": f"{STEP}return 1{SCORE.replace('return 0.5', 'time.sleep(1)')}",
}


@pytest.mark.parametrize("text", HANGS.values(), ids=HANGS.keys())
def test_one_that_hangs_ends_the_run_in_one_line_and_is_left(tmp_path, text, monkeypatch):
    monkeypatch.setattr(user_episodes, "CLOSE_S", 0.1)
    late = r"mine.py: \w+ on the prompt 'q' returned nothing for 0.09 s \(0.9 --timeout-s\)$"
    begin = time.monotonic()
    with pytest.raises(UserError, match=late):
        answered(load(tmp_path, text, timeout_s=0.1), ended())
    assert time.monotonic() - begin < 0.9


BOTH = """both.wait()
        threads.append(threading.get_ident())
        return 1.0
    async def score(self):
        await asyncio.sleep(0.01)
        threads.append(threading.get_ident())
        return both.wait() * 0 + 0.5
    async def close(self):
        shown.append("closed")"""


def test_what_blocks_holds_up_nobody(tmp_path):
    """Two episodes that wait for each other must both end, in threads; async ones have their own loop."""
    text = f"{STEP}{BOTH}".replace("return both.wait() * 0 +", "return")
    samples = [ended("a.", index) for index in (0, 1)]
    episodes = load(tmp_path, text)
    assert answered(episodes, *samples) == ["a", "a", "closed", "closed"]
    assert [sample.earned for sample in samples] == [[1.5], [1.5]]
    assert len({*noted(episodes, "threads")}) == 3


def test_a_group_plays_one_episode_and_a_sample_is_a_copy(tmp_path):
    row, turns = {"tests": [1]}, [turn("user", "q")]
    episodes = load(tmp_path, STEP + "return str(self.seed)", max_new_tokens=99)
    samples = [replace(ended(index=i), prompt_id=p) for p in (3, 4) for i in (0, 1)]
    answered(episodes, *samples)
    a, b, c, d = (sample.replies[0].tokens for sample in samples)
    assert a == b != c == d
    spoils = "sample.row['tests'].clear(), sample.turns[0].clear(), sample.prompt.clear()"
    text = STEP.replace("self.sample, self.seed =", f"{spoils}\n        self.sample, self.seed =")
    sample = ended(row=row, turns=turns)
    answered(load(tmp_path, text + "return 1.0"), sample)
    assert (row, turns, sample.prompt) == ({"tests": [1]}, [turn("user", "q")], [ord("?")])


def test_judges_and_rules_see_the_last_turn_and_all_before_it():
    seen = rewards.seen_by_rules(two_turns(response=[*map(ord, "a.b.")], question="q"), to_text)
    assert (seen.text, seen.plain_text, seen.prompt_text) == ("b.", "b.", "\x01a.\x08\t")
    assert seen.turns == [turn("user", "q"), turn("assistant", "a."), turn("user", "hm")]
