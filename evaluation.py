"""Evaluation on held-out prompts: every `eval_every` steps and at the end, or with --steps 0.

Each prompt gets a greedy answer and `eval_samples` sampled ones. Controllers that serve share the prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain

import rollout
from engines.pool import QUEUED
from runtime.shutdown import Stopped
from sample import Prompt, Sample
from scheduling.measured import total
from state import Controller


@dataclass
class Answered:
    """This controller's results for each prompt, in the order in which the prompts finished."""

    # whether the greedy answer is right, and how many of the sampled ones are
    right: list[tuple[bool, int]] = field(default_factory=list)
    earned: list[float] = field(default_factory=list)  # the greedy answer's, in an environment
    lost: int = 0  # prompts with a lost episode


async def evaluate_once(c: Controller) -> bool:
    """Answer the held-out prompts only (collective: all ranks). Returns whether a stop ended it."""
    await c.devices.rollout.wake()
    c.timeline.start()
    try:
        await evaluate(c, 0)
    except Stopped:
        return True
    return False


async def evaluate(c: Controller, step: int) -> None:
    """Report how many answers to held-out prompts are right (collective: ranks that serve)."""
    held_out = c.prompts.source.held_out
    is_due = step % c.config.eval_every == 0 or step == c.config.steps
    if not (held_out and is_due and c.devices.rollout.engines and c.devices.serves):
        return
    numbers = list(range(c.same_duty.index, len(held_out), c.same_duty.size))
    answered = Answered()
    with c.timeline.span("evaluate"):
        async with rollout.Tasks() as tasks:
            # only as many at once as engines take: all prompts and images could fill the memory
            for worker in range(min(len(numbers), QUEUED * c.config.max_running_requests)):
                tasks.start(worker, answer_in_turn(c, numbers, answered, tasks))
            await rollout.wait_for_all(c, tasks)
    c.devices.rollout.pop_stats()
    c.timeline.drain()  # a step's measurements exclude evaluation
    c.environment.means([])
    own = (answered.right, answered.earned, answered.lost, *c.rewards.counts())
    *of_prompts, lost, failed, succeeded = zip(*await c.same_duty.gather(own), strict=True)
    c.rewards.check(total(failed), total(succeeded))
    right, earned = (list(chain.from_iterable(lists)) for lists in of_prompts)
    c.report.evaluation(step, right, earned, sum(lost), c.timeline.now())


async def answer_in_turn(
    c: Controller, numbers: list[int], answered: Answered, tasks: rollout.Tasks
) -> None:
    """Answer one prompt after another until none is left. Several tasks share `numbers`."""
    while numbers and not tasks.closed:
        number = numbers.pop(0)
        prompt = await c.prompts.in_thread(c.prompts.source.held_out.__getitem__, number)
        samples = empty_samples(prompt, number, 1 + c.config.eval_samples)
        await rollout.play(c, samples, tasks)
        has_key = prompt.answer_key is not None
        flags = [has_key and c.rewards.final_answer(s) == s.answer_key for s in samples]
        if any(s.finish == "lost" for s in samples):
            answered.lost += 1
        elif has_key:
            answered.right.append((flags[0], sum(flags[1:])))
        if samples[0].earned and samples[0].finish != "lost":
            answered.earned.append(math.fsum(samples[0].earned))
        c.report.answers(number, samples, flags)


def empty_samples(prompt: Prompt, number: int, count: int) -> list[Sample]:
    """Make `count` unwritten answers to held-out prompt `number`; the first one is greedy."""
    fields = (prompt.tokens, prompt.question, prompt.answer_key, prompt.images)
    samples = [Sample(-1 - number, n, *fields, greedy=n == 0) for n in range(count)]
    for sample in samples:
        sample.turns = prompt.turns
        sample.row = prompt.row
    return samples
