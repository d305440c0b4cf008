"""Rebalance: from measured steps to the split of the next; test_fusion.py has it beside queues."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from scheduling.measured import RequestStats, Split, StepStats
from scheduling.rebalance import COOL_DOWN, choose_split

TP = {"rollout": 1, "genrm": 1}


def side_by_side(ranks):
    return [Split("partial", rollout, ranks - rollout) for rollout in range(1, ranks)]


class Engines:
    """Of any speed, with work of any size: answers end evenly, and queue where judges are too few."""

    requests = 512

    def __init__(self, seed):
        rng = random.Random(seed)
        self.tokens = {"rollout": 100_000, "genrm": round(100_000 * 3 ** rng.uniform(-1, 1))}
        self.rank_s = {
            role: 10 ** rng.uniform(-4.2, -3.5) for role in TP
        }  # of a token, of one rank
        self.critique_s = rng.uniform(0.1, 1)

    def serve(self, split, judge_scale=1, noise=0.0):
        """A step, as choose_split gets to see it."""
        tokens = self.tokens | {"genrm": judge_scale * self.tokens["genrm"]}
        rollout_s = tokens["rollout"] * self.rank_s["rollout"] / split.rollout
        genrm_s = tokens["genrm"] * self.rank_s["genrm"] / split.genrm
        waits_s = self.critique_s + max(0.0, genrm_s - rollout_s) / 2
        seconds = max(rollout_s + self.critique_s, genrm_s)
        took = {"rollout": self.requests * rollout_s / 2, "genrm": self.requests * waits_s}
        how = dict(requests=self.requests)
        stats = [RequestStats(tokens[role], request_s=took[role], **how) for role in TP]
        return StepStats(split, *stats, 1, (1 + noise) * seconds, 0.0, lengths=(self.requests,))


@pytest.mark.parametrize("judge_scale", [1, 4, 0.25])
@pytest.mark.parametrize("splits", [side_by_side(4), side_by_side(8)], ids=len)
def test_from_the_worst_split_to_the_best(splits, judge_scale):
    """One engine at a time; critiques may get longer or shorter in mid-run, and clocks are 3 % off."""
    for seed in range(20):
        engines, rng, history = Engines(seed), random.Random(seed), []
        split = max(splits, key=lambda split: engines.serve(split).serve_s)
        for step in range(100):
            scale = judge_scale if step >= 50 else 1
            history.append(engines.serve(split, scale, rng.uniform(-0.03, 0.03)))
            split = choose_split(history, splits, 64, TP).split
        taken = [step.split for step in history]
        for number, (a, b) in enumerate(pairwise(taken[:50])):
            is_new = b not in taken[: number + 1]
            assert not is_new or abs(a.rollout - b.rollout) == 1
        moves = [a != b for a, b in pairwise(taken)]
        assert sum(moves[35:50]) <= 1 and sum(moves[85:]) <= 1
        best = min(engines.serve(split, judge_scale).serve_s for split in splits)
        assert engines.serve(taken[-1], judge_scale).serve_s < 1.12 * best


@pytest.mark.parametrize("genrm,first,then", [(2, 0, 2), (0.5, 2, 0), (4, 0, 1)])
def test_the_busier_role_gets_an_engine(genrm, first, then):
    """If that was slower, the other one does, if it has anything to do."""
    splits = side_by_side(4)
    work = [RequestStats(100, request_s=load, requests=10) for load in (1, genrm)]
    step = StepStats(splits[1], *work, 1, 1.0, 0.0, lengths=(10,))
    history = [step] * COOL_DOWN
    assert choose_split(history, splits, 64, TP).split == splits[first]
    slower = [replace(step, split=splits[first], serve_s=2.0)] * COOL_DOWN
    assert choose_split(slower + history, splits, 64, TP).split == splits[then]


def test_answers_in_vain_are_no_speed():
    """A split that writes twice the tokens in 1.5 times the seconds isn't the faster one."""
    splits = side_by_side(3)
    work = RequestStats(100, request_s=1.0, requests=10)
    step = StepStats(splits[0], work, work, 1, 1.0, 0.0, lengths=(10,))
    more = replace(work, tokens=200, requests=20)
    vain = StepStats(splits[1], more, more, 1, 1.5, 0.0, lengths=(20,))
    history = [step] * COOL_DOWN + [vain] * COOL_DOWN
    decision = choose_split(history, splits, 64, TP)
    assert decision == (splits[0], "2|1 -> 1|2: it was 1.50 times as fast")


def test_what_was_slower_is_measured_again_for_another_load():
    """Critiques that are a third longer are a new load, a sixth isn't."""
    engines, splits = Engines(0), side_by_side(4)
    step = engines.serve(splits[1])
    slower = [replace(step, split=split, serve_s=2 * step.serve_s) for split in splits]
    history = [slower[0]] * COOL_DOWN + [slower[2]] * COOL_DOWN + [step] * COOL_DOWN
    assert (
        choose_split(history[:-1], splits, 64, TP).reason == "2|2 stays: measured for 2 of 3 steps"
    )
    assert choose_split(history, splits, 64, TP).reason == "2|2 stays: nothing was measured faster"
    for judge_scale, stays in ((7 / 6, True), (4 / 3, False)):
        tokens = round(judge_scale * step.genrm.tokens)
        changed = replace(step, genrm=replace(step.genrm, tokens=tokens))
        decision = choose_split([*history, *[changed] * COOL_DOWN], splits, 64, TP)
        assert (decision.split == splits[1]) == stays


def test_request_stats_by_hand():
    """4 s and 2 s that overlap for 2 s: 6 request-seconds; as they see it (2 x 2 + 2 x 4) / 6 in flight."""
    parts = [(0.0, 4.0, 40, 40, 10, 5, True), (1.0, 3.0, 20, 20, 10, 0, True)]
    stats = RequestStats.of(parts, wakes=1)
    assert stats == RequestStats(60, 40, 6.0, 10 / 6, 20, 5, 2, 1)
    total = RequestStats.total([stats, stats, RequestStats.of([])])
    assert total == RequestStats(120, 40, 12.0, 20 / 6, 40, 10, 4, 1)


def test_a_request_that_moves_is_as_one_that_stays():
    """It moves twice. One that was cut off has tokens, and takes time, but it isn't whole."""
    stays = [(0.0, 9.0, 90, 90, 100, 20, True)]
    moves = [(0.0, 4.0, 40, 40, 100, 0, False), (4.0, 6.0, 20, 60, 100, 100, False)]
    moves += [(6.0, 9.0, 30, 90, 100, 20, True)]
    assert RequestStats.of(moves) == RequestStats.of(stays)
    assert RequestStats.of(moves[:1]) == RequestStats(40, 40, 4.0, 1.0)
