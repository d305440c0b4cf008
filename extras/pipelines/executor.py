"""Runs a pipeline schedule: Megatron-Core's passes of single stages, with messages between them.

Megatron's own schedules run one model in a fixed order. This runs any table, for one model or several that
share ranks, such as actor and critic. In every table a stage takes a model's micro-batches in ascending
order, so the choice of table affects time but not a bit of the gradient.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import backward_step, forward_step
from torch import Tensor

from extras.pipelines.tables import Pipe, Table, Task
from runtime.timeline import Pass
from training.passes import Work


def pipe_of(work: Work) -> Pipe:
    """Describe work to a schedule. Durations are multiply-adds; a backward pass has twice as many."""
    trainer = work.trainer
    config = trainer.gpt.config
    ranks = tuple(range(len(trainer.pipeline.ranks)))
    if trainer.reverse:
        ranks = ranks[::-1]
    macs = trainer.macs(trainer.config.max_tokens_per_micro_batch)
    memory = config.num_layers * config.hidden_size  # a rough number per token
    return Pipe(ranks, len(work.micro_batches), macs, 2 * macs, memory)


def shape_of(work: Work, task: Task) -> tuple[int, int, int]:
    """Return the shape of activations between stages, [T, 1, hidden]; sequence parallelism divides T."""
    config = work.trainer.gpt.config
    tokens = work.micro_batches[task.micro_batch].tokens.shape[1]
    if config.sequence_parallel:
        tokens //= config.tensor_model_parallel_size
    return tokens, 1, config.hidden_size


def run(works: list[Work], schedule: Callable[[list[Pipe]], Table]) -> None:
    """Run all works as one table (collective: the models' ranks; if forward only, a copy's ranks)."""
    trainer = works[0].trainer
    pipes = [pipe_of(work) for work in works]
    table = schedule(pipes)
    if works[0].forward_only:
        table = [[task for task in tasks if not task.backward] for tasks in table]
    learning = [work for work in works if not work.forward_only]
    for work in learning:
        work.trainer.ddp.zero_grad_buffer()
    with torch.set_grad_enabled(bool(learning)):
        run_tasks(works, Messages(table, pipes, works), table[trainer.pipeline.rank])
    for work in learning:
        work.finalize()


def run_tasks(works: list[Work], messages: Messages, tasks: list[Task]) -> None:
    """Run this rank's tasks in order; CUDA runs them asynchronously."""
    clock = Clock(works[0].trainer.device)
    ran = []
    kept = {}  # forward task -> (its input, its output), for the backward pass
    last = {task.pipe: task for task in tasks if task.backward}  # later ones overwrite earlier
    for task in tasks:
        work = works[task.pipe]
        received = messages.receive(task)
        start = clock.mark()
        if task.backward:
            pair = task._replace(backward=False)
            result = go_back(work, kept.pop(pair), received, task == last[task.pipe])
        else:
            last_stage = len(messages.pipes[task.pipe].ranks) - 1
            result = go_forward(work, task, received, task.stage == last_stage)
            if not work.forward_only:
                kept[task] = (received, result)
        ran.append((work, task, start, clock.mark()))
        messages.send(task, result)
        del received, result  # free them before waiting for the next task's
    messages.finish()
    for work, task, start, end in ran:
        label = f"{'B' if task.backward else 'F'}{task.micro_batch}"
        times = (clock.time(start), clock.time(end))
        work.passes.append(Pass(work.trainer.title, label, task.stage, *times))


class Clock:
    """Timestamps of a device's work. A GPU records them asynchronously, so marking never waits."""

    def __init__(self, device: torch.device):
        self.has_gpu = device.type == "cuda"
        if self.has_gpu:
            torch.cuda.current_stream().synchronize()
            self.first = self.mark()
        self.began = time.monotonic()

    def mark(self) -> float | torch.cuda.Event:
        if not self.has_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def time(self, mark: float | torch.cuda.Event) -> float:
        """Wait until the device reaches a mark. Returns that time, on the scale of time.monotonic."""
        if not self.has_gpu:
            return mark
        mark.synchronize()
        return self.began + self.first.elapsed_time(mark) / 1000


def go_forward(work: Work, task: Task, received: Tensor | None, is_last_stage: bool) -> Tensor:
    """Run Megatron's forward pass of one stage. Returns its output, or the loss on the last stage."""
    module = work.trainer.module
    if received is not None:
        received.requires_grad_(not work.forward_only)
    result, _ = forward_step(
        forward_step_func=work.forward,
        data_iterator=iter([task.micro_batch]),
        model=module,
        num_microbatches=len(work.micro_batches),
        input_tensor=received,
        forward_data_store=work.stats,
        config=module.config,
        cp_group_size=1,  # each rank has whole sequences
        is_last_stage=is_last_stage,
    )
    return result


def go_back(work: Work, kept: tuple, gradient: Tensor | None, is_last: bool) -> Tensor | None:
    """Run Megatron's backward pass of one stage. Returns its input's gradient, None on the first stage."""
    given, output = kept
    module = work.trainer.ddp
    # DDP reduces the gradient over ranks in the stage's last backward pass
    with contextlib.nullcontext() if is_last else module.no_sync():
        return backward_step(given, output, gradient, ModelType.encoder_or_decoder, module.config)


def taker_of(task: Task) -> Task:
    """Return the task that takes the result of `task`; its stage may be outside the pipe."""
    return task._replace(stage=task.stage + (-1 if task.backward else 1))


def rank_of(pipes: list[Pipe], task: Task) -> int | None:
    """Return the rank that runs a task, or None if the pipe has no such stage."""
    ranks = pipes[task.pipe].ranks
    return ranks[task.stage] if 0 <= task.stage < len(ranks) else None


class Messages:
    """This rank's messages to other stages: activations going forward, gradients going back.

    The table fixes the order in which each rank sends, so messages need no tags (NCCL has none) and no
    shapes. Each direction has its own group: in a shared one, NCCL would let a message that waits for its
    receiver block those that come the other way. Not yet tested on two GPUs.
    """

    def __init__(self, table: Table, pipes: list[Pipe], works: list[Work]):
        self.pipes = pipes
        self.works = works
        self.pipeline = works[0].trainer.pipeline
        self.rank = self.pipeline.rank
        self.arriving: dict[Task, tuple[Tensor, dist.Work]] = {}  # receiving task -> its input
        self.expected: dict[int, deque[Task]] = {}  # sender -> the tasks for its next messages
        # receiver -> messages that may not have arrived yet
        self.leaving: dict[int, list[tuple[Task, Tensor, dist.Work]]] = {}
        self.order: list[dict[Task, int]] = []  # rank -> its tasks' positions
        for rank, tasks in enumerate(table):
            takers = map(taker_of, tasks)
            self.expected[rank] = deque(x for x in takers if rank_of(pipes, x) == self.rank)
            self.leaving[rank] = []
            self.order.append({task: place for place, task in enumerate(tasks)})

    def receive(self, task: Task) -> Tensor | None:
        """Wait for a task's input from its neighbor. Returns None if the task starts a pass."""
        source = task._replace(stage=task.stage + (1 if task.backward else -1))
        sender = rank_of(self.pipes, source)
        if sender is None:
            return None
        while task not in self.arriving:
            self._expect_next(sender)
        buffer, request = self.arriving.pop(task)
        request.wait()
        self._forget(sender, self.order[sender][source])
        self._expect_next(sender)  # arrives while the task runs
        return buffer

    def _expect_next(self, sender: int) -> None:
        if not self.expected[sender]:
            return
        task = self.expected[sender].popleft()
        work = self.works[task.pipe]
        dtype = work.trainer.gpt.config.pipeline_dtype
        buffer = torch.empty(shape_of(work, task), dtype=dtype, device=work.trainer.device)
        group = self.pipeline.up if sender < self.rank else self.pipeline.down
        self.arriving[task] = (buffer, dist.irecv(buffer, self.pipeline.ranks[sender], group))

    def _forget(self, receiver: int, done: int) -> None:
        """Free messages that a rank must have received: it has run its tasks up to position `done`."""
        still_leaving = []
        for taker, kept, request in self.leaving[receiver]:
            if self.order[receiver][taker] <= done:
                request.wait()  # gloo reports completion only to a waiter
            else:
                still_leaving.append((taker, kept, request))
        self.leaving[receiver] = still_leaving

    def finish(self) -> None:
        """Wait until all messages have arrived."""
        for rank, tasks in enumerate(self.order):
            self._forget(rank, len(tasks))

    def send(self, task: Task, result: Tensor | None) -> None:
        """Send a task's result to the stage that takes it, if any, without waiting."""
        taker = taker_of(task)
        receiver = rank_of(self.pipes, taker)
        if receiver is not None:
            kept = result.detach().contiguous()
            group = self.pipeline.up if receiver > self.rank else self.pipeline.down
            request = dist.isend(kept, self.pipeline.ranks[receiver], group)
            self.leaving[receiver].append((taker, kept, request))
