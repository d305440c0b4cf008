"""Rollout: one step's answers are generated, judged, and drawn again until the step has its groups.

A mode is one short loop here. Groups whose rewards are all equal are replaced (dynamic sampling). While they
serve, controllers meet in small reductions: which groups finished, and with what. Every decision, to draw
more, to stop, to cut off the rest, is a pure function of what came of it: all take the same one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import genrm
from engines.engine import Answer, Request, seed_of
from engines.pool import EngineStatus
from sample import Outcome, Sample
from scheduling.balance import flat
from scheduling.dynamic_sampling import (
    DynamicSampler,
    OrderedSampler,
    is_generated,
    is_informative,
    is_judged,
)
from scheduling.fusion import Left, histogram, kept_engines
from scheduling.rebalance import StepStats, token_latency

if TYPE_CHECKING:
    from controller import Controller

MEETING_INTERVAL_S = 0.05  # controllers that serve meet at least this often


@dataclass
class RolloutBatch:
    """What this controller's prompts came to in one step. Every group is kept, filtered or carried."""

    kept: list[Sample] = field(default_factory=list)  # samples to train on
    # of kept groups: without a reward, and greedy ones
    dropped: list[Sample] = field(default_factory=list)
    filtered: list[list[Sample]] = field(default_factory=list)  # groups that teach nothing
    carried: list[list[Sample]] = field(default_factory=list)  # groups whose prompts come again
    waves: int = 0
    missing_groups: int = 0  # short of the batch, over all controllers
    tokens: int = 0  # generated in this step
    moved: int = 0  # answers that another engine went on with
    aborted: int = 0  # answers cut off
    stats: StepStats | None = None  # what this controller measured


class Tasks:
    """What this controller waits for: a task for each prompt. closed: all is being cut off."""

    def __init__(self):
        self.running: dict[int, asyncio.Task] = {}
        self.closed = False
        self._end = None  # the wait for all of them, or for one that fails

    def start(self, key: int, work: Coroutine) -> None:
        self.running[key] = asyncio.create_task(work)
        self._end = None

    async def poll(self) -> int:
        """Wait for the tasks to end, but only a moment; returns how many did. Their errors are raised."""
        if self.running:
            first, tasks = asyncio.FIRST_EXCEPTION, self.running.values()
            self._end = self._end or asyncio.create_task(asyncio.wait(tasks, return_when=first))
            await asyncio.wait([self._end], timeout=MEETING_INTERVAL_S)
        ended = [key for key, task in self.running.items() if task.done()]
        for task in map(self.running.pop, ended):
            if not task.cancelled():
                task.result()
        return len(ended)


class RolloutStep:
    """One controller's part of a step: the sampler that all controllers share, and this one's groups."""

    def __init__(
        self, c: Controller, sampler: DynamicSampler, keeps: Callable[[list[Sample]], bool]
    ):
        # keeps: does a judged group teach something?
        self.c, self.sampler, self.keeps = c, sampler, keeps
        self.groups: dict[int, list[Sample]] = {}  # by prompt_id
        self.unwritten: dict[int, int] = {}  # prompt_id -> answers that aren't finished
        self.tasks, self.batch = Tasks(), RolloutBatch()
        self.judging = 0  # answers, those that wait for an engine, too

    @property
    def is_over(self) -> bool:
        """Whether the batch is complete, no more groups can come, or a stop was asked for."""
        sampler = self.sampler
        if sampler.is_complete or self.c.stopping:
            return True
        return not sampler.num_in_flight and sampler.next_wave() is None

    def begin_wave(self) -> list[int]:
        """Draw and deal the prompts of a wave, if one is to begin. Returns this controller's."""
        c, wave, actor = self.c, self.sampler.next_wave(), self.c.placement.actor
        if wave is None:
            return []
        drawn = c.prompts.draw(wave.size)
        owners = c.prompts.assign_owners(drawn, actor.dp_size)
        if wave.number not in self.sampler.wave_of.values():
            c.timeline.mark("wave", f"wave {wave.number + 1}")
        self.sampler.add(drawn, wave.number)
        mine = [p for p, owner in owners.items() if owner == actor.dp_rank and actor.is_head]
        self.groups |= {prompt_id: c.prompts.group(prompt_id) for prompt_id in mine}
        self.unwritten |= {
            p: sum(not sample.is_finished for sample in self.groups[p]) for p in mine
        }
        return mine

    def start(
        self, prompt_ids: list[int], work: Callable[[RolloutStep, list[Sample]], Coroutine]
    ) -> None:
        for prompt_id in prompt_ids:
            self.tasks.start(prompt_id, work(self, self.groups[prompt_id]))


async def collect(c: Controller) -> RolloutBatch:
    """Draw prompts, serve them, drop groups that teach nothing and draw again (collective).

    The first wave has `prompts_per_step` prompts, times `over_dispatch`; each of up to `max_refill_waves`
    more replaces what was filtered. The first informative groups in the order of drawing are kept, with
    `over_dispatch` above 1 the first to finish; prompts that aren't used come first in the next step. When a
    stop is asked for, nothing of the step counts.
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
    for sample in flat([step.groups.values()]):
        # they stay here: whoever trains on it, or takes it up again, reads them anew
        sample.media = ()
    if c.stopping:
        c.prompts.requeue(list(sampler.wave_of), list(step.groups.values()))
        return step.batch
    c.state.groups_per_kept = sampler.updated_groups_per_kept()
    partition(step)
    placement, finished = c.placement, [s for s in flat([step.groups.values()]) if s.is_finished]
    step.batch.stats = StepStats(
        placement.plan.split,
        placement.rollout.pop_stats(),
        placement.genrm.pop_stats(),
        sampler.waves,
        serve_s=c.timeline.now() - start,
        swap_s=placement.swap_s,
        hand_over_s=placement.hand_over_s,
        lengths=histogram(len(sample.response) for sample in finished),
    )
    return step.batch


async def generate_then_judge(step: RolloutStep) -> None:
    """Full colocation: rollout holds all ranks until a wave is generated, then genrm holds them."""
    c, placement = step.c, step.c.placement
    while not step.is_over:
        unfinished = [p for p, group in step.groups.items() if not is_generated(group)]
        wave = step.begin_wave() + unfinished
        await placement.share(rollout=placement.plan.leads("rollout"))
        step.start(wave, generate)
        await wait_for_enough(step)
        if c.stopping:
            return
        await placement.share(genrm=placement.plan.leads("genrm"))
        step.start([prompt_id for prompt_id in wave if is_generated(step.groups[prompt_id])], judge)
        await wait_for_all(c, step.tasks)
        await gather_finished_groups(step)


async def judge_as_generated(step: RolloutStep) -> None:
    """Partial colocation: an answer is judged the moment it is finished, elsewhere; a wave costs no swap."""
    plan = step.c.placement.plan
    await step.c.placement.share(plan.leads("rollout"), plan.leads("genrm"))
    while not step.is_over:
        step.start(step.begin_wave(), generate_and_judge)
        await step.tasks.poll()
        await gather_finished_groups(step)


async def judge_beside_the_tail(step: RolloutStep) -> None:
    """Inter-stage fusion: rollout holds all ranks, genrm most of them once few answers are left unwritten."""
    c, rollout = step.c, step.c.placement.rollout
    mode = c.placement.plan.mode
    latency = token_latency(c.state.history, rollout.role, c.config.rollout_tp, mode)
    capacity = rollout.capacity
    while not step.is_over:
        step.start(step.begin_wave(), generate_and_judge)
        await step.tasks.poll()
        left, owed = await gather_finished_groups(step)
        if not step.is_over:
            keep = kept_engines(left.unwritten, latency, capacity)
            await c.placement.follow_the_tail(left, keep, owed)


MODES = {"full": generate_then_judge, "partial": judge_as_generated, "fused": judge_beside_the_tail}


async def ask(
    c: Controller, group: list[Sample], tasks: Tasks
) -> AsyncIterator[tuple[Sample, Answer]]:
    """What engines generate, for the caller to append. What they abort is asked again, unless all ends."""
    while (unfinished := [s for s in group if not s.is_finished]) and not tasks.closed:
        requests = []
        for sample in unfinished:
            rule = c.greedy if sample.greedy else c.sampling
            seed = seed_of(c.config.seed, *sample.key)
            limit = rule.max_new_tokens - len(sample.response)
            prompt = sample.prompt + sample.response
            requests.append(Request(prompt, rule, limit, seed, sample.media))
        async for answer in c.placement.rollout.generate(requests):
            yield unfinished[answer.index], answer


async def generate(step: RolloutStep, group: list[Sample], on_finished=lambda sample: None) -> None:
    async for sample, answer in ask(step.c, group, step.tasks):
        append_tokens(step, sample, answer)
        if sample.is_finished and not step.tasks.closed:
            on_finished(sample)


def append_tokens(step: RolloutStep, sample: Sample, answer: Answer) -> None:
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
    step.unwritten[sample.prompt_id] -= sample.is_finished
    if not sample.is_finished:
        is_over = step.tasks.closed  # else another engine goes on with it
        state = "aborted" if is_over else "moved"
        timeline.sample(state, *key, answer.rank, answer.end, answer.end)
        step.batch.aborted += is_over
        step.batch.moved += not is_over


async def judge(step: RolloutStep, group: list[Sample]) -> None:
    """Have every answer of a generated group judged that isn't yet."""
    await asyncio.gather(*(judge_one(step, sample) for sample in group if sample.reward is None))


async def generate_and_judge(step: RolloutStep, group: list[Sample]) -> None:
    """Have the answers of a group generated, and each judged the moment it is finished."""
    finished = [sample for sample in group if sample.is_finished and sample.reward is None]
    judging = [asyncio.create_task(judge_one(step, sample)) for sample in finished]
    await generate(step, group, lambda s: judging.append(asyncio.create_task(judge_one(step, s))))
    await asyncio.gather(*judging)


async def judge_one(step: RolloutStep, sample: Sample) -> None:
    if step.tasks.closed:
        # it finished a moment before its group was cut off: a call now would outlive the step
        return
    c, clock = step.c, asyncio.get_running_loop().time
    start = clock()
    step.judging += 1
    await c.rewards.score(sample, c.placement.genrm)
    step.judging -= 1
    end, begin = clock(), max(start, c.placement.genrm.woke_at)
    c.timeline.sample("queued", *sample.key, c.world.rank, start, begin)
    c.timeline.sample("judging", *sample.key, c.world.rank, begin, end)
    c.timeline.sample("done", *sample.key, c.world.rank, end, end)


def partition(step: RolloutStep) -> None:
    """This controller's groups are kept, carried or filtered. A batch may be short."""
    c, sampler, batch = step.c, step.sampler, step.batch
    chosen, requeued = set(sampler.chosen()), set(sampler.requeued())
    for prompt_id, group in step.groups.items():
        if prompt_id in chosen:
            outcomes = outcomes_of(group)
            for sample in group:
                sample.outcomes = outcomes
                is_dropped = sample.reward is None or sample.greedy
                (batch.dropped if is_dropped else batch.kept).append(sample)
        else:
            (batch.carried if prompt_id in requeued else batch.filtered).append(group)
    c.prompts.requeue(sampler.requeued(), batch.carried)
    batch.waves, batch.missing_groups = sampler.waves, sampler.target - len(chosen)


def outcomes_of(group: list[Sample]) -> list[Outcome]:
    """The outcomes that advantages compare. A group is whole here; its answers train on any ranks."""
    judged = [sample for sample in group if sample.reward is not None]
    return [Outcome(s.index, len(s.response), s.reward, s.cost, s.greedy) for s in judged]


class Meeting(NamedTuple):
    """What the controllers told together, and the signal that asked one of them to stop, else 0."""

    facts: Any
    rollout: EngineStatus
    genrm: EngineStatus
    stop: int


async def sync_controllers(
    c: Controller, facts: Any, total: Callable[[list], Any] = sum
) -> Meeting:
    """All tell each other their facts, how their engines are, whether to stop (collective); `follow` acts."""

    def total_of(parts: list[Meeting]) -> Meeting:
        facts, rollout, genrm, asked = zip(*parts, strict=True)
        statuses = (EngineStatus.total(rollout), EngineStatus.total(genrm))
        return Meeting(total(facts), *statuses, max(asked))

    statuses = (c.placement.rollout.status(), c.placement.genrm.status())
    return await c.world.reduce(Meeting(facts, *statuses, c.stop.asked), total_of)


def follow(c: Controller, meeting: Meeting) -> None:
    """Remember a stop, else route around lost engines, on all alike. UserError if a role has none left."""
    c.stopping = max(c.stopping, meeting.stop)
    if not c.stopping:  # else all is cut off, and saved, whoever is left
        for pool, status in (
            (c.placement.rollout, meeting.rollout),
            (c.placement.genrm, meeting.genrm),
        ):
            for line in pool.apply_status(status):
                c.report.note(line)


async def gather_finished_groups(step: RolloutStep) -> tuple[Left, Counter[int]]:
    """All tell which groups finished (collective). Returns what is left, and tokens owed, by rank."""
    c, sampler, unwritten = step.c, step.sampler, step.unwritten
    ended = sorted(
        p for p in unwritten if p not in step.tasks.running and p not in sampler.informative
    )
    mine = {p: step.keeps(step.groups[p]) for p in ended if not unwritten[p]}
    left = (sum(unwritten.values()), step.judging, sum(map(len, step.groups.values())))
    facts = (mine, [*unwritten.values()].count(0), c.rewards.counts(), left)
    meeting = await sync_controllers(c, facts, total_of_groups)
    follow(c, meeting)
    finished, sampler.num_generated, counts, left = meeting.facts
    sampler.record(finished)
    genrm.check_judges(c.config, counts)
    return Left(*left), meeting.rollout.outstanding


def total_of_groups(parts: list[tuple]) -> tuple:
    finished, generated, counts, left = zip(*parts, strict=True)
    union = {prompt_id: keeps for groups in finished for prompt_id, keeps in groups.items()}
    sums = (
        [sum(column) for column in zip(*rows, strict=True)] for rows in zip(*counts, strict=True)
    )
    return union, sum(generated), tuple(sums), tuple(map(sum, zip(*left, strict=True)))


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
