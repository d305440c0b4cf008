"""Pools: who is asked next, going on elsewhere with the tokens so far, lost engines, the split that moves."""

import asyncio
import re
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from config import Config
from engines.engine import Answer, EngineLost, Sampling
from engines.pool import MAX_STALLS, RECONNECT_S, EngineStatus, Pool
from fakes import (
    Device,
    FakeEngine,
    FakeWorld,
    VirtualClock,
    end_all,
    requests_of,
    simulate,
    to_text,
)
from reporting.timeline import Timeline

CONFIG = Config()  # --timeout-s 600: an engine stalls after 120 s


def pool_of(*outstanding, rank=0, models=None):
    """A pool of engines of which others await so many tokens, as the controller of `rank` sees it."""
    models = models or [0] * len(outstanding)
    engines = [
        SimpleNamespace(rank=rank, role="rollout", model=model, name=f"engine {rank}")
        for rank, model in enumerate(models)
    ]
    pool = Pool(engines, SimpleNamespace(rank=rank, size=len(engines)), SimpleNamespace(), CONFIG)
    pool.awake = tuple(range(len(engines)))
    hear(pool, tells(dict(enumerate(outstanding))))
    return pool


def tells(outstanding, parts=(), trouble=(), stalled=()):
    """What another controller tells."""
    return EngineStatus(Counter(outstanding), Counter(parts), dict(trouble), tuple(stalled))


def hear(pool, *others):
    """A meeting with them."""
    return pool.apply_status(EngineStatus.total([pool.status(), *others]))


# ---------------------------------------------------------------- who is asked next


ENGINES = st.tuples(st.integers(0, 9), st.integers(0, 2), st.booleans(), st.booleans())


@given(st.lists(ENGINES, min_size=1, max_size=8), st.data())
def test_route_asks_the_better_of_two_that_may_be_asked(engines, data):
    """Of the model that is asked for, awake and up; those that stalled last; of two never the more loaded."""
    owed, models, stalled, lost = zip(*engines, strict=True)
    model, rank = data.draw(st.sampled_from(models)), data.draw(st.integers(0, 7))
    assume({m for m, is_lost in zip(models, lost, strict=True) if not is_lost} == {*models})
    pool = pool_of(*owed, rank=rank, models=models)
    pool.awake = tuple(data.draw(st.sets(st.integers(0, len(engines) - 1))))
    slow = [r for r in range(len(engines)) if stalled[r]]
    down = {r: "died" for r in range(len(engines)) if lost[r]}
    hear(pool, tells(dict(enumerate(owed)), trouble=down, stalled=slow))
    may = [r for r in pool.awake if models[r] == model and not lost[r]]
    asked = [pool.route(model) for _ in range(10)]
    if not may:
        assert asked == [None] * 10
        return
    first = [r for r in may if not stalled[r]] or may
    assert {engine.rank for engine in asked} <= {*first}
    most = max(owed[r] for r in first)
    if [owed[r] for r in first].count(most) < len(first) == 2:
        assert all(owed[engine.rank] < most for engine in asked)


def test_the_split_moves_only_while_all_sleep():
    """An engine that is awake and out of the plan would never be put to sleep."""
    pool = pool_of(0, 0, 0)
    pool.awake = tuple(engine.rank for engine in pool.engines)
    with pytest.raises(AssertionError, match="while every engine sleeps"):
        pool.assign((0,))
    pool.awake = ()
    pool.assign((0, 2))
    assert [engine.rank for engine in pool.engines] == [0, 2] and len(pool.all_engines) == 3
    assert pool.own.rank == 0
    pool.assign((1, 2))
    assert pool.own is None


# ---------------------------------------------------------------- asking, on a virtual clock


def token_at(seed, place):
    """What an engine writes at a place of a sequence: it follows from seed and place alone."""
    return (31 * (seed or 0) + 7 * place) % 1000


def answer_to(prompt, seed, length):
    return [token_at(seed, len(prompt) + k) for k in range(length)]


class Writer:
    """An engine that writes a token of each answer every `pace` seconds, in parts of `interval` tokens.

    lengths: seed -> the place of an answer's end. breaks, stops: the parts after which the connection
    breaks, and after which nothing comes any more; each only once.
    """

    def __init__(self, rank, lengths, pace=1.0, interval=10, breaks=None, stops=None, model=0):
        self.role, self.rank, self.model, self.name = (
            "rollout",
            rank,
            model,
            f"rollout engine of rank {rank}",
        )
        self.lengths, self.pace, self.interval = lengths, pace, interval
        self.breaks, self.stops = breaks, stops
        self.asked = []  # (time, its requests)
        self.aborted = False

    async def generate(self, requests):
        clock = asyncio.get_running_loop().time
        start, sent, done = clock(), 0, set()
        self.asked.append((start, requests))
        while len(done) < len(requests):
            await self._until(start + self.pace * (sent + 1) * self.interval)
            for index, request in enumerate(requests):
                begun, end = len(request.prompt), self.lengths[request.seed] - len(request.prompt)
                end = min(end, request.limit)
                places = range(sent * self.interval, min(end, (sent + 1) * self.interval))
                if index in done:
                    continue
                finish = "abort" if self.aborted else "stop" if places.stop == end else ""
                done |= {index} if finish else set()
                tokens = [token_at(request.seed, begun + place) for place in places]
                facts = [
                    [-place / 1000 for place in places],
                    finish,
                    [3] * len(tokens),
                    0,
                    start,
                    start,
                    clock(),
                ]
                yield Answer(index, tokens, *facts, rank=self.rank)
            sent += 1

    async def _until(self, time):
        self.breaks = None if self.breaks is None else self.breaks - 1
        if self.breaks == -1:
            raise EngineLost("broke the connection")
        self.stops = None if self.stops is None else self.stops - 1
        await asyncio.sleep(1e6 if self.stops == -1 else time - asyncio.get_running_loop().time())


def run_alone(engines, work):
    """`await work(pool)` with the pool of one rank, on a virtual clock; what it returned, and when."""
    clock = VirtualClock()
    pool = Pool(engines, FakeWorld(0, 1, {}), Timeline(0, clock.time), CONFIG)
    pool.awake = tuple(engine.rank for engine in pool.engines)
    hear(pool, tells({engine.rank: 10**9 * engine.rank for engine in engines}))  # in their order
    try:
        return clock.run_until_complete(work(pool)), clock.time()
    finally:
        end_all(clock)


async def ask(pool, prompts, limit=10**6, model=0, **how):
    """All answers, by their prompts."""
    answers = await ask_with(pool, prompts, Sampling(1.0, limit), model, **how)
    assert sorted(answer.index for answer in answers) == list(range(len(prompts)))
    assert not pool.status().outstanding
    return sorted(answers, key=lambda answer: answer.index)


def test_its_own_tokens_are_not_counted_twice():
    """What this controller told the others is in its own count already."""
    first, second = Writer(0, {1: 100, 2: 40}), Writer(1, {2: 40})

    async def work(pool):
        long = asyncio.create_task(ask_with(pool, [[5]], Sampling(1.0, 99), seeds=[1]))
        await asyncio.sleep(1)
        hear(pool, tells({1: 150}))  # of the first engine it awaits 100
        await ask_with(pool, [[5]], Sampling(1.0, 39), seeds=[2])
        await long

    run_alone([first, second], work)
    assert len(first.asked) == 2 and not second.asked


@pytest.mark.parametrize("trouble", ["breaks", "stops"])
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_another_engine_goes_on_with_the_tokens_so_far(trouble, parts):
    """After a broken connection, or when nothing came for 120 s.

    Prompt and tokens so far are the new prompt, with the same seed and what is left of the limit. Finished
    answers aren't asked again.
    """
    lengths = {1: 25, 2: 62, 3: 90}
    first, second = Writer(0, lengths, **{trouble: parts}), Writer(1, lengths)
    prompts = [[5, 6], [5, 6], [5, 6, 7]]

    async def work(pool):
        answers = await ask(pool, prompts, seeds=[1, 2, 3], limits=[100, 100, 80])
        return answers, pool.pop_stats(), pool.timeline.spans

    (answers, stats, spans), _ = run_alone([first, second], work)
    (asked_at, requests), written = second.asked[0], 10 * parts
    unfinished = [index for index in range(3) if lengths[index + 1] - len(prompts[index]) > written]
    assert [request.seed for request in requests] == [index + 1 for index in unfinished]
    for request, index in zip(requests, unfinished, strict=True):
        assert request.prompt == prompts[index] + answer_to(prompts[index], index + 1, written)
        assert request.limit == [100, 100, 80][index] - written
    waited = asked_at - written
    assert waited == RECONNECT_S if trouble == "breaks" else 120 <= waited <= 240
    for index, (answer, prompt) in enumerate(zip(answers, prompts, strict=True)):
        length = min(lengths[index + 1] - len(prompt), [100, 100, 80][index])
        assert answer.tokens == answer_to(prompt, index + 1, length)
        assert answer.rank == (1 if index in unfinished else 0)
        assert answer.sent == (0 if parts or index not in unfinished else asked_at)
    assert stats.tokens == sum(len(answer.tokens) for answer in answers) and stats.stalls == 1
    assert sorted(span.rank for span in spans) == sorted(answer.rank for answer in answers)


class Queue(Writer):
    """Begins with the answer of seed 2 after 1000 s, when others are done."""

    async def generate(self, requests):
        if requests[0].seed == 2:
            self.asked.append((asyncio.get_running_loop().time(), requests))
            await asyncio.sleep(1000)
        async for part in super().generate(requests):
            yield part


@pytest.mark.parametrize("writes", [True, False])
def test_an_answer_that_queues_is_not_late_while_others_are_written(writes):
    """For 500 s answers of this controller, then for 500 s another's, as the meetings tell; or nothing."""
    engine = Queue(0, {1: 500, 2: 30}, interval=100)

    async def meet(pool):
        for _ in range(20):
            await asyncio.sleep(60)
            hear(pool, tells({}, {0: 1} if writes else {}))

    async def work(pool):
        meeting = asyncio.create_task(meet(pool))
        try:
            await asyncio.gather(
                *(ask_with(pool, [[5]], Sampling(1.0, 900), seeds=[seed]) for seed in (1, 2))
            )
        finally:
            meeting.cancel()
        assert not pool.status().outstanding
        return pool.pop_stats().stalls

    if writes:
        assert run_alone([engine], work)[0] == 0
    else:
        with pytest.raises(
            ValueError, match=r"^the rollout engine of rank 0 wrote nothing for 120 s, .*600"
        ):
            run_alone([engine], work)
    queued = [
        sent for sent, requests in engine.asked if len(requests) == 1 and requests[0].seed == 2
    ]
    assert len(queued) == (2 if writes else MAX_STALLS)  # it was queued once, and then begun


@pytest.mark.parametrize("trouble", ["breaks", "stops"])
def test_an_engine_that_brings_nothing_again_and_again_ends_the_run(trouble):
    """In one line that names it and the setting."""
    engines = [Writer(rank, {1: 900}, **{trouble: 0}) for rank in range(MAX_STALLS)]
    with pytest.raises(
        ValueError, match=r"^the rollout engine of rank \d .*third.*--timeout-s 600[^\n]*$"
    ):
        run_alone(engines, lambda pool: ask(pool, [[5, 6]], seeds=[1]))
    assert [len(engine.asked) for engine in engines] == [1] * MAX_STALLS


def test_an_aborted_answer_is_not_asked_again():
    """It comes with what was written: by two engines, if another had begun."""
    first, second = Writer(0, {1: 100}, breaks=2), Writer(1, {1: 100})

    async def work(pool):
        asyncio.get_running_loop().call_later(35, vars(second).update, {"aborted": True})
        return await ask(pool, [[5, 6]], seeds=[1])

    [answer], _ = run_alone([first, second], work)
    assert (answer.finish, answer.tokens) == ("abort", answer_to([5, 6], 1, 40))
    assert len(first.asked) == len(second.asked) == 1


@pytest.mark.parametrize("breaks,tokens", [(0, 0), (2, 20)])
def test_what_waits_for_an_engine_is_given_up_when_all_is_aborted(breaks, tokens):
    """The only engine was lost: what came of the answer comes back, and nobody waits for the rest."""

    async def work(pool):
        asked = asyncio.create_task(ask_with(pool, [[5, 6]], Sampling(1.0, 1000), seeds=[1]))
        await asyncio.sleep(10 * breaks + 1)
        pool.awake = ()
        await asyncio.sleep(100)
        assert not asked.done()
        await pool.abort()
        return await asked

    answers, seconds = run_alone([Writer(1, {1: 100}, breaks=breaks)], work)
    expected = [("abort", answer_to([5, 6], 1, tokens))] * bool(tokens)
    assert [(answer.finish, answer.tokens) for answer in answers] == expected and seconds < 122


async def ask_with(pool, prompts, sampling, model=0, **how):
    return [answer async for answer in pool.generate(requests_of(prompts, sampling, **how), model)]


def test_requests_wait_while_no_engine_of_the_model_is_up():
    """Until the next meeting ends the run, or tells that it is up."""
    engines = [Writer(0, {1: 30}), Writer(1, {1: 30}, model=1)]

    async def work(pool):
        pool.awake = (0,)
        asked = asyncio.create_task(ask(pool, [[5]], seeds=[1], model=1))
        await asyncio.sleep(100)
        assert not asked.done() and engines[1].asked == [] == engines[0].asked
        pool.awake = (0, 1)
        return await asked

    run_alone(engines, work)
    assert len(engines[1].asked) == 1 and not engines[0].asked


# ---------------------------------------------------------------- engines that are lost


def with_lost(*lost):
    return tells({}, trouble={rank: "died (signal 9)" for rank in lost})


def test_each_lost_engine_is_told_once():
    """Then it isn't asked any more."""
    pool = pool_of(0, 5, 5)
    assert hear(pool, with_lost()) == []
    line = "the engine {} died (signal 9): others go on with its work"
    assert hear(pool, with_lost(0)) == [line.format(0)]
    assert hear(pool, with_lost(0)) == [] and pool.route().rank in (1, 2)
    assert hear(pool, with_lost(0), with_lost(1)) == [line.format(1)] and pool.route().rank == 2


def test_sleep_forgets_what_others_awaited():
    """Or the first requests of a step would go other ways in a run that was resumed."""

    async def work(pool):
        async def asked():
            return [pool.route().rank for _ in range(10)]

        first = await asked()
        hear(pool, tells({0: 100}))
        assert await asked() == [1] * 10
        await pool.sleep()
        assert pool.route() is None
        await pool.wake()
        assert await asked() == first

    run_ranks(2, work)


@pytest.mark.parametrize(
    "models,lost,dead", [([0, 0], (0, 1), "01"), ([0, 1, 1], (0, 1), "0"), ([0], (0,), "0")]
)
def test_a_role_or_judge_without_an_engine_ends_the_run(models, lost, dead):
    """One line with each engine that could have been asked."""
    pool = pool_of(*[0] * len(models), models=models)
    troubles = "; ".join(f"the engine {rank} died (signal 9)" for rank in dead)
    with pytest.raises(
        ValueError, match=f"^no rollout engine is left to ask: {re.escape(troubles)}$"
    ):
        hear(pool, with_lost(*lost))


def run_ranks(size, work):
    """`work(pool)` on every rank of a fleet of fake engines, awake, on a virtual clock."""
    clock, meetings, log = VirtualClock(), {}, []
    write = lambda prompt, index, sampling: Answer(0, [1] * 40, [-0.5] * 40, "stop", [])  # noqa: E731
    own = [FakeEngine("genrm", rank, Device(rank, log), write) for rank in range(size)]
    pools = []
    for rank in range(size):
        engines = [engine if engine.rank == rank else engine.handle() for engine in own]
        pools.append(
            Pool(engines, FakeWorld(rank, size, meetings), Timeline(rank, clock.time), CONFIG)
        )

    async def all_ranks():
        await asyncio.gather(*(pool.wake() for pool in pools))
        return await asyncio.gather(*(work(pool) for pool in pools))

    try:
        return clock.run_until_complete(all_ranks())
    finally:
        end_all(clock)


async def meet(pool, times):
    """The controllers' meetings: the lines for people."""
    lines = []
    for _ in range(times):
        await asyncio.sleep(0.05)
        lines += pool.apply_status(await pool.world.reduce(pool.status(), EngineStatus.total))
    return lines


@pytest.mark.parametrize("verb", ["die", "hang"])
@pytest.mark.parametrize("when", ["awake", "asleep"])
def test_a_lost_engine_is_passed_over_and_started_again_once_all_sleep(verb, when):
    """Its owner finds it out; the other writes what it owed; after restart_lost it takes part again."""

    async def work(pool):
        server = pool.own.server
        await pool.sleep()
        strike = {"die": server.die, "hang": server.hang}[verb]
        if pool.world.rank == 1 and when == "asleep":
            strike()
        await pool.wake()
        if pool.world.rank == 1 and when == "awake":
            asyncio.get_running_loop().call_later(0.2, strike)
        asked = asyncio.create_task(ask(pool, [[ord("7"), ord("+")]] * 4, seeds=[0] * 4))
        lines = await meet(pool, 1000)
        await asked
        asked_before = server.requests
        await pool.sleep()
        started = await pool.restart_lost()
        await pool.wake()
        await ask(pool, [[ord("7"), ord("+")]] * 4, seeds=[0] * 4)
        await pool.sleep()
        assert await pool.restart_lost() == 0
        return lines, started, server.requests - asked_before, server.runs

    (lines, *first), (others, *second) = run_ranks(2, work)
    how = (
        {"die": "died", "hang": "gave no sign of life"}[verb]
        if when == "awake"
        else "didn't answer"
    )
    assert lines == others == [f"the genrm engine of rank 1 {how}: others go on with its work"]
    assert first == [0, 1, True] and second == [1, 1, True]


# ---------------------------------------------------------------- moves, in a whole run


def slow_judges(engines):
    """genrm takes nearly all of the time: another split may seem better."""
    for engine in engines:
        engine.server.pace = 0.05 if engine.role == "genrm" else 0.002


@pytest.mark.parametrize(
    "mode,rollout_tp", [("partial", 1), pytest.param("auto", 2, marks=pytest.mark.slow)]
)
def test_engines_change_hands_when_the_split_moves(mode, rollout_tp):
    """What is newly asked was pushed the version of its step; every rank tells of each move."""
    size, steps = 4 * rollout_tp, 10 if mode == "partial" else 20
    settings = dict(
        rebalance=True, rollout_tp=rollout_tp, prompts_per_step=16, eval_every=100, steps=steps
    )
    settings["rollout_ranks"] = 3 * rollout_tp if mode == "partial" else 0
    controllers, _ = simulate(mode, size, prepare=slow_judges, **settings)
    first = controllers[0]
    splits = [str(stats.split) for stats in first.state.history] + [str(first.placement.plan.split)]
    moved = [(step, now) for step, (before, now) in enumerate(pairwise(splits)) if before != now]
    assert moved
    for c in controllers:
        assert c.state.history == first.state.history and c.placement.plan == first.placement.plan
        marks = c.report.marks
        assert [mark.text for mark in marks if mark.kind == "split"] == [now for _, now in moved]
        assert [mark.text for mark in marks if mark.kind == "weights"] == [
            f"v{n + 1}" for n in range(steps)
        ]
        notes = [note.split(":")[0] for note in c.report.notes if "->" in note]
        assert notes == [f"step {step + 1}" for step, _ in moved]
    plans = {str(plan.split): plan for plan in first.placement.plans}
    for step in range(
        steps
    ):  # the requests of a step went to the engines of its plan and no others
        spans = [span for c in controllers for span in c.report.steps[step][3]]
        for role in ("rollout", "genrm"):
            asked = {span.rank for span in spans if span.name == role}
            assert asked and asked <= set(plans[splits[step]].leads(role))
        wrote = {
            version
            for c in controllers
            for s in c.report.steps[step][1].kept
            for version in s.versions
        }
        assert wrote <= {step}
    asked = [
        request for engine in first.placement.rollout.all_engines for request in engine.server.asked
    ]
    assert {version for _, version in asked} == set(range(steps + 1))  # also the last evaluation's


def test_judges_take_turns_on_the_genrm_engines():
    """Each judge is asked on engines of its own model, as many times as the other; the reward needs both."""
    controllers, _ = simulate("partial", 4, model="M", judge=("A", "B"), rollout_ranks=2, steps=2)
    engines = controllers[0].placement.genrm.all_engines
    requests = {
        engine.model: engine.server.requests for engine in engines if engine.server.requests
    }
    assert set(requests) == {0, 1} and requests[0] == requests[1]
    samples = [s for c in controllers for _, batch, _, _ in c.report.steps for s in batch.kept]
    finished = [s for s in samples if ">" in to_text(s.response)]
    assert finished and all(s.reward in (0.0, 1.0) and "judge 1:" in s.critique for s in finished)
