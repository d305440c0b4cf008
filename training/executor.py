"""Runs a table of pipeline passes on real stages: Megatron-Core's passes of one stage, messages in between.

Megatron's own schedules run one model in one order. Here any table of scheduling/pipeline.py is run, of one
model or of several that share the ranks. In every table a stage takes a model's micro-batches in the order of
their numbers, and no model's gradient depends on another's: so tables differ in time, and in no bit.
"""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import backward_step, forward_step
from torch import Tensor
from torch.distributed import ProcessGroup

from scheduling.pipeline import SCHEDULES, Pipe, Table, Task

if TYPE_CHECKING:
    from training.packing import MicroBatch
    from training.trainer import Stats, Trainer

COARSE = 1.05  # durations are told apart in such steps: not every measurement makes a new table


class Pass(NamedTuple):
    """What this rank did of a table; times in seconds, by time.monotonic."""

    title: str  # of the model
    task: Task
    start: float
    end: float


class Phase(NamedTuple):
    """A table that was run, as this rank saw it."""

    start: float
    end: float
    passes: list[Pass]


@dataclass
class Work:
    """A pass over this rank's micro-batches, forward and, unless `forward_only`, backward.

    Once it is done DDP has the gradient of the mean loss over all ranks; `stats` are those of each
    micro-batch on the last stage, and empty elsewhere.
    """

    trainer: Trainer
    micro_batches: list[MicroBatch]
    # (micro-batch, module) -> output, and what makes (loss, divisor, statistics) of it
    forward: Callable
    forward_only: bool = False
    stats: list[Stats] = field(default_factory=list)
    divisor: int | Tensor = 0
    passes: list[Pass] = field(default_factory=list)

    def pipe(self, unit: float) -> Pipe:
        """unit: of the durations, in seconds."""
        trainer, places = self.trainer, tuple(range(len(self.trainer.pipeline.ranks)))
        order = places[::-1] if trainer.reverse else places
        steps = (round(math.log(seconds / unit, COARSE)) for seconds in trainer.durations)
        durations = (COARSE**step for step in steps)
        stages = order * len(trainer.chunks)
        return Pipe(stages, len(self.micro_batches), *durations, trainer.activations)

    def shape(self, task: Task) -> tuple[int, int, int]:
        """Of the activations between two stages: [T, 1, hidden], or a part of T with sequence parallelism."""
        config = self.trainer.chunks[0].config
        tokens = self.micro_batches[task.micro_batch].tokens.shape[1]
        parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return tokens // parts, 1, config.hidden_size

    def seconds(self, backward: bool) -> list[float]:
        return [done.end - done.start for done in self.passes if done.task.backward == backward]


Update = Generator[Work, None, dict[str, float]]  # asks for passes; each is done when it goes on


def together(
    updates: Iterable[Update], schedule: str
) -> tuple[list[dict[str, float]], list[Phase]]:
    """Run updates side by side: what they ask for at a time is one table (collective over all ranks).

    One that asks for more passes goes on alone. Returns what each returned, in order, and what was run.
    """
    waiting, results, phases = dict(enumerate(updates)), {}, []
    while waiting:
        works = {}
        for number, update in waiting.items():
            try:
                works[number] = next(update)
            except StopIteration as end:
                results[number] = end.value
        waiting = {number: waiting[number] for number in works}
        phases += [run([*works.values()], schedule)] if works else []
    return [results[number] for number in sorted(results)], phases


def run(works: list[Work], schedule: str) -> Phase:
    """Run a table of a pass of each model (collective: all ranks; forward only, the model-parallel group)."""
    trainer, forward_only = works[0].trainer, works[0].forward_only
    pipes = [work.pipe(trainer.durations[0]) for work in works]
    table = SCHEDULES[schedule].table(pipes)
    if forward_only:
        table = [[task for task in tasks if not task.backward] for tasks in table]
    assert_same_table(table, trainer)
    for work in works:
        for module in work.trainer.ddps:
            module.zero_grad_buffer()
    tasks, clock = table[trainer.pipeline.rank], Clock(trainer.device)
    with torch.set_grad_enabled(not forward_only):
        run_tasks(works, Messages(table, pipes, works), tasks, clock)
    start, *times, end = clock.read()
    for task, *span in zip(tasks, times[::2], times[1::2], strict=True):
        work = works[task.pipe]
        work.passes.append(Pass(work.trainer.title, task, *span))
    for work in works if not forward_only else ():
        divisor = torch.as_tensor(work.divisor, dtype=torch.int, device=trainer.device)
        finalize_model_grads(work.trainer.ddps, divisor, pg_collection=work.trainer.groups)
    return Phase(start, end, [done for work in works for done in work.passes])


def assert_same_table(table: Table, trainer: Trainer) -> None:
    """On all ranks of a model-parallel group, who would wait for each other in vain (collective over it)."""
    digest = zlib.crc32(repr(table).encode())
    both = torch.tensor([digest, -digest])
    for group in (trainer.groups.tp_cp, trainer.groups.pp) if len(table) > 1 else ():
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    assert not both.sum(), "ranks of a pipeline have different tables: none would end"


def run_tasks(works: list[Work], messages: Messages, tasks: list[Task], clock: Clock) -> None:
    """This rank's tasks in their order, from mark to mark of the clock each."""
    kept = {}
    last = {task[:2]: task for task in tasks if task.backward}  # of each stage: the later one stays
    for task in tasks:
        work, received = works[task.pipe], messages.receive(task)
        clock.mark()
        if task.backward:
            done = kept.pop(task._replace(backward=False))
            result = go_back(work, task, *done, received, is_last=task == last[task[:2]])
            del done
        else:
            result = go_forward(work, task, received, len(messages.pipes[task.pipe].ranks) - 1)
            if not work.forward_only:
                kept[task] = received, result
        clock.mark()
        messages.send(task, result)
        del received, result  # nothing is held while the next is waited for
    messages.finish()
    clock.mark()


def go_forward(work: Work, task: Task, received: Tensor | None, last_stage: int) -> Tensor:
    """Megatron's own pass of one stage: its output, or the loss of the last one."""
    module = work.trainer.module_of(task.stage)
    if received is not None:
        received.requires_grad_(not work.forward_only)
    result, divisor = forward_step(
        work.forward,
        work.micro_batches[task.micro_batch],
        module,
        len(work.micro_batches),
        received,
        work.stats,
        module.config,
        module.config.context_parallel_size,
        is_last_stage=task.stage == last_stage,
    )
    work.divisor = work.divisor + divisor
    return result


def go_back(
    work: Work,
    task: Task,
    received: Tensor | None,
    output: Tensor,
    gradient: Tensor | None,
    is_last: bool,
) -> Tensor | None:
    """Megatron's own pass of one stage: the gradient of what the stage was given, None on the first."""
    module = work.trainer.module_of(task.stage)
    # DDP sums over ranks in the last one
    with contextlib.nullcontext() if is_last else module.no_sync():
        return backward_step(
            received, output, gradient, ModelType.encoder_or_decoder, module.config
        )


def messages_between(table: Table, pipes: list[Pipe], sender: int, receiver: int) -> list[Task]:
    """What one rank sends another, in order: the tasks that take the results of its own (pure)."""
    tasks = ((task, -1 if task.backward else 1) for task in table[sender])
    takers = (task._replace(stage=task.stage + onward) for task, onward in tasks)
    return [task for task in takers if rank_of(pipes, task.pipe, task.stage) == receiver]


def rank_of(pipes: list[Pipe], pipe: int, stage: int) -> int | None:
    """None: the pipe has no such stage."""
    ranks = pipes[pipe].ranks
    return ranks[stage] if 0 <= stage < len(ranks) else None


class Pipeline(NamedTuple):
    """The ranks that share the stages of models, in Megatron's order."""

    rank: int  # this one's place among them
    ranks: list[int]  # in the world
    up: ProcessGroup  # of them all, Megatron's own
    # the same with the last one first, which is the order of a reversed model's stages
    down: ProcessGroup


def join_pipeline(device: torch.device) -> Pipeline:
    """Make the groups of this rank's pipeline (collective: every rank)."""
    up = mpu.get_pipeline_model_parallel_group()
    own, every = dist.get_process_group_ranks(up), [None] * dist.get_world_size()
    if len(own) == 1:
        return Pipeline(0, own, up, up)
    dist.all_gather_object(every, own)
    pipelines = sorted(set(map(tuple, every)))
    # each makes those of all, in one order: with use_local_synchronization=True gloo hangs
    down = {ranks: dist.new_group(ranks[::-1], sort_ranks=False) for ranks in pipelines}
    pipeline = Pipeline(up.rank(), own, up, down[tuple(own)])
    connect(pipeline, device)
    return pipeline


def connect(pipeline: Pipeline, device: torch.device) -> None:
    """Pass one number between all neighbours in both groups, in one order (collective over the pipeline).

    At the first message of two ranks in a group NCCL connects them, and both wait for that: in tables, where
    ranks first turn to different neighbours, without end.
    """
    number, ranks = torch.zeros(1, device=device), len(pipeline.ranks)
    pairs = {tuple(sorted((place, (place + 1) % ranks))) for place in range(ranks)}  # also the ends
    for group in (pipeline.up, pipeline.down):
        for low, high in sorted(pairs):
            if pipeline.rank == low:
                dist.send(number, pipeline.ranks[high], group)
            if pipeline.rank == high:
                dist.recv(number, pipeline.ranks[low], group)


class Messages:
    """A rank's part of what stages tell each other: activations going forward, their gradients going back.

    What comes from another rank is awaited in the order in which that one sends it, which the table says: so
    neither tags, which NCCL lacks, nor shapes travel. A group for messages to higher ranks and one for those
    to lower: NCCL carries a group's messages between two ranks one after the other, and one that waits for
    its receiver would hold up what comes the other way. Two GPUs have not yet run it.
    """

    def __init__(self, table: Table, pipes: list[Pipe], works: list[Work]):
        self.pipes, self.works, self.pipeline = pipes, works, works[0].trainer.pipeline
        self.rank, others = self.pipeline.rank, range(len(table))
        due = {rank: messages_between(table, pipes, rank, self.rank) for rank in others}
        self.expected = {rank: deque(messages) for rank, messages in due.items()}
        assert not self.expected[self.rank], "two stages that follow each other lie on one rank"
        self.arriving: dict[Task, tuple[Tensor, dist.Work]] = {}
        # by receiver its tasks, in its order, and what leaves for them: kept until that is known to be there
        self.order = [{task: number for number, task in enumerate(tasks)} for tasks in table]
        self.leaving: dict[int, list[tuple[Task, Tensor, dist.Work]]] = {
            rank: [] for rank in others
        }

    def receive(self, task: Task) -> Tensor | None:
        """What a task needs of its neighbour. None: it begins a forward pass, or the way back."""
        source = task._replace(stage=task.stage + (1 if task.backward else -1))
        sender = rank_of(self.pipes, source.pipe, source.stage)
        if sender is None:
            return None
        while task not in self.arriving:
            self._expect_next(sender)
        buffer, request = self.arriving.pop(task)
        request.wait()
        self._forget(sender, self.order[sender][source])
        self._expect_next(sender)  # arrives while the task is run
        return buffer

    def _expect_next(self, sender: int) -> None:
        if self.expected[sender]:
            task = self.expected[sender].popleft()
            work = self.works[task.pipe]
            dtype, device = work.trainer.chunks[0].config.pipeline_dtype, work.trainer.device
            buffer = torch.empty(work.shape(task), dtype=dtype, device=device)
            group = self.pipeline.up if sender < self.rank else self.pipeline.down
            self.arriving[task] = buffer, dist.irecv(buffer, self.pipeline.ranks[sender], group)

    def _forget(self, receiver: int, done: int) -> None:
        """Let go of what a rank has: it has done its tasks up to number `done`. gloo tells only who waits."""
        leaving, self.leaving[receiver] = self.leaving[receiver], []
        for taker, kept, request in leaving:
            if self.order[receiver][taker] <= done:
                request.wait()
            else:
                self.leaving[receiver].append((taker, kept, request))

    def finish(self) -> None:
        """Wait until all is there."""
        for rank, tasks in enumerate(self.order):
            self._forget(rank, len(tasks))

    def send(self, task: Task, result: Tensor | None) -> None:
        """The task's result to who waits for it, if anybody does. Doesn't wait."""
        taker = task._replace(stage=task.stage + (-1 if task.backward else 1))
        receiver = rank_of(self.pipes, taker.pipe, taker.stage)
        if receiver is not None:
            kept = result.detach().contiguous()
            group = self.pipeline.up if receiver > self.rank else self.pipeline.down
            request = dist.isend(kept, self.pipeline.ranks[receiver], group)
            self.leaving[receiver].append((taker, kept, request))


class Clock:
    """Marks points in a device's work: on CUDA, not yet run, events between its kernels, which are queued."""

    def __init__(self, device: torch.device):
        self.on_cuda, self.zero, self.marks = device.type == "cuda", time.monotonic(), []
        self.mark()

    def mark(self) -> None:
        self.marks.append(
            torch.cuda.Event(enable_timing=True) if self.on_cuda else time.monotonic()
        )
        if self.on_cuda:
            self.marks[-1].record()

    def read(self) -> list[float]:
        """Each mark, by time.monotonic, once own kernels are done; sums over other ranks aren't awaited."""
        if not self.on_cuda:
            return self.marks
        torch.cuda.current_stream().synchronize()
        return [self.zero + self.marks[0].elapsed_time(mark) / 1000 for mark in self.marks]
