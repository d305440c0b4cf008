"""Rebalance against a simulator that knows more than its model: queues, ragged lengths, late judgements."""

import asyncio
import random
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from statistics import fmean

import pytest

from scheduling.costs import Decode
from scheduling.rebalance import (
    COOL_DOWN,
    HISTORY,
    RequestStats,
    Split,
    StepStats,
    choose_split,
    fit,
    mean_work,
    token_latency,
)
from simulation.clock import VirtualClock
from simulation.engine import Batch, Sequence

STEPS = 60
TP = {"rollout": 1, "genrm": 1}


def side_by_side(ranks):
    return [Split("partial", rollout, ranks - rollout) for rollout in range(1, ranks)]


def auto(ranks):
    return [*side_by_side(ranks), Split("full", ranks, ranks)]


@dataclass(frozen=True)
class Workload:
    """What a step asks of the engines, and how fast they truly are. A latency is (fixed, per request)."""

    answers: tuple[int, ...]  # tokens of each
    critiques: tuple[int, ...]
    rollout_latency: tuple[float, float]
    genrm_latency: tuple[float, float]
    capacity: int
    swap_s: float
    waves: int


@cache
def random_workload(seed, ranks, judge_scale=1.0):
    """Hundreds of answers with a long tail and critiques a third to thrice as long, engines of any speed."""
    rng = random.Random(seed)
    count, mean = ranks * rng.choice([16, 32, 64]), rng.uniform(50, 400)
    judge, spread = mean * 3 ** rng.uniform(-1, 1) * judge_scale, rng.uniform(0.2, 0.9)

    def lengths(mean, spread):
        return tuple(max(1, round(mean * rng.lognormvariate(0, spread))) for _ in range(count))

    texts = lengths(mean, spread), lengths(judge, spread / 2)
    latencies = [(10 ** rng.uniform(-2.5, -1.5), 10 ** rng.uniform(-4.5, -3)) for _ in range(2)]
    capacity, swap_s = rng.choice([16, 64, 256]), rng.uniform(0.2, 3.0)
    return Workload(*texts, *latencies, capacity, swap_s, waves=rng.choice([1, 1, 2, 3]))


def run_engines(requests, engines, latency, capacity):
    """(arrival, tokens) of each request -> (sent, end, tokens); `capacity` decode at once, in lockstep."""
    clock, ended, ends = VirtualClock(), asyncio.Queue(), {}
    batches = [Batch(Decode(*latency, most=capacity), clock) for _ in range(engines)]
    order = sorted(range(len(requests)), key=lambda i: requests[i][0])
    for turn, i in enumerate(order):
        sent, tokens = requests[i]
        sequence = Sequence(i, context=0, unread=0, length=tokens, ended=ended)
        clock.call_at(sent, batches[turn % engines].submit, [sequence])

    async def collect():
        while len(ends) < len(requests):
            sequence, *_ = await ended.get()
            ends[sequence.index] = clock.now

    clock.run_until_complete(collect())
    clock.close()
    return [(sent, ends[i], tokens) for i, (sent, tokens) in enumerate(requests)]


@cache
def serve(split, work):
    """What a serving phase of `split` truly takes, as choose_split gets to see it."""
    rollout, genrm, start = [], [], 0.0
    part, capacity = len(work.answers) // work.waves, work.capacity
    for wave in range(work.waves):
        cut = slice(wave * part, (wave + 1) * part)
        asked = [(start, tokens) for tokens in work.answers[cut]]
        written = run_engines(asked, split.rollout, work.rollout_latency, capacity)
        start = max(end for _, end, _ in written)
        begin = [start + work.swap_s if split.mode == "full" else end for _, end, _ in written]
        asked = list(zip(begin, work.critiques[cut], strict=True))
        judged = run_engines(asked, split.genrm, work.genrm_latency, capacity)
        rollout, genrm = rollout + written, genrm + judged
        if split.mode == "full":
            start = max(end for _, end, _ in judged)
    seconds = max(end for _, end, _ in genrm)
    stats = [RequestStats.of((*each, 1, 0) for each in requests) for requests in (rollout, genrm)]
    return StepStats(split, *stats, work.waves, seconds, work.swap_s * work.waves, 0.5)


def worst_of(splits, work):
    return max(splits, key=lambda split: serve(split, work).serve_s)


def walk(splits, start, works, seed):
    """The split of every step, `works` being what each asks; clocks are 5 % off."""
    history, split, taken, rng = [], start, [], random.Random(f"noise {seed}")
    noise = partial(rng.uniform, 0.95, 1.05)
    for step, work in enumerate(works):
        taken.append(split)
        true = serve(split, work)
        roles = (replace(of, request_s=of.request_s * noise()) for of in (true.rollout, true.genrm))
        seen = StepStats(split, *roles, true.waves, true.serve_s * noise(), true.swap_s, 0.5)
        history = [*history, seen][-HISTORY:]
        split = choose_split(history, splits, work.capacity, TP, len(works) - step - 1).split
    return taken


def moves(taken):
    return sum(a != b for a, b in pairwise(taken))


def regret(taken, work, splits):
    """How much longer the last 20 steps took than with the split that is truly best."""
    best = min(serve(split, work).serve_s for split in splits)
    return fmean(serve(split, work).serve_s for split in taken[-20:]) / best


def quantile(values, part):
    return sorted(values)[int(part * (len(values) - 1))]


@pytest.mark.parametrize("ranks,most_moves,workloads", [(4, 6, 30), (8, 8, 15)])
def test_from_the_worst_split_to_the_best(ranks, most_moves, workloads):
    """One engine at a time, for nine of ten workloads to within 6 % of the best split; there it stays."""
    splits, found, away = side_by_side(ranks), [], []
    for seed in range(workloads):
        work = random_workload(seed, ranks)
        taken = walk(splits, worst_of(splits, work), [work] * STEPS, seed)
        assert all(abs(a.rollout - b.rollout) <= 1 for a, b in pairwise(taken))
        assert moves(taken) <= most_moves and moves(taken[-10:]) <= 2
        found.append(regret(taken, work, splits))
        away.append(regret(taken[:1], work, splits))
    assert quantile(found, 0.5) < 1.01 and quantile(found, 0.9) < 1.06 and max(found) < 1.2
    assert quantile(away, 0.5) > 1.4  # there was something to find


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_it_follows_a_shift(ranks):
    """Critiques get four times as long in mid-run: what was learnt before doesn't hold it back."""
    found, splits = [], side_by_side(ranks)
    for seed in range(30):
        before, after = random_workload(seed, ranks), random_workload(seed, ranks, judge_scale=4.0)
        taken = walk(splits, splits[0], [before] * 40 + [after] * STEPS, seed)
        found.append(regret(taken, after, splits))
    assert quantile(found, 0.5) < 1.02 and quantile(found, 0.9) < 1.08 and max(found) < 1.25


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_auto_ends_in_the_better_mode(ranks):
    """Within 5 % of the best split of both modes for 95 % of workloads."""
    splits, found = auto(ranks), []
    for seed in range(60):
        work = random_workload(1000 + seed, ranks)
        taken = walk(splits, splits[(len(splits) - 1) // 2], [work] * STEPS, seed)
        found.append(regret(taken, work, splits))
    assert quantile(found, 0.95) < 1.05


def test_one_split_is_no_choice():
    """It stays, also where nobody holds genrm."""
    alone = Split("partial", 2, 0)
    step = StepStats(alone, RequestStats(100, 10, 5.0, 2.0), RequestStats(), 1, 5.0, 0.0, 0.5)
    decision = choose_split([step], [alone], 16, TP, 10)
    assert (decision.split, decision.reason) == (alone, "2|0: the only plan")


def test_a_move_must_pay_for_itself():
    """Near the run's end there is less to gain than a hand-over costs, and no mode to measure."""
    work, splits = random_workload(3, 4), side_by_side(4)
    worst = worst_of(splits, work)
    history = [serve(worst, work)] * COOL_DOWN
    assert choose_split(history, splits, work.capacity, TP, 20).split != worst
    assert choose_split(history, splits, work.capacity, TP, 0).split == worst
    reason = choose_split(history[1:], splits, work.capacity, TP, 20).reason
    assert reason == f"{worst} stays: measured for 2 of 3 steps"
    history = [serve(splits[0], work)] * COOL_DOWN
    for left, mode in ((COOL_DOWN + 1, "full"), (COOL_DOWN, "partial")):
        assert choose_split(history, auto(4), work.capacity, TP, left).split.mode == mode


def test_engines_of_two_ranks_move_as_engines_of_one():
    """What counts is how many engines a split has: twice the ranks an engine, and all comes out alike."""
    work, splits, two = random_workload(3, 4), auto(4), dict.fromkeys(TP, 2)
    doubled = {split: Split(split.mode, 2 * split.rollout, 2 * split.genrm) for split in splits}
    for start in splits:
        history = [serve(start, work)] * COOL_DOWN
        wide = [replace(step, split=doubled[step.split]) for step in history]
        split, _, seconds = choose_split(history, splits, work.capacity, TP, 3)
        other = choose_split(wide, list(doubled.values()), work.capacity, two, 3)
        assert (other.split, other.predicted_s) == (doubled[split], seconds)


def test_a_latency_is_found():
    """From two numbers of requests exactly; from one alone half is fixed; older points count less."""
    latency = fit([(k, 0.01 + 0.002 * k) for k in (4.0, 16.0, 8.0, 32.0) * 3])
    assert latency.fixed == pytest.approx(0.01, rel=0.2)
    assert latency.per_request == pytest.approx(0.002, rel=0.05)
    assert fit([(10.0, 0.04)] * 5) == (pytest.approx(0.02), pytest.approx(0.002))
    assert fit([(10.0, 0.4)] * 5 + [(10.0, 0.04)] * 50).fixed == pytest.approx(0.02, rel=0.05)


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
    work = mean_work([replace(step, lengths=lengths) for lengths in (short, long)])
    assert work.lengths == (0, 4, 0, 0.5, 0.5) and mean_work([step]).lengths == ()


def test_request_stats_by_hand():
    """4 s and 2 s that overlap for 2 s: 6 request-seconds; as they see it (2 x 2 + 2 x 4) / 6 in flight."""
    stats = RequestStats.of([(0.0, 4.0, 40, 10, 5), (1.0, 3.0, 20, 10, 0)], wakes=1)
    assert stats == RequestStats(60, 40, 6.0, 10 / 6, 20, 5, 2, 1)
    total = RequestStats.total([stats, stats, RequestStats.of([])])
    assert total == RequestStats(120, 40, 12.0, 20 / 6, 40, 10, 4, 1)
