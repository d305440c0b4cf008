"""Advantages and losses: pure functions that know neither Megatron nor SGLang.

A new algorithm is a new row of `ALGORITHMS`. Nothing here imports torch: the losses use tensor methods only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rollout import Sample

STD_EPSILON = 1e-4  # keeps a group of equal rewards at advantage 0 instead of 0/0


def grpo_advantages(rewards: list[float]) -> list[float]:
    """Group-relative advantages: A_i = (r_i - mean(r)) / (std(r) + 1e-4), with the population standard deviation.

    `rewards` are those of one group (all answers to one prompt). Source: GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    mean, std = fmean(rewards), pstdev(rewards)
    return [(reward - mean) / (std + STD_EPSILON) for reward in rewards]


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The clipped policy-gradient loss of each token, and whether the clip cut its gradient. All tensors: [tokens].

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) with ratio = exp(logprob - old_logprob).
    Source: PPO (arXiv 1707.06347), equation 7; the two separate bounds are DAPO's clip-higher (arXiv 2503.14476, section 3.1).
    """
    ratio = (logprobs - old_logprobs).exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return unclipped.maximum(clipped), clipped > unclipped


def stale_weights(proximal_logprobs: Tensor, engine_logprobs: Tensor, largest: float) -> Tensor:
    """What the loss of a token that older weights wrote is multiplied by: min(exp(proximal - engine), largest). All: [tokens].

    `engine_logprobs` are under the weights that wrote a token, `proximal_logprobs` under those at the start of the step, which also
    stand in for the old log-probabilities in the ratio that is clipped: the clip keeps the weights near where the step began, and
    the weight, through which no gradient flows, corrects for who wrote the token. Source: the decoupled objective of AReaL (arXiv
    2505.24298, section 5.2), after Hilton et al. (arXiv 2110.00641); cut off as in truncated importance sampling (Ionides, 2008).
    """
    return (proximal_logprobs - engine_logprobs).exp().clamp(max=largest).detach()


@dataclass(frozen=True)
class Algorithm:
    advantages: Callable[[list[float]], list[float]]  # the rewards of one group -> one advantage per answer
    loss: Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]  # per token, as `clipped_loss`


ALGORITHMS = {
    "grpo": Algorithm(advantages=grpo_advantages, loss=clipped_loss),
}


def get_algorithm(name: str) -> Algorithm:
    """The row called `name`. ValueError with the rows there are, if there is none."""
    if name not in ALGORITHMS:
        raise ValueError(f"--algorithm {name!r} is unknown; choose one of: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def set_advantages(samples: list[Sample], algorithm: str) -> None:
    """Fill `advantages` of every sample from the rewards of its group (the samples with its prompt_id). Drops no sample.

    Every token of an answer gets the answer's advantage. Not collective: a group never leaves its controller.
    """
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        assert sample.reward is not None, f"sample {sample.index} of prompt {sample.prompt_id} has no reward yet"
        groups.setdefault(sample.prompt_id, []).append(sample)
    for group in groups.values():
        advantages = get_algorithm(algorithm).advantages([sample.reward for sample in group])
        for sample, advantage in zip(group, advantages, strict=True):
            sample.advantages = [advantage] * len(sample.response)
