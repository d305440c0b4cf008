"""Rebalance: from measured steps to the split of the next; test_fusion.py has it beside queues."""

import random
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest

from scheduling import rebalance
from scheduling.fusion import TokenLatency
from scheduling.measured import RequestStats, Split, StepStats
from scheduling.rebalance import COOL_DOWN, choose_split, token_latency

STEPS, CAPACITY = 60, 64
TP = {"rollout": 1, "genrm": 1}


def side_by_side(ranks):
    return [Split("partial", rollout, ranks - rollout) for rollout in range(1, ranks)]


def auto(ranks):
    return [*side_by_side(ranks), Split("full", ranks, ranks)]


class Engines:
    """Of any speed, with work of any size: a split takes what the formula says, give or take a tenth."""

    def __init__(self, seed, ranks):
        rng, self.seed = random.Random(seed), seed
        fixed, each = (lambda: 10 ** rng.uniform(-2.5, -1.5)), (lambda: 10 ** rng.uniform(-4.5, -3))
        latency = {role: TokenLatency(fixed(), each()) for role in TP}
        self.model = rebalance.ServingModel(latency, CAPACITY, TP, rng.uniform(0.2, 3.0))
        mean, judge, requests = rng.uniform(50, 400), 3 ** rng.uniform(-1, 1), 32 * ranks
        self.asked = {}
        for role, tokens in (("rollout", mean), ("genrm", mean * judge)):
            longest = round(tokens * rng.uniform(1.5, 6))
            self.asked[role] = RequestStats(round(tokens * requests), longest, requests=requests)

    def serve(self, split, judge_scale=1, noise=0.0):
        """A step, as choose_split gets to see it."""
        rng, stats = random.Random(f"{self.seed} {split}"), {}
        for role, asked in self.asked.items():
            scale, in_flight = judge_scale if role == "genrm" else 1, asked.requests / 2
            latency, ranks = self.model.latency[role], split._asdict()[role]
            request_s = asked.tokens * scale * latency.seconds(in_flight / ranks, 10**6)
            sizes = dict(tokens=asked.tokens * scale, longest=asked.longest * scale)
            stats[role] = replace(asked, **sizes, request_s=request_s, in_flight=in_flight)
        stats |= dict(waves=1, serve_s=0, swap_s=self.model.swap_s, hand_over_s=0.5)
        step = StepStats(split, **stats)
        error = rng.uniform(0.9, 1.1) * (1 + noise)
        return replace(step, serve_s=error * self.model.seconds(split, step))


@pytest.mark.parametrize("judge_scale", [1, 4])
@pytest.mark.parametrize("splits", [side_by_side(4), side_by_side(8), auto(4)], ids=len)
def test_from_the_worst_split_to_the_best(splits, judge_scale):
    """One engine at a time, though clocks are 5 % off and critiques may get longer in mid-run."""
    regrets = []
    for seed in range(20):
        engines = Engines(seed, splits[0].rollout + splits[0].genrm)
        rng, history = random.Random(seed), []
        split = max(splits, key=lambda split: engines.serve(split).serve_s)
        for step in range(2 * STEPS):
            scale = judge_scale if step > STEPS else 1
            history.append(engines.serve(split, scale, rng.uniform(-0.05, 0.05)))
            split = choose_split(history, splits, CAPACITY, TP, 2 * STEPS - step - 1).split
        taken = [step.split for step in history]
        of_one_mode = [(a, b) for a, b in pairwise(taken) if a.mode == b.mode]
        assert all(abs(a.rollout - b.rollout) <= 1 for a, b in of_one_mode)
        if judge_scale == 1:
            assert sum(a != b for a, b in pairwise(taken[-20:])) <= 2
        best = min(engines.serve(split, judge_scale).serve_s for split in splits)
        regrets.append(fmean(step.serve_s for step in history[-20:]) / best)
    assert sorted(regrets)[15] < 1.05 and max(regrets) < 1.25


def test_a_move_must_pay_for_itself():
    """Near the run's end there is less to gain than a hand-over costs, and no mode to measure."""
    engines, splits = Engines(3, 4), side_by_side(4)
    worst = max(splits, key=lambda split: engines.serve(split).serve_s)
    history = [engines.serve(worst)] * COOL_DOWN
    assert choose_split(history, splits, CAPACITY, TP, 20).split != worst
    assert choose_split(history, splits, CAPACITY, TP, 0).split == worst
    reason = choose_split(history[1:], splits, CAPACITY, TP, 20).reason
    assert reason == f"{worst} stays: measured for 2 of 3 steps"
    for left, mode in ((COOL_DOWN + 1, "full"), (COOL_DOWN, "partial")):
        assert choose_split(history, auto(4), CAPACITY, TP, left).split.mode == mode


def test_engines_of_two_ranks_move_as_engines_of_one():
    """What counts is how many engines a split has: twice the ranks an engine, and all comes out alike."""
    engines, splits, two = Engines(3, 4), auto(4), dict.fromkeys(TP, 2)
    doubled = {split: Split(split.mode, 2 * split.rollout, 2 * split.genrm) for split in splits}
    for start in splits:
        history = [engines.serve(start)] * COOL_DOWN
        wide = [replace(step, split=doubled[step.split]) for step in history]
        split, _, seconds = choose_split(history, splits, CAPACITY, TP, 3)
        other = choose_split(wide, list(doubled.values()), CAPACITY, two, 3)
        assert (other.split, other.predicted_s) == (doubled[split], seconds)


def test_a_latency_is_found():
    """From two numbers of requests exactly; from one alone half is fixed; older points count less."""
    latency = rebalance.fit([(k, 0.01 + 0.002 * k) for k in (4.0, 16.0, 8.0, 32.0) * 3])
    assert latency.fixed == pytest.approx(0.01, rel=0.2)
    assert latency.per_request == pytest.approx(0.002, rel=0.05)
    assert rebalance.fit([(10.0, 0.04)] * 5) == (pytest.approx(0.02), pytest.approx(0.002))
    assert rebalance.fit([(10.0, 0.4)] * 5 + [(10.0, 0.04)] * 50).fixed == pytest.approx(
        0.02, rel=0.05
    )


def test_each_mode_has_its_own_pace():
    """Side by side, prompts come one by one, and each holds up what is written; in turns they don't."""

    def step(split, in_flight, token_s):
        stats = RequestStats(100, 10, request_s=100 * token_s, in_flight=in_flight, requests=10)
        return StepStats(split, stats, stats, 1, 1.0, 0.0, 0.0)

    history = [step(Split("partial", 2, 2), 50.0, 0.08), step(Split("full", 4, 4), 120.0, 0.05)]
    paces = {mode: token_latency(history, "genrm", 1, mode) for mode in ("partial", "full")}
    assert paces["partial"] == (pytest.approx(0.04), pytest.approx(0.0016))  # 25 in an engine
    assert paces["full"] == (pytest.approx(0.025), pytest.approx(0.025 / 30))
    of_all = token_latency(history, "genrm", 1, "fused")
    assert of_all.per_request == 0.0  # more are no slower


def test_the_work_ahead_has_no_longer_answers_than_the_steps_had():
    """One long answer a step, shorter or longer: it is one, and of their mean."""
    step = StepStats(Split("full", 4, 4), RequestStats(9, 9), RequestStats(9, 9), 1, 1.0, 0.0, 0.0)
    short, long = (0, 4, 0, 1), (0, 4, 0, 0, 0, 1)
    work = rebalance.mean_work([replace(step, lengths=lengths) for lengths in (short, long)])
    assert work.lengths == (0, 4, 0, 0.5, 0.5) and rebalance.mean_work([step]).lengths == ()


def test_request_stats_by_hand():
    """4 s and 2 s that overlap for 2 s: 6 request-seconds; as they see it (2 x 2 + 2 x 4) / 6 in flight."""
    stats = RequestStats.of([(0.0, 4.0, 40, 10, 5), (1.0, 3.0, 20, 10, 0)], wakes=1)
    assert stats == RequestStats(60, 40, 6.0, 10 / 6, 20, 5, 2, 1)
    total = RequestStats.total([stats, stats, RequestStats.of([])])
    assert total == RequestStats(120, 40, 12.0, 20 / 6, 40, 10, 4, 1)
