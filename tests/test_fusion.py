"""Inter-stage fusion: who holds which ranks, moves of answers on fakes, the model that chooses the tail."""

import asyncio
import random
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollout
from engines.pool import Pool
from fakes import simulate
from scheduling.costs import Decode, Passes
from scheduling.fusion import FluidModel, Left, TokenLatency, histogram, kept_engines, ranks_of_tail
from simulation.cluster import Cluster, Lengths, Simulation, Workload
from simulation.engine import Moves
from test_faults import UNBROKEN, check_as_unbroken, in_parts_of

FOUR, TWO = [(0,), (1,), (2,), (3,)], [(0, 1), (2, 3)]
ALL = (0, 1, 2, 3)
OWED = Counter({0: 5, 1: 1, 2: 9, 3: 2})


def engines(models):
    """Lead ranks and their models: "01.0" has none on rank 2."""
    return {rank: int(model) for rank, model in enumerate(models) if model != "."}


# ---------------------------------------------------------------- who holds which ranks


@pytest.mark.parametrize(
    "held,unwritten,judging,expected",
    [
        (ALL, 21, 30, ALL),  # one more than the tail
        (ALL, 20, 30, (2,)),  # the one that owes most
        ((2,), 1, 30, (2,)),  # it stays, whatever it owes
        ((2,), 0, 30, ()),  # all is written
        ((), 30, 30, ()),  # a wave waits until what is left is judged ...
        ((), 30, 0, ALL),
        ((), 20, 0, (2,)),  # ... and may be a tail itself
        ((2,), 60, 1, (2,)),  # a wave is begun beside the judging
        ((2,), 60, 0, ALL),
    ],
)
def test_ranks_of_tail(held, unwritten, judging, expected):
    """100 answers were begun, a fifth is the tail, of one engine."""
    left, up = Left(unwritten, judging, 100), engines("0000")
    assert ranks_of_tail(0.2, FOUR, held, left, 1, OWED, up, up) == expected


@pytest.mark.parametrize(
    "units,keep,writers,judges,expected",
    [
        (FOUR, 2, "0000", "0000", (0, 2)),
        (FOUR, 9, "0000", "0000", (0, 2, 3)),  # one is left for genrm
        (FOUR, 1, "00.0", "0000", (0,)),  # that of rank 2 was lost
        (FOUR, 1, "0000", "000.", (2,)),  # rank 3 has no judge: it idles
        (FOUR, 3, "0000", "0101", (2, 3)),  # each judge has an engine
        (TWO, 1, "0.0.", "0000", (2, 3)),  # rollout engines of two ranks
        (TWO, 1, "0000", "0.1.", ALL),  # the two judges need all ranks
    ],
)
def test_which_ranks_the_tail_keeps(units, keep, writers, judges, expected):
    """Those that owe most, as far as somebody can write and every judge has an engine that is up."""
    how = units, ALL, Left(5, 0, 10), keep, OWED, engines(writers), engines(judges)
    assert ranks_of_tail(1.0, *how) == expected


@given(st.data())
def test_rollout_never_holds_what_a_judge_needs(data):
    """Whoever is lost: somebody writes and every judge has an engine, or one role holds all ranks."""
    size, models = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    some_ranks = st.sets(st.integers(0, size - 1), min_size=1)
    judges = {rank: rank % models for rank in data.draw(some_ranks)}
    writers = dict.fromkeys(data.draw(some_ranks), 0)
    everyone, units = tuple(range(size)), [(rank,) for rank in range(size)]
    held = tuple(sorted(data.draw(st.sets(st.sampled_from(everyone)))))
    left = Left(*data.draw(st.tuples(*[st.integers(0, 20)] * 2)), begun=20)
    owed = Counter({rank: data.draw(st.integers(0, 9)) for rank in everyone})
    keep, tail = data.draw(st.integers(1, 8)), data.draw(st.floats(0, 1))
    ranks = ranks_of_tail(tail, units, held, left, keep, owed, writers, judges)
    if ranks in ((), everyone):
        return
    assert {*ranks} & {*writers}
    assert {judges[rank] for rank in judges if rank not in ranks} == {*judges.values()}
    assert ranks == held or len(ranks) <= keep


@pytest.mark.parametrize(
    "unwritten,latency,capacity,expected",
    [
        (25, (0.02, 0.001), 128, 2),  # 20 answers double the time of an empty step
        (20, (0.02, 0.001), 128, 1),
        (25, (0.0, 0.0), 10, 3),  # nothing is known yet but the room for KV caches
        (0, (0.02, 0.001), 128, 1),
    ],
)
def test_kept_engines(unwritten, latency, capacity, expected):
    assert kept_engines(unwritten, TokenLatency(*latency), capacity) == expected


# ---------------------------------------------------------------- moves, in a whole run


def tail_marks(controllers):
    """Who holds the ranks: time, step, and what rollout and genrm have from then on."""
    marks = [mark for mark in controllers[0].report.marks if mark.kind == "tail"]
    return [(mark.time, mark.step, mark.text) for mark in marks]


def test_the_tail_moves_and_every_answer_is_judged_beside_it():
    """Ten writers' tail on one rank of four, in the first step; all is written, all is judged."""
    controllers, log = simulate("fused", 4, tail=0.3, prepare=in_parts_of(3), **UNBROKEN)
    check_as_unbroken(controllers)
    assert [text for _, step, text in tail_marks(controllers) if step == 0][:2] == ["1|3", "0|4"]
    all_batches = [c.report.steps[step][1] for c in controllers for step in range(4)]
    assert sum(batch.moved for batch in all_batches) > 10
    for batch in all_batches:  # what was written is trained on, filtered or carried: nothing twice
        groups = [batch.kept, batch.dropped, *batch.filtered, *batch.carried]
        assert batch.tokens == sum(len(sample.response) for group in groups for sample in group)
    holders = {rank: set() for rank in range(4)}
    for rank, verb, holder in log:
        holders[rank] = holders[rank] | {holder} if verb == "take" else holders[rank] - {holder}
        assert len({holder.split()[0] for holder in holders[rank]} & {"rollout", "genrm"}) < 2


def test_without_a_tail_the_roles_take_turns():
    controllers, _ = simulate("fused", 4, tail=0.0, **UNBROKEN)
    assert {text for *_, text in tail_marks(controllers)} == {"0|4", "4|0"}


@pytest.mark.parametrize("rollout_tp,genrm_tp", [(2, 1), (1, 2)])
def test_engines_of_several_ranks_change_hands_whole(rollout_tp, genrm_tp):
    options = dict(UNBROKEN, rollout_tp=rollout_tp, genrm_tp=genrm_tp, tail=0.3)
    controllers, _ = simulate("fused", 4, **options)
    check_as_unbroken(controllers)
    assert {text for *_, text in tail_marks(controllers)} == {"2|2", "0|4", "4|0"}


WHOSE = {"kept": 0, "leaving": 1, "judge": 2}  # from the rank that is kept


@pytest.mark.parametrize("when", ["before", "during", "after"])
@pytest.mark.parametrize("whose", WHOSE)
@pytest.mark.parametrize("verb", ["die", pytest.param("hang", marks=pytest.mark.slow)])
def test_an_engine_lost_in_a_move(when, whose, verb):
    """Before, during and after the first one: it trains on the samples of an unbroken run."""
    struck = []

    def strike_now(c, leads):
        if c.world.rank == (leads[0] + WHOSE[whose]) % 4 and not struck:
            struck.append(c.world.rank)
            server = (c.placement.genrm if whose == "judge" else c.placement.rollout).own.server
            {"die": server.die, "hang": server.hang}[verb]()

    def prepare_controller(c):
        pool = c.placement.rollout

        async def use(leads, move=False):
            is_first = len(leads) == 1 and len(pool.awake) == 4
            if is_first and when == "before":
                strike_now(c, leads)
            if is_first and when == "during":  # an engine takes 0.1 s to sleep
                asyncio.get_running_loop().call_later(0.12, strike_now, c, leads)
            await Pool.use(pool, leads, move)
            if is_first and when == "after":
                strike_now(c, leads)

        vars(pool)["use"] = use

    how = dict(prepare=in_parts_of(3), prepare_controller=prepare_controller)
    controllers, _ = simulate("fused", 4, tail=0.3, **how, **UNBROKEN)
    assert struck
    check_as_unbroken(controllers)


def test_whoever_moves_is_dealt():
    """Requests that move at once go to the kept engines in turns: none gets two more than another."""
    options = dict(UNBROKEN, tail=0.9, prompts_per_step=32, steps=1)
    latency = TokenLatency(0.01, 0.01 / 50)  # so that the tail keeps 3 engines of 8
    with mock.patch.object(rollout, "token_latency", lambda *_: latency):
        controllers, _ = simulate("fused", 8, **options)
    moved_at = next(time for time, _, text in tail_marks(controllers) if text == "3|5")
    asked = Counter()
    for engine in controllers[0].placement.rollout.all_engines:
        sent = [sent for sent, _ in engine.server.asked if moved_at < sent < moved_at + 0.4]
        asked += Counter({engine.rank: len(sent)})
    assert len(asked) == 3 and sum(asked.values()) > 10
    assert max(asked.values()) - min(asked.values()) <= 1


# ---------------------------------------------------------------- which tail


def test_the_fluid_model_by_hand():
    """16 answers of 16 tokens and 4 of 64, on 2 engines of each role; critiques of 8 tokens; swaps of 1 s."""
    lengths = histogram([16] * 16 + [64] * 4)
    model = FluidModel((2, 2), TokenLatency(1.0, 0.1), TokenLatency(1.0, 0.0), 100, 1.0)
    written = 16 * (1 + 0.1 * 10) + 48 * (1 + 0.1 * 2)
    assert model.seconds(0.0, lengths, 20, 8) == pytest.approx(written + 1 + 8)  # all take turns
    # the four go on together; the others are judged meanwhile
    tail = 16 * 2.0 + 1 + 48 * (1 + 0.1 * 4)
    assert model.seconds(0.2, lengths, 20, 8) == pytest.approx(tail + 8)
    slow = model._replace(genrm=TokenLatency(1.0, 1.0))
    beside = 16 * 2.0 + 1 + 8 * (1 + 16)  # 16 critiques on one engine take longer than the tail
    assert slow.seconds(0.2, lengths, 20, 8) == pytest.approx(max(beside, tail + 8 * (1 + 4 / 2)))


DECODE = Decode(fixed=0.020, each=0.001, prefill=0.00002, most=128)
WORKLOADS = {  # share of long answers, their length, tokens of a critique, part of the groups that is kept
    "tail": (0.025, 100, 32, 1.0),
    "longer tail": (0.05, 200, 64, 1.0),
    "longer tail, half filtered": (0.05, 200, 64, 0.5),
}


@dataclass(frozen=True)
class WithATail(Lengths):
    """Of 10 to 20 tokens, but a `share` of them of nearly `most`."""

    share: float = 0.0

    def of(self, *text):
        rng = random.Random(repr(text))
        is_long = rng.random() < self.share
        return rng.randint(self.most * 4 // 5, self.most) if is_long else rng.randint(10, 20)


def simulated(workload, mode, steps=6, **settings):
    """Steps on four ranks whose engines take 0.3 s to change places."""
    share, longest, critique, keep = WORKLOADS[workload]
    work = Workload(6, WithATail(0, 0, longest, share), Lengths(critique, 0, critique), keep)
    roles = ("rollout", "genrm")
    how = dict(moves=dict.fromkeys(roles, Moves(0.15, 0.15)), meeting_s=rollout.MEETING_INTERVAL_S)
    cluster = Cluster(dict.fromkeys(roles, DECODE), Passes(0.0), **how)
    sizes = dict(prompts_per_step=16, answers_per_prompt=8, steps=steps)
    return Simulation(mode, 4, work, cluster, **sizes | settings).run()


def serving_s(steps, first=1):
    """In the median; the slowest controller's."""
    return median(step.stats.serve_s for step in steps[first:])


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["tail", "longer tail"])
def test_the_model_says_what_steps_take(workload):
    """With the engines' true latencies, within 10 % of the controllers on engines that decode in steps."""
    latency, (_, _, critique, _) = TokenLatency(DECODE.fixed, DECODE.each), WORKLOADS[workload]
    for tail in (0.0, 0.1, 0.2, 0.9):
        steps = simulated(workload, "fused", tail=tail)
        model = FluidModel((4, 4), latency, latency, 128, 0.3)
        said = [model.seconds(tail, step.stats.lengths, 128, critique + 1) for step in steps[1:]]
        assert median(said) == pytest.approx(serving_s(steps), rel=0.1), tail


def sides_of(workload, tails):
    """Seconds of serving: roles in turns, side by side, fused with each tail."""
    sides = {"full": dict(mode="full")}
    sides |= {f"{n}|{4 - n}": dict(mode="partial", rollout_ranks=n) for n in (1, 2, 3)}
    sides |= {f"fused {tail:g}": dict(mode="fused", tail=tail) for tail in tails}
    return {side: serving_s(simulated(workload, **how)) for side, how in sides.items()}


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["tail", "longer tail"])
def test_fusion_pays_on_a_tail(workload):
    """Fused at its best tail against full and the best split; a U over the tail."""
    seconds = sides_of(workload, (0, 0.1, 0.2, 0.9))
    best = min(seconds["fused 0.1"], seconds["fused 0.2"])
    assert best <= 0.85 * seconds["full"]
    assert best <= 0.95 * min(seconds[split] for split in ("1|3", "2|2", "3|1"))
    assert min(seconds["fused 0"], seconds["fused 0.9"]) >= 1.05 * best


@pytest.mark.slow
@pytest.mark.parametrize("tail", [0.05, 0.9])
def test_the_tail_finds_its_place(tail):
    """Within 5 % of the best fixed one after 15 steps, wherever it began."""
    work = "longer tail"
    fixed = [serving_s(simulated(work, "fused", tail=t)) for t in (0.05, 0.1, 0.2, 0.3, 0.5)]
    steps = simulated(work, "fused", steps=20, tail=tail, rebalance=True)
    assert serving_s(steps, 15) <= 1.05 * min(fixed)
    assert sum(a.stats.split.tail != b.stats.split.tail for a, b in pairwise(steps)) <= 5


if __name__ == "__main__":  # the table of docs/fusion.md
    for name in WORKLOADS:
        print(name, sides_of(name, (0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.9)))
