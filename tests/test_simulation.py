"""The simulation: its engines against a token-by-token one, its costs, and the real controllers in it."""

import asyncio
import random
import sys
from collections import deque
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

import controller
import rollout
from engines.engine import Request, Sampling
from sample import Sample
from scheduling.costs import FULL, Decode, Device, Model, Passes, decode_of, passes_of
from simulation.clock import VirtualClock, end_all
from simulation.cluster import Cluster, Lengths, Simulation, Workload, coarse
from simulation.engine import Batch, Moves, Reply, Sequence, SimulatedEngine
from simulation.meetings import Network, SimulatedWorld
from simulation.trainers import SimulatedTrainer

ROOT = Path(__file__).parent.parent
DECODE = Decode(fixed=0.01, each=2e-4, context=1e-7, prefill=5e-6, most=32, kv_tokens=60_000)
JUDGE = replace(DECODE, fixed=0.02)
WORK = Workload(256, Lengths(300, 0.8, 2048), Lengths(120, 0.5, 480), keep=0.7)
CLUSTER = Cluster(
    dict(rollout=DECODE, genrm=JUDGE),
    Passes(2e-5, 1e-9, micro_batch=0.01, update=0.2),
    moves=dict(rollout=Moves(0.5, 0.7, 0.9), genrm=Moves(0.4, 0.6), train=Moves(1.0, 1.5)),
    grain=8,
    meeting_s=0.5,
)
SIZES = dict(prompts_per_step=16, answers_per_prompt=4, steps=3)


def simulation(mode="partial", ranks=4, work=WORK, cluster=CLUSTER, **settings):
    return Simulation(mode, ranks, work, cluster, **SIZES | settings)


def serve_s(steps):
    return [step.stats.serve_s for step in steps]


# ---------------------------------------------------------------- engines


def token_by_token(costs, arrivals, aborts):
    """What a Batch does, one decode step at a time: (when, tokens, how) each sequence ended, by index.

    arrivals: (seconds, sequences), in order; aborts: seconds of the moments in which all is cut off.
    """
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
        ended.update(
            {s.index: (now, s.length, "stop") for s, tokens in live.items() if tokens == s.length}
        )
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
        clock.call_at(
            seconds, batch.submit, [replace(sequence, ended=queue) for sequence in sequences]
        )
    for seconds in aborts:
        clock.call_at(seconds, batch.cut_off, lambda sequence: True)
    clock.run_until_complete(collect())
    end_all(clock)
    return ended


def random_workload(seed):
    rng, numbers, now, arrivals = random.Random(seed), count(), 0.0, []
    pause_s = rng.choice([0.001, 0.05, 0.3])
    for _ in range(rng.randint(1, 15)):
        now, prompt = now + rng.expovariate(1 / pause_s), rng.randint(1, 80)
        group = [
            rng.choice([0, 0, rng.randint(1, 30)]) for _ in range(rng.randint(1, 4))
        ]  # begun elsewhere
        unread = [prompt + group[0], *group[1:]]
        lengths = [rng.randint(1, 60) for _ in group]
        whole = zip(group, unread, lengths, strict=True)
        arrivals.append(
            (now, [Sequence(next(numbers), prompt + b, u, n, None) for b, u, n in whole])
        )
    longest = max(sequence.room for _, sequences in arrivals for sequence in sequences)
    costs = Decode(
        rng.uniform(0.005, 0.03),
        rng.choice([0, 5e-4]),
        rng.choice([0, 1e-6, 1e-5]),
        rng.choice([0, 1e-4]),
        rng.choice([0, 0.02]),
        rng.choice([0, 3, 8]),
        rng.randint(1, rng.choice([8, 24])),
        rng.choice([float("inf"), longest * rng.uniform(1, 4)]),
    )
    return costs, arrivals, sorted(rng.uniform(0, 2 * now + 1) for _ in range(rng.randint(0, 2)))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_batch_as_token_by_token(first):
    """200 random workloads: every sequence ends when it should, to a microsecond, with the same tokens."""
    cuts = 0
    for seed in range(first, first + 50):
        costs, arrivals, aborts = random_workload(seed)
        expected, found = token_by_token(costs, arrivals, aborts), batched(costs, arrivals, aborts)
        assert found.keys() == expected.keys()
        for index, (when, tokens, how) in expected.items():
            assert found[index] == (pytest.approx(when, abs=1e-6), tokens, how), (seed, index)
        cuts += sum(how == "abort" for *_, how in found.values())
    assert cuts > 50


def engine_on(clock, costs=DECODE, write=lambda request: Reply([7] * request.limit)):
    engine = SimulatedEngine("rollout", 0, 0, costs, Moves(), 8, write, clock)
    engine.awake = True
    return engine


def run_on(clock, work):
    result = clock.run_until_complete(work)
    end_all(clock)
    return result


def test_what_is_cut_off_goes_on_elsewhere():
    """Tokens asked for are tokens written, however often answers are aborted; nothing is written twice."""
    clock, rng, lengths = VirtualClock(), random.Random(0), {}
    whole = {number: rng.randint(1, 300) for number in range(40)}

    def rest(request):
        return Reply([request.prompt[0]] * (whole[request.prompt[0]] + 10 - len(request.prompt)))

    engines = [engine_on(clock, replace(DECODE, most=4), rest) for _ in range(2)]

    async def answer(number):
        prompt, finish = [number] + [0] * 9, ""
        while finish != "stop":
            (part,) = [
                part async for part in engines[rng.random() < 0.5].generate(request_of(prompt))
            ]
            prompt, finish = prompt + part.tokens, part.finish
        lengths[number] = len(prompt) - 10

    async def all_answers():
        working = asyncio.gather(*map(answer, whole))
        while not working.done():
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            await engines[rng.random() < 0.5].abort()
        await working

    run_on(clock, all_answers())
    assert lengths == whole


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
    first = [answer.first_token for answer in answers]
    assert first == pytest.approx(
        [1000 * DECODE.prefill, 1100 * DECODE.prefill, 1100 * DECODE.prefill]
    )


# ---------------------------------------------------------------- costs

DEVICE = Device(flops=1e14, memory=80e9, hbm=2e12, network=5e9, host=2e10)
MODEL = Model(params=7e9, layers=32, hidden=4096, kv_width=1024)


def test_decode_seconds_are_the_sum_of_its_steps():
    for batch, context, steps in ((1, 0, 1), (8, 4000, 333), (256, 1e6, 50)):
        contexts = range(int(context), int(context) + steps * batch, batch)
        total = sum(DECODE.fixed + DECODE.each * batch + DECODE.context * c for c in contexts)
        assert DECODE.seconds(steps, batch, context) == pytest.approx(total)
        assert DECODE.tokens(total, batch, context) == pytest.approx(steps)
        assert coarse(DECODE, 16).seconds(steps / 16, batch, context / 16) == pytest.approx(total)


def test_a_change_of_the_device_moves_its_part():
    """Twice the time where a bandwidth is halved or a batch doubled, and nothing else."""
    how = dict(weights=0.8, kv=0.3, flops=0.9, prefill=0.5, layer_s=1e-4, sequence_s=2e-5)
    decode, on_top = decode_of(MODEL, DEVICE, 2, **how), MODEL.layers * 1e-4
    slow = decode_of(MODEL, DEVICE._replace(hbm=1e12), 2, **how)
    assert slow.fixed - on_top == pytest.approx(2 * (decode.fixed - on_top))
    assert (slow.each, slow.prefill, slow.kv_tokens) == (
        decode.each,
        decode.prefill,
        decode.kv_tokens,
    )
    assert slow.context == pytest.approx(2 * decode.context)
    weak = decode_of(MODEL, DEVICE._replace(flops=5e13), 2, **how)
    assert weak.each - 2e-5 == pytest.approx(2 * (decode.each - 2e-5))
    assert weak.prefill == pytest.approx(2 * decode.prefill)
    assert (
        decode_of(MODEL, DEVICE, 1, **how).kv_tokens < decode.kv_tokens / 2
    )  # of one copy of the weights
    with pytest.raises(ValueError, match="leave 1 devices no room"):
        decode_of(MODEL._replace(params=7e10), DEVICE, 1, **how)


def test_training_seconds():
    """6 FLOPs a parameter and token, attention, a pipeline's ends, the update."""
    passes = passes_of(MODEL, DEVICE, 4, mfu=0.5, update=1.0, stages=3)
    flops = 6 * 7e9 * 1000 + 3 * 2 * 32 * 4096 * 2 * 500**2
    one = passes.update_s([[500, 500]])
    assert one == pytest.approx(1.0 + 3 * flops / 2e14)
    assert passes.update_s([[500, 500]] * 4) - 1.0 == pytest.approx((4 + 2) / 3 * (one - 1.0))
    assert passes.forward_s([[500, 500], []]) == pytest.approx((one - 1.0) / 3)
    grainy = coarse(passes, 10)
    assert grainy.update_s([[50, 50]]) == pytest.approx(one)


# ---------------------------------------------------------------- clock, meetings, trainers


def test_a_deadlock_and_a_run_without_end_are_errors():
    async def wait_for_ever():
        await asyncio.get_running_loop().create_future()

    async def never_end():
        while True:
            await asyncio.sleep(1.0)

    for work, error in ((wait_for_ever, RuntimeError), (never_end, AssertionError)):
        clock = VirtualClock(longest_s=100.0)
        with pytest.raises(error, match=r"deadlock|never ends"):
            clock.run_until_complete(work())
        end_all(clock)


def meet(work, ranks=8, network=None):
    """`work` of every rank's world; returns what it came to, the seconds, and the meetings left."""
    clock, meetings = VirtualClock(), {}

    async def all_ranks():
        worlds = [SimulatedWorld(rank, ranks, meetings, network) for rank in range(ranks)]
        return await asyncio.gather(*map(work, worlds)), clock.now

    results, seconds = run_on(clock, all_ranks())
    return results, seconds, meetings


def test_meetings_take_time_and_are_forgotten():
    network = Network(latency_s=0.01)

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
    assert seconds == pytest.approx(3 * 0.01 + 3 * 0.01 + 0.01) and network.meetings == 3


def test_a_trainers_ranks_wait_for_each_other_in_each_mini_batch():
    passes = Passes(0.01, update=1.0)

    async def work(world):
        actor = SimulatedTrainer("actor", world, passes, Moves(2.0, 3.0))
        critic = SimulatedTrainer("reward", world, passes, Moves(), speed_up=1.5)
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


@pytest.mark.parametrize("algorithm", [("ppo", "kl_coef=0.1"), ("remax",)])
def test_other_algorithms(algorithm):
    cluster = replace(
        CLUSTER, scores=True, decode=dict(rollout=DECODE, genrm=replace(JUDGE, most=1))
    )
    steps = simulation("full", cluster=cluster, algorithm=algorithm).run()
    assert all(sum(map(len, step.trained.values())) == 64 for step in steps)


@pytest.mark.parametrize("mode", ["full", "partial", "fused"])
def test_the_same_again(mode):
    """To the last digit."""
    first, again = (simulation(mode).run() for _ in range(2))
    assert first == again
    other = simulation(mode, work=replace(WORK, seed=1)).run()
    assert serve_s(first) != serve_s(other)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mode", ["full", "partial", "fused"])
def test_sharing_changes_nothing(mode, seed):
    """All facts of all steps are equal when every controller works out everything."""
    sizes = dict(ranks=64, prompts_per_step=64, steps=2, rebalance=mode == "partial")
    sizes |= dict(work=replace(WORK, seed=seed), cluster=replace(CLUSTER, meeting_s=2.0))
    shared, alone = simulation(mode, **sizes), simulation(mode, **sizes)
    assert shared.run() == alone.run(share=False)
    assert shared.thinking_s and not alone.thinking_s


@pytest.mark.parametrize("mode", ["full", "partial"])
def test_grain_is_a_matter_of_speed(mode):
    """Tokens by 16 give the seconds of tokens one by one, within 1 %."""
    cluster = replace(CLUSTER, meeting_s=0.1, actor=Passes(2e-5, 1e-9))
    work = replace(WORK, answer=Lengths(600, 0.8, 4096))
    fine, rough = (
        simulation(mode, work=work, cluster=replace(cluster, grain=grain)).run()
        for grain in (1, 16)
    )
    for one, other in zip(fine, rough, strict=True):
        for phase in ("serve", "train"):
            assert other.seconds[phase] == pytest.approx(one.seconds[phase], rel=0.01), phase


def test_a_change_moves_its_phase():
    """Twice the batch: twice the passes. Half the bandwidth: twice the push. No other phase moves."""
    alike = Workload(256, Lengths(512, 0.0, 512), Lengths(128, 0.0, 128))
    plain = replace(CLUSTER, actor=Passes(2e-5, 1e-9), moves=dict(rollout=Moves(push_s=0.9)))
    slow = replace(plain, moves=dict(rollout=Moves(push_s=1.8)))

    def seconds(cluster, prompts):
        sizes = dict(prompts_per_step=prompts, steps=1)
        return simulation("full", work=alike, cluster=cluster, **sizes).run()[0].seconds

    one, two, slowed = seconds(plain, 16), seconds(plain, 32), seconds(slow, 16)
    assert one["train"] == pytest.approx(16 * 4 / 4 * 3 * plain.actor.cost(768))
    assert two["train"] == pytest.approx(2 * one["train"])
    assert (two["sync"], slowed["sync"]) == pytest.approx((one["sync"], 2 * one["sync"]))
    assert (slowed["train"], slowed["serve"]) == pytest.approx((one["train"], one["serve"]))


MINE = {  # the product's own, which serve, route, choose, deal and judge in a simulation
    "controller.py": {
        "train",
        "exchange",
        "deal",
        "learn",
        "compute_advantages",
        "rebalance",
        "advance",
    },
    "rollout.py": {
        "collect",
        "begin_wave",
        "gather_finished_groups",
        "judge_one",
        "generate",
        "ask",
    },
    "placement.py": {"to_training", "to_serving", "switch", "share"},
    "engines/pool.py": {"generate", "route", "status", "apply_status", "use"},
    "scheduling/balance.py": {"plan_batch", "karmarkar_karp"},
    "scheduling/dynamic_sampling.py": {"next_wave", "chosen", "candidates", "wave_ends", "record"},
    "scheduling/rebalance.py": {"choose_split"},
    "rewards.py": {"score"},
    "genrm.py": {"ask"},
    "data.py": {"draw", "assign_owners"},
}


@pytest.mark.parametrize("mode", ["full", "partial", "fused"])
def test_whose_functions_are_called(mode):
    """The loop, the mode and every decision are the product's, with and without sharing."""
    serve = rollout.MODES[mode]
    for share in (True, False):
        called, run = set(), simulation(mode, steps=1)

        def note(frame, event, argument, called=called):
            if event == "call":
                called.add((frame.f_code.co_filename, frame.f_code.co_name))

        sys.setprofile(note)
        try:
            run.run(share)
        finally:
            sys.setprofile(None)
        assert {
            (str(ROOT / file), name) for file, names in MINE.items() for name in names
        } <= called
        assert (serve.__code__.co_filename, serve.__name__) in called
        assert all(
            c.collect is rollout.collect and c.learn is controller.learn for c in run.controllers
        )
