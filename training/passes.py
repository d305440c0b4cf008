"""Runs a model's passes over micro-batches: Megatron-Core's schedule without pipelining.

A rank has the whole model, or its tensor-parallel shards. extras/pipelines runs stages on several ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from config import Config
from runtime.timeline import Pass
from training.groups import Pipeline
from training.packing import MicroBatch, packing_of

Stats = dict[str, Tensor]  # a micro-batch's sums, or maxima if the name ends in _max
LossSums = tuple[Tensor, Tensor, Stats]  # see trainer.loss_sums
# a policy outputs hidden states, [1, T, hidden], a critic values, [1, T, 1]
Loss = Callable[[MicroBatch, Tensor], LossSums]


class Stage(Protocol):
    """One rank's part of a model, as passes and checkpoints need it; trainer.Trainer is one."""

    title: str
    holds: bool  # this rank has a part of the model
    awake: bool
    version: int
    config: Config
    device: torch.device
    gpt: GPTModel
    module: torch.nn.Module  # what passes run
    ddp: DistributedDataParallel
    optimizer: MegatronOptimizer
    groups: ProcessGroupCollection
    pipeline: Pipeline
    reverse: bool  # stage 0 is on the last rank
    macs: Callable[[int], int]  # tokens -> a forward pass's multiply-adds
    frequencies: Tensor


@dataclass
class Work:
    """Passes over this rank's micro-batches; they leave the gradient of all ranks' mean loss in DDP."""

    trainer: Stage
    micro_batches: list[MicroBatch]
    losses: list[Loss]  # one per micro-batch
    forward_only: bool = False
    stats: list[Stats] = field(default_factory=list)  # one per micro-batch, on the last stage
    passes: list[Pass] = field(default_factory=list)

    def run(self) -> None:
        """Run micro-batches in order (collective: the model's ranks; if forward only, its tp group)."""
        trainer = self.trainer
        learns = not self.forward_only
        count = len(self.micro_batches)
        if learns:
            trainer.ddp.zero_grad_buffer()
        start = self._now()
        with torch.set_grad_enabled(learns):
            self.stats = forward_backward_no_pipelining(
                forward_step_func=self.forward,
                data_iterator=iter(range(count)),
                model=trainer.module,
                num_microbatches=count,
                seq_length=0,  # unused, like the next one
                micro_batch_size=0,
                forward_only=self.forward_only,
                pg_collection=trainer.groups,
            )
        self.passes.append(Pass(trainer.title, f"{count} micro-batches", 0, start, self._now()))
        if learns:
            self.finalize()

    def forward(self, numbers: Iterator[int], module: torch.nn.Module) -> tuple[Tensor, Callable]:
        """Run the next micro-batch for Megatron. Returns its output, and the loss as a function of that."""
        number = next(numbers)
        batch = self.micro_batches[number].to(self.trainer.device)
        packing = packing_of(batch, self.trainer.frequencies)
        output = module(batch.tokens, None, None, packed_seq_params=packing)
        return output, partial(self.losses[number], batch)

    def finalize(self) -> None:
        """Sum gradients over ranks; divide them by the sum of divisors (collective: the model's ranks)."""
        divisor = torch.zeros((), dtype=torch.int, device=self.trainer.device)
        for stats in self.stats:
            divisor += stats["divisor"]
        finalize_model_grads([self.trainer.ddp], divisor, pg_collection=self.trainer.groups)

    def _now(self) -> float:
        """Return the time when the device has run all passes so far, as time.monotonic."""
        if self.trainer.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.monotonic()
