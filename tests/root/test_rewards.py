"""Rewards: judges and rules, their combination, and Safe-RLHF's lambda."""

import asyncio
import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import algorithms
import genrm
import rewards
from algorithms import algorithm_of
from config import Config
from sample import Sample
from tests.support.fakes import simulate, to_text, trained


class StubJudge:
    """A judge that gives every answer `value`, whatever pool it gets."""

    format, failed, parsed = genrm.FORMATS["chat"], 0, 0

    def __init__(self, value, signal="reward"):
        self.value, self.signal, self.gives_verdict = value, signal, signal == "reward"

    async def judge(self, prompt, answer, pool, images=(), is_cut=False):
        return genrm.Judgement(f"says {self.value}", self.value)


def says(value, signal="reward"):
    """Make a rule that gives every answer `value`."""

    async def ask(sample):
        return None if value is None else genrm.Judgement(f"--{signal} {value}: {value}", value)

    return rewards.Rule(signal, ask)


def score(judges=(), rules=(), weights=(), **fields):
    """Return a finished answer, scored by these judges and rules."""
    config = Config(model="m", rule=("right",) * max(1, len(weights)), reward_weights=weights)
    config = replace(config, judge_format=("chat",))
    listed = rewards.Rewards(config, list(judges), list(rules), to_text)
    sample = Sample(0, 0, [1], response=list(b"It is 5"), finish="stop", **fields)
    asyncio.run(listed.score(sample, None))
    return sample


TENTHS = st.integers(0, 10).map(lambda tenths: Fraction(tenths, 10))
QUARTERS = st.integers(0, 4).map(lambda quarters: Fraction(quarters, 4))
WEIGHTED = st.lists(st.tuples(TENTHS, QUARTERS, QUARTERS), min_size=1, max_size=5)


# in floats 0.3 / 0.6 twice, but with different last digits
@example([(Fraction(1, 10), 1, 0), (Fraction(2, 10), 1, 0), (Fraction(3, 10), 0, 1)])
@given(WEIGHTED.filter(lambda rows: any(row[0] for row in rows)))
def test_the_weighted_mean(rows):
    """It must match exact fractions, and be equal where those are, or a group would seem to have variance."""
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
    """Weights must apply over judges and rules; the verdict must come only from the judges."""
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


def test_what_says_none_isn_t_weighed():
    """By hand: (1 * 1 + 0 * 3) / 4, without its weight of 4; the cost is only the given one."""
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


@pytest.mark.parametrize("judges, rules", [([None, 1.0], []), ([None], [1.0])])
@pytest.mark.parametrize("key", ["reward", "cost"])
def test_a_sample_that_one_has_no_number_for_is_dropped(judges, rules, key):
    """A part must not replace the whole: no reward, cost or verdict. The critiques are kept."""
    judges = [StubJudge(1.0), *(StubJudge(value, key) for value in judges)]
    sample = score(judges, [says(value, key) for value in rules])
    assert (sample.reward, sample.cost, sample.verdict) == (None, None, None)
    assert "judge 1:\nsays None" in sample.critique


def test_rules_alone_reward_where_there_is_no_judge():
    """Rollout must have all ranks in every mode."""
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


def test_the_rules_that_are_there():
    fields = dict(text="3+9=12;>12<8>", plain_text="3+9=12;>12", answer="12", answer_key="12")
    sample = rewards.TextSample(0, 0, [1], response=[2] * 10, **fields)
    cut_off = rewards.TextSample(0, 0, [1], answer_key="12", text=">", answer=None)
    say = lambda spec, sample: asyncio.run(rewards.load("cost", spec, 9).judge(sample)).value  # noqa: E731
    assert say("right", sample) == 1.0 and say("right", cut_off) == 0.0
    assert say("length:40", sample) == 0.25
    assert [say(f"forbidden:{text}", sample) for text in ("9", "8", ";>")] == [1.0, 0.0, 1.0]


def test_the_rule_number_compares_last_numbers():
    def says(text, key="12", finish="stop"):
        fields = dict(text=text + "<|9|>", plain_text=text, answer=text, finish=finish)
        sample = rewards.TextSample(0, 0, [1], answer_key=key, **fields)
        return asyncio.run(rewards.load("reward", "number", 9).judge(sample)).value

    assert says("3+9=12") and says("It is 12.0, I'd say", "$12")
    assert not says("It is 13") and not says("No idea") and not says("3+9=12", finish="length")


@pytest.mark.parametrize("rule, key", [("right", None), ("number", None), ("number", "Paris")])
def test_what_has_no_answer_key_can_t_be_compared(rule, key):
    with pytest.raises(ValueError, match=rf"^the rule {rule}: the prompt '3\+9=' has no `answer`"):
        score([], [rewards.load("reward", rule, 9)], question="3+9=", answer_key=key)


def safe_rlhf(**settings):
    return ("safe_rlhf", *(f"{name}={value}" for name, value in settings.items()))


def constraint(**changes):
    settings = {"cost_limit": 0.2, "lagrange_init": 0.5} | changes
    return algorithm_of(Config(algorithm=safe_rlhf(**settings), cost_rule=("length:50",)))


def lagrange_multiplier(state, algorithm):
    return algorithms.lagrange_multiplier(state.log_multiplier, algorithm)


def update_multiplier(state, costs, algorithm):
    reacts = state.step >= algorithm.critic_warmup
    found = algorithms.updated_multiplier(state.log_multiplier, costs, algorithm, reacts)
    state.log_multiplier, metrics = found
    return metrics


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
    """A violation of 0.5 in each step must be reported from the first step, and count from the third on."""
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
    """If a constraint can't be met for a while, a step of slack must reduce lambda by e, not to nothing."""
    algorithm = constraint(cost_limit=0.0, lagrange_lr=1.0)
    state = SimpleNamespace(step=0, log_multiplier=0.0)
    for _ in range(50):
        update_multiplier(state, [1.0], algorithm)
    assert lagrange_multiplier(state, algorithm) == pytest.approx(100)
    update_multiplier(state, [-1.0], algorithm)
    assert lagrange_multiplier(state, algorithm) == pytest.approx(100 / math.e)


def test_safe_rlhf_in_the_real_loop():
    """Two critics have names; lambda uses all samples and agrees on every controller; nothing is filtered."""

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
