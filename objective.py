"""What an update minimises and reports: the loss of packed targets, the learning rate, the metrics. Pure torch, no Megatron."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms import Algorithm, stale_weights
from balance import Key
from rollout import Sample

SUMS = ("loss", "entropy", "kl", "clipped", "tokens", "stale", "stale_weight")  # statistics that are summed over targets and ranks
MAXIMA = ("engine_logprob_diff_max",)  # and those whose maximum is taken


@dataclass
class Known:
    """What is known of the response tokens of a mini-batch before its forward pass, by slot (see batch.py). Tensors: [slots]."""

    engine_logprobs: Tensor  # under the weights that wrote the token
    advantages: Tensor
    stale: Tensor  # whether older weights than the step's wrote it
    # under the weights at the start of the step, where stale; None: they are the weights that train
    proximal_logprobs: Tensor | None


def known_of(samples: list[Sample], version: int, proximal: dict[Key, list[float]], device: torch.device) -> Known:
    """The columns of a mini-batch's samples, in their order. `proximal`: log-probabilities of the samples with stale tokens."""
    engine_logprobs, advantages, stale, proximal_logprobs = [], [], [], []
    for sample in samples:
        engine_logprobs += sample.logprobs
        advantages += sample.advantages
        stale += [written < version for written in sample.versions]
        proximal_logprobs += proximal.get((sample.prompt_id, sample.index), sample.logprobs)
    return Known(
        torch.tensor(engine_logprobs, device=device),
        torch.tensor(advantages, device=device),
        torch.tensor(stale, dtype=torch.bool, device=device),
        torch.tensor(proximal_logprobs, device=device) if proximal else None,
    )


def policy_loss(
    known: Known, algorithm: Algorithm, config, slots: Tensor, logprobs: Tensor, entropy: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each target and a micro-batch's statistics; slots, logprobs, entropy: [targets].

    A target that the step's own weights wrote has the algorithm's loss; for the others see `algorithms.stale_weights`.
    """
    engine_logprobs, stale = known.engine_logprobs[slots], known.stale[slots]
    proximal = logprobs.detach() if known.proximal_logprobs is None else known.proximal_logprobs[slots]
    weights = stale_weights(proximal, engine_logprobs, config.stale_weight_max).where(stale, 1.0)
    old_logprobs = proximal.where(stale, engine_logprobs)
    loss, clipped = algorithm.loss(logprobs, old_logprobs, known.advantages[slots], config.clip_low, config.clip_high)
    loss = weights * loss
    log_ratio = logprobs.detach() - engine_logprobs
    stats = {
        "loss": loss.detach().sum(),
        "entropy": entropy.sum(),
        "kl": -log_ratio.sum(),  # the k1 estimator of KL(those that wrote || those that train)
        "clipped": clipped.sum(),
        "stale": stale.sum(),
        "stale_weight": weights[stale].sum(),
        "engine_logprob_diff_max": largest(log_ratio[~stale].abs()),
    }
    return loss, stats


def largest(values: Tensor) -> Tensor:
    """The maximum, 0 of nothing; infinity stands for NaN, which a maximum over ranks could lose."""
    return torch.nan_to_num(values, nan=math.inf, posinf=math.inf).max() if values.numel() else values.new_zeros(())


def learning_rate(version: int, config) -> float:
    """Linear warm-up over `lr_warmup_steps` updates, then linear to `lr_decay_to` * lr at the last of `steps` updates."""
    if version < config.lr_warmup_steps:
        return config.lr * (version + 1) / config.lr_warmup_steps
    progress = (version - config.lr_warmup_steps + 1) / max(1, config.steps - config.lr_warmup_steps)
    return config.lr * (1 - min(progress, 1.0) * (1 - config.lr_decay_to))


def update_metrics(steps: list[dict[str, float]], lr: float) -> dict[str, float]:
    """The metrics of one update from what its optimizer steps returned: token means, and means over the steps."""
    total = {name: sum(step[name] for step in steps) for name in steps[0]}
    tokens = max(total["tokens"], 1.0)
    return {
        "train/loss": total["loss"] / tokens,
        "train/entropy": total["entropy"] / tokens,
        "train/kl": total["kl"] / tokens,
        "train/clip_frac": total["clipped"] / tokens,
        "train/grad_norm": total["grad_norm"] / len(steps),
        "train/lr": lr,
        "train/tokens": total["tokens"],
        "train/micro_batches": total["micro_batches"],  # the same on every rank
        # optimizer steps that had no token to train on, or whose loss or gradient wasn't finite
        "train/skipped": float(sum(step["tokens"] == 0 or step["not_finite"] for step in steps)),
        "train/not_finite": total["not_finite"],
        "train/engine_logprob_diff_max": steps[0]["engine_logprob_diff_max"],
        "train/seconds_spread": (total["slowest"] - total["fastest"]) / total["slowest"],
        "train/stale_token_frac": total["stale"] / tokens,
        "train/stale_weight_mean": total["stale_weight"] / total["stale"] if total["stale"] else 1.0,
    }
