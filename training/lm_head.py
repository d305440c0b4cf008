"""The output layer of a language model, in chunks: log-probabilities without all logits at once.

Logits of 16,384 tokens over 152,000 words take 10 GB in float32, and a loss makes several copies. So
Megatron's output layer hands on the hidden states. Where the loss is, a chunk's logits are made and read, and
made again for the gradient (torch.utils.checkpoint); all but the last one's, which the gradient needs first:
two copies of a chunk live at once, six where the entropy learns. Chunks are of all tokens, prompts' too: with
one chunk the sums have the same bits as without.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import mappings, vocab_parallel_cross_entropy
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from training.packing import NO_TARGET, MicroBatch

CHUNK_BYTES = 512 << 20  # of a chunk's logits in float32


def leave_out_logits(gpt: GPTModel) -> None:
    """Have the output layer hand on all tokens' hidden states, on every tensor-parallel rank."""

    # as Megatron calls it; [T, 1, hidden]
    def forward(hidden: Tensor, **unused) -> tuple[Tensor, None]:
        # going back, the ranks' gradients are summed: each has read a part of the vocabulary
        if gpt.config.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(hidden), None
        return mappings.copy_to_tensor_model_parallel_region(hidden), None

    gpt.output_layer.forward = forward


def read_targets(
    gpt: GPTModel, batch: MicroBatch, hidden: Tensor, temperature: float, entropy_learns=False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets and entropies, in nats: [targets] each, float32.

    hidden: [1, T, hidden], the output of `gpt`. temperature: SGLang, too, reports log_softmax(logits /
    temperature). entropy_learns: whether the entropies have a gradient, which costs four more copies of a
    chunk. Collective over the tensor-parallel group, both ways.
    """
    weight = gpt.output_layer.weight  # [vocab / tp, hidden]
    if gpt.share_embeddings_and_output_weights:
        weight = gpt.shared_embedding_or_output_weight()
    rows = max(1, CHUNK_BYTES // (4 * len(weight)))
    read = partial(_read_chunk, weight, temperature, entropy_learns)
    columns = (hidden[0], batch.targets)
    *chunks, last = zip(*(column.split(rows) for column in columns), strict=True)
    parts = []
    for chunk in chunks:
        parts.append(checkpoint(read, *chunk, use_reentrant=False, preserve_rng_state=False))
    parts.append(read(*last))
    logprobs, entropies = zip(*parts, strict=True)
    chosen = batch.slots != NO_TARGET
    return torch.cat(logprobs)[chosen], torch.cat(entropies)[chosen]


def _read_chunk(
    weight: Tensor, temperature: float, entropy_learns: bool, hidden: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Read all tokens, also those without a target: to select rows of logits would copy them."""
    logits = F.linear(hidden.to(weight.dtype), weight).float()
    if temperature != 1:
        # by a tensor as engines do: by a number CUDA would multiply by its reciprocal
        logits.div_(torch.full_like(targets[:, None], temperature, dtype=torch.float32))
    maximum = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=mpu.get_tensor_model_parallel_group())
    logits.sub_(maximum)
    entropy = VocabParallelEntropy.apply(logits.clone() if entropy_learns else logits.detach())
    return -vocab_parallel_cross_entropy(logits, targets), entropy  # overwrites logits


def over_context_parallel(sums: Tensor) -> Tensor:
    """The sum over the context-parallel group (collective); its gradient is summed over it, too."""
    if mpu.get_context_parallel_world_size() == 1:
        return sums
    return differentiable.all_reduce(sums, group=mpu.get_context_parallel_group())


class VocabParallelEntropy(torch.autograd.Function):
    """Entropy of rows l, less their largest: log(Z) - sum(l exp(l)) / Z, Z = sum(exp(l)) (collective)."""

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
