"""Rebalance: which split serves the next step, from what the last steps measured. Pure.

Without --rebalance there is one split, and nothing to choose. Else a split serves for COOL_DOWN steps. Then
the first that fits:

1. It is the fastest so far, and a better one may be next to it: what wasn't measured is tried.
   Side by side (partial), one engine goes to the busier role, as WeChat-YATT's utilisation asks. In fused
   mode the fluid model chooses the tail, as in RLHFuse.
2. A split was measured faster: the run goes there. Else it stays.

What was measured holds for one load: when critiques get longer or shorter beside the answers, and after
HISTORY steps, all is measured again. In fused mode ranks change hands within a step, too:
fusion.ranks_of_tail.
"""

from collections.abc import Callable
from itertools import takewhile
from statistics import fmean, median
from typing import NamedTuple

from scheduling.measured import Split, StepStats

LEAST_GAIN = 0.05  # what is faster by a smaller part isn't worth a move
HISTORY = 200  # steps that are remembered
COOL_DOWN = 3  # steps to measure a split before the next move
RECENT = 10  # steps of a split that say how fast it is
SIMILAR_LOAD = 1.3  # a step whose critiques are so many times longer or shorter says nothing of now
LEAST_BUSY = 0.3  # a role whose engines have a smaller part of the other's in flight gets no more


class Decision(NamedTuple):
    split: Split  # of the next step
    reason: str  # for people


# mode -> what is worth a trial there, where that isn't an engine more; see with_an_engine_moved
TRIALS: dict[str, Callable[..., list[Split]]] = {}


def choose_split(
    history: list[StepStats], splits: list[Split], capacity: int, tp: dict[str, int]
) -> Decision:
    """The next step's split. history: newest last; capacity, tp: requests and ranks of an engine."""
    now = history[-1].split
    if len(splits) == 1:
        return Decision(now, f"{now}: the only split")
    newest = [*takewhile(lambda step: step.split == now, reversed(history))][:COOL_DOWN]
    if len(newest) < COOL_DOWN:
        return Decision(now, f"{now} stays: measured for {len(newest)} of {COOL_DOWN} steps")
    speeds = measured_speeds(history)
    enough = (1 + LEAST_GAIN) * speeds[now]
    trials = []
    if max(speeds.values()) <= enough:
        find = TRIALS.get(now.mode, with_an_engine_moved)
        trials = find(history, newest, splits, capacity, tp)
    trials = [split for split in trials if split not in speeds]
    if trials:
        return Decision(trials[0], f"{now} -> {trials[0]}: to measure it")
    best = max(speeds, key=speeds.__getitem__)
    if speeds[best] > enough:
        ratio = speeds[best] / speeds[now]
        return Decision(best, f"{now} -> {best}: it was {ratio:.2f} times as fast")
    return Decision(now, f"{now} stays: nothing was measured faster")


def measured_speeds(history: list[StepStats]) -> dict[Split, float]:
    """Steps a second with answers of one token, of each split that had a load like that of now.

    A step trains on as many answers in every split, however many more one writes in vain.
    """
    load = median(judges_load(step) for step in history[-COOL_DOWN:])
    steps_of: dict[Split, list[StepStats]] = {}
    for step in history:
        if load / SIMILAR_LOAD <= judges_load(step) <= load * SIMILAR_LOAD:
            steps_of[step.split] = [*steps_of.get(step.split, []), step][-RECENT:]
    speeds = {}
    for split, steps in steps_of.items():
        seconds = sum(step.serve_s for step in steps)
        speeds[split] = sum(step.answer_tokens for step in steps) / max(1e-9, seconds)
    return speeds


def judges_load(step: StepStats) -> float:
    """Tokens of a critique for each token of an answer."""
    return step.genrm.tokens / max(1, step.genrm.requests) / max(1.0, step.answer_tokens)


def with_an_engine_moved(
    _: list, newest: list[StepStats], splits: list[Split], capacity: int, tp: dict
) -> list[Split]:
    """Return the splits in which one role has an engine more, that of the busier role first.

    newest: steps of one split. The busier role is that whose engines have more in flight.
    """
    now = newest[0].split
    load = {}
    for role, ranks in tp.items():
        load[role] = fmean(step.engine_load(role, ranks) for step in newest)
    found = []
    for role in sorted(load, key=load.__getitem__, reverse=True):
        more = [s for s in splits if s != now and (s.rollout > now.rollout) == (role == "rollout")]
        if more and load[role] >= LEAST_BUSY * max(load.values()):
            found.append(min(more, key=lambda split: abs(split.rollout - now.rollout)))
    return found
