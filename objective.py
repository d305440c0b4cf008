"""What an update minimises and reports: the loss of packed targets, the learning rate, the metrics. Pure torch, no Megatron."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms import Algorithm
from losses import KL, MEANS, Tokens, is_within, truncated_weights
from sample import Sample
from scheduling.balance import Key

# statistics that are summed over targets and ranks; the loss is divided by "normaliser"
SUMS = ("loss", "normaliser", "entropy", "kl", "reference_kl", "clipped", "tokens", "stale", "stale_weight", "masked")
MAXIMA = ("engine_logprob_diff_max",)  # and those whose maximum is taken


@dataclass
class Known:
    """What is known of the response tokens of a mini-batch before its forward pass, by slot (see batch.py). Tensors: [slots]."""

    engine_logprobs: Tensor  # under the weights that wrote the token
    advantages: Tensor
    stale: Tensor  # whether older weights than the step's wrote it
    # under the weights at the start of the step, where they are needed; None: they are the weights that train
    proximal_logprobs: Tensor | None
    weights: Tensor  # of each token's loss in the sum, and
    divisors: Tensor  # what it adds to that by which the sum is divided: see losses.MEANS
    sequence: Tensor  # the answer that a token belongs to, by its number in the mini-batch
    lengths: Tensor  # [answers]
    reference_logprobs: Tensor | None = None  # None: there is no reference model


def known_of(samples: list[Sample], version: int, proximal: dict[Key, list[float]], mean: str, longest: int, device) -> Known:
    """The columns of a mini-batch's samples, in their order. proximal: log-probabilities at the start of the step, by sample.

    mean: a row of losses.MEANS; longest: the most tokens of an answer.
    """
    columns = {name: [] for name in ("engine", "advantages", "stale", "proximal", "weights", "divisors", "sequence", "reference")}
    for number, sample in enumerate(samples):
        length = len(sample.response)
        weights, divisors = MEANS[mean](length, longest)
        columns["engine"] += sample.logprobs
        columns["advantages"] += sample.advantages
        columns["stale"] += [written < version for written in sample.versions]
        columns["proximal"] += proximal.get((sample.prompt_id, sample.index), sample.logprobs)
        columns["weights"] += weights
        columns["divisors"] += divisors
        columns["sequence"] += [number] * length
        columns["reference"] += sample.reference_logprobs or []
    types = {"stale": torch.bool, "divisors": torch.int64, "sequence": torch.int64}
    of = {name: torch.tensor(column, dtype=types.get(name, torch.float32), device=device) for name, column in columns.items()}
    lengths = torch.tensor([float(len(sample.response)) for sample in samples] or [0.0], device=device)
    known = (of["engine"], of["advantages"], of["stale"], of["proximal"] if proximal else None)
    return Known(*known, of["weights"], of["divisors"], of["sequence"], lengths, of["reference"] if columns["reference"] else None)


def corrects_all(config) -> bool:
    """Whether fresh tokens, too, are corrected for what wrote them: the engine's numbers, which aren't the trainer's."""
    return config.mismatch_max > 0 or config.mismatch_mask > 0


def policy_loss(
    known: Known, algorithm: Algorithm, config, total: Callable[[Tensor], Tensor], slots: Tensor, logprobs: Tensor, entropy: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each target, weighted for the sum, and a micro-batch's statistics; slots, logprobs, entropy: [targets].

    A target that the step's own weights wrote has the algorithm's loss, with its ratio to the engine's log-probabilities. One that
    older weights wrote has it with the ratio to those at the start of the step, times an importance weight; `mismatch_max` and
    `mismatch_mask` have all targets do so. A masked target gives no gradient. total: see losses.Tokens.
    """
    engine_logprobs, stale, sequence = known.engine_logprobs[slots], known.stale[slots], known.sequence[slots]
    proximal = logprobs.detach() if known.proximal_logprobs is None else known.proximal_logprobs[slots]
    weights = truncated_weights(proximal, engine_logprobs, config.stale_weight_max).where(stale, 1.0)
    old_logprobs, kept = proximal.where(stale, engine_logprobs), torch.ones_like(stale)
    log_ratio = logprobs.detach() - engine_logprobs
    if corrects_all(config):
        most, bound = config.mismatch_max or math.inf, config.mismatch_mask or math.inf
        old_logprobs, kept = proximal, stale | is_within(proximal, engine_logprobs, bound)
        weights = weights.where(stale, truncated_weights(proximal, engine_logprobs, most)).where(kept, 0.0)  # it may be infinite
        logprobs = logprobs.where(kept, logprobs.detach())  # an answer's ratio has no gradient from it either
    tokens = Tokens(logprobs, old_logprobs, known.advantages[slots], sequence, known.lengths, total)
    loss, clipped = algorithm.loss(tokens, config)
    loss, stats = weights * loss, {"normaliser": known.divisors[slots].sum()}
    if known.reference_logprobs is not None:
        reference_kl = KL[config.kl_estimator](logprobs - known.reference_logprobs[slots])
        stats["reference_kl"] = reference_kl.detach().sum()
        if config.kl_in == "loss":
            loss = loss + config.kl_coef * reference_kl
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
    loss = (known.weights[slots] * loss).where(kept, 0.0)
    return loss, stats | {
        "loss": loss.detach().sum(),
        "entropy": entropy.detach().sum(),
        "kl": -log_ratio.sum(),  # the k1 estimator of KL(those that wrote || those that train)
        "clipped": clipped.sum(),
        "stale": stale.sum(),
        "stale_weight": weights[stale].sum(),
        "masked": (~kept).sum(),
        "engine_logprob_diff_max": largest(log_ratio[~stale].abs()),
    }


def largest(values: Tensor) -> Tensor:
    """The maximum, 0 of nothing; infinity stands for NaN, which a maximum over ranks could lose."""
    return torch.nan_to_num(values, nan=math.inf, posinf=math.inf).max() if values.numel() else values.new_zeros(())


def learning_rate(version: int, config) -> float:
    """Linear warm-up over `lr_warmup_steps` updates, then linear to `lr_decay_to` * lr at the last of `steps` updates.

    Before that it is 0 for `critic_warmup` updates, in which the critic learns alone: AdamW leaves the weights as they are.
    """
    version, steps = version - config.critic_warmup, config.steps - config.critic_warmup
    if version < 0:
        return 0.0
    if version < config.lr_warmup_steps:
        return config.lr * (version + 1) / config.lr_warmup_steps
    progress = (version - config.lr_warmup_steps + 1) / max(1, steps - config.lr_warmup_steps)
    return config.lr * (1 - min(progress, 1.0) * (1 - config.lr_decay_to))


def update_metrics(steps: list[dict[str, float]], lr: float) -> dict[str, float]:
    """The metrics of one update from what its optimizer steps returned: token means, and means over the steps."""
    total = {name: sum(step[name] for step in steps) for name in steps[0]}
    tokens = max(total["tokens"], 1.0)
    return {
        "train/loss": total["loss"] / max(total["normaliser"], 1.0),
        "train/entropy": total["entropy"] / tokens,
        "train/kl": total["kl"] / tokens,
        "train/reference_kl": total["reference_kl"] / tokens,
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
        "train/masked_frac": total["masked"] / tokens,
        "train/stale_token_frac": total["stale"] / tokens,
        "train/stale_weight_mean": total["stale_weight"] / total["stale"] if total["stale"] else 1.0,
    }
