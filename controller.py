"""The parallel controllers: every rank runs this program on its own share of the prompts.

There is no rank that holds the batch. Controllers meet in small collectives (counts, lengths, a flag) and take the same decisions,
because each decision is a pure function of what was gathered. The outside is three things: a `World`, engines and actor, and the
event loop's clock.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import algorithms
import placement
from balance import flat, plan_batch
from rollout import Sample


@dataclass
class State:
    """What the loop carries from step to step; the same on every controller."""

    step: int = 0
    groups_per_kept: float = 1.0  # moving average of groups generated for each group kept (1 / keep rate)


@dataclass
class Job:
    """Everything one controller works with: the real parts under torchrun, fakes in the tests."""

    config: object
    world: object
    actor: object
    rollout: placement.Pool
    genrm: placement.Pool
    judge: object
    prompts: object
    sampling: object  # how answers are sampled; `greedy` is how held-out prompts are answered
    greedy: object
    timeline: object
    report: object
    state: State = field(default_factory=State)


async def train(job: Job) -> None:
    """The training loop (collective: every rank calls). One turn is one column of the paper's figure."""
    config, world, actor, rollout, genrm = job.config, job.world, job.actor, job.rollout, job.genrm
    await rollout.sleep()  # engines come up awake, and so does the actor
    await genrm.sleep()
    await placement.to_serving(actor, rollout, world, job.timeline)
    for step in range(job.state.step, config.steps):
        job.timeline.step = step
        await evaluate(job, step)

        # ---- serve: answers are written and judged, and drawn again until the step has its groups
        with job.timeline.span("serve"):
            served = await serve(job, SERVE[config.mode])
        algorithms.set_advantages(served.kept, config.algorithm)  # local: a group never leaves its controller

        # ---- all controllers meet: equal work for every data-parallel rank
        mini_batches = await balance(served.kept + served.padding, config, actor, world)

        # ---- train: every rank belongs to the actor now
        await placement.to_training(actor, rollout, genrm, world, job.timeline)
        with job.timeline.span("train"):
            stats = await world.run(actor.update, mini_batches)
        await placement.to_serving(actor, rollout, world, job.timeline)

        job.state.step = step + 1
        await job.report.step(step, served, flat(mini_batches), stats, job)
    job.timeline.step = config.steps
    await evaluate(job, config.steps)


# ---------------------------------------------------------------- serving: one function per row of the figure


async def serve_in_turns(job: Job, groups: list[list[Sample]]) -> None:
    """Full colocation: rollout holds all ranks until the last answer is written, then genrm holds them."""
    await job.genrm.sleep()
    await job.rollout.wake()
    await asyncio.gather(*(generate(job, group) for group in groups))
    await job.rollout.sleep()
    await job.genrm.wake()
    await asyncio.gather(*(job.judge.judge(sample, job.genrm) for group in groups for sample in group))


async def serve_side_by_side(job: Job, groups: list[list[Sample]]) -> None:
    """Partial colocation: an answer is judged the moment it is finished, on other ranks; waves cost no swap."""

    async def write_then_judge(group):
        judging = [asyncio.create_task(job.judge.judge(sample, job.genrm)) async for sample in stream(job, group)]
        await asyncio.gather(*judging)

    await job.genrm.wake()
    await asyncio.gather(*(write_then_judge(group) for group in groups))


SERVE = {"full": serve_in_turns, "partial": serve_side_by_side}


async def stream(job: Job, group: list[Sample]):
    """Have the answers of one group written by one engine (they share the prompt's KV cache); yield each sample when it is done."""
    engine = job.rollout.least_loaded()
    async for answer in engine.generate(group[0].prompt, len(group), job.sampling):
        sample = group[answer.index]
        sample.response, sample.logprobs = answer.tokens, answer.logprobs
        sample.finish, sample.versions = answer.finish, answer.versions
        yield sample


async def generate(job: Job, group: list[Sample]) -> None:
    """Have the answers of one group written."""
    async for _ in stream(job, group):
        pass


# ---------------------------------------------------------------- dynamic sampling


@dataclass
class Served:
    """What this controller's prompts came to in one step. Every sample is kept, dropped, or in a filtered or carried group."""

    kept: list[Sample] = field(default_factory=list)  # groups to train on
    dropped: list[Sample] = field(default_factory=list)  # samples of kept groups whose judge failed
    padding: list[Sample] = field(default_factory=list)  # filtered groups that fill a short batch, masked out of the loss
    filtered: list[list[Sample]] = field(default_factory=list)  # groups whose rewards are all equal: nothing to learn
    carried: list[list[Sample]] = field(default_factory=list)  # informative groups more than needed: their prompts come again
    waves: int = 0
    padded: int = 0  # groups short of the batch, over all controllers


async def serve(job: Job, serve_wave) -> Served:
    """Draw prompts, serve them, drop groups without variance and draw again (collective; dynamic sampling: DAPO, waves: WeChat-YATT).

    The first wave has `prompts_per_step` prompts. Each of up to `max_refill_waves` more fills the gap, scaled by the moving average of
    groups drawn per group kept and by 1.2. The first `prompts_per_step` informative groups in the order of drawing are kept, over all
    controllers together, so that the batch doesn't depend on the number of ranks; the prompts of the others go back to the buffer.
    """
    config, world = job.config, job.world
    job.judge.forget()
    served, mine, informative, drawn = Served(), {}, set(), []
    for wave in range(1 + config.max_refill_waves):
        gap = config.prompts_per_step - len(informative)
        if gap <= 0:
            break
        draws = job.prompts.take(refill_size(gap, job.state.groups_per_kept if wave else None, job.actor.dp_size))
        groups = [job.prompts.group(draw, config.answers_per_prompt) for draw in share(draws, job.actor)]
        await serve_wave(job, groups)
        facts = await world.gather(([g[0].prompt_id for g in groups if is_informative(g)], job.judge.failed, job.judge.parsed))
        found = {draw for draws_of_rank, _, _ in facts for draw in draws_of_rank}
        check_judge(config, sum(failed for _, failed, _ in facts), sum(parsed for _, _, parsed in facts))
        job.state.groups_per_kept = 0.9 * job.state.groups_per_kept + 0.1 * min(len(draws) / max(1, len(found)), 10.0)
        mine |= {group[0].prompt_id: group for group in groups}
        informative |= found
        drawn += draws
        served.waves += 1
    chosen = [draw for draw in drawn if draw in informative]
    surplus = chosen[config.prompts_per_step :]
    job.prompts.put_back(surplus)
    fill(served, mine, set(chosen) - set(surplus), set(surplus), config.prompts_per_step - len(chosen), job.actor.dp_size)
    return served


def refill_size(gap: int, groups_per_kept: float | None, controllers: int) -> int:
    """Prompts to draw to fill `gap` groups (pure): as many in the first wave (None), scaled by what it takes in a refill wave.

    Rounded up to a multiple of the controllers, so that each gets as many.
    """
    wanted = gap if groups_per_kept is None else math.ceil(gap * groups_per_kept * 1.2)
    return -(-wanted // controllers) * controllers


def share(draws: list[int], actor) -> list[int]:
    """This controller's part of the draws: every dp_size-th for the head of a model-parallel group, none for its other ranks."""
    return draws[actor.dp_rank :: actor.dp_size] if actor.is_head else []


def is_informative(group: list[Sample]) -> bool:
    """Whether the judged answers of a group have more than one reward. Answers that the judge failed on don't count."""
    rewards = {sample.reward for sample in group if sample.reward is not None}
    return len(rewards) > 1


def fill(served: Served, mine: dict[int, list[Sample]], kept: set[int], surplus: set[int], short: int, controllers: int) -> None:
    """Sort this controller's groups into kept, carried and filtered, and pad a short batch with filtered ones (under the loss mask)."""
    for draw, group in mine.items():
        if draw in kept:
            for sample in group:
                (served.dropped if sample.reward is None else served.kept).append(sample)
        else:
            (served.carried if draw in surplus else served.filtered).append(group)
    served.padded = max(0, short)
    own_padding = -(-served.padded // controllers)
    served.padding = [sample for group in served.filtered[:own_padding] for sample in group]


def check_judge(config, failed: int, parsed: int) -> None:
    """Raises ValueError once `max_judge_failures` answers got no verdict and none ever got one: such a judge never will give one."""
    if parsed == 0 and failed >= config.max_judge_failures:
        raise ValueError(
            f"--judge {config.judge}: none of the first {failed} answers got a verdict (--max-judge-failures "
            f"{config.max_judge_failures}): it can't be read as --judge-format {config.judge_format} (see FORMATS in genrm.py), "
            f"or is later than --judge-timeout-s {config.judge_timeout_s:g}"
        )


# ---------------------------------------------------------------- where controllers meet


async def balance(samples: list[Sample], config, actor, world) -> list[list[list[Sample]]]:
    """Deal all samples to the data-parallel ranks in equal work; returns this one's mini-batches of micro-batches (collective).

    Controllers gather lengths, and each works out the whole plan from them (see balance.py). The samples then move point to point,
    never through one; every rank of a data-parallel rank's model-parallel group gets the same. Padding isn't trained on and stays.
    """
    mine = {(sample.prompt_id, sample.index): sample for sample in samples if sample.advantages is not None}
    lengths = {key: len(sample.prompt) + len(sample.response) for key, sample in mine.items()}
    facts = await world.gather((actor.dp_rank, lengths))
    tokens = {key: length for _, lengths_of_rank in facts for key, length in lengths_of_rank.items()}
    assert len(tokens) == sum(len(lengths_of_rank) for _, lengths_of_rank in facts), "two controllers hold the same sample"
    plan = plan_batch(tokens, actor.cost, config, actor.dp_size)
    shares = [[mine[key] for key in flat(plan[dp_rank]) if key in mine] for dp_rank in range(actor.dp_size)]
    incoming = await world.exchange({rank: shares[dp_rank] for rank, (dp_rank, _) in enumerate(facts) if shares[dp_rank]})
    got = {(sample.prompt_id, sample.index): sample for parcel in incoming.values() for sample in parcel}
    return [[[got[key] for key in micro_batch] for micro_batch in mini_batch] for mini_batch in plan[actor.dp_rank]]


async def evaluate(job: Job, step: int) -> None:
    """Every `eval_every` steps and at the end: greedy answers to the held-out prompts, compared with their keys (collective)."""
    config, held_out = job.config, [prompt for prompt in job.prompts.held_out if prompt.answer_key is not None]
    if not held_out or (step % config.eval_every and step != config.steps):
        return
    mine = [Sample(-1 - i, 0, p.tokens, p.question, p.answer_key) for i, p in share(list(enumerate(held_out)), job.actor)]
    with job.timeline.span("evaluate"):
        await asyncio.gather(*(answer_greedily(job, sample) for sample in mine))
    right = [job.judge.final_answer(sample) == sample.answer_key for sample in mine]
    counts = await job.world.gather((sum(right), len(right)))
    job.timeline.take()  # evaluation is no part of the step's own figures
    job.report.accuracy(step, sum(r for r, _ in counts) / sum(n for _, n in counts), job.timeline.now())


async def answer_greedily(job: Job, sample: Sample) -> None:
    """One greedy answer."""
    async for answer in job.rollout.least_loaded().generate(sample.prompt, 1, job.greedy):
        sample.response, sample.finish = answer.tokens, answer.finish
