"""Rollout: one step's answers are generated, judged, and drawn again until the step has its groups.

A mode is one short loop here. Groups whose rewards are all equal are replaced (dynamic sampling). While
they serve, controllers meet in one small reduction at a time: which groups finished, and with what. Every
decision, to draw more, to stop, to cut off the rest, is a pure function of what came of it, so that all
controllers take the same one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import genrm
from algorithms import set_baseline
from engines.engine import Answer, Sampling, seed_of
from engines.pool import EngineStatus, Pool
from sample import Sample
from scheduling.dynamic_sampling import (
    DynamicSampler,
    OrderedSampler,
    is_generated,
    is_informative,
    is_judged,
)
from scheduling.rebalance import StepStats

if TYPE_CHECKING:
    from controller import Controller

MEETING_INTERVAL_S = 0.05  # controllers that serve meet at least this often


@dataclass
class RolloutBatch:
    """What this controller's prompts came to in one step. Every group is kept, filtered or carried."""

    kept: list[Sample] = field(default_factory=list)  # samples to train on
    dropped: list[Sample] = field(default_factory=list)  # of kept groups: without a reward, and greedy ones
    filtered: list[list[Sample]] = field(default_factory=list)  # groups that teach nothing
    carried: list[list[Sample]] = field(default_factory=list)  # groups whose prompts come again
    waves: int = 0
    missing_groups: int = 0  # short of the batch, over all controllers
    tokens: int = 0  # generated in this step
    aborted: int = 0  # answers cut off
    stats: StepStats | None = None  # what this controller measured


class Tasks:
    """What this controller waits for: a task for each prompt. closed: all is being cut off."""

    def __init__(self):
        self.running: dict[int, asyncio.Task] = {}
        self.closed = False

    def start(self, key: int, work: Coroutine) -> None:
        self.running[key] = asyncio.create_task(work)

    async def poll(self) -> int:
        """Wait for the tasks to end, but only a moment; returns how many did. Their errors are raised."""
        if self.running:
            first = asyncio.FIRST_EXCEPTION
            await asyncio.wait(self.running.values(), timeout=MEETING_INTERVAL_S, return_when=first)
        ended = [key for key, task in self.running.items() if task.done()]
        for task in map(self.running.pop, ended):
            if not task.cancelled():
                task.result()
        return len(ended)


class RolloutStep:
    """One controller's part of a step: the sampler that all controllers share, and this one's groups.

    keeps: whether a judged group teaches something.
    """

    def __init__(self, c: Controller, sampler: DynamicSampler, keeps: Callable[[list[Sample]], bool]):
        self.c, self.sampler, self.keeps = c, sampler, keeps
        self.groups: dict[int, list[Sample]] = {}  # by prompt_id
        self.tasks, self.batch, self.swap_s = Tasks(), RolloutBatch(), 0.0

    @property
    def is_over(self) -> bool:
        """Whether the batch is complete, no more groups can come, or a stop was asked for."""
        sampler = self.sampler
        if sampler.is_complete or self.c.stopping:
            return True
        return not sampler.num_in_flight and sampler.next_wave() is None

    def begin_wave(self) -> list[int]:
        """Draw and deal the prompts of a wave, if one is to begin. Returns this controller's."""
        c, wave = self.c, self.sampler.next_wave()
        if wave is None:
            return []
        drawn = c.prompts.draw(wave.size)
        actor = c.placement.actor
        owners = c.prompts.assign_owners(drawn, actor.dp_size)
        if wave.number not in self.sampler.wave_of.values():
            c.timeline.mark("wave", f"wave {wave.number + 1}")
        self.sampler.add(drawn, wave.number)
        mine = [p for p, owner in owners.items() if owner == actor.dp_rank and actor.is_head]
        self.groups |= {prompt_id: c.prompts.group(prompt_id) for prompt_id in mine}
        return mine

    def start(self, prompt_ids: list[int], work: Callable[[RolloutStep, list[Sample]], Coroutine]) -> None:
        for prompt_id in prompt_ids:
            self.tasks.start(prompt_id, work(self, self.groups[prompt_id]))

    async def wake(self, pool: Pool, instead_of: Pool | None = None) -> None:
        """A pool gets its devices, which another may hold; nothing to do if it has them (collective)."""
        if not pool.engines:
            return  # of a run without a judge
        clock = self.c.timeline.now
        start = clock()
        if instead_of:
            await instead_of.sleep()
        await pool.wake()
        self.swap_s += clock() - start


async def collect(c: Controller) -> RolloutBatch:
    """Draw prompts, serve them, drop groups that teach nothing and draw again (collective).

    The first wave has `prompts_per_step` prompts, times `over_dispatch`; each of up to `max_refill_waves`
    more replaces what was filtered. By default the first informative groups in the order of drawing are kept,
    with `over_dispatch` above 1 the first to finish. Prompts that aren't used come first in the next step.
    When a stop is asked for, everything is cut off and nothing of the step counts.
    """
    config, start = c.config, c.timeline.now()
    kind = DynamicSampler if config.over_dispatch > 1 else OrderedSampler
    waves = dict(over_dispatch=config.over_dispatch, max_refills=config.max_refill_waves)
    sampler = kind(config.prompts_per_step, c.state.groups_per_kept, **waves)
    step = RolloutStep(c, sampler, is_informative if c.algorithm.filters else is_judged)
    c.rewards.reset()
    with c.timeline.span("serve"):
        await MODES[c.placement.plan.mode](step)
        await cut_off(c, step.tasks)
    if c.stopping:
        c.prompts.requeue(list(sampler.wave_of), list(step.groups.values()))
        return step.batch
    c.state.groups_per_kept = sampler.updated_groups_per_kept()
    partition(step)
    placement = c.placement
    step.batch.stats = StepStats(
        placement.plan.split, placement.rollout.pop_stats(), placement.genrm.pop_stats(), sampler.waves,
        serve_s=c.timeline.now() - start, swap_s=step.swap_s, hand_over_s=placement.hand_over_s,
    )  # fmt: skip
    return step.batch


# ---------------------------------------------------------------- one loop per mode


async def generate_then_judge(step: RolloutStep) -> None:
    """Full colocation: rollout holds all ranks until a wave is generated, then genrm holds them."""
    c, placement = step.c, step.c.placement
    while not step.is_over:
        unfinished = [prompt_id for prompt_id, group in step.groups.items() if not is_generated(group)]
        wave = step.begin_wave() + unfinished
        await step.wake(placement.rollout, instead_of=placement.genrm)
        step.start(wave, generate)
        await wait_for_enough(step)
        if c.stopping:
            return
        await step.wake(placement.genrm, instead_of=placement.rollout)
        step.start([prompt_id for prompt_id in wave if is_generated(step.groups[prompt_id])], judge)
        await wait_for_all(c, step.tasks)
        await gather_finished_groups(step)


async def judge_as_generated(step: RolloutStep) -> None:
    """Partial colocation: an answer is judged the moment it is finished, elsewhere; a wave costs no swap."""
    await step.wake(step.c.placement.genrm)
    while not step.is_over:
        step.start(step.begin_wave(), generate_and_judge)
        await step.tasks.poll()
        await gather_finished_groups(step)


MODES = {"full": generate_then_judge, "partial": judge_as_generated}


async def ask(
    c: Controller, sampling: Sampling, group: list[Sample], tasks: Tasks
) -> AsyncIterator[tuple[Sample, Answer]]:
    """What engines generate of the unfinished answers of a group, which the caller appends.

    They share the prompt's KV cache. What an engine aborted is asked for again, unless all is being cut off.
    """
    while (unfinished := [s for s in group if not s.is_finished]) and not tasks.closed:
        answers = c.placement.rollout.generate(
            [sample.prompt + sample.response for sample in unfinished],
            sampling,
            limits=[sampling.max_new_tokens - len(sample.response) for sample in unfinished],
            seeds=[seed_of(c.config.seed, *sample.key) for sample in unfinished],
            greedy=[sample.greedy for sample in unfinished],
        )
        async for answer in answers:
            yield unfinished[answer.index], answer


async def generate(step: RolloutStep, group: list[Sample], on_finished=lambda sample: None) -> None:
    """Have the answers of a group generated, or continued."""
    async for sample, answer in ask(step.c, step.c.sampling, group, step.tasks):
        append_tokens(step, sample, answer)
        if sample.is_finished and not step.tasks.closed:
            on_finished(sample)


def append_tokens(step: RolloutStep, sample: Sample, answer: Answer) -> None:
    """Add what an engine generated to a sample."""
    version, timeline, key = step.c.placement.actor.version, step.c.timeline, sample.key
    assert set(answer.versions) <= {version}, f"weights {set(answer.versions)} wrote, not {version}"
    generating = "resumed" if sample.response else "decoding"
    timeline.sample("queued", *key, answer.rank, answer.sent, answer.first_token)
    timeline.sample(generating, *key, answer.rank, answer.first_token, answer.end)
    sample.response = sample.response + answer.tokens
    sample.logprobs = sample.logprobs + answer.logprobs
    sample.versions = sample.versions + answer.versions
    sample.finish = answer.finish
    step.batch.tokens += len(answer.tokens)
    if not sample.is_finished:
        timeline.sample("aborted", *key, answer.rank, answer.end, answer.end)
        step.batch.aborted += 1


async def judge(step: RolloutStep, group: list[Sample]) -> None:
    """Have every answer of a generated group judged that isn't yet."""
    await asyncio.gather(*(judge_one(step, sample) for sample in group if sample.reward is None))


async def generate_and_judge(step: RolloutStep, group: list[Sample]) -> None:
    """Have the answers of a group generated, and each judged the moment it is finished."""
    finished = [sample for sample in group if sample.is_finished and sample.reward is None]
    judging = [asyncio.create_task(judge_one(step, sample)) for sample in finished]

    def begin_to_judge(sample: Sample) -> None:
        judging.append(asyncio.create_task(judge_one(step, sample)))

    await generate(step, group, begin_to_judge)
    await asyncio.gather(*judging)


async def judge_one(step: RolloutStep, sample: Sample) -> None:
    if step.tasks.closed:
        return  # it finished a moment before its group was cut off: a call now would outlive the step
    c, clock = step.c, asyncio.get_running_loop().time
    start = clock()
    await c.rewards.score(sample, c.placement.genrm)
    end = clock()
    c.timeline.sample("judging", *sample.key, c.world.rank, start, end)
    c.timeline.sample("done", *sample.key, c.world.rank, end, end)


def partition(step: RolloutStep) -> None:
    """This controller's groups are kept, carried or filtered. A batch may be short."""
    c, sampler, batch = step.c, step.sampler, step.batch
    chosen, requeued = set(sampler.chosen()), set(sampler.requeued())
    for prompt_id, group in step.groups.items():
        if prompt_id in chosen:
            set_baseline(group, c.algorithm)
            for sample in group:
                (batch.dropped if sample.reward is None or sample.greedy else batch.kept).append(sample)
        else:
            (batch.carried if prompt_id in requeued else batch.filtered).append(group)
    c.prompts.requeue(sampler.requeued(), batch.carried)
    batch.waves, batch.missing_groups = sampler.waves, sampler.target - len(chosen)


# ---------------------------------------------------------------- where controllers meet


class Meeting(NamedTuple):
    """What the controllers told together, and the signal that asked one of them to stop, else 0."""

    facts: Any
    rollout: EngineStatus
    genrm: EngineStatus
    stop: int


async def sync_controllers(c: Controller, facts: Any, total: Callable[[list], Any] = sum) -> Meeting:
    """All tell each other their facts, how their engines are, whether to stop (collective); `follow` acts."""

    def total_of(parts: list[Meeting]) -> Meeting:
        facts, rollout, genrm, asked = zip(*parts, strict=True)
        statuses = EngineStatus.total(rollout), EngineStatus.total(genrm)
        return Meeting(total(facts), *statuses, max(asked))

    statuses = (c.placement.rollout.status(), c.placement.genrm.status())
    return await c.world.reduce(Meeting(facts, *statuses, c.stop.asked), total_of)


def follow(c: Controller, meeting: Meeting) -> None:
    """Act on a meeting, on every controller alike: remember a stop, else route around lost engines.

    ValueError if a role has no engine left.
    """
    c.stopping = max(c.stopping, meeting.stop)
    if c.stopping:
        return  # all is cut off, and saved, whoever is left
    for pool, status in ((c.placement.rollout, meeting.rollout), (c.placement.genrm, meeting.genrm)):
        for line in pool.apply_status(status):
            c.report.note(line)


async def gather_finished_groups(step: RolloutStep) -> None:
    """All controllers tell which of their groups finished, and whether those are informative (collective)."""
    c, sampler = step.c, step.sampler
    ended = step.groups.keys() - step.tasks.running.keys() - sampler.informative.keys()
    mine = {p: step.keeps(step.groups[p]) for p in sorted(ended) if is_generated(step.groups[p])}
    num_generated = sum(map(is_generated, step.groups.values()))
    meeting = await sync_controllers(c, (mine, num_generated, c.rewards.counts()), total_of_groups)
    follow(c, meeting)
    finished, sampler.num_generated, counts = meeting.facts
    sampler.record(finished)
    genrm.check_judges(c.config, counts)


def total_of_groups(parts: list[tuple]) -> tuple:
    """Of what several controllers tell in `gather_finished_groups`."""
    finished, generated, counts = zip(*parts, strict=True)
    union = {prompt_id: keeps for groups in finished for prompt_id, keeps in groups.items()}
    sums = ([sum(column) for column in zip(*rows, strict=True)] for rows in zip(*counts, strict=True))
    return union, sum(generated), tuple(sums)


async def wait_for_all(c: Controller, tasks: Tasks) -> None:
    """Wait for the tasks of every controller, or until a stop is asked for (collective)."""
    while True:
        meeting = await sync_controllers(c, len(tasks.running))
        follow(c, meeting)
        if not meeting.facts or c.stopping:
            return
        await tasks.poll()


async def wait_for_enough(step: RolloutStep) -> None:
    """With over-dispatch wait for as many groups as should do, then cut off the others (collective)."""
    c, sampler = step.c, step.sampler
    if c.config.over_dispatch == 1:
        return await wait_for_all(c, step.tasks)
    missing = (sampler.target - sampler.num_informative) * c.state.groups_per_kept
    generated, wanted = 0, min(missing, sampler.num_in_flight)
    while generated < wanted and not c.stopping:
        meeting = await sync_controllers(c, await step.tasks.poll())
        follow(c, meeting)
        generated += meeting.facts
    await cut_off(c, step.tasks)


async def cut_off(c: Controller, tasks: Tasks) -> None:
    """No new requests; abort what is generated and judged, and wait until it has come back (collective)."""
    tasks.closed = True
    await c.rewards.cancel()
    while await c.world.reduce(len(tasks.running), sum):
        await asyncio.gather(c.placement.rollout.abort(), c.placement.genrm.abort())
        await tasks.poll()  # a request that was on its way then is aborted in the next round
    tasks.closed = False
