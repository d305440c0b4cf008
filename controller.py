"""The parallel controllers: every rank runs this program on its own share of the prompts.

No rank holds the batch. Controllers meet in small collectives (counts, lengths, a flag) and take the same
decisions, because each is a pure function of what was gathered. The outside is four things: a `World`,
engines, trainers, and the event loop's clock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import algorithms
import rollout
from algorithms import Algorithm
from checkpoint import Checkpoints
from config import Config, UserError
from data import Prompts
from engines.engine import Sampling
from placement import Placement
from reporting.metrics import Report
from reporting.timeline import Timeline
from rewards import Rewards
from rollout import RolloutBatch
from runtime.shutdown import Stop
from runtime.world import World
from sample import Key, Sample
from scheduling.balance import flat, plan_batch
from scheduling.pipeline import schedule_of
from scheduling.rebalance import HISTORY, StepStats, choose_split

if TYPE_CHECKING:
    from actor import Actor, Reference

MAX_SKIPS = 3  # updates in a row whose loss or gradient wasn't finite
MAX_EMPTY_STEPS = 20  # steps in a row without one informative group

MiniBatches = list[list[list[Sample]]]  # of one data-parallel rank: mini-batches of micro-batches


@dataclass
class State:
    """The state that goes from step to step; the same on every controller."""

    step: int = 0
    groups_per_kept: float = 1.0  # moving average of groups generated for each one kept
    history: list[StepStats] = field(default_factory=list)  # what the newest steps measured
    empty_steps: int = 0  # in a row
    skips: int = 0  # in a row
    log_multiplier: float = 0.0  # ln(lambda / lagrange_init), where the cost is constrained


@dataclass
class Controller:
    """Everything one controller works with: the real parts under torchrun, fakes in the tests."""

    config: Config
    algorithm: Algorithm
    world: World
    placement: Placement  # of the actor, the critics, and the engines
    rewards: Rewards
    prompts: Prompts
    sampling: Sampling  # of answers; greedy ones at temperature 0
    timeline: Timeline
    report: Report
    checkpoints: Checkpoints
    references: list[Reference] = field(default_factory=list)  # one, if the KL to it is asked for
    collect: Callable[[Controller], Awaitable[RolloutBatch]] = rollout.collect  # or a replay's
    learn: Callable[..., Awaitable[dict]] = field(default_factory=lambda: learn)
    state: State = field(default_factory=State)
    stop: Stop = field(default_factory=Stop)  # what this process was asked for
    stopping: int = 0  # the signal that asked one of the controllers to stop, once all know


async def train(c: Controller) -> int:
    """The loop: serve, then train (collective). Returns the signal that ended it, once all is saved, or 0."""
    await c.placement.begin()
    for step in range(c.state.step, c.config.steps):
        c.timeline.step = step
        await evaluate(c, step)
        batch = await c.collect(c)  # generate, judge, refill until the step has its groups
        if c.stopping:
            break
        mini_batches = await exchange(batch.kept, c)  # all meet: equal work for every rank
        await c.placement.to_training()  # engines sleep; trainers wake as they are needed
        with c.timeline.span("train"):
            stats = await c.learn(c, mini_batches)
        decision = await rebalance(c, batch.stats)  # engines sleep: the split may move
        advance(c, batch)
        await c.checkpoints.save(c)  # a snapshot, written while the next step is served
        await c.placement.to_serving()  # weights back, push, trainers out, KV cache back
        c.timeline.mark("weights", f"v{c.placement.actor.version}")
        await c.report.step(c, step, batch, flat(mini_batches), stats | decision)
        await c.checkpoints.finish(c)  # names a save that all have written, maybe an earlier one
        stop_on_empty_steps(c)
        del batch, mini_batches  # not held while the next step is served
    return await finish(c)


async def finish(c: Controller) -> int:
    """Evaluate after the last step, or save after a stop (collective). Returns the signal or 0."""
    if not c.stopping:
        c.timeline.step = c.config.steps
        await evaluate(c, c.config.steps)
    if c.stopping:
        await c.placement.to_training(go_on=False)
        await c.checkpoints.save_now(c)
    await c.checkpoints.finish(c, wait=True)
    return c.stopping


class Held(NamedTuple):
    """The samples that a controller holds, as it tells the others."""

    dp_rank: int  # of its trainer
    lengths: dict[int, list[int]]  # prompt_id -> tokens of each answer, 0 of one that isn't held
    image_costs: dict[int, int]  # prompt_id -> work on its images

    @staticmethod
    def of(samples: list[Sample], actor: Actor) -> Held:
        lengths: dict[int, list[int]] = {}
        for sample in sorted(samples, key=lambda sample: sample.key):
            row = lengths.setdefault(sample.prompt_id, [])
            row += [0] * (sample.index - len(row))
            row.append(len(sample.prompt) + len(sample.response))
        costs = {s.prompt_id: cost for s in samples if (cost := actor.image_cost(s.prompt))}
        return Held(actor.dp_rank, lengths, costs)

    def tokens(self) -> dict[Key, int]:
        """Return the tokens of each sample, prompt and response together."""
        rows = self.lengths.items()
        return {(prompt, i): n for prompt, row in rows for i, n in enumerate(row) if n}


class Deal(NamedTuple):
    """The decision who trains on which sample: the same on every controller."""

    plan: list[list[list[list[Key]]]]  # [dp_rank][mini-batch][micro-batch][sample]
    groups: list[list[int]]  # [dp_rank]: the ranks of its model-parallel group, its head first
    holders: dict[Key, int]  # the rank that has a sample
    receivers: dict[Key, int]  # the rank that gets it


def deal(held: list[Held], cost: Callable[[int], int], config: Config, dp_size: int) -> Deal:
    """Deal all samples in equal work, from what each rank holds (pure). cost(tokens): work."""
    groups = [[] for _ in range(dp_size)]
    tokens = {}
    holders = {}
    image_costs = {}
    for rank, theirs in enumerate(held):
        groups[theirs.dp_rank].append(rank)
        image_costs |= theirs.image_costs
        for key, length in theirs.tokens().items():
            assert key not in tokens, "two controllers hold the same sample"
            tokens[key] = length
            holders[key] = rank
    plan = plan_batch(tokens, cost, config, dp_size, image_costs)
    receivers = {}
    for share, group in zip(plan, groups, strict=True):
        receivers |= dict.fromkeys(flat(share), group[0])
    return Deal(plan, groups, holders, receivers)


async def exchange(samples: list[Sample], c: Controller) -> MiniBatches:
    """Deal all samples to the data-parallel ranks in equal work; returns this one's (collective).

    Each rank gathers lengths, works out the same deal, and sends its samples straight to the ranks that train
    on them. A model-parallel group trains on one share. Before, only its head, the first rank, holds samples,
    because it alone sends requests to engines; after, the head copies the share to the others.
    """
    actor = c.placement.actor
    held = await c.world.gather(Held.of(samples, actor))
    dealt = deal(held, actor.cost, c.config, actor.dp_size)
    share = dealt.plan[actor.dp_rank]
    group = dealt.groups[actor.dp_rank]
    is_first = c.world.rank == group[0]
    parcels = {}
    for sample in samples:
        parcels.setdefault(dealt.receivers[sample.key], []).append(sample)
    senders = {dealt.holders[key] for key in flat(share)} if is_first else set()
    incoming = await c.world.exchange(parcels, senders)
    received = flat([incoming.values()])
    if len(group) > 1:
        copies = dict.fromkeys(group, received) if is_first else {}
        incoming = await c.world.exchange(copies, {group[0]})
        received = flat([incoming.values()])
    c.prompts.attach_images(received)
    found = {sample.key: sample for sample in received}
    mini_batches = [[] for _ in share]
    for number, mini_batch in enumerate(share):
        for keys in mini_batch:
            mini_batches[number].append([found[key] for key in keys])
    return mini_batches


async def learn(c: Controller, mini_batches: MiniBatches) -> dict[str, float]:
    """Update critics and actor, in turns or in one pipeline (collective). Returns metrics."""
    stats = await compute_advantages(c, mini_batches)
    trainers = [*reversed(c.placement.critics), c.placement.actor]  # the last critic has the device
    turns = [trainers] if schedule_of(c.config).fuses else [[trainer] for trainer in trainers]
    for first, *beside in turns:
        await c.placement.give_device_to(first, *beside)
        stats |= await c.world.run(first.update, mini_batches, beside)
        c.timeline.ran(first.phases)
    stop_on_nan(c, stats, mini_batches)
    return stats


async def compute_advantages(c: Controller, mini_batches: MiniBatches) -> dict[str, float]:
    """Give every sample its advantages (collective). Returns metrics of a constraint, if any."""
    samples = flat(mini_batches)
    metrics = {}
    for reference in c.references:
        await c.placement.give_device_to(c.placement.actor)
        await c.world.run(reference.compute_ref_logprobs, mini_batches)
    for critic in c.placement.critics:
        await c.placement.give_device_to(critic)
        await c.world.run(critic.compute_values, mini_batches)
    # others of its model-parallel group hold the same
    mine = samples if c.placement.actor.is_head else []
    if "cost" in c.algorithm.signals:
        costs = await c.world.gather([sample.cost for sample in mine])
        metrics = algorithms.update_multiplier(c.state, flat([costs]), c.algorithm)
    multiplier = algorithms.lagrange_multiplier(c.state, c.algorithm)
    algorithms.set_advantages(samples, c.algorithm, multiplier)
    if c.algorithm.whiten:
        moments = algorithms.moments([a for sample in mine for a in sample.advantages])
        algorithms.whiten(samples, await c.world.gather(moments))
    return metrics


async def rebalance(c: Controller, stats: StepStats) -> dict[str, float | str]:
    """Note what the step measured, and take the plan that should serve fastest (collective)."""
    placement = c.placement
    restarts = await c.world.reduce(placement.restarts, sum)
    step_stats = await c.world.reduce(stats, StepStats.total)
    c.state.history = [*c.state.history, step_stats][-HISTORY:]
    plans = {plan.split: plan for plan in placement.plans}
    tp = {"rollout": c.config.rollout_tp, "genrm": c.config.genrm_tp}
    left = c.config.steps - c.state.step - 1
    decision = choose_split(c.state.history, list(plans), placement.rollout.capacity, tp, left)
    moves = decision.split != placement.plan.split
    if moves:
        c.report.note(f"step {c.state.step + 1}: {decision.reason}")
        c.timeline.mark("split", str(decision.split))
        placement.switch(plans[decision.split])
    metrics = {"split/predicted_s": decision.predicted_s, "split/moved": float(moves)}
    return metrics | {"split/reason": decision.reason, "faults/engine_restarts": float(restarts)}


def stop_on_nan(c: Controller, stats: dict[str, float], mini_batches: MiniBatches) -> None:
    """Count skipped updates of any trainer; UserError after MAX_SKIPS in a row, samples saved."""
    skipped = any(stats[name] for name in stats if name.endswith("/not_finite"))
    c.state.skips = c.state.skips + 1 if skipped else 0
    if skipped:
        problem = "loss or gradient aren't finite: the update is skipped"
        c.report.note(f"step {c.state.step + 1}: {problem}")
    if c.state.skips == MAX_SKIPS:
        path = c.report.dump(flat(mini_batches) if c.placement.actor.is_head else [])
        problem = f"the loss or the gradient of {MAX_SKIPS} updates in a row was not finite"
        raise UserError(f"{problem}; the samples of the last one are in {path}")


def advance(c: Controller, batch: RolloutBatch) -> None:
    """Count the step as done: a checkpoint from now on holds it."""
    c.state.step += 1
    is_empty = batch.missing_groups == c.config.prompts_per_step
    c.state.empty_steps = c.state.empty_steps + 1 if is_empty else 0


def stop_on_empty_steps(c: Controller) -> None:
    if c.state.empty_steps >= MAX_EMPTY_STEPS:
        problem = f"no prompt of {MAX_EMPTY_STEPS} steps in a row had answers of different reward"
        raise UserError(f"{problem}; they are too easy or too hard, or the judge can't tell")


async def evaluate(c: Controller, step: int) -> None:
    """Report greedy accuracy on held-out prompts, every `eval_every` steps (collective)."""
    held_out = [prompt for prompt in c.prompts.source.held_out if prompt.answer_key is not None]
    is_due = step % c.config.eval_every == 0 or step == c.config.steps
    if not (held_out and is_due and c.placement.rollout.engines):
        return
    actor = c.placement.actor
    tasks = rollout.Tasks()
    share = list(enumerate(held_out))[actor.dp_rank :: actor.dp_size] if actor.is_head else []
    mine = []
    for i, prompt in share:
        fields = (prompt.tokens, prompt.question, prompt.answer_key, prompt.images())
        mine.append(Sample(-1 - i, 0, *fields, greedy=True))
    with c.timeline.span("evaluate"):
        for sample in mine:
            tasks.start(sample.prompt_id, answer_greedily(c, sample, tasks))
        await rollout.wait_for_all(c, tasks)
    if c.stopping:
        return await rollout.cut_off(c, tasks)
    num_right = sum(c.rewards.final_answer(sample) == sample.answer_key for sample in mine)
    counts = await c.world.gather((num_right, len(mine)))
    c.placement.rollout.pop_stats()
    c.timeline.drain()  # evaluation is no part of the step's own figures
    accuracy = sum(right for right, _ in counts) / sum(asked for _, asked in counts)
    c.report.accuracy(step, accuracy, c.timeline.now())


async def answer_greedily(c: Controller, sample: Sample, tasks: rollout.Tasks) -> None:
    async for _, answer in rollout.ask(c, [sample], tasks):
        sample.response = sample.response + answer.tokens
        sample.finish = answer.finish
