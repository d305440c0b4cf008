"""Inter-stage fusion: who holds which ranks, moves of answers on fakes, the model that chooses the tail."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.engine import Sampling
from extras.fused import tail as fusion
from extras.fused.mode import newest
from extras.fused.tail import FluidModel, TokenLatency, kept_engines, ranks_of_tail
from genrm import FORMATS
from runtime import timeline
from scheduling.measured import Remaining, RequestStats, Split, StepStats, histogram
from tests.engines.test_pool import PROMPT, SEEDS, answer_to, engine_of, run_alone
from tests.root.test_faults import UNBROKEN, check_as_unbroken, in_parts_of
from tests.support.fakes import number_in, requests_of, samples_of, simulate, text_answer, to_text

FOUR = [(0,), (1,), (2,), (3,)]
ALL = (0, 1, 2, 3)
OWED = Counter({0: 5, 1: 1, 2: 9, 3: 2})


@pytest.mark.parametrize(
    "held,unwritten,judging,expected",
    [
        (ALL, 21, 30, ALL),  # one more than the tail
        (ALL, 20, 30, (2,)),  # the engine with the most tokens left
        ((2,), 1, 30, (2,)),  # it stays, however much it has left
        ((2,), 0, 30, ()),  # all answers are finished
        ((), 30, 30, ()),  # a wave waits until the remaining answers are judged ...
        ((), 30, 0, ALL),
        ((), 20, 0, (2,)),  # ... and may be a tail itself
        ((2,), 60, 1, (2,)),  # a wave starts during judging
        ((2,), 60, 0, ALL),
    ],
)
def test_ranks_of_tail(held, unwritten, judging, expected):
    """100 answers were begun; the tail is a fifth of them, and fits on one engine."""
    left, up = Remaining(unwritten, judging, 100), dict.fromkeys(ALL, 0)
    assert ranks_of_tail(0.2, FOUR, held, left, 1, OWED, up, up) == expected


@given(st.data())
def test_rollout_never_holds_what_a_judge_needs(data):
    """With any lost engines, some rank must generate and every judge have an engine, or one role hold all."""
    size, models = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    some_ranks = st.sets(st.integers(0, size - 1), min_size=1)
    judges = {rank: rank % models for rank in data.draw(some_ranks)}
    writers = dict.fromkeys(data.draw(some_ranks), 0)
    everyone, rank_groups = tuple(range(size)), [(rank,) for rank in range(size)]
    held = tuple(sorted(data.draw(st.sets(st.sampled_from(everyone)))))
    left = Remaining(*data.draw(st.tuples(*[st.integers(0, 20)] * 2)), begun=20)
    outstanding = Counter({rank: data.draw(st.integers(0, 9)) for rank in everyone})
    keep, tail = data.draw(st.integers(1, 8)), data.draw(st.floats(0, 1))
    ranks = ranks_of_tail(tail, rank_groups, held, left, keep, outstanding, writers, judges)
    if ranks in ((), everyone):
        return
    assert {*ranks} & {*writers}
    assert {judges[rank] for rank in judges if rank not in ranks} == {*judges.values()}
    assert ranks == held or len(ranks) <= keep


def test_kept_engines():
    """20 answers double an empty step's time; at first only the room for KV caches is known."""
    latency = TokenLatency(0.02, 0.001)
    assert [kept_engines(unwritten, latency, 128) for unwritten in (0, 20, 25)] == [1, 1, 2]
    assert kept_engines(25, TokenLatency(0.0, 0.0), 10) == 3


def measured(split, *points):
    """Return a step for each (requests in flight in all engines, seconds per token), equal for both roles."""
    for in_flight, token_s in points:
        work = RequestStats(100, 10, request_s=100 * token_s, in_flight=in_flight, requests=10)
        yield StepStats(split, work, work, 1, 1.0, 0.0)


def test_half_of_a_latency_is_fixed():
    """This must hold in any mode; steps in fused mode count, if there are any."""
    fused, partial = Split("fused", 2, 2), Split("partial", 2, 2)
    one = [*measured(fused, (20.0, 0.04))]
    assert fusion.token_latency(one, "genrm", 1) == (pytest.approx(0.02), pytest.approx(0.002))
    others = [*measured(partial, (20.0, 0.4))] * 5
    assert fusion.token_latency(one + others, "genrm", 1) == fusion.token_latency(one, "genrm", 1)
    assert fusion.token_latency(others, "genrm", 1).fixed == pytest.approx(0.2)


def test_the_best_tail():
    """A tail must pay where few answers are long and judging is slow; a setting without gain doesn't move."""
    splits = [Split("fused", 4, 4, tail) for tail in (0.0, 0.1, 0.9)]
    answers = RequestStats(4000, 200, request_s=160.0, in_flight=80.0, requests=128)
    critiques = RequestStats(16384, 32, request_s=655.36, in_flight=80.0, requests=512)
    lengths = histogram([20] * 120 + [200] * 8)
    step = StepStats(splits[0], answers, critiques, 1, 1.0, 0.1, lengths)
    rule = partial(fusion.best_tail, splits=splits, capacity=128, tp=dict(rollout=1, genrm=1))
    decision = rule([step] * fusion.RECENT)
    assert decision.split == splits[1]
    assert decision.reason.startswith("fused 0 -> fused 0.1: it should be ")
    assert rule([step]).reason == "fused 0 stays: measured for 1 of 3 steps"
    alike = replace(step, split=splits[2], lengths=histogram([20] * 128))
    assert rule([alike] * fusion.RECENT).split == splits[2]


def tail_marks(controllers):
    """Return when the ranks change hands: time, step, and the ranks of rollout and genrm from then on."""
    marks = [mark for mark in controllers[0].report.marks if mark.kind == "tail"]
    return [(mark.start, mark.step, mark.name) for mark in marks]


def test_the_tail_moves_and_every_answer_is_judged_beside_it():
    """The tail of ten must move to one of four ranks in the first step, and all answers must be judged."""
    controllers, _ = simulate("fused", 4, tail=0.3, prepare=in_parts_of(3), **UNBROKEN)
    check_as_unbroken(controllers)
    assert [text for _, step, text in tail_marks(controllers) if step == 0][:2] == ["1|3", "0|4"]
    all_batches = [c.report.steps[step][1] for c in controllers for step in range(4)]
    assert sum(batch.moved for batch in all_batches) > 10
    for batch in all_batches:  # generated answers are trained on, filtered or carried: none twice
        groups = [batch.kept, batch.dropped, *batch.filtered, *batch.carried]
        assert batch.tokens == sum(len(sample.response) for group in groups for sample in group)


def long_or_short(prompt, index, sampling):
    asked, begun = to_text(prompt).split("?")
    is_right = asked.split(">")[1] == str(number_in(prompt))
    work = "0:0." * random.Random(asked).randint(1, 20)
    return text_answer(work + ("Y" if is_right else "N"), begun=begun)


def judged_by(c, batch):
    """Return the judge's prompts and critiques, once for equal answers."""
    found = {}
    for sample in samples_of([batch]):
        answer = c.rewards.final_answer(sample)
        if sample.reward is not None and answer is not None:
            found[FORMATS["addition"].prompt(sample.question, answer)] = sample.critique
    return found


@pytest.mark.parametrize(
    "how",
    [
        dict(tail=0.3),
        dict(tail=0.9, rollout_tp=2),
        dict(tail=0.1, algorithm=("ppo",)),
        dict(tail=0.3, size=3, max_refill_waves=0),
    ],
)
def test_what_moves_is_one_request_everywhere(tmp_path, how):
    """Spans, requests and samples must count one request with its real length and prompt, in both roles."""

    def prepare(c):
        c.timeline.folder = tmp_path
        c.prompts.source.held_out = ()  # their answers belong to no step

    how = dict(size=4, steps=4, prepare=in_parts_of(3), verdict=long_or_short) | how
    controllers, _ = simulate("fused", **how, prepare_controller=prepare)
    moved = Counter()
    for step, stats in enumerate(controllers[0].state.history):
        batches = [c.report.steps[step][1] for c in controllers]
        finished = [sample for sample in samples_of(batches) if sample.is_finished]
        expected = {"rollout": [(s.prompt, s.response) for s in finished], "genrm": []}
        for c, batch in zip(controllers, batches, strict=True):
            expected["genrm"] += judged_by(c, batch).items()
        for role, asked in expected.items():
            events = [e for e in timeline.read(tmp_path, step, step) if e.name == role]
            spans = [e for e in events if e.kind == "span"]
            moved[role] += len({e.rank for e in events if e.args["begun"]})
            own, lengths = stats.ranks_and_stats(role)[1], [len(text) for _, text in asked]
            assert sorted(span.args["tokens"] for span in spans) == sorted(lengths)
            assert (own.requests, own.longest) == (len(asked), max(lengths))
            assert own.prompt_tokens == sum(len(prompt) for prompt, _ in asked)
            assert own.tokens == sum(e.args["tokens"] - e.args["begun"] for e in events)
    assert moved["rollout"] and moved["genrm"]


@pytest.mark.parametrize("rollout_tp,genrm_tp", [(2, 1), (1, 2)])
def test_engines_of_several_ranks_change_hands_whole(rollout_tp, genrm_tp):
    options = dict(UNBROKEN, rollout_tp=rollout_tp, genrm_tp=genrm_tp, tail=0.3)
    controllers, _ = simulate("fused", 4, **options)
    check_as_unbroken(controllers)
    assert {text for *_, text in tail_marks(controllers)} == {"2|2", "0|4", "4|0"}


def test_the_fluid_model_by_hand():
    """It has 16 answers of 16 tokens and 4 of 64, 2 engines per role, critiques of 8 tokens, swaps of 1 s."""
    lengths = histogram([16] * 16 + [64] * 4)
    model = FluidModel((2, 2), TokenLatency(1.0, 0.1), TokenLatency(1.0, 0.0), 100, 1.0)
    written = 16 * (1 + 0.1 * 10) + 48 * (1 + 0.1 * 2)
    assert model.seconds(0.0, lengths, 20, 8) == pytest.approx(written + 1 + 8)  # roles alternate
    # the four go on together while the others are judged
    tail = 16 * 2.0 + 1 + 48 * (1 + 0.1 * 4)
    assert model.seconds(0.2, lengths, 20, 8) == pytest.approx(tail + 8)
    slow = model._replace(genrm=TokenLatency(1.0, 1.0))
    # 16 critiques on one engine gain few tokens beside the tail; then all have both engines
    gained = 48 * (1 + 0.1 * 4) / (1 + 16)
    after = (8 - gained) * (1 + 20 / 2) + gained * (1 + 4 / 2)
    assert slow.seconds(0.2, lengths, 20, 8) == pytest.approx(tail + after)


@pytest.mark.parametrize("choose", [None, newest])
def test_what_waits_at_a_busy_engine_moves_to_one_that_joins(choose):
    """The joining engine's share of the newest must continue there from the tokens so far."""
    engines = [engine_of(rank, {1: 60, 2: 60}) for rank in range(2)]

    async def whole(pool, number):
        written = []
        while True:
            prompt = PROMPT + written
            limit = 100 - len(written)
            (request,) = requests_of([prompt], Sampling(1.0, limit), seeds=[SEEDS[number]])
            async for answer in pool.generate([request]):
                written += answer.tokens
                if answer.finish == "stop":
                    return written, answer.rank

    async def work(pool):
        pool._mark_awake((0,))
        asked = [asyncio.create_task(whole(pool, number)) for number in (1, 2)]
        await asyncio.sleep(20)
        await pool.set_awake((0, 1), choose)
        return await asyncio.gather(*asked)

    answers, _ = run_alone(engines, work)
    assert [tokens for tokens, _ in answers] == [answer_to(number, 60) for number in (1, 2)]
    assert [rank for _, rank in answers] == (
        [0, 1] if choose else [0, 0]
    )  # the newest of two moves
