"""The parallel controllers: every rank runs this program on its own share of the prompts.

There is no rank that holds the batch. Controllers meet in small collectives (counts, lengths, a flag) and
take the same decisions, because each decision is a pure function of what was gathered. The outside is four
things: a `World`, engines, trainers, and the event loop's clock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import algorithms
import rollout
from algorithms import Algorithm
from checkpoint import Checkpoints
from config import Config, UserError
from data import Prompt, Prompts
from engines.engine import Sampling
from placement import Placement
from reporting.metrics import Report
from reporting.timeline import Timeline
from rewards import Rewards
from rollout import RolloutBatch
from runtime.shutdown import Stop
from runtime.world import World
from sample import Sample
from scheduling.balance import flat, plan_batch
from scheduling.pipeline import schedule_of
from scheduling.rebalance import HISTORY, StepStats, choose_split

if TYPE_CHECKING:
    from actor import Reference

MAX_SKIPS = 3  # updates in a row whose loss or gradient wasn't finite
MAX_EMPTY_STEPS = 20  # steps in a row without one informative group

MiniBatches = list[list[list[Sample]]]  # of one data-parallel rank: mini-batches of micro-batches


@dataclass
class State:
    """What the loop carries from step to step; the same on every controller."""

    step: int = 0
    groups_per_kept: float = 1.0  # moving average of groups generated for each one kept
    history: list[StepStats] = field(default_factory=list)  # what the newest steps measured
    empty_steps: int = 0  # in a row
    skips: int = 0  # in a row
    # of the cost, where there is a constraint: ln(lambda / lagrange_init)
    log_multiplier: float = 0.0


@dataclass
class Controller:
    """Everything one controller works with: the real parts under torchrun, fakes in the tests."""

    config: Config
    algorithm: Algorithm
    world: World
    placement: Placement  # of the actor, the critics, and the engines
    rewards: Rewards
    prompts: Prompts
    sampling: Sampling  # of answers; `greedy` of samples that say so
    greedy: Sampling
    timeline: Timeline
    report: Report
    checkpoints: Checkpoints
    references: list[Reference] = field(default_factory=list)  # one, if the KL to it is asked for
    collect: Callable[[Controller], Awaitable[RolloutBatch]] = rollout.collect  # or a replay's
    learn: Callable[[Controller, MiniBatches], Awaitable[dict]] = field(
        default_factory=lambda: learn
    )
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
        await c.checkpoints.finish(c)  # after the report: a saved step has its row
        stop_on_empty_steps(c)
        del batch, mini_batches  # not held while the next step is served
    return await finish(c)


async def finish(c: Controller) -> int:
    """After the last step, evaluate; where a stop was asked for, save (collective). Returns the signal."""
    if not c.stopping:
        c.timeline.step = c.config.steps
        await evaluate(c, c.config.steps)
    if c.stopping:
        await c.placement.to_training(go_on=False)
        await c.checkpoints.save_now(c)
    await c.checkpoints.finish(c, wait=True)
    return c.stopping


def deal(facts: list[tuple], cost: Callable[[int], int], config: Config, dp_size: int) -> tuple:
    """From all facts: plan_batch's plan, who holds and who gets each sample, each group's ranks (pure)."""
    tokens, holders, images, groups = {}, {}, {}, [[] for _ in range(dp_size)]
    for rank, (dp_rank, rows, costs) in enumerate(facts):
        groups[dp_rank].append(rank)
        images |= costs
        for key, length in (((p, i), n) for p, row in rows.items() for i, n in enumerate(row) if n):
            assert key not in tokens, "two controllers hold the same sample"
            tokens[key], holders[key] = length, rank
    plan = plan_batch(tokens, cost, config, dp_size, images)
    receivers = {
        key: ranks[0] for share, ranks in zip(plan, groups, strict=True) for key in flat(share)
    }
    return plan, holders, receivers, groups


async def exchange(samples: list[Sample], c: Controller) -> MiniBatches:
    """Deal all samples to the data-parallel ranks in equal work; returns this one's share (collective).

    Each works out the whole plan from gathered lengths. Samples then move point to point, never through one
    rank; of a model-parallel group the first gets them and passes them on. Images are read here, not moved.
    """
    actor, mine = c.placement.actor, {sample.key: sample for sample in samples}
    # prompt_id -> tokens of its answers, 0 of one that isn't held here
    lengths: dict[int, list[int]] = {}
    for (prompt_id, index), sample in sorted(mine.items()):
        row = lengths.setdefault(prompt_id, [])
        row += [0] * (index - len(row)) + [len(sample.prompt) + len(sample.response)]
    images = {
        sample.prompt_id: cost for sample in samples if (cost := actor.image_cost(sample.prompt))
    }
    facts, outgoing = await c.world.gather((actor.dp_rank, lengths, images)), {}
    plan, holders, receivers, groups = deal(facts, actor.cost, c.config, actor.dp_size)
    for key, sample in mine.items():
        outgoing.setdefault(receivers[key], []).append(sample)
    first, *others = members = groups[actor.dp_rank]
    senders = (
        {holders[key] for key in flat(plan[actor.dp_rank])} if c.world.rank == first else set()
    )
    incoming = await c.world.exchange(outgoing, senders)
    if others:
        share = [sample for parcel in incoming.values() for sample in parcel]
        outgoing = dict.fromkeys(members, share) if c.world.rank == first else {}
        incoming = await c.world.exchange(outgoing, {first})
    found = {sample.key: sample for parcel in incoming.values() for sample in parcel}
    c.prompts.attach_images(list(found.values()))
    return [
        [[found[key] for key in micro] for micro in mini_batch]
        for mini_batch in plan[actor.dp_rank]
    ]


async def learn(c: Controller, mini_batches: MiniBatches) -> dict[str, float]:
    """Advantages, then updates of critics and actor, in turns or fused (collective). Returns metrics."""
    stats, fuses = await compute_advantages(c, mini_batches), schedule_of(c.config).fuses
    trainers = [*reversed(c.placement.critics), c.placement.actor]  # the last critic has the device
    for first, *beside in [trainers] if fuses else [[trainer] for trainer in trainers]:
        await c.placement.give_device_to(first, *beside)
        stats |= await c.world.run(first.update, mini_batches, beside)
        c.timeline.ran(first.phases)
    stop_on_nan(c, stats, mini_batches)
    return stats


async def compute_advantages(c: Controller, mini_batches: MiniBatches) -> dict[str, float]:
    """Give every sample its advantages (collective). Returns the metrics of a constraint, if there is one."""
    samples, metrics = flat(mini_batches), {}
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
    """Take the split that should serve the next step fastest (collective). Returns metrics."""
    placement, config = c.placement, c.config
    restarts = await c.world.reduce(placement.restarts, sum)
    c.state.history = [*c.state.history, await c.world.reduce(stats, StepStats.total)][-HISTORY:]
    plans = {plan.split: plan for plan in placement.plans}
    tp = {"rollout": config.rollout_tp, "genrm": config.genrm_tp}
    left = config.steps - c.state.step - 1
    decision = choose_split(c.state.history, list(plans), placement.rollout.capacity, tp, left)
    if moves := decision.split != placement.plan.split:
        c.report.note(f"step {c.state.step + 1}: {decision.reason}")
        c.timeline.mark("split", str(decision.split))
        placement.switch(plans[decision.split])
    metrics = {"split/predicted_s": decision.predicted_s, "split/moved": float(moves)}
    return metrics | {"split/reason": decision.reason, "faults/engine_restarts": float(restarts)}


def stop_on_nan(c: Controller, stats: dict[str, float], mini_batches: MiniBatches) -> None:
    """UserError after MAX_SKIPS skipped updates in a row, any trainer's; leaves the samples in a file."""
    skipped = any(stats[name] for name in stats if name.endswith("/not_finite"))
    c.state.skips = c.state.skips + 1 if skipped else 0
    if skipped:
        c.report.note(
            f"step {c.state.step + 1}: loss or gradient aren't finite: the update is skipped"
        )
    if c.state.skips == MAX_SKIPS:
        path = c.report.dump(flat(mini_batches) if c.placement.actor.is_head else [])
        problem = f"the loss or the gradient of {MAX_SKIPS} updates in a row was not finite"
        raise UserError(f"{problem}; the samples of the last one are in {path}")


def advance(c: Controller, batch: RolloutBatch) -> None:
    """The step is done, as far as a checkpoint is concerned."""
    c.state.step += 1
    is_empty = batch.missing_groups == c.config.prompts_per_step
    c.state.empty_steps = c.state.empty_steps + 1 if is_empty else 0


def stop_on_empty_steps(c: Controller) -> None:
    if c.state.empty_steps >= MAX_EMPTY_STEPS:
        problem = f"no prompt of {MAX_EMPTY_STEPS} steps in a row had answers of different reward"
        raise UserError(f"{problem}; they are too easy or too hard, or the judge can't tell")


async def evaluate(c: Controller, step: int) -> None:
    """Every `eval_every` steps and at the end: greedy accuracy on the held-out prompts (collective)."""
    held_out = [prompt for prompt in c.prompts.held_out if prompt.answer_key is not None]
    is_due = step % c.config.eval_every == 0 or step == c.config.steps
    if not (held_out and is_due and c.placement.rollout.engines):
        return
    actor, tasks = c.placement.actor, rollout.Tasks()
    share = list(enumerate(held_out))[actor.dp_rank :: actor.dp_size] if actor.is_head else []
    mine = [Sample(-1 - i, 0, p.tokens, p.question, p.answer_key, greedy=True) for i, p in share]
    with c.timeline.span("evaluate"):
        for sample, (_, prompt) in zip(mine, share, strict=True):
            tasks.start(sample.prompt_id, answer_greedily(c, sample, prompt, tasks))
        await rollout.wait_for_all(c, tasks)
    if c.stopping:
        return await rollout.cut_off(c, tasks)
    right = [c.rewards.final_answer(sample) == sample.answer_key for sample in mine]
    counts = await c.world.gather((sum(right), len(right)))
    c.placement.rollout.pop_stats()
    c.timeline.drain()  # evaluation is no part of the step's own figures
    c.report.accuracy(step, sum(n for n, _ in counts) / sum(n for _, n in counts), c.timeline.now())


async def answer_greedily(
    c: Controller, sample: Sample, prompt: Prompt, tasks: rollout.Tasks
) -> None:
    sample.media = prompt.images()
    async for _, answer in rollout.ask(c, [sample], tasks):
        sample.response, sample.finish = sample.response + answer.tokens, answer.finish
    sample.media = ()
