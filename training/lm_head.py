"""The output layer of a language model, in chunks: log-probabilities without all logits at once.

Logits of 16,384 tokens over a vocabulary of 152,000 take 10 GB in float32, and a loss makes several copies.
So Megatron's output layer passes on hidden states, and the loss computes one chunk's logits at a time. It
recomputes them for the gradient, except for the last chunk and for those that memory has room for. Tokens
without a target, such as a prompt's, get no logits.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import mappings
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from training.packing import MicroBatch

CHUNK_BYTES = 512 << 20  # one chunk's logits in float32


def leave_out_logits(gpt: GPTModel) -> None:
    """Make the output layer return all tokens' hidden states on every tensor-parallel rank."""
    tp = gpt.pg_collection.tp

    # hidden: [T, 1, hidden]
    def forward(hidden: Tensor, **unused) -> tuple[Tensor, None]:
        # the backward pass sums the ranks' gradients: each has read a part of the vocabulary
        if gpt.config.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(hidden, group=tp), None
        return mappings.copy_to_tensor_model_parallel_region(hidden, tp), None

    gpt.output_layer.forward = forward


def read_targets(
    gpt: GPTModel,
    batch: MicroBatch,
    hidden: Tensor,
    temperature: float,
    entropy_learns: bool = False,
    kept: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the targets and entropies, in nats: [targets] each, float32.

    hidden: [1, T, hidden], the output of `gpt`. temperature: as in SGLang, log_softmax(logits / temperature).
    entropy_learns: entropies get a gradient, for four more copies of a chunk. kept: chunks, besides the last,
    that aren't recomputed. Collective over the tensor-parallel group, forward and backward.
    """
    weight = gpt.output_layer.weight  # [vocab / tp, hidden]
    if gpt.share_embeddings_and_output_weights:
        weight = gpt.shared_embedding_or_output_weight()
    rows = max(1, CHUNK_BYTES // (4 * len(weight)))
    read = partial(_read_chunk, weight, temperature, entropy_learns, gpt.pg_collection.tp)
    columns = (hidden[0].index_select(0, batch.reads), batch.targets)
    chunks = list(zip(*(column.split(rows) for column in columns), strict=True))
    parts = []
    for number, chunk in enumerate(chunks):
        if number + kept < len(chunks) - 1:
            parts.append(checkpoint(read, *chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(read(*chunk))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _read_chunk(
    weight: Tensor,
    temperature: float,
    entropy_learns: bool,
    tp: ProcessGroup,
    hidden: Tensor,
    targets: Tensor,
) -> tuple[Tensor, Tensor]:
    """Read one chunk of targets. hidden: [rows, hidden], from the tokens before them."""
    logits = F.linear(hidden.to(weight.dtype), weight).float()
    if temperature != 1:
        # divide by a tensor as engines do: with a number CUDA would multiply by the reciprocal
        logits.div_(torch.full_like(targets[:, None], temperature, dtype=torch.float32))
    maximum = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=tp)
    return ReadLogits.apply(logits.sub_(maximum), targets, tp, entropy_learns)


class ReadLogits(torch.autograd.Function):
    """log p(target) and entropy for rows of logits that are sharded over `tp` (collective: tp group).

    shifted: [rows, vocab / tp], minus each row's maximum; overwritten. With Z = sum(exp(l)) of a row l, the
    results are l[target] - log(Z) and log(Z) - sum(l exp(l)) / Z.
    """

    @staticmethod
    def forward(ctx, shifted: Tensor, targets: Tensor, tp: ProcessGroup, entropy_learns: bool):
        places = targets - tp.rank() * shifted.shape[1]  # indices in this rank's vocabulary
        is_here = (places >= 0) & (places < shifted.shape[1])
        places = places.where(is_here, 0)[:, None]
        chosen = shifted.gather(1, places)[:, 0].where(is_here, 0.0)
        weights = shifted.exp()
        kept = shifted.clone() if entropy_learns else None
        sums = torch.stack([chosen, weights.sum(-1), shifted.mul_(weights).sum(-1)])
        dist.all_reduce(sums, group=tp)
        chosen, z, weighted = sums
        log_z = z.log()
        entropy = log_z - weighted / z
        probabilities = weights.div_(z[:, None])
        ctx.save_for_backward(probabilities, places, is_here, kept, log_z, entropy)
        if not entropy_learns:
            ctx.mark_non_differentiable(entropy)
        return chosen - log_z, entropy

    @staticmethod
    def backward(ctx, logprob_slope: Tensor, entropy_slope: Tensor):
        probabilities, places, is_here, kept, log_z, entropy = ctx.saved_tensors
        gradient = probabilities.scatter_add_(1, places, -is_here.float()[:, None])
        gradient.mul_(-logprob_slope[:, None])
        if kept is not None:
            logprobs = kept - log_z[:, None]
            slope = entropy_slope[:, None]
            gradient += -slope * logprobs.exp() * (logprobs + entropy[:, None])
        return gradient, None, None, None
