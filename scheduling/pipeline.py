"""Pipeline schedules: in which order each rank runs the forward and backward passes of its stages. Pure.

A schedule makes a `Table` of the `Pipe`s that an optimizer step trains; one executor runs any table.

`1f1b`: PipeDream-Flush, pipe after pipe. `interleaved`: several stages of a pipe on a rank, so that fill and
drain are shorter (Megatron-LM, arXiv 2104.04473, section 2.2). `fused`: all pipes in one table, where those
that run in opposite directions fill each other's idle time (RLHFuse, arXiv 2409.13221, section 5; it searches
by simulated annealing, here it is list scheduling). `python -m bench.schedules` shows what it gains.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from config import Config, UserError

MOST_MEMORY = 1.5  # of a fused table, over `base_memory`
TRIES = 400  # list schedules; a count and not a time, so that all ranks come to the same table
STUCK = 10  # tries without a gain, then a fresh start
# of the bound: how far a pipe's urgency is shifted, at most; FAR at a fresh start
NEAR, FAR = 0.025, 0.25
EPSILON = 1e-9  # part by which sums of floats may be off
NOTHING = (math.inf, 0)  # that a rank can go on with


class Pipe(NamedTuple):
    """One model's pipeline; time and memory, in any unit, are those of one micro-batch on one stage."""

    ranks: tuple[int, ...]  # ranks[stage] runs the stage; interleaved they go round: (0, 1, 0, 1)
    micro_batches: int
    forward: float = 1.0
    backward: float = 2.0
    memory: float = 1.0  # held from a stage's forward pass to the end of its backward pass


class Task(NamedTuple):
    """One stage's pass over one micro-batch of pipe number `pipe`."""

    pipe: int
    stage: int
    backward: bool
    micro_batch: int


Table = list[list[Task]]  # of each rank, in order


class Evaluation(NamedTuple):
    latency: float
    peak_memory: float  # of the rank that holds most
    starts: dict[Task, float]


def needs(pipes: Sequence[Pipe], task: Task) -> list[Task]:
    """The tasks that must end before `task`: the neighbour's, and a backward pass's own forward pass."""
    neighbour = task.stage + (1 if task.backward else -1)
    found = [task._replace(stage=neighbour)] if 0 <= neighbour < len(pipes[task.pipe].ranks) else []
    return [*found, task._replace(backward=False)] if task.backward else found


def evaluate(pipes: Sequence[Pipe], table: Table) -> Evaluation:
    """Each rank runs its tasks in order, each as soon as what it needs has ended; messages take no time.

    ValueError if the table is not of these pipes' tasks, each once, or if ranks wait for each other.
    """
    expected = empty_table(pipes)
    for number, pipe in enumerate(pipes):
        for stage, rank in enumerate(pipe.ranks):
            both = ((backward, i) for backward in (False, True) for i in range(pipe.micro_batches))
            expected[rank] += [Task(number, stage, *which) for which in both]
    if [sorted(tasks) for tasks in table] != expected:
        wrong = "lacks tasks, repeats them or has them on other ranks"
        raise ValueError(f"a pipeline schedule that {wrong}")
    starts, ends, free, held, peak = {}, {}, [0.0] * len(table), [0.0] * len(table), 0.0
    left = [tasks[::-1] for tasks in table]
    while any(left):
        before = len(starts)
        for rank, tasks in enumerate(left):
            while tasks and all(need in ends for need in needs(pipes, tasks[-1])):
                task = tasks.pop()
                pipe = pipes[task.pipe]
                starts[task] = max([free[rank], *(ends[need] for need in needs(pipes, task))])
                took = pipe.backward if task.backward else pipe.forward
                free[rank] = ends[task] = starts[task] + took
                held[rank] += -pipe.memory if task.backward else pipe.memory
                peak = max(peak, held[rank])
        if len(starts) == before:
            raise ValueError("a pipeline schedule in which ranks wait for each other")
    return Evaluation(max(free), peak, starts)


def empty_table(pipes: Sequence[Pipe]) -> Table:
    return [[] for _ in range(1 + max(max(pipe.ranks) for pipe in pipes))]


def bound(pipes: Sequence[Pipe]) -> float:
    """No table is faster (RLHFuse's bound): a pipe's last stage waits for fill and drain, so does a rank."""
    most = max(
        (pipe.micro_batches + len(pipe.ranks) - 1) * (pipe.forward + pipe.backward)
        for pipe in pipes
    )
    for rank in {rank for pipe in pipes for rank in pipe.ranks}:
        here = [(pipe, s) for pipe in pipes for s, other in enumerate(pipe.ranks) if other == rank]
        work = sum(pipe.micro_batches * (pipe.forward + pipe.backward) for pipe, _ in here)
        fill = min(s * pipe.forward for pipe, s in here)
        drain = min(s * pipe.backward for pipe, s in here)
        most = max(most, fill + work + drain)
    return most


def base_memory(pipes: Sequence[Pipe]) -> float:
    """What 1F1B's first stage holds of the largest pipe, if there are micro-batches enough."""
    return max(len(pipe.ranks) * pipe.memory for pipe in pipes)


def one_after_another(pipes: Sequence[Pipe]) -> Table:
    """1F1B. A rank goes on to the next pipe as soon as it can. ValueError if it has two stages of a pipe."""
    for number, pipe in enumerate(pipes):
        if len(set(pipe.ranks)) < len(pipe.ranks):
            has = f"pipe {number} has several stages on a rank"
            raise ValueError(f"{has}: that takes `interleaved`")
    return interleaved(pipes)


def interleaved(pipes: Sequence[Pipe]) -> Table:
    """1F1B whose ranks take their stages in turns, as many micro-batches a turn as there are ranks.

    Megatron asks for a multiple of them. Here the missing ones are planned for, then left out: no rank can
    come to wait for another by that. ValueError if the stages don't go round the ranks.
    """
    table = empty_table(pipes)
    for number, pipe in enumerate(pipes):
        p = len(set(pipe.ranks))
        chunks, behind = len(pipe.ranks) // p, 1 if len(pipe.ranks) == p else 2
        if pipe.ranks != pipe.ranks[:p] * chunks:
            raise ValueError(f"the stages of pipe {number} don't go round its ranks: {pipe.ranks}")
        firsts = range(0, pipe.micro_batches, p)
        turns = [(c, i) for first in firsts for c in range(chunks) for i in range(first, first + p)]
        for place, rank in enumerate(pipe.ranks[:p]):
            forwards = [Task(number, c * p + place, False, i) for c, i in turns]
            backwards = [Task(number, (chunks - 1 - c) * p + place, True, i) for c, i in turns]
            order = alternate(forwards, backwards, behind * (p - 1 - place) + (chunks - 1) * p)
            table[rank] += [task for task in order if task.micro_batch < pipe.micro_batches]
    return table


def alternate(forwards: list[Task], backwards: list[Task], warm_up: int) -> list[Task]:
    """`warm_up` forward passes, then one forward and one backward pass by turns, then the rest."""
    steady = list(chain(*zip(forwards[warm_up:], backwards, strict=False)))
    return forwards[:warm_up] + steady + backwards[len(steady) // 2 :]


# ---------------------------------------------------------------- fused


class Lane(NamedTuple):
    """One direction of one stage. A micro-batch goes through the lanes of its pipe in order."""

    pipe: int
    stage: int
    backward: bool
    rank: int
    duration: float
    memory: float  # that a pass takes up; negative if it gives it back


class Tried(NamedTuple):
    latency: float
    ends: list[list[float]]  # [lane][micro-batch]
    order: list[int]  # the lane of each task; all that a task needs stands before it


def fused(pipes: Sequence[Pipe]) -> Table:
    """All pipes at once, in MOST_MEMORY times `base_memory`; never slower than `one_after_another`."""
    return [list(tasks) for tasks in search(tuple(pipes))]


@lru_cache(maxsize=64)
def search(pipes: tuple[Pipe, ...], seed: int = 0) -> Table:
    """The fastest of TRIES list schedules, or the first that meets `bound`: the same whoever asks.

    A try looks at the last good schedule from its end, where forward passes are backward ones: what ended
    last is most urgent, and gaps close as it is built anew (forward-backward improvement of project
    scheduling: Li and Willis, 1992). Chance shifts the pipes' urgency against each other.
    """
    best, most_memory = one_after_another(pipes), MOST_MEMORY * base_memory(pipes)
    fastest, target = evaluate(pipes, best).latency, bound(pipes) * (1 + EPSILON)
    lanes, mirrored = lanes_of(pipes)
    rng, stuck = random.Random(seed), STUCK
    for _ in range(TRIES):
        if fastest <= target:
            break
        if stuck == STUCK:
            now, reach, stuck = Tried(math.inf, alone(pipes, lanes), []), FAR * target, 0
        # not gauss: logarithms may differ in the last digit between machines, and then their tables would
        shifts = [rng.uniform(-reach, reach) for _ in pipes]
        seen_from_end = zip(mirrored, reversed(now.ends), strict=True)
        urgency = [
            [shifts[lane.pipe] - end for end in reversed(ends)] for lane, ends in seen_from_end
        ]
        tried = list_schedule(mirrored, urgency, rng.random(), most_memory)
        stuck = 0 if tried and tried.latency < now.latency else stuck + 1
        if tried and tried.latency <= now.latency:
            now, reach, lanes, mirrored = tried, NEAR * target, mirrored, lanes
            if now.latency < fastest:
                fastest, best = now.latency, table_of(pipes, lanes, now.order)
    return best


def lanes_of(pipes: tuple[Pipe, ...]) -> tuple[list[Lane], list[Lane]]:
    """All lanes, and as they are seen from the end: the last first, and what gave memory back takes it up."""
    lanes = []
    for number, pipe in enumerate(pipes):
        stages = list(enumerate(pipe.ranks))
        lanes += [Lane(number, s, False, rank, pipe.forward, pipe.memory) for s, rank in stages]
        lanes += [
            Lane(number, s, True, rank, pipe.backward, -pipe.memory) for s, rank in reversed(stages)
        ]
    return lanes, [lane._replace(memory=-lane.memory) for lane in reversed(lanes)]


def alone(pipes: tuple[Pipe, ...], lanes: list[Lane]) -> list[list[float]]:
    """When the passes of each lane would end if each pipe had its ranks for itself."""
    ends, first = [], [0.0] * len(pipes)
    for lane in lanes:
        first[lane.pipe] += lane.duration
        _, micro_batches, forward, backward, _ = pipes[lane.pipe]
        ends.append([first[lane.pipe] + i * (forward + backward) for i in range(micro_batches)])
    return ends


def list_schedule(
    lanes: list[Lane], urgency: list[list[float]], patience: float, most_memory: float
) -> Tried | None:
    """The rank that can go on first does so, as `choose` says, until all is placed.

    None if that ends with the memory of all ranks taken up. Flat lists, for speed: a task takes about 8 us.
    """
    ranks = range(1 + max(lane.rank for lane in lanes))
    ends, here = [[] for _ in lanes], [[] for _ in ranks]
    for k, lane in enumerate(lanes):
        ready = ends[k - 1] if k and lanes[k - 1].pipe == lane.pipe else [0.0] * len(urgency[k])
        here[lane.rank].append((k, ends[k], ready, urgency[k], lane.duration, lane.memory))
    free, room = [0.0 for _ in ranks], [most_memory * (1 + EPSILON) for _ in ranks]
    choices, order = [choose(here[rank], 0.0, room[rank], patience) for rank in ranks], []
    while (choice := min(choices)) != NOTHING:
        start, k = choice
        rank = lanes[k].rank
        free[rank] = start + lanes[k].duration
        room[rank] -= lanes[k].memory
        ends[k].append(free[rank])
        order.append(k)
        for changed in (rank, lanes[k + 1].rank) if k + 1 < len(lanes) else (rank,):
            choices[changed] = choose(here[changed], free[changed], room[changed], patience)
    return Tried(max(free), ends, order) if len(order) == sum(map(len, urgency)) else None


def choose(here: list[tuple], free: float, room: float, patience: float) -> tuple[float, int]:
    """When a rank goes on, and in which lane: the most urgent (lowest) that may start soon, or NOTHING.

    here: of each lane of the rank its number, ends, the ends of the lane before, urgency, duration, memory.
    patience, 0 to 1: the part of the time until another task would have ended that the rank may wait.
    """
    able, earliest, soonest = [], math.inf, math.inf
    for k, ends, ready, urgency, duration, memory in here:
        i = len(ends)
        if i < len(ready) and memory <= room:
            start = ready[i] if ready[i] > free else free
            able.append((urgency[i], k, start))
            earliest, soonest = min(earliest, start), min(soonest, start + duration)
    if not able:
        return NOTHING
    limit = earliest + patience * (soonest - earliest)
    _, k, start = min([candidate for candidate in able if candidate[2] <= limit])
    return start, k


def table_of(pipes: tuple[Pipe, ...], lanes: list[Lane], order: list[int]) -> Table:
    """The tasks of each rank; `lanes` that are mirrored start with a backward one."""
    table, done = empty_table(pipes), [0] * len(lanes)
    for k in reversed(order) if lanes[0].backward else order:
        lane = lanes[k]
        table[lane.rank].append(Task(lane.pipe, lane.stage, lane.backward, done[k]))
        done[k] += 1
    return table


class Schedule(NamedTuple):
    table: Callable[[list[Pipe]], Table]
    stages_per_rank: int = 1
    fuses: bool = False  # actor and critics train in one table, the critics' pipes the other way


SCHEDULES = {
    "1f1b": Schedule(one_after_another),
    "interleaved": Schedule(interleaved, stages_per_rank=2),
    "fused": Schedule(fused, fuses=True),
}


def schedule_of(config: Config) -> Schedule:
    """The row of --schedule. UserError if there is none, or if a rank would have stages in a row."""
    if config.schedule not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise UserError(f"--schedule {config.schedule} is unknown; choose one of {known}")
    schedule = SCHEDULES[config.schedule]
    if schedule.stages_per_rank > config.pp == 1:
        needed = "--pp 2 or more: one rank waits for nobody"
        raise UserError(f"--schedule {config.schedule} needs {needed}")
    return schedule


def read_instances(path: str) -> dict[str, list[Pipe]]:
    """By name, the instances of a file such as papers/published/rlhfuse_table3.json."""
    found = {}
    for instance in json.loads(Path(path).read_text()):
        rows = (row | {"ranks": tuple(row["ranks"])} for row in instance["pipes"])
        found[instance["name"]] = [Pipe(**row) for row in rows]
    return found
