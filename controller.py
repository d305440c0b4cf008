"""The parallel controllers: every rank runs this program on its own share of the prompts.

No rank holds the batch. Controllers meet in small collectives (counts, lengths, a flag) and make the same
decisions, because each decision is a pure function of the gathered facts. Models on separate ranks run at the
same time, because every rank skips the models that it doesn't hold. A controller depends only on a `World`,
engines, trainers, and the event loop's clock.
"""

from __future__ import annotations

from itertools import chain

import algorithms
import modes
from evaluation import evaluate
from runtime.errors import UserError
from runtime.shutdown import Stopped
from sample import Sample, flat
from scheduling.dealing import Shares, Sizes, deal
from scheduling.measured import MOVES, StepStats
from scheduling.pipeline import schedule_of
from state import Controller, RolloutBatch

HISTORY = 50  # steps to remember; not more, because answer lengths change as the model learns
MAX_SKIPS = 3  # consecutive updates with a loss or gradient that isn't finite
MAX_EMPTY_STEPS = 20  # consecutive steps without an informative group


async def train(c: Controller) -> bool:
    """Run the loop, then save everything (collective: all ranks). Returns whether a stop ended it."""
    was_stopped = False
    try:
        await loop(c)
    except Stopped:
        was_stopped = True
    finally:
        await c.report.written()
    if was_stopped:
        await c.world.barrier()  # from here on no rank sends a request to an engine
        await c.devices.to_training()
        await c.checkpoints.save_now(c)
    await c.checkpoints.close(c)
    return was_stopped


async def loop(c: Controller) -> None:
    """Serve, then train, step by step (collective: all ranks). Raises Stopped if a rank was asked to stop."""
    await c.devices.to_serving()  # engines start asleep: wake them and push the first weights
    for step in range(c.state.step, c.config.steps):
        c.timeline.step = step
        await evaluate(c, step)
        batch = c.ahead or await modes.collect(c, step)  # draw, generate, judge
        sizes, measured = await gather_sizes(batch, c)  # all ranks meet: lengths, times, stop flags
        shares = await exchange(batch, sizes, c)  # deal the samples: equal work for every rank
        await c.devices.to_training()  # engines that share ranks with trainers sleep
        c.ahead = await serve_ahead(c)  # --ahead: ranks that only serve continue
        with c.timeline.span("train"):
            stats = await learn(c, shares)
        stats = await gather_metrics(c, stats, shares)  # all ranks meet if some hold other models
        decision = rebalance(c, measured)  # --rebalance may change the split
        advance(c, batch)
        await c.checkpoints.save(c)  # if due, take a snapshot, which is written in the background
        await c.devices.to_serving()  # rollout engines wake and load the weights; trainers sleep
        c.timeline.mark("weights", f"v{c.devices.actor.version}")
        await c.report.step(c, step, batch, flat(shares.of(c.devices.actor)), stats | decision)
        await c.checkpoints.finish(c)  # finish the save if every rank has written its part
        stop_if_due(c)
        del batch, sizes, shares  # free them before the next step is served
    c.timeline.step = c.config.steps
    await evaluate(c, c.config.steps)
    await c.world.wait_for_all()


async def gather_sizes(batch: RolloutBatch, c: Controller) -> tuple[list[Sizes], StepStats | None]:
    """Gather every rank's sample sizes, and its measurements of serving (collective: all ranks).

    Raises Stopped if a rank was asked to stop: the batch is saved, and trained on when the run resumes.
    """
    await c.world.wait_for_all()  # ranks that only train wait here for those that serve
    own = Sizes.of(batch.kept, c.devices.actor.prefix_of, "cost" in c.algorithm.signals)
    facts = (own, batch.stats, batch.missing_groups, bool(c.stop.asked))
    sizes, stats, missing_groups, stops = zip(*await c.world.gather(facts), strict=True)
    batch.missing_groups = max(missing_groups)
    c.stopping = any(stops)
    if c.stopping:
        c.ahead = batch
        raise Stopped
    measured = [each for each in stats if each]
    return list(sizes), StepStats.total(measured) if measured else None


async def exchange(batch: RolloutBatch, sizes: list[Sizes], c: Controller) -> Shares:
    """Deal all samples to the models' data-parallel ranks in equal work (collective: all ranks).

    Every rank computes the same deals from the gathered sizes: one per shape, because actor and critics may
    be sharded differently. For each model, a sample goes straight from its owner to every rank of one copy.
    """
    actor = c.devices.actor
    shapes = [m.shape for m in (actor, *c.devices.critics, *c.devices.references)]
    owners, deals = deal(sizes, shapes, actor.macs, c.config)
    parcels: dict[int, list[Sample]] = {}  # receiver -> samples
    own = {sample.key: sample for sample in batch.kept}
    for key, owner in owners.items():
        if owner == c.world.rank:
            receivers = {rank for each in deals.values() for rank in each.copies[key]}
            for receiver in receivers:
                parcels.setdefault(receiver, []).append(own[key])
    incoming = await c.world.exchange(parcels)
    received = list(chain.from_iterable(incoming.values()))
    with c.timeline.span("read"):
        await c.prompts.attach_images(received)
    samples = {sample.key: sample for sample in received}
    return Shares(deals, samples, list(chain.from_iterable(each.costs for each in sizes)))


async def serve_ahead(c: Controller) -> RolloutBatch | None:
    """With --ahead, serve the next step's batch on the ranks that serve; the others go on to train.

    It uses the weights from the start of this step, so the batch doesn't depend on timing.
    """
    is_last = c.state.step + 1 == c.config.steps
    if not c.config.ahead or is_last:
        return None
    return await modes.collect(c, c.state.step + 1)


async def learn(c: Controller, shares: Shares) -> dict[str, float]:
    """Update critics and actor: in turn, in one pipeline, or on separate ranks. Returns metrics."""
    stats = await compute_advantages(c, shares)
    trainers = [*reversed(c.devices.critics)]  # the last one first: it is awake already
    if c.state.step >= c.algorithm.critic_warmup:
        trainers.append(c.devices.actor)
    # with --schedule fused the first is a critic, which learns together with those beside it
    turns = [trainers] if schedule_of(c.config).fuses else [[trainer] for trainer in trainers]
    for first, *beside in turns:
        await c.devices.give_device_to(first, *beside)
        stats |= await c.same_duty.run(first.update, shares.of(first), *beside)
        c.timeline.ran(first.passes)
    return stats


async def compute_advantages(c: Controller, shares: Shares) -> dict[str, float]:
    """Compute every sample's advantages. Returns the metrics of a constraint, if there is one."""
    actor = c.devices.actor
    for reference in c.devices.references:
        await c.devices.give_device_to(actor, reference)
        await c.same_duty.run(actor.compute_policy_logprobs, shares.of(actor))
        with c.timeline.span("reference"):
            await c.same_duty.run(reference.compute_ref_logprobs, shares.of(reference))
    for critic in c.devices.critics:
        await c.devices.give_device_to(critic)
        await c.same_duty.run(critic.compute_values, shares.of(critic))
    await c.devices.colocation.send_columns(c.same_duty, shares)
    metrics = {}
    if "cost" in c.algorithm.signals:
        reacts = c.state.step >= c.algorithm.critic_warmup  # earlier it would wind up
        before = c.state.log_multiplier
        found = algorithms.updated_multiplier(before, shares.costs, c.algorithm, reacts)
        c.state.log_multiplier, metrics = found
    multiplier = algorithms.lagrange_multiplier(c.state.log_multiplier, c.algorithm)
    learned = {}
    for trainer in (actor, *c.devices.critics):
        learned |= {sample.key: sample for sample in flat(shares.of(trainer))}
    samples = list(learned.values())
    algorithms.set_advantages(samples, c.algorithm, multiplier)
    if c.algorithm.whiten:
        # count each sample once: all ranks of a model-parallel group hold the same ones
        mine = flat(shares.of(actor)) if actor.is_lead else []
        moments = algorithms.moments([a for sample in mine for a in sample.advantages])
        algorithms.whiten(samples, await c.same_duty.gather(moments))
    return metrics


async def gather_metrics(
    c: Controller, stats: dict[str, float], shares: Shares
) -> dict[str, float]:
    """Gather the metrics of all models; if they are on separate ranks, these meet and note a stop.

    Raises UserError after MAX_SKIPS consecutive skipped updates, and saves the samples of the last one.
    """
    is_asked = bool(c.stop.asked)
    stats, was_asked = await c.devices.colocation.gather_metrics(c.world, stats, is_asked)
    c.stopping = c.stopping or was_asked
    skipped = any(stats[name] for name in stats if name.endswith("/not_finite"))
    c.state.skips = c.state.skips + 1 if skipped else 0
    if skipped:
        c.report.note(
            f"step {c.state.step + 1}: the loss or the gradient isn't finite: the update is skipped"
        )
    if c.state.skips == MAX_SKIPS:
        actor = c.devices.actor
        path = c.report.dump(flat(shares.of(actor)) if actor.is_lead else [])
        raise UserError(
            f"the loss or the gradient of {MAX_SKIPS} updates in a row was not finite; "
            f"the samples of the last one are in {path}"
        )
    return stats | {"balance/max_over_mean": shares.imbalance(c.devices.actor)}


def rebalance(c: Controller, step_stats: StepStats | None) -> dict[str, str]:
    """Record the step's measurements, if it was served, and choose the next split by the mode's rule."""
    if step_stats is None:
        return {}
    devices = c.devices
    c.state.history = [*c.state.history, step_stats][-HISTORY:]
    if len(devices.splits) == 1:
        return {}
    tp = {"rollout": c.config.rollout_tp, "genrm": c.config.genrm_tp}
    move = MOVES[devices.split.mode]
    decision = move(c.state.history, devices.splits, devices.rollout.capacity, tp)
    was_served_so = step_stats.split == devices.split  # if not, they are of an older split
    if was_served_so and decision.split != devices.split:
        c.report.note(f"step {c.state.step + 1}: {decision.reason}")
        c.timeline.mark("split", str(decision.split))
        devices.next = decision.split
    return {"split/reason": decision.reason}


def advance(c: Controller, batch: RolloutBatch) -> None:
    """Count the step as done: checkpoints include it from now on."""
    c.state.step += 1
    is_empty = batch.missing_groups == c.config.prompts_per_step
    c.state.empty_steps = c.state.empty_steps + 1 if is_empty else 0


def stop_if_due(c: Controller) -> None:
    """Raise Stopped if a rank was asked to stop, or UserError after MAX_EMPTY_STEPS empty steps."""
    if c.stopping:
        raise Stopped
    if c.state.empty_steps >= MAX_EMPTY_STEPS:
        raise UserError(
            f"in {MAX_EMPTY_STEPS} steps in a row no prompt had answers of different reward: "
            "prompts are too easy or too hard, the judge can't decide, rules drop all answers, "
            "or all are cut off (--max-new-tokens)"
        )
