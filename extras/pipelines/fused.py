"""`--schedule fused`: all pipes in one table. Pipes in opposite directions fill each other's idle time. Pure.

RLHFuse (arXiv 2409.13221), section 5, but with list scheduling instead of simulated annealing.
"""

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from extras.pipelines import tables
from extras.pipelines.tables import Pipe, Table, Task

MOST_MEMORY = 1.5  # limit of a fused table, in multiples of `base_memory`
TRIES = 400  # list schedules; a count instead of a time, so that all ranks find the same table
STUCK = 10  # number of tries without a gain before a restart
NEAR = 0.025  # largest random shift of a pipe's urgency, as a fraction of the bound
FAR = 0.25  # the same after a restart
EPSILON = 1e-9  # relative error of sums of floats
NOTHING = (math.inf, 0)  # the choice of a rank that can't run any task now


class Lane(NamedTuple):
    """One direction of one stage. A micro-batch passes through its pipe's lanes in order."""

    pipe: int
    stage: int
    backward: bool
    rank: int
    duration: float
    memory: float  # change by a pass; negative if it frees memory


class Tried(NamedTuple):
    """A list schedule."""

    latency: float
    ends: list[list[float]]  # [lane][micro-batch]
    order: list[int]  # the lane of each task; a task comes after all that it needs


def fused(pipes: Sequence[Pipe]) -> Table:
    """Return a table of all pipes, in MOST_MEMORY * `base_memory`, no slower than `one_after_another`."""
    return [list(tasks) for tasks in search(tuple(pipes))]


@lru_cache(maxsize=64)
def search(pipes: tuple[Pipe, ...]) -> Table:
    """Return the fastest of TRIES list schedules, or the first that meets `bound`: the same on every rank.

    Each try reverses the last good schedule in time and rebuilds it, so gaps close. Tasks that ended last are
    the most urgent, up to random shifts (forward-backward improvement: Li and Willis, 1992).
    """
    best = tables.one_after_another(pipes)
    fastest = tables.evaluate(pipes, best).latency
    target = tables.bound(pipes) * (1 + EPSILON)
    most_memory = MOST_MEMORY * tables.base_memory(pipes)
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
        # not rng.gauss: logarithms may differ in the last digit between machines, and so would the tables
        shifts = [rng.uniform(-reach, reach) for _ in pipes]
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
    """Return all lanes: each pipe's stages, forward and then backward."""
    lanes = []
    for number, pipe in enumerate(pipes):
        stages = list(enumerate(pipe.ranks))
        for stage, rank in stages:
            lanes.append(Lane(number, stage, False, rank, pipe.forward, pipe.memory))
        for stage, rank in reversed(stages):
            lanes.append(Lane(number, stage, True, rank, pipe.backward, -pipe.memory))
    return lanes


def alone(pipes: tuple[Pipe, ...], lanes: list[Lane]) -> list[list[float]]:
    """Return the end of each pass if each pipe had its ranks to itself: [lane][micro-batch]."""
    ends = []
    first = [0.0] * len(pipes)  # when each pipe's first micro-batch has passed the lanes so far
    for lane in lanes:
        pipe = pipes[lane.pipe]
        first[lane.pipe] += lane.duration
        between = pipe.forward + pipe.backward
        ends.append([first[lane.pipe] + i * between for i in range(pipe.micro_batches)])
    return ends


class LaneState(NamedTuple):
    """A lane in a partial list schedule. Its lists are [micro-batch], and the first two grow."""

    number: int  # among all lanes
    ends: list[float]  # the ends of its passes that are placed
    ready: list[float]  # the ends in the previous lane, which its passes wait for
    urgency: list[float]  # the lowest is the most urgent
    duration: float
    memory: float


def list_schedule(
    lanes: list[Lane], urgency: list[list[float]], patience: float, most_memory: float
) -> Tried | None:
    """Place tasks until none is left: always the one that can start first among the ranks' choices.

    Returns None if memory runs out on all ranks. A task takes about 8 us.
    """
    ranks = range(1 + max(lane.rank for lane in lanes))
    ends = [[] for _ in lanes]
    here: list[list[LaneState]] = [[] for _ in ranks]
    for k, lane in enumerate(lanes):
        follows = k > 0 and lanes[k - 1].pipe == lane.pipe
        ready = ends[k - 1] if follows else [0.0] * len(urgency[k])
        here[lane.rank].append(LaneState(k, ends[k], ready, urgency[k], lane.duration, lane.memory))
    free = [0.0 for _ in ranks]  # when each rank becomes free
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
    """Return the start and the lane of a rank's next task: the most urgent that may start soon, or NOTHING.

    patience, 0 to 1: how long the rank may wait, as a fraction of the time until a task could end.
    """
    able = []
    earliest = math.inf  # the first start of any task
    soonest = math.inf  # the first end of any task
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
    """Return each rank's tasks. Mirrored `lanes` start with a backward one."""
    table = tables.empty_table(pipes)
    done = [0] * len(lanes)
    for k in reversed(order) if lanes[0].backward else order:
        lane = lanes[k]
        table[lane.rank].append(Task(lane.pipe, lane.stage, lane.backward, done[k]))
        done[k] += 1
    return table
