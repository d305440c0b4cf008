"""Pools: who is asked next, going on elsewhere with the tokens so far, lost engines, the split that moves."""

import asyncio
import re
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from config import Config
from engines.engine import Answer, Sampling, seed_of
from engines.pool import MAX_STALLS, RECONNECT_S, EngineStatus, Pool
from engines.routing import Load
from engines.server import STREAM_INTERVAL
from fakes import Device, FakeEngine, FakeWorld, VirtualClock, requests_of, run_on, text_answer
from reporting.timeline import Timeline

CONFIG = Config()  # --timeout-s 600: an engine stalls after 120 s


def pool_of(*outstanding, rank=0, models=None):
    """A pool of engines of which others await so many tokens, as the controller of `rank` sees it."""
    models = models or [0] * len(outstanding)
    engines = [
        SimpleNamespace(rank=rank, role="rollout", model=model, name=f"engine {rank}", capacity=1)
        for rank, model in enumerate(models)
    ]
    world = FakeWorld(rank, len(engines), {})
    pool = Pool(engines, world, SimpleNamespace(), CONFIG)
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
    first = [r for r in may if not stalled[r]] or may
    asked = [pool.route(model) for _ in range(10)]
    assert {engine and engine.rank for engine in asked} <= ({*first} or {None})
    if len(first) == 2 and owed[first[0]] != owed[first[1]]:
        assert all(owed[engine.rank] < max(owed[r] for r in first) for engine in asked)


@pytest.mark.parametrize("controllers", [1, 2, 3, 4, 16, 32])
@pytest.mark.parametrize("engines", [1, 2, 4, 6, 7, 16, 32])
def test_who_ask_as_often_load_engines_alike(controllers, engines):
    """And each controller asks all engines alike, though nobody knows what others ask."""
    engines = [SimpleNamespace(rank=rank, model=0) for rank in range(engines)]
    loads = [Load(FakeWorld(rank, controllers, {})) for rank in range(controllers)]
    for _ in range(12):
        for load in loads:
            load.outstanding[load.choose(engines).rank] += 1
        own = [[load.outstanding[engine.rank] for engine in engines] for load in loads]
        for counts in (*own, list(map(sum, zip(*own, strict=True)))):
            assert max(counts) - min(counts) <= 1


# ---------------------------------------------------------------- asking, on a virtual clock


PROMPT = [ord("7"), ord("+")]
# by which an engine knows which answer is meant
SEEDS = [seed_of(0, 7, number) for number in range(4)]


def answer_to(prompt, number, length):
    """What any engine writes after a prompt: each token follows from the answer's number and its place."""
    return [(31 * number + 7 * (len(prompt) + k)) % 1000 for k in range(length)]


def engine_of(rank, ends, model=0, kind=FakeEngine):
    """It is awake and writes a token of each answer a second, in parts of ten. ends: number of an
    answer -> the place at which it ends."""

    def write(prompt, number, sampling):
        tokens = answer_to(prompt, number, ends[number] - len(prompt))
        return Answer(0, tokens, [-token / 1000 for token in tokens], "stop", [])

    engine = kind("genrm", rank, Device(rank, []), write, model)
    vars(engine).update(pace=1.0, part=10, awake=True)
    return engine


def run_alone(engines, work, config=CONFIG):
    """`await work(pool)` with the pool of one rank, on a virtual clock; what it returned, and when."""
    clock = VirtualClock()
    pool = Pool(engines, FakeWorld(0, 1, {}), Timeline(0, clock.time), config)
    pool.awake = tuple(engine.rank for engine in pool.engines)
    hear(pool, tells({engine.rank: 10**9 * engine.rank for engine in engines}))  # in their order
    return *run_on(clock, work(pool)), clock.time()


def at(seconds, act):
    asyncio.get_running_loop().call_later(seconds, act)


async def ask(pool, prompts, numbers, limit=1000, model=0, **how):
    """The answers of these numbers, as they come."""
    seeds = [SEEDS[number] for number in numbers]
    requests = requests_of(prompts, Sampling(1.0, limit), seeds=seeds, **how)
    answers = [answer async for answer in pool.generate(requests, model)]
    return sorted(answers, key=lambda answer: answer.index)


def test_its_own_tokens_are_not_counted_twice():
    """What this controller told the others is in its own count already."""
    first, second = engine_of(0, {1: 100, 2: 40}), engine_of(1, {2: 40})

    async def work(pool):
        long = asyncio.create_task(ask(pool, [PROMPT], [1], limit=98))
        await asyncio.sleep(1)
        hear(pool, tells({1: 150}))  # of the first engine it awaits 100
        await ask(pool, [PROMPT], [2], limit=38)
        await long

    run_alone([first, second], work)
    assert len(first.asked) == 2 and not second.asked


@pytest.mark.parametrize("trouble", ["dies", "hangs"])
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_another_engine_goes_on_with_the_tokens_so_far(trouble, parts):
    """After a broken connection, or when nothing came for 120 s. Prompt and tokens so far are the
    new prompt, with the same seed and what is left of the limit. Finished answers aren't asked
    again."""
    ends, limits, written = {1: 25, 2: 62, 3: 90}, [100, 100, 80], 10 * parts
    first, second = engine_of(0, ends), engine_of(1, ends)
    prompts = [PROMPT, PROMPT, [*PROMPT, 0]]
    lengths = [23, 60, 80]  # as far as the prompt and the limit leave room

    async def work(pool):
        at(written + 1, first.die if trouble == "dies" else first.hang)
        answers = await ask(pool, prompts, [1, 2, 3], limits=limits)
        assert not pool.status().outstanding
        return answers, pool.pop_stats(), pool.timeline.events

    (answers, stats, spans), _ = run_alone([first, second], work)
    [(asked_at, _)], [requests] = second.asked, second.requests
    unfinished = [index for index in range(3) if lengths[index] > written]
    assert [request.seed for request in requests] == [SEEDS[index + 1] for index in unfinished]
    for request, index in zip(requests, unfinished, strict=True):
        assert request.prompt == prompts[index] + answer_to(prompts[index], index + 1, written)
        assert request.limit == limits[index] - written
    waited = asked_at - written
    assert waited == 1 + RECONNECT_S if trouble == "dies" else 120 <= waited <= 240
    for index, answer in enumerate(answers):
        assert answer.tokens == answer_to(prompts[index], index + 1, lengths[index])
        assert answer.rank == (1 if index in unfinished else 0)
        assert answer.sent == (0 if parts or index not in unfinished else asked_at)
    assert stats.tokens == sum(lengths) and stats.stalls == 1
    assert sorted(span.rank for span in spans) == sorted(answer.rank for answer in answers)


def test_an_answer_that_queues_is_not_late_while_another_is_written():
    """Another controller's, as the meetings tell."""
    engine = engine_of(0, {1: 500})
    engine.part = 500

    async def work(pool):
        for seconds in range(60, 500, 60):
            at(seconds, lambda: hear(pool, tells({}, {0: 1})))
        await ask(pool, [PROMPT], [1])
        return pool.pop_stats().stalls

    assert run_alone([engine], work)[0] == 0 and len(engine.asked) == 1


@pytest.mark.parametrize("tokens_a_second", [30, 2])
def test_an_engine_that_writes_is_not_called_stalled(tokens_a_second):
    """With --timeout-s 30, though it tells of a first token, and then of each STREAM_INTERVAL. That
    takes a second, or more than the 6 s after which its health is asked."""
    engine = engine_of(0, {1: 302})
    vars(engine).update(pace=1 / tokens_a_second, first=1, part=STREAM_INTERVAL)

    async def work(pool):
        [answer] = await ask(pool, [PROMPT], [1])
        return answer.tokens, pool.pop_stats().stalls

    found, seconds = run_alone([engine], work, Config(timeout_s=30))
    assert found == (answer_to(PROMPT, 1, 300), 0) and len(engine.asked) == 1
    assert seconds == pytest.approx(300 / tokens_a_second)


LOSES_IT = dict(pace=1e9)  # is healthy, but nothing ever comes of this request
GAINS_A_TOKEN = dict(pace=100, first=1)  # each time that it is asked


@pytest.mark.parametrize("trouble", [dict(drops=1), dict(hangs=True), LOSES_IT, GAINS_A_TOKEN])
def test_an_engine_that_brings_nothing_again_and_again_ends_the_run(trouble):
    """In one line that names it and the setting."""
    engines = [engine_of(rank, {1: 900}) for rank in range(MAX_STALLS)]
    for engine in engines:
        vars(engine).update(trouble)
    line = r"^the genrm engine of rank \d .*third.*--timeout-s 600[^\n]*$"
    with pytest.raises(ValueError, match=line):
        run_alone(engines, lambda pool: ask(pool, [PROMPT], [1]))
    assert [len(engine.asked) for engine in engines] == [1] * MAX_STALLS


def test_requests_take_turns():
    """Two for each that the engines of their model decode; the rest wait, and don't hold up another's."""
    one, other = engine_of(0, {1: 12}), engine_of(1, {1: 12}, model=1)

    async def work(pool):
        asked = [ask(pool, [PROMPT], [1], model=model) for model in [0] * 20 + [1]]
        at(15, lambda: vars(pool).update(awake=()))
        at(50, lambda: vars(pool).update(awake=(0, 1)))
        return await asyncio.gather(*asked)

    answers, seconds = run_alone([one, other], work, Config(max_running_requests=3))
    assert {(len(answer.tokens), answer.finish) for [answer] in answers} == {(10, "stop")}
    starts = Counter(round(start) for start, _ in one.asked)
    assert starts == {0: 6, 10: 6, 50: 6, 60: 2} and seconds == pytest.approx(70, abs=1)
    assert [start for start, _ in other.asked] == [0]


def test_what_waits_for_its_turn_is_not_asked_after_an_abort():
    engine = engine_of(0, {1: 100})

    async def work(pool):
        at(5.5, lambda: asyncio.ensure_future(pool.abort()))
        return await asyncio.gather(*(ask(pool, [PROMPT], [1]) for _ in range(9)))

    answers, seconds = run_alone([engine], work, Config(max_running_requests=2))
    assert [[len(a.tokens) for a in each] for each in answers] == [[5]] * 4 + [[]] * 5
    assert len(engine.asked) == 4 and seconds == 5.5


def test_an_aborted_answer_is_not_asked_again():
    """It comes with what was written: by two engines, if another had begun."""
    first, second = engine_of(0, {1: 100}), engine_of(1, {1: 100})

    async def work(pool):
        at(21, first.die)
        asked = asyncio.create_task(ask(pool, [PROMPT], [1]))
        await asyncio.sleep(21 + RECONNECT_S + 25.5)
        await second.abort()
        return await asked

    [answer], _ = run_alone([first, second], work)
    assert (answer.finish, answer.tokens) == ("abort", answer_to(PROMPT, 1, 20 + 25))
    assert len(first.asked) == len(second.asked) == 1


# ---------------------------------------------------------------- engines that are lost


def with_lost(*lost):
    return tells({}, trouble={rank: "died (signal 9)" for rank in lost})


def test_each_lost_engine_is_told_once():
    """Then it isn't asked any more."""
    pool = pool_of(0, 5, 5)
    assert hear(pool, with_lost()) == []
    line = "others go on with its work: the engine {} died (signal 9)"
    assert hear(pool, with_lost(0)) == [line.format(0)]
    assert hear(pool, with_lost(0)) == [] and pool.route().rank in (1, 2)
    assert hear(pool, with_lost(0), with_lost(1)) == [line.format(1)] and pool.route().rank == 2


def test_a_judge_without_an_engine_ends_the_run():
    """One line with each engine that could have been asked."""
    pool = pool_of(0, 0, 0, models=[0, 1, 0])
    troubles = "; ".join(f"the engine {rank} died (signal 9)" for rank in (0, 2))
    line = f"^no rollout engine is left to ask: {re.escape(troubles)}$"
    with pytest.raises(ValueError, match=line):
        hear(pool, with_lost(0, 2))


def run_ranks(size, work):
    """`work(pool)` on every rank of a fleet of fake engines, awake, on a virtual clock."""
    clock, meetings, pools = VirtualClock(), {}, []
    write = lambda *_: text_answer("7" * 40)  # noqa: E731
    engines = [FakeEngine("genrm", rank, Device(rank, []), write) for rank in range(size)]
    for rank in range(size):
        world = FakeWorld(rank, size, meetings)
        pools.append(Pool(engines, world, Timeline(rank, clock.time), CONFIG))

    async def one_rank(pool):
        await pool.wake()
        return await work(pool)

    return run_on(clock, *map(one_rank, pools))


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
    "verb,when,how",
    [
        ("die", "awake", "died"),
        ("hang", "awake", "gave no sign of life"),
        ("die", "asleep", "didn't answer"),
    ],
)
def test_a_lost_engine_is_passed_over_and_started_again_once_all_sleep(verb, when, how):
    """Its owner finds it out; the other writes what it owed; after restart_lost it takes part again."""

    async def use(pool, meetings):
        """Four answers, while the controllers meet: the lines for people."""
        lines, asked = [], asyncio.create_task(ask(pool, [PROMPT] * 4, range(4)))
        for _ in range(meetings):
            await asyncio.sleep(0.05)
            lines += pool.apply_status(await pool.world.reduce(pool.status(), EngineStatus.total))
        assert len(await asked) == 4
        return lines

    async def work(pool):
        server, is_struck = pool.own, pool.world.rank == 1
        strike = server.die if verb == "die" else server.hang
        await pool.sleep()
        if is_struck and when == "asleep":
            strike()
        await pool.wake()
        if is_struck and when == "awake":
            at(0.2, strike)
        lines, asked_before = await use(pool, 1000), len(server.requests)
        await pool.sleep()
        started = await pool.restart_lost()
        await pool.wake()
        await use(pool, 0)
        await pool.sleep()
        assert await pool.restart_lost() == 0
        return lines, started, len(server.requests) - asked_before, server.runs

    (lines, *first), (others, *second) = run_ranks(2, work)
    line = f"others go on with its work: the genrm engine of rank 1 {how}; the end of its log"
    assert lines == others and [each.split(": written")[0] for each in lines] == [line]
    assert first == [0, 1, True] and second == [1, 1, True]
