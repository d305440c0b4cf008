"""What a rank that holds a part of the vocabulary, or of a sequence, computes together with the others."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

__all__ = ["gather_from_sequence_parallel_region"]


def over_context_parallel(sums: Tensor) -> Tensor:
    """The sum over the context-parallel group (collective), with a gradient, which is summed likewise."""
    if mpu.get_context_parallel_world_size() == 1:
        return sums
    return differentiable.all_reduce(sums, group=mpu.get_context_parallel_group())


def shift_by_maximum(logits: Tensor) -> Tensor:
    """The logits less the largest of their row, in place; [rows, vocab / tp] (collective)."""
    maximum = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=mpu.get_tensor_model_parallel_group())
    return logits.sub_(maximum)


class VocabParallelEntropy(torch.autograd.Function):
    """Entropy in nats of softmax(logits) per row; logits as from `shift_by_maximum` (collective in forward).

    With Z = sum(exp(l)): H = log(Z) - sum(l * exp(l)) / Z.
    """

    @staticmethod
    def forward(ctx, shifted: Tensor) -> Tensor:
        weights = shifted.exp()
        sums = torch.stack([weights.sum(-1), weights.mul_(shifted).sum(-1)])
        dist.all_reduce(sums, group=mpu.get_tensor_model_parallel_group())
        entropy = sums[0].log() - sums[1] / sums[0]
        ctx.save_for_backward(shifted, sums[0].log(), entropy)
        return entropy

    @staticmethod
    def backward(ctx, slope: Tensor) -> Tensor:
        shifted, log_z, entropy = (x if x.ndim == 2 else x[:, None] for x in ctx.saved_tensors)
        logprobs = shifted - log_z
        return -slope[:, None] * logprobs.exp() * (logprobs + entropy)
