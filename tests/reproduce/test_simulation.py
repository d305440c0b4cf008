"""The simulation: its engines and costs by hand, and the real controllers in it."""

import asyncio
from dataclasses import replace

import pytest

from engines.engine import Request, Sampling
from reproduce.simulation.clock import VirtualClock, end_all
from reproduce.simulation.cluster import Cluster, Lengths, Simulation, Workload, coarse
from reproduce.simulation.costs import Decode, Device, Model, Passes, passes_of
from reproduce.simulation.engine import Moves, Reply, SimulatedEngine
from reproduce.simulation.meetings import SimulatedWorld
from reproduce.simulation.trainers import SimulatedTrainer, forward_s, update_s
from sample import Sample
from scheduling.layout import Shape

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


def test_a_batch_by_hand():
    """Two prompts are read in one pass, and each token makes a step longer. The third request waits."""
    clock = VirtualClock()
    costs = Decode(fixed=1.0, each=0.5, context=0.01, prefill=0.1, most=2)
    engine = engine_on(clock, costs)

    async def ask(token, length, limit):
        [request] = request_of([token] * length, limit=limit)
        return (await anext(engine.generate([request]))).end

    async def ask_all():
        return await asyncio.gather(ask(1, 10, limit=2), ask(2, 20, limit=4), ask(3, 10, limit=2))

    first = (10 + 20) * 0.1 + (2 + 0.30) + (2 + 0.32)
    last = first + 10 * 0.1 + (2 + 0.32) + (2 + 0.34)
    assert run_on(clock, ask_all()) == pytest.approx([first, last, last])


def test_who_leaves_frees_its_room():
    """A caller that leaves must take its answers along; others gain its time."""
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


DEVICE = Device(flops=1e14, memory=80e9, hbm=2e12, network=5e9, host=2e10)
MODEL = Model(params=7e9, layers=32, hidden=4096, kv_width=1024)


def test_training_seconds():
    """They are 6 FLOPs per parameter and token, attention, a pipeline's ends, and the update."""
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


def meet(work, ranks=8, **network):
    """Run `work` in every rank's world; return results, seconds and the unfinished meetings."""
    clock, meetings = VirtualClock(), {}

    async def all_ranks():
        worlds = [SimulatedWorld(rank, ranks, meetings, **network) for rank in range(ranks)]
        return await asyncio.gather(*map(work, worlds)), clock.now

    results, seconds = run_on(clock, all_ranks())
    return results, seconds, meetings


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
        await critic.update([idle], actor)
        await critic.compute_values([idle])
        assert sample.values == {"reward": [0.0] * 90}
        assert (actor.version, critic.version) == (2, 1)

    _, seconds, _ = meet(work, ranks=2)
    assert seconds == pytest.approx(17.0 + 2 * 4.0 / 1.5 + 1.0)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mode", ["full", "partial", "fused"])
def test_deciding_once_changes_nothing(mode, seed):
    sizes = dict(ranks=64, prompts_per_step=64, steps=2, rebalance=mode == "partial")
    sizes |= dict(work=replace(WORK, seed=seed), cluster=replace(CLUSTER, meeting_s=2.0))
    shared, alone = simulation(mode, **sizes), simulation(mode, **sizes)
    assert shared.run() == alone.run(once=False)
