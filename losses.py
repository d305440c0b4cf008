"""Losses of tokens, and what they are weighted by: pure functions of tensors, by their methods alone, so that nothing imports torch.

A target is a response token that is trained on; all tensors are [targets] unless it says otherwise. A loss returns the loss of each
target and whether the clip cut its gradient. What the losses of all targets are summed with is a row of `MEANS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Tokens:
    """The targets of one micro-batch, as one context-parallel rank sees them."""

    logprobs: Tensor  # under the weights that train; the only one with a gradient
    old_logprobs: Tensor  # under the weights that the ratio is to
    advantages: Tensor
    sequence: Tensor  # the answer that each target belongs to, a row of `lengths`
    lengths: Tensor  # [answers], the targets of each answer, over all context-parallel ranks
    total: Callable[[Tensor], Tensor] = lambda sums: sums  # [answers] summed over the context-parallel ranks; has a gradient

    def mean_of_sequence(self, x: Tensor) -> Tensor:
        """For each target the mean of x over its answer. Collective over the context-parallel group."""
        sums = x.new_zeros(len(self.lengths)).index_add(0, self.sequence, x)
        return (self.total(sums) / self.lengths.clamp(min=1))[self.sequence]


# ---------------------------------------------------------------- losses


def clipped_loss(tokens: Tokens, config) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) with ratio = exp(logprob - old_logprob).

    With clip_dual c > 1 the loss of a token of negative advantage is at most -c * A, however likely the token became.
    Source: PPO (arXiv 1707.06347), equation 7; the two separate bounds are DAPO's clip-higher (arXiv 2503.14476, section 3.1), the
    third is dual-clip PPO (arXiv 1912.09729, equation 5).
    """
    return clip((tokens.logprobs - tokens.old_logprobs).exp(), tokens.advantages, config)


def clip(ratio: Tensor, advantages: Tensor, config) -> tuple[Tensor, Tensor]:
    """The clipped loss of any ratio, for `clipped_loss` and `gspo_loss`."""
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    loss, is_clipped = unclipped.maximum(clipped), clipped > unclipped
    if config.clip_dual:
        most = (-config.clip_dual * advantages).where(advantages < 0, loss.detach())
        loss, is_clipped = most.where(loss > most, loss), is_clipped | (loss > most)  # not `minimum`: it halves gradients of equals
    return loss, is_clipped


def gspo_loss(tokens: Tokens, config) -> tuple[Tensor, Tensor]:
    """The clipped loss of the sequence ratio s = exp(mean over the answer of (logprob - old_logprob)), the same for all its tokens.

    It wants bounds a thousand times as near as a token's: the paper has clip_low 3e-4 and clip_high 4e-4. Collective over the
    context-parallel group. Source: GSPO (arXiv 2507.18071), section 4.1, equations 5 to 7.
    """
    return clip(tokens.mean_of_sequence(tokens.logprobs - tokens.old_logprobs).exp(), tokens.advantages, config)


def cispo_loss(tokens: Tokens, config) -> tuple[Tensor, Tensor]:
    """-stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob: the weight is clipped, no token loses its gradient.

    The flag says where the weight was cut. clip_low 1 leaves it unbounded below, as in the paper.
    Source: CISPO, MiniMax-M1 (arXiv 2506.13585), section 3.1, equations 4 and 5.
    """
    ratio = (tokens.logprobs - tokens.old_logprobs).exp().detach()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * tokens.advantages * tokens.logprobs, weight != ratio


# ---------------------------------------------------------------- means: each token's weight, and what the sum is divided by


def token_mean(length: int, longest: int) -> tuple[list[float], list[int]]:
    """Every token of the step weighs the same: the sum is divided by the number of tokens. DAPO (arXiv 2503.14476), section 3.3.

    Returns for an answer of `length` tokens the weight of each token's loss, and what it adds to the divisor of the sum, which is
    that of the whole step: the mean doesn't depend on the split into micro-batches or ranks. longest: the most tokens of an answer.
    """
    return [1.0] * length, [1] * length


def sequence_mean(length: int, longest: int) -> tuple[list[float], list[int]]:
    """Every answer weighs the same: the mean over answers of the mean over their tokens. GRPO (arXiv 2402.03300), equation 3."""
    return [1 / max(1, length)] * length, ([1] + [0] * length)[:length]


def constant_mean(length: int, longest: int) -> tuple[list[float], list[int]]:
    """Answers' sums over tokens, divided by the number of answers and `longest`: a token's weight doesn't depend on how long
    its answer is, nor on how long the others of the step are. Dr. GRPO (arXiv 2503.20783), section 3.2."""
    return [1 / longest] * length, ([1] + [0] * length)[:length]


MEANS = {"token": token_mean, "sequence": sequence_mean, "constant": constant_mean}


# ---------------------------------------------------------------- KL to a reference model


def k1(log_ratio: Tensor) -> Tensor:
    """log_ratio = logprob - reference's. Unbiased, of either sign. As a loss it pulls nowhere: its gradient is 0 in the mean.

    Source of k1, k2, k3, estimators of KL(policy || reference) on the policy's own tokens: Schulman, Approximating KL
    Divergence (2020).
    """
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """log_ratio^2 / 2. Biased; on fresh tokens its gradient is that of the KL without bias."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-log_ratio) - 1 + log_ratio. Unbiased and never negative; GRPO's (arXiv 2402.03300, equation 4)."""
    return (-log_ratio).exp() - 1 + log_ratio


KL = {"k1": k1, "k2": k2, "k3": k3}


# ---------------------------------------------------------------- importance weights, through which no gradient flows


def truncated_weights(proximal_logprobs: Tensor, engine_logprobs: Tensor, largest: float) -> Tensor:
    """What the loss of a token is multiplied by that others wrote: min(exp(proximal - engine), largest).

    `engine_logprobs` are under the weights that wrote a token, as the engine computed them; `proximal_logprobs` under those at the
    start of the step, which also stand in for the old log-probabilities in the ratio that is clipped: the clip keeps the weights near
    where the step began, and the weight corrects for who wrote the token. Sources: the decoupled objective of AReaL (arXiv
    2505.24298, section 5.2), after Hilton et al. (arXiv 2110.00641); truncated importance sampling (Ionides, 2008), for an engine that
    computes other numbers than the trainer by Yao et al. (Your Efficient RL Framework Secretly Brings You Off-Policy RL, 2025).
    """
    return (proximal_logprobs - engine_logprobs).exp().clamp(max=largest).detach()


def is_within(proximal_logprobs: Tensor, engine_logprobs: Tensor, bound: float) -> Tensor:
    """Whether trainer and engine agree on a token: 1 / bound <= exp(proximal - engine) <= bound. Others give no gradient.

    Source: IcePop, in Every Step Evolves (arXiv 2510.18855).
    """
    ratio = (proximal_logprobs - engine_logprobs).exp().detach()
    return (ratio >= 1 / bound) & (ratio <= bound)
