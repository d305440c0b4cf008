"""`--schedule fused`: pipes in one table; those in opposite directions fill each other's idle time. Pure.

RLHFuse (arXiv 2409.13221), section 5; it searches by simulated annealing, here it is list scheduling.
`python -m bench.schedules` shows what it gains.
"""

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from scheduling import pipeline
from scheduling.pipeline import SCHEDULES, Pipe, Schedule, Table, Task

MOST_MEMORY = 1.5  # of a fused table, over `base_memory`
TRIES = 400  # list schedules; a count and not a time, so that all ranks come to the same table
STUCK = 10  # tries without a gain, then a fresh start
NEAR = 0.025  # of the bound: how far a pipe's urgency is shifted, at most
FAR = 0.25  # the same at a fresh start
EPSILON = 1e-9  # part by which sums of floats may be off
NOTHING = (math.inf, 0)  # the choice of a rank that can run no task now


class Lane(NamedTuple):
    """One direction of one stage. A micro-batch goes through the lanes of its pipe in order."""

    pipe: int
    stage: int
    backward: bool
    rank: int
    duration: float
    memory: float  # that a pass takes up; negative if it gives it back


class Tried(NamedTuple):
    """A list schedule."""

    latency: float
    ends: list[list[float]]  # [lane][micro-batch]
    order: list[int]  # the lane of each task; all that a task needs stands before it


def fused(pipes: Sequence[Pipe]) -> Table:
    """All pipes at once, in MOST_MEMORY times `base_memory`; never slower than `one_after_another`."""
    return [list(tasks) for tasks in search(tuple(pipes))]


@lru_cache(maxsize=64)
def search(pipes: tuple[Pipe, ...]) -> Table:
    """The fastest of TRIES list schedules, or the first that meets `bound`: the same on every rank.

    A try looks at the last good schedule from its end, where forward passes are backward ones: what ended
    last is most urgent, and gaps close as it is built anew (forward-backward improvement of project
    scheduling: Li and Willis, 1992). Chance shifts the pipes' urgency against each other.
    """
    best = pipeline.one_after_another(pipes)
    fastest = pipeline.evaluate(pipes, best).latency
    target = pipeline.bound(pipes) * (1 + EPSILON)
    most_memory = MOST_MEMORY * pipeline.base_memory(pipes)
    lanes = lanes_of(pipes)
    rng = random.Random(0)
    stuck = STUCK
    for _ in range(TRIES):
        if fastest <= target:
            break
        if stuck == STUCK:
            now = Tried(math.inf, alone(pipes, lanes), [])
            reach = FAR * target
            stuck = 0
        # not gauss: logarithms may differ in the last digit between machines, and then their tables would
        shifts = [rng.uniform(-reach, reach) for _ in pipes]
        # seen from the end what gave memory back takes it up
        mirrored = [lane._replace(memory=-lane.memory) for lane in reversed(lanes)]
        urgency = []
        for lane, ends in zip(mirrored, reversed(now.ends), strict=True):
            urgency.append([shifts[lane.pipe] - end for end in reversed(ends)])
        tried = list_schedule(mirrored, urgency, rng.random(), most_memory)
        stuck = 0 if tried and tried.latency < now.latency else stuck + 1
        if tried and tried.latency <= now.latency:
            now = tried
            reach = NEAR * target
            lanes = mirrored
            if now.latency < fastest:
                fastest = now.latency
                best = table_of(pipes, lanes, now.order)
    return best


def lanes_of(pipes: tuple[Pipe, ...]) -> list[Lane]:
    """All lanes: the stages of each pipe, forward, then back."""
    lanes = []
    for number, pipe in enumerate(pipes):
        stages = list(enumerate(pipe.ranks))
        for stage, rank in stages:
            lanes.append(Lane(number, stage, False, rank, pipe.forward, pipe.memory))
        for stage, rank in reversed(stages):
            lanes.append(Lane(number, stage, True, rank, pipe.backward, -pipe.memory))
    return lanes


def alone(pipes: tuple[Pipe, ...], lanes: list[Lane]) -> list[list[float]]:
    """The ends of each lane's passes if each pipe had its ranks for itself: [lane][micro-batch]."""
    ends = []
    first = [0.0] * len(pipes)  # when a pipe's first micro-batch is through the lanes so far
    for lane in lanes:
        pipe = pipes[lane.pipe]
        first[lane.pipe] += lane.duration
        between = pipe.forward + pipe.backward
        ends.append([first[lane.pipe] + i * between for i in range(pipe.micro_batches)])
    return ends


class LaneState(NamedTuple):
    """A lane while a list schedule is built. Its lists grow; [micro-batch]."""

    number: int  # among all lanes
    ends: list[float]  # of the passes that were placed
    ready: list[float]  # the ends of the lane before, which its passes wait for
    urgency: list[float]  # the lowest is the most urgent
    duration: float
    memory: float


def list_schedule(
    lanes: list[Lane], urgency: list[list[float]], patience: float, most_memory: float
) -> Tried | None:
    """Let the rank that can begin first run its next task, as `choose` says, until all are placed.

    None if that ends with the memory of all ranks taken up. A task takes about 8 us.
    """
    ranks = range(1 + max(lane.rank for lane in lanes))
    ends = [[] for _ in lanes]
    here: list[list[LaneState]] = [[] for _ in ranks]
    for k, lane in enumerate(lanes):
        follows = k > 0 and lanes[k - 1].pipe == lane.pipe
        ready = ends[k - 1] if follows else [0.0] * len(urgency[k])
        here[lane.rank].append(LaneState(k, ends[k], ready, urgency[k], lane.duration, lane.memory))
    free = [0.0 for _ in ranks]  # when each rank has run all that was placed on it
    room = [most_memory * (1 + EPSILON) for _ in ranks]
    choices = [choose(here[rank], 0.0, room[rank], patience) for rank in ranks]
    order = []
    while (choice := min(choices)) != NOTHING:
        start, k = choice
        rank = lanes[k].rank
        free[rank] = start + lanes[k].duration
        room[rank] -= lanes[k].memory
        ends[k].append(free[rank])
        order.append(k)
        for each in {lane.rank for lane in lanes[k : k + 2]}:  # the next lane's task may be ready
            choices[each] = choose(here[each], free[each], room[each], patience)
    is_whole = len(order) == sum(map(len, urgency))
    return Tried(max(free), ends, order) if is_whole else None


def choose(here: list[LaneState], free: float, room: float, patience: float) -> tuple[float, int]:
    """The start of a rank's next task, and its lane: the most urgent that may start soon, or NOTHING.

    patience, 0 to 1: the part of the time until another task would have ended that the rank may wait.
    """
    able = []
    earliest = math.inf  # start of any task
    soonest = math.inf  # end of any task
    for k, ends, ready, urgency, duration, memory in here:
        i = len(ends)
        if i < len(ready) and memory <= room:
            start = ready[i] if ready[i] > free else free
            able.append((urgency[i], k, start))
            earliest = min(earliest, start)
            soonest = min(soonest, start + duration)
    if not able:
        return NOTHING
    limit = earliest + patience * (soonest - earliest)
    _, k, start = min([candidate for candidate in able if candidate[2] <= limit])
    return start, k


def table_of(pipes: tuple[Pipe, ...], lanes: list[Lane], order: list[int]) -> Table:
    """The tasks of each rank; `lanes` that are mirrored start with a backward one."""
    table = pipeline.empty_table(pipes)
    done = [0] * len(lanes)
    for k in reversed(order) if lanes[0].backward else order:
        lane = lanes[k]
        table[lane.rank].append(Task(lane.pipe, lane.stage, lane.backward, done[k]))
        done[k] += 1
    return table


SCHEDULES["fused"] = Schedule(fused, fuses=True)
