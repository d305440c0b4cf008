"""The simulation: its engines against a token-by-token one, its costs, and the real controllers in it."""

import asyncio
import random
from collections import deque
from dataclasses import replace
from itertools import count

import pytest

from engines.engine import Request, Sampling
from sample import Sample
from scheduling.layout import Shape
from simulation.clock import VirtualClock, end_all
from simulation.cluster import Cluster, Lengths, Simulation, Workload, coarse
from simulation.costs import Decode, Device, Model, Passes, passes_of
from simulation.engine import FULL, Batch, Moves, Reply, Sequence, SimulatedEngine
from simulation.meetings import Network, SimulatedWorld
from simulation.trainers import SimulatedTrainer, forward_s, update_s

DECODE = Decode(fixed=0.01, each=2e-4, context=1e-7, prefill=5e-6, most=32, kv_tokens=60_000)
JUDGE = replace(DECODE, fixed=0.02)
WORK = Workload(256, Lengths(300, 0.8, 2048), Lengths(120, 0.5, 480), keep=0.7)
PASSES = Passes(2e-5, 1e-9, update=0.2)
MOVES = dict(rollout=Moves(0.5, 0.7, 0.9), genrm=Moves(0.4, 0.6), train=Moves(1.0, 1.5))
ENGINES = dict(rollout=DECODE, genrm=JUDGE)
CLUSTER = Cluster(ENGINES, PASSES, moves=MOVES, grain=8, meeting_s=0.5)
SIZES = dict(prompts_per_step=16, answers_per_prompt=4, steps=3)


def simulation(mode="partial", ranks=4, work=WORK, cluster=CLUSTER, **settings):
    return Simulation(mode, ranks, work, cluster, **SIZES | settings)


# ---------------------------------------------------------------- engines


def token_by_token(costs, arrivals, aborts):
    """(when, tokens, how) sequences ended, by index, a decode step at a time; `aborts` cut all off."""
    arrivals, aborts = deque(arrivals), deque([*aborts, float("inf")])
    now, waiting, live, ended = 0.0, deque(), {}, {}  # live: sequence -> tokens that it has
    steps_since_read = costs.apart

    def until(moment):
        """Time goes on to this moment, or to an abort before it; whether it got there."""
        nonlocal now
        while arrivals and arrivals[0][0] <= min(moment, aborts[0]):
            waiting.extend(arrivals.popleft()[1])
        if aborts[0] > moment:
            now = moment
            return True
        now = aborts.popleft()
        ended.update({s.index: (now, tokens, "abort") for s, tokens in live.items()})
        ended.update({s.index: (now, 0, "abort") for s in waiting})
        live.clear()
        waiting.clear()
        return False

    def has_room():
        used = waiting[0].room + sum(s.room for s in live)
        return len(live) < costs.most and used <= costs.kv_tokens

    def may_read():
        return len(live) < FULL or steps_since_read >= costs.apart

    while arrivals or waiting or live:
        done = [s for s, tokens in live.items() if tokens == s.length]
        ended.update({s.index: (now, s.length, "stop") for s in done})
        live = {s: tokens for s, tokens in live.items() if tokens < s.length}
        if not live and not waiting:
            until(max(now, arrivals[0][0]) if arrivals else now)
        got_there = True
        while got_there and may_read() and waiting and has_room():
            joined, steps_since_read = [], 0
            while waiting and has_room():
                joined.append(waiting.popleft())
                live[joined[-1]] = 0
            got_there = until(now + costs.read + costs.prefill * sum(s.unread for s in joined))
        if got_there and live:
            contexts = sum(s.context + tokens for s, tokens in live.items())
            if until(now + costs.fixed + costs.each * len(live) + costs.context * contexts):
                live = {s: tokens + 1 for s, tokens in live.items()}
                steps_since_read += 1
    return ended


def batched(costs, arrivals, aborts):
    """The same of a Batch, which never has more than its room."""
    ended = {}

    def look():
        sequences = [sequence for *_, sequence in batch.live]
        assert batch.room_used == sum(s.room for s in sequences) <= costs.kv_tokens
        assert len(sequences) <= costs.most
        now = sum(s.context + batch.gained - s.begun for s in sequences)
        assert batch.context == pytest.approx(now, abs=1e-6)

    clock = VirtualClock(look=look)
    batch, queue = Batch(costs, clock), asyncio.Queue()

    async def collect():
        for _ in range(sum(len(sequences) for _, sequences in arrivals)):
            sequence, tokens, finish = await queue.get()
            assert sequence.index not in ended
            ended[sequence.index] = (clock.now, tokens, finish)

    for seconds, sequences in arrivals:
        clock.call_at(seconds, batch.submit, [replace(each, ended=queue) for each in sequences])
    for seconds in aborts:
        clock.call_at(seconds, batch.cut_off, lambda sequence: True)
    clock.run_until_complete(collect())
    end_all(clock)
    return ended


def random_group(rng, numbers):
    """One to four answers to a prompt, of which some were begun elsewhere."""
    prompt, group = rng.randint(1, 80), []
    for place in range(rng.randint(1, 4)):
        begun = rng.choice([0, 0, rng.randint(1, 30)])
        unread = begun if place else prompt + begun
        group.append(Sequence(next(numbers), prompt + begun, unread, rng.randint(1, 60), None))
    return group


def random_workload(seed):
    rng, numbers, now, arrivals = random.Random(seed), count(), 0.0, []
    pause_s = rng.choice([0.001, 0.05, 0.3])
    for _ in range(rng.randint(1, 15)):
        now += rng.expovariate(1 / pause_s)
        arrivals.append((now, random_group(rng, numbers)))
    longest = max(sequence.room for _, sequences in arrivals for sequence in sequences)
    speeds = dict(fixed=rng.uniform(0.005, 0.03), each=rng.choice([0, 5e-4]))
    speeds |= dict(context=rng.choice([0, 1e-6, 1e-5]), prefill=rng.choice([0, 1e-4]))
    speeds |= dict(read=rng.choice([0, 0.02]), apart=rng.choice([0, 3, 8]))
    most = rng.randint(1, rng.choice([8, 24]))
    kv_tokens = rng.choice([float("inf"), longest * rng.uniform(1, 4)])
    costs = Decode(**speeds, most=most, kv_tokens=kv_tokens)
    return costs, arrivals, sorted(rng.uniform(0, 2 * now + 1) for _ in range(rng.randint(0, 2)))


def test_batch_as_token_by_token():
    """150 random workloads: every sequence ends when it should, to a microsecond, with the same tokens."""
    cuts = 0
    for seed in range(150):
        costs, arrivals, aborts = random_workload(seed)
        expected, found = token_by_token(costs, arrivals, aborts), batched(costs, arrivals, aborts)
        assert found.keys() == expected.keys()
        for index, (when, tokens, how) in expected.items():
            assert found[index] == (pytest.approx(when, abs=1e-6), tokens, how), (seed, index)
        cuts += sum(how == "abort" for *_, how in found.values())
    assert cuts > 150


def engine_on(clock, costs=DECODE):
    def write(request):
        return Reply([7] * request.limit)

    engine = SimulatedEngine("rollout", 0, 0, costs, Moves(), 8, write, clock)
    engine.awake = True
    return engine


def run_on(clock, work):
    result = clock.run_until_complete(work)
    end_all(clock)
    return result


def request_of(*prompts, limit=50):
    return [Request(prompt, Sampling(1.0, limit), limit) for prompt in prompts]


def test_who_leaves_frees_its_room():
    """A caller that goes away takes its answers along; others gain its time."""
    clock = VirtualClock()
    engine = engine_on(clock, replace(DECODE, most=2))

    async def leave():
        asked = asyncio.ensure_future(anext(engine.generate(request_of([1], [1], [1]))))
        other = asyncio.ensure_future(anext(engine.generate(request_of([2]))))
        await asyncio.sleep(0.1)
        asked.cancel()
        answer = await other
        assert (len(answer.tokens), answer.finish, engine.batch.room_used) == (50, "stop", 0)
        assert answer.first_token == pytest.approx(0.1, abs=0.02)  # it had waited for room

    run_on(clock, leave())


def test_a_groups_prompt_is_read_once():
    clock = VirtualClock()
    engine = engine_on(clock)

    async def ask():
        group, begun = [1] * 1000, [1] * 1100
        return [answer async for answer in engine.generate(request_of(group, begun, group))]

    answers = sorted(run_on(clock, ask()), key=lambda answer: answer.index)
    assert [answer.cached_tokens for answer in answers] == [0, 1000, 1000]
    read = [answer.first_token / DECODE.prefill for answer in answers]
    assert read == pytest.approx([1000, 1100, 1100])


# ---------------------------------------------------------------- costs

DEVICE = Device(flops=1e14, memory=80e9, hbm=2e12, network=5e9, host=2e10)
MODEL = Model(params=7e9, layers=32, hidden=4096, kv_width=1024)


def test_training_seconds():
    """6 FLOPs a parameter and token, attention, a pipeline's ends, the update."""
    passes = passes_of(MODEL, DEVICE, 4, mfu=0.5, update=1.0, stages=3)
    flops = 6 * 7e9 * 1000 + 3 * 2 * 32 * 4096 * 2 * 500**2
    one = update_s(passes, [[500, 500]])
    assert one == pytest.approx(1.0 + 3 * flops / 2e14)
    assert update_s(passes, [[500, 500]] * 4) - 1.0 == pytest.approx((4 + 2) / 3 * (one - 1.0))
    assert forward_s(passes, [[500, 500], []]) == pytest.approx((one - 1.0) / 3)
    grainy = coarse(passes, 10)
    assert update_s(grainy, [[50, 50]]) == pytest.approx(one)
    decode = Decode(fixed=2.0, each=0.3, context=0.1)
    assert coarse(decode, 10).seconds(5, 4, 20) == pytest.approx(decode.seconds(50, 4, 200))


# ---------------------------------------------------------------- clock, meetings, trainers


def meet(work, ranks=8, **network):
    """`work` of every rank's world; returns what it came to, the seconds, and the meetings left."""
    clock, meetings = VirtualClock(), {}

    async def all_ranks():
        worlds = [SimulatedWorld(rank, ranks, meetings, **network) for rank in range(ranks)]
        return await asyncio.gather(*map(work, worlds)), clock.now

    results, seconds = run_on(clock, all_ranks())
    return results, seconds, meetings


def test_meetings_are_counted_and_forgotten():
    network = Network()

    async def work(world):
        facts = await world.gather("x" * 10)
        total = await world.reduce(str(world.rank), "".join)
        sample = Sample(world.rank, 0, [1])
        outgoing = {(world.rank + 1) % world.size: [sample] * 50, world.rank: [sample]}
        got = await world.exchange(outgoing, {(world.rank - 1) % world.size, world.rank})
        mine, theirs = got[world.rank][0], got[(world.rank - 1) % world.size][0]
        assert mine is sample and theirs.prompt_id == (world.rank - 1) % world.size
        return facts, total, theirs

    results, seconds, meetings = meet(work, network=network)
    assert not meetings
    assert all(facts is results[0][0] and total == "01234567" for facts, total, _ in results)
    assert len({id(theirs) for *_, theirs in results}) == 8
    assert seconds == 0 and network.meetings == 3


def test_a_trainers_ranks_wait_for_each_other_in_each_mini_batch():
    passes = Passes(0.01, update=1.0)

    async def work(world):
        shape = Shape((0, 1))
        actor = SimulatedTrainer("actor", world, passes, Moves(2.0, 3.0), shape)
        critic = SimulatedTrainer("reward", world, passes, Moves(), shape, speed_up=1.5)
        await actor.wake()
        critic.awake = True
        sample = Sample(0, 0, [1] * 10, response=[1] * 90)
        busy, idle = [[sample, sample]], [[sample]]
        await actor.update([busy, idle] if world.rank else [idle, busy])
        assert asyncio.get_running_loop().time() == pytest.approx(3.0 + 2 * 7.0)
        await critic.update([idle], (actor,))
        await critic.compute_values([idle])
        assert sample.values == {"reward": [0.0] * 90}
        assert (actor.version, critic.version) == (2, 1)

    _, seconds, _ = meet(work, ranks=2)
    assert seconds == pytest.approx(17.0 + 2 * 4.0 / 1.5 + 1.0)


# ---------------------------------------------------------------- the real controllers in it


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mode", ["full", "partial", "fused"])
def test_sharing_changes_nothing(mode, seed):
    sizes = dict(ranks=64, prompts_per_step=64, steps=2, rebalance=mode == "partial")
    sizes |= dict(work=replace(WORK, seed=seed), cluster=replace(CLUSTER, meeting_s=2.0))
    shared, alone = simulation(mode, **sizes), simulation(mode, **sizes)
    assert shared.run() == alone.run(share=False)


SPLIT = "actor=0-3:tp2 critic=4-7 reference=4-7:tp4"
APART = "engines=0-3 actor=4-5 critic=6:tp1 reference=7"


@pytest.mark.parametrize("placement, ahead", [(SPLIT, 0), (APART, 0), (APART, 1)])
def test_models_have_ranks_of_their_own(placement, ahead):
    """They train at once, and engines beside them; all train on the same samples, whoever works it out."""
    settings = dict(ranks=8, algorithm=("ppo", "kl_coef=0.1"), placement=placement, ahead=ahead)
    cluster = replace(CLUSTER, critic=replace(PASSES, token=4e-5), reference=PASSES)
    runs = [simulation("full", cluster=cluster, **settings) for _ in range(2)]
    steps, alone = runs[0].run(), runs[1].run(share=False)
    assert steps == alone
    held = runs[0].placement
    for step in steps:
        copies = [[step.trained[rank] for rank in copy] for copy in held.actor.copies]
        assert all(keys == copy[0] for copy in copies for keys in copy)
        assert len({key for copy in copies for key in copy[0]}) == 64
        assert step.waves and step.stats.serve_s
    train_s = steps[1].seconds["train"]
    assert steps[1].ended_s - steps[0].ended_s > train_s
    if ahead:
        assert steps[1].ended_s - steps[0].ended_s < train_s + steps[1].stats.serve_s
