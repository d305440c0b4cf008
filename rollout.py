"""Serving: one step's answers are written, judged, and drawn again until the step has its groups.

A mode is one short function here, a row of the paper's figure. Dynamic sampling (DAPO; in waves: WeChat-YATT) replaces groups whose
rewards are all equal. While they serve, controllers meet in one small gather at a time: which groups ended, and how. Every decision,
to draw more, to stop, to cut off what is late, is a pure function of what was gathered, so that all take the same one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import placement
from algorithms import get_algorithm, set_baseline
from engines.engine import WRITTEN, Answer, EngineLost, seed_of
from sample import Sample
from scheduling.dynamic_sampling import Draws, is_informative, is_written, moving_average

MOST_LATE = 3  # engines that may be late with one group


@dataclass
class Served:
    """What this controller's prompts came to in one step. Every sample is kept, dropped, or in a filtered or carried group."""

    kept: list[Sample] = field(default_factory=list)  # groups to train on
    dropped: list[Sample] = field(default_factory=list)  # samples of kept groups whose judge failed, and greedy ones
    filtered: list[list[Sample]] = field(default_factory=list)  # groups that teach nothing: their rewards are all equal
    carried: list[list[Sample]] = field(default_factory=list)  # groups not needed, or cut off: their prompts come again
    waves: int = 0
    lacking: int = 0  # groups short of the batch, over all controllers
    tokens: int = 0  # written in this step
    aborted: int = 0  # answers cut off


class Step:
    """One controller's part of a serving phase: its groups, and the tasks that have them written and judged."""

    def __init__(self, job, draws: Draws | None = None):
        self.job, self.draws, self.served = job, draws, Served()
        self.groups: dict[int, list[Sample]] = {}
        self.tasks: dict[int, asyncio.Task] = {}  # of groups that haven't ended
        self.closed = False  # nothing new is asked for: what is in flight is being cut off

    def start(self, mine: list[int], work) -> None:
        """Begin with this controller's groups; `work(step, group)` is what is done for each."""
        self.groups |= {draw: self.job.groups.take(draw) for draw in mine}
        self.go_on(mine, work)

    def go_on(self, mine: list[int], work) -> None:
        """Begin a stage of groups."""
        self.tasks |= {draw: asyncio.create_task(work(self, self.groups[draw])) for draw in mine}

    def has_ended(self, draw: int) -> bool:
        """Whether a group of this controller has been written and judged since the controllers last met."""
        return draw not in self.tasks and draw not in self.draws.informative and is_written(self.groups[draw])

    async def settle(self, timeout: float | None = None) -> list[int]:
        """Wait for this controller's tasks, at most `timeout` seconds; returns the draws whose task ended."""
        if self.tasks:
            await asyncio.wait(self.tasks.values(), timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        ended = [draw for draw, task in self.tasks.items() if task.done()]
        for draw in ended:
            task = self.tasks.pop(draw)
            if not task.cancelled():
                task.result()
        return ended


# ---------------------------------------------------------------- one function per row of the figure


async def serve_in_turns(step: Step, mine: list[int]) -> None:
    """Full colocation: rollout holds all ranks until the last answer is written, then genrm holds them."""
    job = step.job
    await job.genrm.sleep()
    await job.rollout.wake()
    cut = [draw for draw, group in step.groups.items() if not is_written(group)]
    step.start(mine, write)
    step.go_on(cut, write)
    await enough_written(step)
    if job.stopping:
        return
    await job.rollout.sleep()
    await job.genrm.wake()
    step.go_on([draw for draw in mine + cut if is_written(step.groups[draw])], have_judged)
    await until_settled(step)


async def serve_side_by_side(step: Step, mine: list[int]) -> None:
    """Partial colocation: an answer is judged the moment it is finished, on other ranks; waves cost no swap.

    Returns after a moment, so that the controllers meet while answers are written.
    """
    await step.job.genrm.wake()
    step.start(mine, write_and_judge)
    await step.settle(step.job.config.meet_every_s)


SERVE = {"full": serve_in_turns, "partial": serve_side_by_side}


async def write(step: Step, group: list[Sample], when_written=lambda sample: None) -> None:
    """Have the answers of a group written, until the step is closed. `when_written` is told of each that is whole."""

    def take(sample: Sample, answer: Answer, rank: int) -> None:
        take_answer(step, sample, answer, rank)
        if sample.finish in WRITTEN and not step.closed:
            when_written(sample)

    await have_written(step.job, step.job.sampling, group, take, lambda: step.closed)


async def have_written(job, sampling, group: list[Sample], take, is_closed=lambda: False) -> None:
    """Have one engine write the answers of a group: they share the prompt's KV cache. `take(sample, answer, rank)` is told of each.

    Answers that were cut off are continued: their tokens so far are part of the prompt. An engine that is late is asked no more, and
    what it owes is asked of another; likewise one that is lost. Waits while none is up. Raises ValueError when MOST_LATE were late.
    """
    late = 0
    while (unwritten := [sample for sample in group if sample.finish not in WRITTEN]) and not is_closed():
        if (engine := job.rollout.route()) is None:
            await asyncio.sleep(job.config.meet_every_s)  # in the next meeting they may hear of one
            continue
        prompts = [sample.prompt + sample.response for sample in unwritten]
        rooms = [sampling.room(sample) for sample in unwritten]
        seeds = [seed_of(job.config.seed, sample.prompt_id, sample.index) for sample in unwritten]
        greedy = [sample.greedy for sample in unwritten]
        try:
            async with asyncio.timeout(job.config.request_timeout_s):
                async for answer in engine.generate(prompts, sampling, rooms, seeds, greedy):
                    take(unwritten[answer.index], answer, engine.rank)
        except (TimeoutError, EngineLost) as error:
            if isinstance(error, EngineLost) and not engine.up:
                continue
            job.rollout.avoid(engine)
            late += 1
            if late == MOST_LATE:
                raise ValueError(f"{late} engines, at last the {engine.name}, were later than --request-timeout-s") from None


def take_answer(step: Step, sample: Sample, answer: Answer, rank: int) -> None:
    """Add what an engine wrote to a sample."""
    version, timeline = step.job.actor.version, step.job.timeline
    assert set(answer.versions) <= {version}, f"rank {rank} wrote with weights {set(answer.versions)}, not {version}"
    writing = "resumed" if sample.response else "decoding"
    timeline.sample("queued", sample.prompt_id, sample.index, rank, answer.sent, answer.first_token)
    timeline.sample(writing, sample.prompt_id, sample.index, rank, answer.first_token, answer.end)
    if answer.finish not in WRITTEN:
        timeline.sample("aborted", sample.prompt_id, sample.index, rank, answer.end, answer.end)
        step.served.aborted += 1
    sample.response = sample.response + answer.tokens
    sample.logprobs = sample.logprobs + answer.logprobs
    sample.versions = sample.versions + answer.versions
    sample.finish = answer.finish
    step.served.tokens += len(answer.tokens)


async def have_judged(step: Step, group: list[Sample]) -> None:
    """Have every answer of a written group judged that isn't yet."""
    await asyncio.gather(*(judge_one(step, sample) for sample in group if sample.reward is None))


async def judge_one(step: Step, sample: Sample) -> None:
    """Have one answer judged."""
    if step.closed:
        return  # it was whole a moment before its group was cut off: a call now would outlive the step
    job, clock = step.job, asyncio.get_running_loop().time
    start = clock()
    said = await job.rules.ask(sample)
    if step.closed:
        return  # likewise: it was cut off while its rules were asked
    await job.judge.judge(sample, job.genrm)
    job.rules.mix(sample, said)  # in one go with the judges' reward: a sample that is given up meanwhile keeps none
    end = clock()
    job.timeline.sample("judging", sample.prompt_id, sample.index, job.world.rank, start, end)
    job.timeline.sample("done", sample.prompt_id, sample.index, job.world.rank, end, end)


async def write_and_judge(step: Step, group: list[Sample]) -> None:
    """Have the answers of a group written, and each judged the moment it is whole."""
    judging = [asyncio.create_task(judge_one(step, s)) for s in group if s.finish in WRITTEN and s.reward is None]
    await write(step, group, lambda sample: judging.append(asyncio.create_task(judge_one(step, sample))))
    await asyncio.gather(*judging)


# ---------------------------------------------------------------- the tail does not wait


async def enough_written(step: Step) -> None:
    """Full colocation: wait until as many groups are written as should do, over all controllers, then cut off the others.

    Those are as many as the step lacks, and as many more as are filtered by experience: another round would cost a swap.
    """
    job, draws = step.job, step.draws
    if draws.in_order:
        await until_settled(step)
        return
    wanted = min((draws.wanted - draws.found) * job.state.groups_per_kept, draws.flying)
    written, late = 0, len(draws.late)
    while (written < wanted or late) and not job.stopping:
        ended = await step.settle(job.config.meet_every_s)
        news = await told(job, (len(ended), len(draws.late & step.tasks.keys())))
        written, late = written + sum(count for count, _ in news), sum(count for _, count in news)
    await cut_off(step)


async def until_settled(step: Step) -> None:
    """Wait for the tasks of every controller, or until a stop is asked for (collective)."""
    while any(await told(step.job, len(step.tasks))) and not step.job.stopping:
        await step.settle(step.job.config.meet_every_s)


async def cut_off(step: Step) -> None:
    """No new requests, then abort what is written and judged, and wait until all of it has come back (collective)."""
    job = step.job
    step.closed = True
    await asyncio.gather(job.judge.cancel(), job.rules.cancel())
    while any(await job.world.gather(len(step.tasks))):
        await asyncio.gather(job.rollout.abort(), job.genrm.abort())
        await step.settle(job.config.meet_every_s)  # a request that was on its way when its engine aborted all is met next time
    step.closed = False


# ---------------------------------------------------------------- dynamic sampling


async def serve(job, serve_wave) -> Served:
    """Draw prompts, serve them, drop groups without variance and draw again (collective).

    The first wave has `prompts_per_step` prompts, times `over_dispatch`. Each of up to `max_refill_waves` more replaces the groups
    that were filtered, scaled by the moving average of groups drawn per group kept and by 1.2. By default the first
    `prompts_per_step` informative groups in the order of drawing are kept, over all controllers together; with `over_dispatch` above
    1 the first to end. The prompts of the others go back to the buffer, with `partial_rollout` with all that was written for them.
    When a stop is asked for, everything is cut off and nothing of the step counts.
    """
    config = job.config
    job.judge.forget()
    how = (config.over_dispatch == 1, job.state.groups_per_kept, config.over_dispatch, config.max_refill_waves)
    step = Step(job, Draws(config.prompts_per_step, *how))
    draws = step.draws
    while not draws.complete and not job.stopping:
        wave = draws.next_wave()
        if wave is None and not draws.flying:
            break
        mine = [] if wave is None else draw_wave(job, draws, *wave)
        await serve_wave(step, mine)
        await meet(step)
    await cut_off(step)
    if job.stopping:
        job.groups.undo(list(draws.wave_of), list(step.groups.values()))
        return step.served
    job.state.groups_per_kept = moving_average(job.state.groups_per_kept, draws)
    sort_out(step)
    return step.served


def draw_wave(job, draws: Draws, wave: int, size: int) -> list[int]:
    """Deal the prompts of a wave; returns this controller's (the same call on every controller)."""
    drawn = job.prompts.take(size)
    owners = job.groups.deal(drawn, job.actor.dp_size)
    if wave not in draws.wave_of.values():
        job.timeline.mark("wave", f"wave {wave + 1}")
    draws.add(drawn, wave, set() if draws.in_order else job.groups.awaited(drawn))
    return [draw for draw, owner in owners.items() if owner == job.actor.dp_rank and job.actor.is_head]


async def meet(step: Step) -> None:
    """All controllers tell which of their groups ended, and how (collective)."""
    job, filters = step.job, get_algorithm(step.job.config.algorithm).filters
    ended = {draw: is_informative(group, filters) for draw, group in step.groups.items() if step.has_ended(draw)}
    written = sum(map(is_written, step.groups.values()))
    facts = (ended, written, list(job.judge.failed), list(job.judge.parsed))
    endings, written, failed, parsed = zip(*await told(job, facts), strict=True)
    step.draws.written = sum(written)
    step.draws.learn({draw: informative for ending in endings for draw, informative in ending.items()})
    check_judge(job.config, failed, parsed)


async def told(job, facts) -> list:
    """One meeting of the controllers: each one's `facts` (collective). They also hear what is awaited from whom, which engines are up,
    and whether one was asked to stop; and bring rollout back if all of its engines were lost.
    """
    news = (facts, job.rollout.news(), job.genrm.news(), job.stop.asked)
    facts, rollout, genrm, asked = zip(*await job.world.gather(news), strict=True)
    for pool, heard in ((job.rollout, rollout), (job.genrm, genrm)):
        pool.hear(heard)
        while pool.notes:
            job.report.note(pool.notes.pop(0))
    job.stopping = max(job.stopping, *asked)
    if job.rollout.stranded and not job.stopping:
        await placement.revive(job.actor, job.rollout, job.genrm, job.world, job.timeline)
    return list(facts)


def sort_out(step: Step) -> None:
    """Sort this controller's groups into kept, carried and filtered. A batch may be short: actor.py then trains on less."""
    job, draws, served = step.job, step.draws, step.served
    chosen, again = draws.chosen(), draws.come_again()
    for draw, group in step.groups.items():
        if draw in chosen:
            set_baseline(group, job.config)
            for sample in group:
                (served.dropped if sample.reward is None or sample.greedy else served.kept).append(sample)
        else:
            (served.carried if draw in again else served.filtered).append(group)
    job.groups.put_back(again, served.carried)
    served.waves, served.lacking = draws.waves, draws.wanted - len(chosen)


def check_judge(config, failed: list[list[int]], parsed: list[list[int]]) -> None:
    """Raises ValueError once a judge gave no verdict on `max_judge_failures` answers and none on any other: it never will give one.

    failed, parsed: [controllers][judges], since the run's start.
    """
    counts = zip(zip(*failed, strict=True), zip(*parsed, strict=True), strict=True)
    for judge, judge_format, (failures, verdicts) in zip(config.judge, config.judge_format[: config.judges], counts, strict=True):
        if sum(verdicts) == 0 and sum(failures) >= config.max_judge_failures:
            raise ValueError(
                f"--judge {judge}: none of the first {sum(failures)} answers got a verdict (--max-judge-failures "
                f"{config.max_judge_failures}): it can't be read as --judge-format {judge_format} (see FORMATS in genrm.py), "
                f"or is later than --judge-timeout-s {config.judge_timeout_s:g}"
            )
