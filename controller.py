"""The parallel controllers: every rank runs this program on its own share of the prompts.

There is no rank that holds the batch. Controllers meet in small collectives (counts, lengths, a flag) and take the same decisions,
because each decision is a pure function of what was gathered. The outside is three things: a `World`, engines and actor, and the
event loop's clock.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import algorithms
import placement
from checkpoint import Checkpoints
from engines.pool import Pool, RoleLoad
from rewards import Rules
from rollout import SERVE, Step, cut_off, have_written, serve, until_settled
from runtime import shutdown
from sample import Sample
from scheduling.balance import flat, plan_batch
from scheduling.dynamic_sampling import Groups
from scheduling.rebalance import HISTORY, Load, rebalance


@dataclass
class State:
    """What the loop carries from step to step; the same on every controller."""

    step: int = 0
    groups_per_kept: float = 1.0  # moving average of groups generated for each group kept (1 / keep rate)
    history: list[Load] = field(default_factory=list)  # what the newest steps measured: what moves the split
    hand_over_s: float = 0.0  # that the last wake-up and weight push took here: the one field in which controllers differ
    empty_steps: int = 0  # steps in a row without one informative group
    skips: int = 0  # updates in a row whose loss or gradient wasn't finite
    log_multiplier: float = 0.0  # of the cost, where there is a constraint: ln(lambda / lagrange_init), see algorithms.py


@dataclass
class Job:
    """Everything one controller works with: the real parts under torchrun, fakes in the tests."""

    config: object
    world: object
    plans: list[placement.Plan]  # those that the run may take
    plan: placement.Plan  # the one it has taken
    actor: object
    rollout: Pool
    genrm: Pool
    judge: object
    prompts: object
    groups: Groups
    sampling: object  # how answers are sampled; `greedy` is how held-out prompts are answered
    greedy: object
    timeline: object
    report: object
    checkpoints: Checkpoints
    state: State = field(default_factory=State)
    stop: shutdown.Stop = field(default_factory=shutdown.Stop)  # what this process was asked for
    stopping: int = 0  # the signal that asked one of the controllers to stop, once all have heard
    reference: list = field(default_factory=list)  # the reference model, if the KL to it is asked for
    critics: list = field(default_factory=list)  # the value models that the algorithm has
    rules: Rules = field(default_factory=Rules)  # what else than the judges the reward comes from, and the cost


async def train(job: Job) -> int:
    """The training loop (collective: every rank calls). One turn is one column of the paper's figure.

    Returns the signal that ended it early, else 0; the state in which the step began has been saved then.
    """
    config, world, actor, rollout, genrm = job.config, job.world, job.actor, job.rollout, job.genrm
    await begin(job)
    for step in range(job.state.step, config.steps):
        job.timeline.step = step
        await evaluate(job, step)

        # ---- serve: answers are written and judged, and drawn again until the step has its groups
        with job.timeline.span("serve"):
            served = await serve(job, SERVE[job.plan.mode])
        if job.stopping:
            break

        # ---- all controllers meet: equal work for every data-parallel rank
        mini_batches = await balance(served.kept, config, actor, world)

        # ---- train: every rank belongs to the actor now
        await placement.to_training(actor, job.critics, rollout, genrm, world, job.timeline)
        with job.timeline.span("train"):
            stats = await appraise(job, mini_batches) | await update(job, mini_batches)
        check_skips(job, stats, mini_batches)

        # ---- everything sleeps but the actor: the split may move, and what is now is saved while the next step is served
        decision = await replan(job, served)
        note_step(job, served)
        await job.checkpoints.save(job)
        job.state.hand_over_s = await placement.to_serving(actor, job.critics, rollout, world, job.timeline)
        job.timeline.mark("weights", f"v{actor.version}")

        await job.report.step(step, served, flat(mini_batches), stats | decision, job)
        await job.checkpoints.finish(job)  # after the report: what a checkpoint takes for done has its row in the files
        check_progress(job)
        del served, mini_batches  # not held while the next step is served
    return await end(job)


async def begin(job: Job) -> None:
    """Engines come up awake, and so does the actor: hand the devices to serving (collective)."""
    await job.rollout.sleep()
    await job.genrm.sleep()
    placement.take_plan(job.plan, job.rollout, job.genrm)
    job.state.hand_over_s = await placement.to_serving(job.actor, job.critics, job.rollout, job.world, job.timeline)


async def end(job: Job) -> int:
    """After the last step, evaluate; where a stop was asked for, save what is between two steps (collective). Returns the signal."""
    if not job.stopping:
        job.timeline.step = job.config.steps
        await evaluate(job, job.config.steps)
    if job.stopping:
        await placement.to_training(job.actor, job.critics, job.rollout, job.genrm, job.world, job.timeline)
        await job.checkpoints.save_now(job)
    await job.checkpoints.finish(job, wait=True)
    return job.stopping


async def replan(job: Job, served) -> dict[str, float | str]:
    """Take the plan that should serve the next step soonest (collective). Returns the decision, as metrics."""
    spans = job.timeline.spans
    serving = next(span for span in spans if span.name == "serve")
    swaps = [span for span in spans if span.name == "switch" and serving.start <= span.start <= serving.end]
    seconds = [sum(span.end - span.start for span in part) for part in ([serving], swaps)]
    restarts = job.rollout.end_step() + job.genrm.end_step()
    facts = (job.rollout.take_load(), job.genrm.take_load(), *seconds, job.state.hand_over_s, restarts)
    rollout, genrm, serve_s, swap_s, hand_over_s, restarts = zip(*await job.world.gather(facts), strict=True)
    work = (RoleLoad.total(rollout), RoleLoad.total(genrm), served.waves)
    load = Load(job.plan, *work, max(serve_s), max(swap_s), max(hand_over_s))
    job.state.history = [*job.state.history, load][-HISTORY:]
    steps_left = job.config.steps - job.timeline.step - 1
    decision = rebalance(job.state.history, job.plans, job.config.max_running_requests, steps_left)
    moves = decision.plan != job.plan
    metrics = {"split/predicted_s": decision.predicted_s, "split/moved": float(moves), "split/reason": decision.reason}
    metrics["faults/engine_restarts"] = float(sum(restarts))
    if moves:
        job.report.note(f"step {job.timeline.step + 1}: {decision.reason}")
        job.timeline.mark("split", decision.plan.split)
        job.plan = decision.plan
        placement.take_plan(job.plan, job.rollout, job.genrm)
    return metrics


def check_skips(job: Job, stats: dict[str, float], mini_batches) -> None:
    """Raises ValueError after `max_skips` updates in a row that were skipped, and leaves this controller's samples in a file.

    The actor's or a critic's: it is the same samples that they can't learn.
    """
    job.state.skips = job.state.skips + 1 if any(stats[name] for name in stats if name.endswith("/not_finite")) else 0
    if job.state.skips:
        job.report.note(f"step {job.timeline.step + 1}: the loss or the gradient isn't finite: the update is skipped")
    if job.state.skips == job.config.max_skips:
        path = job.report.dump(flat(mini_batches) if job.actor.is_head else [])
        raise ValueError(
            f"--max-skips {job.state.skips}: the loss or the gradient of so many updates in a row was not finite; "
            f"the samples of the last one are in {path}"
        )


def note_step(job: Job, served) -> None:
    """The step is done, as far as a checkpoint is concerned."""
    empty = served.lacking == job.config.prompts_per_step
    job.state.step += 1
    job.state.empty_steps = job.state.empty_steps + 1 if empty else 0


def check_progress(job: Job) -> None:
    """Raises ValueError after `max_empty_steps` steps in a row without one informative group (0: never)."""
    if 0 < job.config.max_empty_steps <= job.state.empty_steps:
        raise ValueError(
            f"--max-empty-steps {job.config.max_empty_steps}: no prompt of so many steps in a row had answers of different reward; "
            f"they are too easy or too hard, or the judge can't tell"
        )


# ---------------------------------------------------------------- where controllers meet


async def balance(samples: list[Sample], config, actor, world) -> list[list[list[Sample]]]:
    """Deal all samples to the data-parallel ranks in equal work; returns this one's mini-batches of micro-batches (collective).

    Controllers gather lengths, and each works out the whole plan from them (see balance.py). The samples then move point to point,
    never through one; every rank of a data-parallel rank's model-parallel group gets the same.
    """
    mine = {(sample.prompt_id, sample.index): sample for sample in samples}
    lengths = {key: len(sample.prompt) + len(sample.response) for key, sample in mine.items()}
    facts = await world.gather((actor.dp_rank, lengths))
    tokens = {key: length for _, lengths_of_rank in facts for key, length in lengths_of_rank.items()}
    assert len(tokens) == sum(len(lengths_of_rank) for _, lengths_of_rank in facts), "two controllers hold the same sample"
    plan = plan_batch(tokens, actor.cost, config, actor.dp_size)
    shares = [[mine[key] for key in flat(plan[dp_rank]) if key in mine] for dp_rank in range(actor.dp_size)]
    incoming = await world.exchange({rank: shares[dp_rank] for rank, (dp_rank, _) in enumerate(facts) if shares[dp_rank]})
    got = {(sample.prompt_id, sample.index): sample for parcel in incoming.values() for sample in parcel}
    return [[[got[key] for key in micro_batch] for micro_batch in mini_batch] for mini_batch in plan[actor.dp_rank]]


async def appraise(job: Job, mini_batches: list[list[list[Sample]]]) -> dict[str, float]:
    """Give every sample its advantages: what the reference model and the critics make of it, then the algorithm (collective).

    A score needs the rewards of the whole group, whose answers may be trained on elsewhere: a number for each is gathered. The weight
    of a cost follows from the same numbers. Returns its metrics, if there is one.
    """
    config, world, samples = job.config, job.world, flat(mini_batches)
    for model in (*job.reference, *job.critics):
        await world.run(model.appraise, mini_batches)
    mine = samples if job.actor.is_head else []  # the other ranks of its model-parallel group hold the same
    parts = await world.gather(algorithms.signals_of(mine, config))
    metrics = algorithms.update_multiplier(job.state, parts, config)
    algorithms.set_advantages(samples, parts, config, algorithms.multiplier_of(job.state, config))
    if algorithms.get_algorithm(config.algorithm).whiten:
        algorithms.whiten(samples, await world.gather(algorithms.moments([a for s in mine for a in s.advantages])))
    return metrics


async def update(job: Job, mini_batches: list[list[list[Sample]]]) -> dict[str, float]:
    """One update of every critic, then of the actor (collective). Returns their metrics."""
    stats = {}
    for model in (*job.critics, job.actor):
        stats |= await job.world.run(model.update, mini_batches)
    return stats


async def evaluate(job: Job, step: int) -> None:
    """Every `eval_every` steps and at the end: greedy answers to the held-out prompts, compared with their keys (collective)."""
    config, held_out = job.config, [prompt for prompt in job.prompts.held_out if prompt.answer_key is not None]
    if not held_out or (step % config.eval_every and step != config.steps):
        return
    share = list(enumerate(held_out))[job.actor.dp_rank :: job.actor.dp_size] if job.actor.is_head else []
    mine = [Sample(-1 - i, 0, p.tokens, p.question, p.answer_key) for i, p in share]
    asked = Step(job)
    with job.timeline.span("evaluate"):
        asked.tasks = {sample.prompt_id: asyncio.create_task(answer_greedily(asked, sample)) for sample in mine}
        await until_settled(asked)
    if job.stopping:
        await cut_off(asked)
        return
    right = [job.judge.final_answer(sample) == sample.answer_key for sample in mine]
    counts = await job.world.gather((sum(right), len(right)))
    job.rollout.take_load()
    job.timeline.take()  # evaluation is no part of the step's own figures
    job.report.accuracy(step, sum(r for r, _ in counts) / sum(n for _, n in counts), job.timeline.now())


async def answer_greedily(asked: Step, sample: Sample) -> None:
    """One greedy answer."""

    def take(sample: Sample, answer, rank: int) -> None:
        sample.response, sample.finish = sample.response + answer.tokens, answer.finish

    await have_written(asked.job, asked.job.greedy, [sample], take, lambda: asked.closed)
