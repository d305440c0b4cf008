"""Rebalancing: from measured steps to the next step's split."""

import random
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest

from controller import HISTORY
from extras.rebalance import COOL_DOWN, to_the_busier_role
from runtime.timeline import Event
from scheduling.measured import RequestStats, Split, StepStats

TP = {"rollout": 1, "genrm": 1}


def side_by_side(ranks):
    return [Split("partial", rollout, ranks - rollout) for rollout in range(1, ranks)]


def decide(history, splits):
    return to_the_busier_role(history, splits, 64, TP)


class Engines:
    """Engines of any speed, with work of any size: answers end evenly, and queue where judges are too few."""

    requests = 512

    def __init__(self, seed):
        rng = random.Random(seed)
        self.tokens = {"rollout": 100_000, "genrm": round(100_000 * 3 ** rng.uniform(-1, 1))}
        # per token, on one rank
        self.rank_s = {role: 10 ** rng.uniform(-4.2, -3.5) for role in TP}
        self.critique_s = rng.uniform(0.1, 1)

    def serve(self, split, judge_scale=1, noise=0.0):
        """Serve a step, and return it as the rule sees it."""
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
@pytest.mark.parametrize("ranks,within", [(4, 1.12), (8, 1.3)])
def test_from_the_worst_split_to_a_good_one(ranks, within, judge_scale):
    """One engine moves at a time; critique lengths may change in mid-run, and clocks are off by 3%."""
    splits = side_by_side(ranks)
    for seed in range(20):
        engines, rng, history = Engines(seed), random.Random(seed), []
        split = max(splits, key=lambda split: engines.serve(split).serve_s)
        for step in range(130):
            scale = judge_scale if step >= 50 else 1
            history.append(engines.serve(split, scale, rng.uniform(-0.03, 0.03)))
            split = decide(history[-HISTORY:], splits).split
        taken = [step.split for step in history]
        for number, (a, b) in enumerate(pairwise(taken[:50])):
            is_new = b not in taken[: number + 1]
            assert not is_new or abs(a.rollout - b.rollout) == 1
        moves = [a != b for a, b in pairwise(taken)]
        assert sum(moves[30:50]) <= 2 and sum(moves[110:]) <= 2
        best = min(engines.serve(split, judge_scale).serve_s for split in splits)
        assert engines.serve(median(taken[-15:]), judge_scale).serve_s < within * best


@pytest.mark.parametrize("genrm,goes_to", [(2, 0), (1.05, 1), (0.5, 2)])
def test_the_busier_role_gets_an_engine(genrm, goes_to):
    """If that is slower, the engine must go back and stay."""
    splits = side_by_side(4)
    work = [RequestStats(100, request_s=load, requests=10) for load in (1, genrm)]
    step = StepStats(splits[1], *work, 1, 1.0, 0.0, lengths=(10,))
    history = [step] * COOL_DOWN
    assert decide(history, splits).split == splits[goes_to]
    slower = [replace(step, split=splits[goes_to], serve_s=2.0)] * COOL_DOWN
    if goes_to != 1:
        assert decide(history + slower, splits).split == splits[1]
        assert decide(history + slower + history, splits).split == splits[1]


def test_a_role_without_a_second_engine_gives_none():
    splits = side_by_side(4)
    work = [RequestStats(100, request_s=load, requests=10) for load in (9, 1)]
    step = StepStats(splits[2], *work, 1, 1.0, 0.0, lengths=(10,))
    decision = decide([step] * COOL_DOWN, splits)
    assert decision == (splits[2], "3|1 stays: rollout is busier, the next split isn't faster")


def test_a_split_serves_for_a_while():
    """However uneven its roles are, its first step's times are no measure."""
    step = Engines(0).serve(Split("partial", 3, 1))
    decision = decide([step] * (COOL_DOWN - 1), side_by_side(4))
    assert decision == (step.split, "3|1 stays: measured for 2 of 3 steps")


def test_answers_in_vain_are_no_speed():
    """A split that generates twice the tokens in 1.5 times the seconds must not count as faster."""
    splits = side_by_side(3)
    work = RequestStats(100, request_s=1.0, requests=10)
    step = StepStats(splits[0], work, work, 1, 1.0, 0.0, lengths=(10,))
    more = replace(work, tokens=200, requests=20)
    vain = StepStats(splits[1], more, more, 1, 1.5, 0.0, lengths=(20,))
    decision = decide([step] * COOL_DOWN + [vain] * COOL_DOWN, splits)
    assert decision == (splits[0], "2|1 -> 1|2: it was 1.50 times as fast")


def sent(start, end, begun, tokens, prompt, cached, kind="span") -> Event:
    """Return the event of a request to an engine."""
    sizes = dict(begun=begun, tokens=tokens, prompt=prompt, cached=cached)
    return Event(kind, "rollout", 0, start, end, 0, sizes)


def test_request_stats_by_hand():
    """4 s and 2 s that overlap for 2 s are 6 request-seconds, with (2 x 2 + 2 x 4) / 6 in flight."""
    stats = RequestStats.of([sent(0.0, 4.0, 0, 40, 10, 5), sent(1.0, 3.0, 0, 20, 10, 0)], wakes=1)
    assert stats == RequestStats(60, 40, 6.0, 10 / 6, 20, 5, 2, 1)
    total = RequestStats.total([stats, stats, RequestStats.of([])])
    assert total == RequestStats(120, 40, 12.0, 20 / 6, 40, 10, 4, 1)


def test_a_request_that_moves_is_as_one_that_stays():
    """It moves twice. One that was cut off must count its tokens and time, but not as a whole request."""
    stays = [sent(0.0, 9.0, 0, 90, 100, 20)]
    moves = [sent(0.0, 4.0, 0, 40, 100, 0, "part"), sent(4.0, 6.0, 40, 60, 100, 100, "part")]
    moves += [sent(6.0, 9.0, 60, 90, 100, 20)]
    assert RequestStats.of(moves) == RequestStats.of(stays)
    assert RequestStats.of(moves[:1]) == RequestStats(40, 40, 4.0, 1.0)
