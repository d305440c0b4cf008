"""Rollout: draw prompts, generate and judge answers, until the step has its groups.

Each mode in modes.py is a short loop that calls these functions. Groups with equal rewards are replaced
(dynamic sampling). While they serve, controllers meet in small reductions, to count finished groups. Every
decision (to draw more, stop, or cut off the rest) is a pure function of the totals, so all make the same one.

An answer that its engine doesn't finish continues from its tokens: in `stream_answers` if engines change
roles, or in full mode's next round (wait_for_enough). If the end of a step cuts it off (cut_off), it resumes
in the next step with --over-dispatch; otherwise its prompt starts again. With an environment an answer is an
episode: `play` alternates generated turns and replies.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from algorithms import teaches
from engines.engine import Answer, Request, seed_of
from engines.pool import EngineStatus
from runtime.shutdown import Stopped
from sample import Outcome, Sample
from scheduling.dynamic_sampling import FirstFinishedSampler
from scheduling.measured import Remaining, total
from state import Controller, RolloutBatch

MEETING_INTERVAL_S = 0.05  # controllers that serve meet at least this often


@dataclass
class Tasks(AbstractAsyncContextManager):
    """The tasks that this controller waits for. None outlives the `async with`."""

    # a step's tasks: prompt_id -> task; those of a group's turns: an answer's index -> task
    running: dict[int, asyncio.Task] = field(default_factory=dict)
    closed: bool = False  # everything is being cut off

    async def __aexit__(self, *error: object) -> None:
        """Cancel running tasks and their requests. Not collective: only one rank may have an error."""
        self.closed = True
        for task in self.running.values():
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)

    def start(self, key: int, work: Coroutine) -> None:
        self.running[key] = asyncio.create_task(work)

    async def poll(self) -> int:
        """Wait a moment for the tasks, and return how many ended. Raises a task's error."""
        if self.running:
            until = asyncio.FIRST_EXCEPTION
            await asyncio.wait(self.running.values(), timeout=MEETING_INTERVAL_S, return_when=until)
        ended = [key for key, task in self.running.items() if task.done()]
        for task in map(self.running.pop, ended):
            if not task.cancelled():
                task.result()
        return len(ended)


@dataclass
class RolloutStep:
    """A controller's part of a step: its groups, and the sampler that all controllers share."""

    c: Controller
    sampler: FirstFinishedSampler
    groups: dict[int, list[Sample]] = field(default_factory=dict)  # prompt_id -> answers
    unwritten: dict[int, int] = field(default_factory=dict)  # prompt_id -> unfinished answers
    judging: int = 0  # answers in judging, including those that wait for an engine
    tasks: Tasks = field(default_factory=Tasks)
    batch: RolloutBatch = field(default_factory=RolloutBatch)

    @property
    def is_over(self) -> bool:
        """True once the batch is decided, or no more groups can come."""
        can_come = self.sampler.num_in_flight or self.sampler.next_draw()
        return self.sampler.is_decided or not can_come

    async def draw_prompts(self) -> list[int]:
        """Draw the prompts that the sampler wants now. Returns this controller's."""
        draw = self.sampler.next_draw()
        if draw is None:
            return []
        c = self.c
        drawn = c.prompts.draw(draw.size)
        owners = c.prompts.assign_owners(drawn, c.same_duty.size)
        if draw.wave not in self.sampler.wave_of.values():
            c.timeline.mark("wave", f"wave {draw.wave + 1}")
        self.sampler.add(drawn, draw.wave)
        mine = [p for p, owner in owners.items() if owner == c.same_duty.index]
        with c.timeline.span("read"):
            prompts = await c.prompts.read(mine)
        if c.state.step + 1 < c.config.steps:
            c.prompts.read_ahead(self.sampler.first_size, c.same_duty.size, c.same_duty.index)
        for prompt_id in mine:
            group = c.prompts.group(prompt_id, prompts[prompt_id])
            self.groups[prompt_id] = group
            self.unwritten[prompt_id] = sum(not sample.is_finished for sample in group)
        return mine

    def without_media(self) -> list[Sample]:
        """Return all samples without images and rows, which are read again when they are needed."""
        samples = list(chain.from_iterable(self.groups.values()))
        for sample in samples:
            sample.media = ()
            sample.row = {}
        return samples

    def start(self, prompt_ids: list[int], work: Callable[..., Coroutine]) -> None:
        """Start `work(step, group)` for each of these groups."""
        for prompt_id in prompt_ids:
            self.tasks.start(prompt_id, work(self, self.groups[prompt_id]))


async def stream_answers(
    c: Controller, group: list[Sample], tasks: Tasks
) -> AsyncIterator[tuple[Sample, Answer]]:
    """Yield samples with generated parts, and continue those that engines abort (see Pool.generate)."""
    greedy = replace(c.sampling, temperature=0.0)
    asked = [sample for sample in group if not sample.is_written]
    while asked and not tasks.closed:
        requests = []
        for sample in asked:
            sampling = greedy if sample.greedy else c.sampling
            limit = sampling.max_new_tokens - sample.begun
            seed = seed_of(c.config.seed, *sample.key)
            requests.append(Request(sample.tokens, sampling, limit, seed, sample.media))
        left = dict(enumerate(asked))
        async for answer in c.devices.rollout.generate(requests):
            sample = asked[answer.index]
            if answer.finish != "abort":
                del left[answer.index]
            yield sample, answer
        asked = list(left.values())


async def play(
    c: Controller,
    group: list[Sample],
    tasks: Tasks,
    before_append: Callable[[Sample, Answer], None] = lambda sample, answer: None,
    on_finished: Callable[[Sample], None] = lambda sample: None,
) -> None:
    """Generate a group's answers, and call `on_finished(sample)` after the last part of each.

    Without an environment one stream writes all of them. With one, it writes each answer's first turn; from
    then on the answer is an episode with a task of its own (`play_on`), so that none waits for another.
    before_append(sample, answer): is called for every part.
    """

    def append(sample: Sample, answer: Answer) -> None:
        before_append(sample, answer)
        append_tokens(c, sample, answer)

    async def play_on(sample: Sample) -> None:
        """Alternate the environment's replies and the policy's turns until the episode ends or is cut off."""
        while sample.finish == "turn" and not tasks.closed:
            await ask_environment(c, sample)
            async for _, turn in stream_answers(c, [sample], tasks):
                append(sample, turn)
        if sample.is_finished:
            on_finished(sample)

    async with Tasks() as episodes:
        for sample in group:
            if sample.finish == "turn":  # an earlier step was cut off here
                episodes.start(sample.index, play_on(sample))
        async for sample, answer in stream_answers(c, group, tasks):
            append(sample, answer)
            if sample.finish == "turn":
                episodes.start(sample.index, play_on(sample))
            elif sample.is_finished:
                on_finished(sample)
        await asyncio.gather(*episodes.running.values())


async def ask_environment(c: Controller, sample: Sample) -> None:
    """Have the environment answer the policy's turn. If it ends the episode, the sample is finished."""
    clock = asyncio.get_running_loop().time
    start = clock()
    await c.environment.answer(sample)
    if sample.prompt_id >= 0:  # the timeline omits evaluations
        c.timeline.sample("environment", *sample.key, c.world.rank, start, clock())


def append_tokens(c: Controller, sample: Sample, answer: Answer) -> None:
    """Append the tokens that an engine wrote. After a turn, even a truncated one, the environment is next."""
    sample.response = sample.response + answer.tokens
    sample.logprobs = sample.logprobs + answer.logprobs
    sample.versions = sample.versions + answer.versions
    sample.finish = c.environment.finish_of(answer)


async def generate(step: RolloutStep, group: list[Sample], on_finished=lambda sample: None) -> None:
    """Generate a group's answers, and call `on_finished(sample)` after each."""

    def finish(sample: Sample) -> None:
        step.unwritten[sample.prompt_id] -= 1
        if not step.tasks.closed:
            on_finished(sample)

    await play(step.c, group, step.tasks, partial(account, step), finish)


def account(step: RolloutStep, sample: Sample, answer: Answer) -> None:
    """Record new tokens of an answer; they must come from the current weights."""
    version = step.c.devices.actor.version
    assert set(answer.versions) <= {version}, f"weights {set(answer.versions)} wrote, not {version}"
    timeline = step.c.timeline
    key = sample.key
    generating = "resumed" if sample.response and sample.finish == "abort" else "decoding"
    timeline.sample("queued", *key, answer.rank, answer.sent, answer.first_token)
    timeline.sample(generating, *key, answer.rank, answer.first_token, answer.end)
    step.batch.tokens += len(answer.tokens)
    if answer.finish != "abort":
        return
    step.batch.aborted += step.tasks.closed
    step.batch.moved += not step.tasks.closed
    fate = "aborted" if step.tasks.closed else "moved"
    timeline.sample(fate, *key, answer.rank, answer.end, answer.end)


async def judge(step: RolloutStep, group: list[Sample]) -> None:
    """Judge the answers of a generated group that haven't been judged yet."""
    await asyncio.gather(*(judge_one(step, sample) for sample in group if sample.reward is None))


async def generate_and_judge(step: RolloutStep, group: list[Sample]) -> None:
    """Generate a group's answers, and judge each as soon as it is finished."""
    async with Tasks() as judging:

        def start_judging(sample: Sample) -> None:
            judging.start(sample.index, judge_one(step, sample))

        for sample in group:
            if sample.is_finished and sample.reward is None:  # finished in an earlier step
                start_judging(sample)
        await generate(step, group, start_judging)
        await asyncio.gather(*judging.running.values())


async def judge_one(step: RolloutStep, sample: Sample) -> None:
    if step.tasks.closed:
        return  # the group was just cut off: a call now would outlive the step
    c = step.c
    clock = asyncio.get_running_loop().time
    start = clock()
    step.judging += 1
    await c.rewards.score(sample, c.devices.genrm)
    step.judging -= 1
    end = clock()
    begin = max(start, c.devices.genrm.woke_at)
    c.timeline.sample("queued", *sample.key, c.world.rank, start, begin)
    c.timeline.sample("judging", *sample.key, c.world.rank, begin, end)
    c.timeline.sample("done", *sample.key, c.world.rank, end, end)


def partition(step: RolloutStep) -> None:
    """Keep, carry or filter each of this controller's groups. The batch may be short of groups."""
    c = step.c
    sampler = step.sampler
    batch = step.batch
    chosen = set(sampler.chosen())
    carried = set(sampler.carried())
    for prompt_id, group in step.groups.items():
        if prompt_id in chosen:
            outcomes = outcomes_of(group)
            for sample in group:
                sample.outcomes = outcomes
                is_dropped = sample.reward is None or sample.greedy
                (batch.dropped if is_dropped else batch.kept).append(sample)
        elif prompt_id in carried:
            batch.carried.append(group)
        else:
            batch.filtered.append(group)
    c.prompts.carry_over(sampler.carried(), batch.carried)
    batch.waves = sampler.waves
    batch.missing_groups = sampler.target - len(chosen)


def outcomes_of(group: list[Sample]) -> list[Outcome]:
    """Return a group's outcomes, which are compared later, when its answers are on different ranks."""
    judged = [sample for sample in group if sample.reward is not None]
    return [Outcome(s.index, len(s.response), s.reward, s.cost, s.greedy) for s in judged]


class Meeting(NamedTuple):
    """The message of one controller in a meeting, or the total of all messages."""

    facts: Any
    rollout: EngineStatus
    genrm: EngineStatus
    stop: bool  # whether a signal asked to stop


async def sync_controllers(c: Controller, facts: Any) -> Meeting:
    """Return all controllers' facts and engines' status, added up (collective: ranks that serve).

    Raises Stopped if a rank was asked to stop and no rank is training, and the errors of Devices.apply.
    """
    statuses = (c.devices.rollout.status(), c.devices.genrm.status())
    own = Meeting(facts, *statuses, bool(c.stop.asked))
    meeting = await c.same_duty.reduce(own, total)
    c.devices.apply(meeting.rollout, meeting.genrm)
    if meeting.stop and c.devices.colocation.stops_serving:
        raise Stopped
    return meeting


class GroupsState(NamedTuple):
    """The state of one controller's groups, which it reports in a meeting, or the total."""

    finished: dict[int, bool]  # prompt_id, reported once -> whether the group is informative
    generated: int  # groups with only finished answers
    failed: list[int]  # see Rewards.counts
    succeeded: list[int]
    lost: int  # episodes
    remaining: Remaining

    @staticmethod
    def of(step: RolloutStep) -> GroupsState:
        finished = {}
        written = {prompt_id for prompt_id, count in step.unwritten.items() if not count}
        still_running = step.tasks.running.keys()
        for prompt_id in sorted(written - still_running - step.sampler.finished.keys()):
            finished[prompt_id] = teaches(outcomes_of(step.groups[prompt_id]), step.c.algorithm)
        unwritten = list(step.unwritten.values())
        begun = list(chain.from_iterable(step.groups.values()))
        lost = sum(sample.finish == "lost" for sample in begun)
        remaining = Remaining(sum(unwritten), step.judging, len(begun))
        counts = (*step.c.rewards.counts(), lost)
        return GroupsState(finished, unwritten.count(0), *counts, remaining)


async def gather_finished_groups(step: RolloutStep) -> tuple[Remaining, Counter[int]]:
    """Gather finished groups (collective: ranks that serve).

    A group counts as judged if its answers are written and its task has ended: call this after judging.
    Returns what remains, and each engine's outstanding tokens.
    """
    meeting = await sync_controllers(step.c, GroupsState.of(step))
    progress = meeting.facts
    step.sampler.record(progress.finished, progress.generated)
    step.c.rewards.check(progress.failed, progress.succeeded)
    step.c.environment.check(progress.lost, progress.remaining.begun)
    return progress.remaining, meeting.rollout.outstanding


async def wait_for_all(c: Controller, tasks: Tasks) -> None:
    """Wait for the tasks of every controller (collective: ranks that serve)."""
    while (await sync_controllers(c, len(tasks.running))).facts:
        await tasks.poll()


async def wait_for_enough(step: RolloutStep) -> None:
    """Wait for all tasks, or with over-dispatch for enough, then cut off (collective: ranks that serve)."""
    c = step.c
    sampler = step.sampler
    if c.config.over_dispatch == 1:
        return await wait_for_all(c, step.tasks)
    missing = (sampler.target - sampler.num_informative) * c.state.groups_per_kept
    wanted = min(missing, sampler.num_in_flight)
    generated = 0
    while generated < wanted:
        meeting = await sync_controllers(c, await step.tasks.poll())
        generated += meeting.facts
    await cut_off(c, step.tasks)


async def cut_off(c: Controller, tasks: Tasks) -> None:
    """Abort generation and judging, and wait for the requests' ends (collective: ranks that serve)."""
    tasks.closed = True
    await c.rewards.cancel()
    c.environment.let_go()
    while (await sync_controllers(c, len(tasks.running))).facts:
        await asyncio.gather(c.devices.rollout.abort(), c.devices.genrm.abort())
        await tasks.poll()  # a request that hadn't arrived yet is aborted in the next round
    tasks.closed = False
