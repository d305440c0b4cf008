"""Pipeline schedules: the order in which each rank runs its stages' forward and backward passes. Pure.

A schedule turns the `Pipe`s of an optimizer step into a `Table`; one executor runs any table.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple


class Pipe(NamedTuple):
    """One model's pipeline. Time and memory are for one micro-batch on one stage, in any unit."""

    ranks: tuple[int, ...]  # ranks[stage] runs the stage; each rank has one stage
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


Table = list[list[Task]]  # each rank's tasks, in order


class Evaluation(NamedTuple):
    """The times and memory of a table, in the units of its pipes."""

    latency: float
    peak_memory: float  # highest peak of any rank
    starts: dict[Task, float]


def needs(pipes: Sequence[Pipe], task: Task) -> list[Task]:
    """Return the tasks that must end before `task`: the adjacent stage's, and its own forward pass."""
    found = []
    neighbour = task.stage + (1 if task.backward else -1)
    if 0 <= neighbour < len(pipes[task.pipe].ranks):
        found.append(task._replace(stage=neighbour))
    if task.backward:
        found.append(task._replace(backward=False))
    return found


def evaluate(pipes: Sequence[Pipe], table: Table) -> Evaluation:
    """Run each rank's tasks in order; messages take no time. Raises ValueError if ranks are deadlocked."""
    starts: dict[Task, float] = {}
    ends: dict[Task, float] = {}
    free = [0.0] * len(table)  # when each rank becomes free
    held = [0.0] * len(table)  # each rank's memory
    peak = 0.0
    left = [tasks[::-1] for tasks in table]  # each rank's remaining tasks, the next one last
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
    last = max(max(pipe.ranks) for pipe in pipes)
    return [[] for _ in range(1 + last)]


def bound(pipes: Sequence[Pipe]) -> float:
    """Return the latency that no table beats (RLHFuse's bound): the longest pipe, or the busiest rank.

    A rank also waits for the shortest fill before its work, and for the shortest drain after it.
    """
    latencies = []
    for pipe in pipes:
        steps = pipe.micro_batches + len(pipe.ranks) - 1
        latencies.append(steps * (pipe.forward + pipe.backward))
    for rank in set(chain.from_iterable(pipe.ranks for pipe in pipes)):
        here = [pipe for pipe in pipes if rank in pipe.ranks]
        work = sum(pipe.micro_batches * (pipe.forward + pipe.backward) for pipe in here)
        fill = min(pipe.ranks.index(rank) * pipe.forward for pipe in here)
        drain = min(pipe.ranks.index(rank) * pipe.backward for pipe in here)
        latencies.append(fill + work + drain)
    return max(latencies)


def base_memory(pipes: Sequence[Pipe]) -> float:
    """Return the memory of 1F1B's first stage in the largest pipe, given enough micro-batches."""
    return max(len(pipe.ranks) * pipe.memory for pipe in pipes)


def one_after_another(pipes: Sequence[Pipe]) -> Table:
    """Run 1F1B, pipe after pipe: PipeDream-Flush as in Megatron-LM (arXiv 2104.04473, section 2.2)."""
    table = empty_table(pipes)
    for number, pipe in enumerate(pipes):
        micro_batches = range(pipe.micro_batches)
        for stage, rank in enumerate(pipe.ranks):
            forwards = [Task(number, stage, False, i) for i in micro_batches]
            backwards = [Task(number, stage, True, i) for i in micro_batches]
            warm_up = len(pipe.ranks) - 1 - stage
            steady = list(chain(*zip(forwards[warm_up:], backwards, strict=False)))  # alternating
            table[rank] += forwards[:warm_up] + steady + backwards[len(steady) // 2 :]
    return table
