"""Pools: routing, turns, outstanding tokens, aborts, and an engine that generates nothing."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import Config
from engines.engine import Answer, EngineLost, Sampling, seed_of
from engines.pool import EngineStatus, Pool
from engines.routing import Load
from runtime.timeline import Timeline
from scheduling.measured import total
from tests.support.fakes import (
    Device,
    FakeEngine,
    FakeWorld,
    VirtualClock,
    requests_of,
    run_on,
    text_answer,
)

CONFIG = Config()  # --timeout-s 600: an engine is lost after 300 s


def pool_of(*outstanding, rank=0, models=None, awake=None):
    """Make a pool of engines with this many tokens outstanding for others, as `rank`'s controller sees it."""
    models = models or [0] * len(outstanding)
    how = dict(role="rollout", capacity=1)
    engines = [SimpleNamespace(rank=rank, model=model, **how) for rank, model in enumerate(models)]
    world = FakeWorld(rank, len(engines), {})
    pool = Pool(engines, world, SimpleNamespace(), CONFIG)
    pool._mark_awake(tuple(range(len(engines))) if awake is None else awake)
    others_await(pool, dict(enumerate(outstanding)))
    return pool


def others_await(pool, outstanding):
    """Set the others' outstanding tokens by an engine's rank, as a meeting would."""
    pool.status()
    pool._load.update(Counter(outstanding))


def hear(pool, parts=()):
    """Simulate a meeting with another controller that has received this many parts of answers."""
    other = EngineStatus(Counter(), Counter(dict(parts)))
    pool.apply_status(total([pool.status(), other]))


ENGINES = st.tuples(st.integers(0, 9), st.integers(0, 2))


@given(st.lists(ENGINES, min_size=1, max_size=8), st.data())
def test_route_asks_the_less_loaded_of_two_that_may_be_asked(engines, data):
    """They must be awake and of the requested model; of two it never takes the more loaded."""
    owed, models = zip(*engines, strict=True)
    model, rank = data.draw(st.sampled_from(models)), data.draw(st.integers(0, 7))
    awake = tuple(data.draw(st.sets(st.integers(0, len(engines) - 1))))
    pool = pool_of(*owed, rank=rank, models=models, awake=awake)
    may = [r for r in awake if models[r] == model]
    asked = [pool.route(model) for _ in range(10)]
    assert {engine and engine.rank for engine in asked} <= ({*may} or {None})
    if len(may) == 2 and owed[may[0]] != owed[may[1]]:
        assert all(owed[engine.rank] < max(owed[r] for r in may) for engine in asked)


@pytest.mark.parametrize("controllers", [1, 2, 3, 4, 16, 32])
@pytest.mark.parametrize("engines", [1, 2, 4, 6, 7, 16, 32])
def test_who_ask_as_often_load_engines_alike(controllers, engines):
    """Each controller must use all engines equally, though none knows the others' requests."""
    engines = [SimpleNamespace(rank=rank, model=0) for rank in range(engines)]
    loads = [Load(FakeWorld(rank, controllers, {})) for rank in range(controllers)]
    for _ in range(12):
        for load in loads:
            load.outstanding[load.choose(engines).rank] += 1
        own = [[load.outstanding[engine.rank] for engine in engines] for load in loads]
        for counts in (*own, list(map(sum, zip(*own, strict=True)))):
            assert max(counts) - min(counts) <= 1


PROMPT = [ord("7"), ord("+")]
# identify the answer for the engine
SEEDS = [seed_of(0, 7, number) for number in range(4)]


def answer_to(number, length):
    return [(31 * number + 7 * k) % 1000 for k in range(length)]


def engine_of(rank, lengths, model=0):
    """Make an awake engine: a token per second and answer, in parts of ten. lengths: by number."""

    def write(prompt, number, sampling):
        tokens = answer_to(number, lengths[number])[len(prompt) - len(PROMPT) :]
        return Answer(0, tokens, [-token / 1000 for token in tokens], "stop", [])

    engine = FakeEngine("genrm", rank, Device(rank, []), write, model)
    vars(engine).update(pace=1.0, part=10, awake=True)
    return engine


def run_alone(engines, work, config=CONFIG):
    """Run `await work(pool)` with the pool of one rank on a virtual clock; return its result and the time."""
    clock = VirtualClock()
    pool = Pool(engines, FakeWorld(0, 1, {}), Timeline(0, clock.time), config)
    pool._mark_awake(tuple(engine.rank for engine in pool.engines))
    others_await(pool, {engine.rank: 10**9 * engine.rank for engine in engines})  # in their order
    return *run_on(clock, work(pool)), clock.time()


def at(seconds, act):
    asyncio.get_running_loop().call_later(seconds, act)


async def ask(pool, numbers, limit=1000, model=0):
    seeds = [SEEDS[number] for number in numbers]
    requests = requests_of([PROMPT] * len(numbers), Sampling(1.0, limit), seeds=seeds)
    answers = [answer async for answer in pool.generate(requests, model)]
    return sorted(answers, key=lambda answer: answer.index)


def test_parts_of_an_answer_come_as_one():
    """The whole must have all tokens, from one engine, once finished; then nothing is outstanding."""
    lengths = {1: 23, 2: 60, 3: 10}
    engine = engine_of(0, lengths)

    async def work(pool):
        answers = await ask(pool, [1, 2, 3])
        assert not pool.status().outstanding
        return answers, pool.pop_stats(), pool.timeline.events

    (answers, stats, spans), _ = run_alone([engine], work)
    for answer, (number, length) in zip(answers, lengths.items(), strict=True):
        assert answer.tokens == answer_to(number, length)
        assert answer.logprobs == [-token / 1000 for token in answer.tokens]
        assert (answer.sent, answer.end, answer.finish) == (0, length, "stop")
    assert stats.tokens == sum(lengths.values()) and len(spans) == stats.requests == 3
    assert [span.args["tokens"] for span in spans] == sorted(lengths.values())


def test_its_own_tokens_are_not_counted_twice():
    """The others' count must not include what this controller reported itself."""
    first, second = engine_of(0, {1: 98, 2: 38}), engine_of(1, {2: 38})

    async def work(pool):
        long = asyncio.create_task(ask(pool, [1], limit=98))
        await asyncio.sleep(1)
        others_await(pool, {0: 100, 1: 150})  # this controller awaits 100 of the first engine's
        await ask(pool, [2], limit=38)
        await long

    run_alone([first, second], work)
    assert len(first.asked) == 2 and not second.asked


def test_requests_take_turns():
    """Two run for each that their model's engines decode; others wait without delaying another model's."""
    one, other = engine_of(0, {1: 10}), engine_of(1, {1: 10}, model=1)

    async def work(pool):
        asked = [ask(pool, [1], model=model) for model in [0] * 20 + [1]]
        at(15, lambda: pool._mark_awake(()))
        at(50, lambda: pool._mark_awake((0, 1)))
        return await asyncio.gather(*asked)

    answers, seconds = run_alone([one, other], work, Config(max_running_requests=3))
    assert {(len(answer.tokens), answer.finish) for [answer] in answers} == {(10, "stop")}
    starts = Counter(round(start) for start, _ in one.asked)
    assert starts == {0: 6, 10: 6, 50: 6, 60: 2} and seconds == pytest.approx(70, abs=1)
    assert [start for start, _ in other.asked] == [0]


def test_what_waits_for_its_turn_is_not_asked_after_an_abort():
    engine = engine_of(0, {1: 98})

    async def work(pool):
        at(5.5, lambda: asyncio.ensure_future(pool.abort()))
        return await asyncio.gather(*(ask(pool, [1]) for _ in range(9)))

    answers, seconds = run_alone([engine], work, Config(max_running_requests=2))
    assert [[len(a.tokens) for a in each] for each in answers] == [[5]] * 4 + [[]] * 5
    assert len(engine.asked) == 4 and seconds == 5.5


def test_what_waits_for_an_engine_returns_at_once_from_an_abort():
    """A later request must keep waiting; all are reported as waiting meanwhile."""
    engine = engine_of(0, {1: 10})

    async def work(pool):
        pool._mark_awake(())
        asked = asyncio.create_task(ask(pool, [1]))
        await asyncio.sleep(5)
        assert pool.status().waiting == 1
        await pool.abort()
        assert await asked == [] and asyncio.get_running_loop().time() == 5
        at(10, lambda: pool._mark_awake((0,)))
        [answer] = await ask(pool, [1])
        assert pool.status().waiting == 0
        return answer.sent

    assert run_alone([engine], work)[0] == 15 and len(engine.asked) == 1


def cancel(engine, asked):
    asked.cancel()


def die(engine, asked):
    engine.die()


@pytest.mark.parametrize("end, error", [(die, EngineLost), (cancel, asyncio.CancelledError)])
def test_what_an_engine_owed_is_given_back_when_it_is_not_awaited_any_more(end, error):
    engine = engine_of(0, {1: 15, 2: 60})

    async def work(pool):
        asked = asyncio.create_task(ask(pool, [1, 2], limit=70))
        at(25, lambda: end(engine, asked))
        await asyncio.sleep(22)
        # prompts of 2 tokens and 70: one answer is finished, 20 tokens of the other came
        assert pool.status().outstanding == {0: 72 - 20}
        with pytest.raises(error):
            await asked
        assert not pool.status().outstanding

    run_alone([engine], work)


def test_an_engine_that_owes_tokens_and_writes_none_is_lost():
    """The limit is half of --timeout-s after the first meeting that reports it; a model may train before."""
    engine = engine_of(0, {1: 98})

    async def work(pool):
        await ask(pool, [1])
        for _ in range(2):  # nothing is outstanding
            hear(pool)
        engine.lose()
        asked = asyncio.create_task(ask(pool, [1]))
        await asyncio.sleep(1000)
        for seconds in (299, 2):
            hear(pool)
            await asyncio.sleep(seconds)
        line = "genrm engine of rank 0 has 1002 tokens outstanding and sent none for 300 s"
        with pytest.raises(EngineLost, match=line):
            hear(pool)
        asked.cancel()

    run_alone([engine], work)


def test_an_answer_that_queues_is_not_late_while_another_is_written():
    """Meetings report another controller's answers; nothing may be late once all are finished."""
    engine = engine_of(0, {1: 500})
    engine.part = 500

    async def work(pool):
        for seconds in range(60, 500, 60):
            at(seconds, lambda: hear(pool, {0: 1}))
        await ask(pool, [1])
        for _ in range(2):
            hear(pool)
            await asyncio.sleep(400)

    run_alone([engine], work)
    assert len(engine.asked) == 1


def test_engines_that_are_to_sleep_are_waited_for_no_longer():
    """They must finish their answers, however long that takes, unless nothing arrives."""
    engine = engine_of(0, {1: 400})
    engine.device.take("genrm weights")

    async def work(pool):
        asked = asyncio.create_task(ask(pool, [1]))
        await asyncio.sleep(1)
        await pool.set_awake(())
        assert asked.done() and not engine.awake
        await pool.set_awake((0,))
        engine.lose()
        asked = asyncio.create_task(ask(pool, [1]))
        await asyncio.sleep(1)
        with pytest.raises(EngineLost, match="has 1002 tokens outstanding and sent none for 300 s"):
            await pool.set_awake(())
        asked.cancel()

    seconds = run_alone([engine], work)[1]
    assert seconds == pytest.approx(400 + 300, abs=3)


def test_sleep_forgets_what_others_awaited():
    """Otherwise a resumed run would route a step's first requests differently."""
    clock, meetings = VirtualClock(), {}
    write = lambda *_: text_answer("7")  # noqa: E731
    engines = [FakeEngine("genrm", rank, Device(rank, []), write) for rank in range(2)]

    async def one_rank(rank):
        world = FakeWorld(rank, 2, meetings)
        pool = Pool(engines, world, Timeline(rank, clock.time), CONFIG)
        await pool.wake()
        first = [pool.route().rank for _ in range(9)]
        others_await(pool, {0: 100})
        assert [pool.route().rank for _ in range(10)] == [1] * 10
        await pool.sleep()
        assert pool.route() is None
        await pool.wake()
        assert [pool.route().rank for _ in range(9)] == first

    run_on(clock, *map(one_rank, range(2)))
