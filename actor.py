"""The policy: its log-probabilities, loss and update; also the reference model of a KL penalty.

controller.learn calls Trainer.update. For each mini-batch it runs the passes (passes.py; Megatron calls
policy_loss on the last stage), then takes AdamW's step (Trainer.take_step).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from algorithms import MEANS, Algorithm, LossInputs, algorithm_of
from config import Config
from runtime.errors import UserError, place_of
from runtime.hooks import added
from sample import Key, Sample, flat
from training import lm_head
from training import model as models
from training.groups import Groups
from training.packing import MicroBatch
from training.trainer import (
    LossSums,
    PlannedStep,
    Trainer,
    as_sequences,
    loss_sums,
    means,
    totals,
)

# How far trainer and engine may differ, on average over tokens: in bfloat16 single tokens differ by far more
MAX_LOGPROB_DIFF = {"float32": 1e-4, "bfloat16": 0.05}
# Statistics of a micro-batch. TOKEN_MEANS are sums over its targets that are reported as means over tokens.
TOKEN_MEANS = ("entropy", "kl", "reference_kl", "clip_frac", "stale_token_frac")
ENGINE_STATS = ("fresh_tokens", "engine_logprob_diff_sum", "engine_logprob_diff_max")
STATS = (*TOKEN_MEANS, "policy_loss", "tokens", "stale_weight", *ENGINE_STATS)


class Actor(Trainer):
    """One rank's part of the policy. A sample's `versions` are those of the weights that wrote each token."""

    title = "actor"

    def __init__(
        self, config: Config, model_dir: str, groups: Groups | None = None, learns: bool = True
    ):
        self.algorithm = algorithm_of(config)
        # what the hook loss_term returned; `names`: their statistics of a micro-batch
        self.terms: list[Any] = []
        self.lag = config.ahead  # how many updates old the weights that wrote a token may be
        super().__init__(config, model_dir, groups, learns=learns)

    def _build_optimizer(self, model_config: models.TransformerConfig) -> None:
        # after the weights were cast: adapters stay float32
        for add_adapters in added("adapters"):
            add_adapters(self.config, self.gpt)
        super()._build_optimizer(model_config)

    def plan_steps(self, mini_batches: list[list[list[Sample]]]) -> list[PlannedStep]:
        """Prepare an optimizer step per mini-batch; none is run yet (collective: the model's ranks)."""
        self._check_samples(flat(mini_batches))
        proximal = self._proximal_logprobs(mini_batches)
        entropy_learns = self.algorithm.entropy_coef > 0
        options = {"temperature": self.config.temperature, "entropy_learns": entropy_learns}
        if not entropy_learns:  # its gradient would double the memory of a kept chunk
            options["kept"] = self.config.kept_chunks
        read = partial(lm_head.read_targets, self.gpt, **options)
        names = (*STATS, *chain(*(term.names for term in self.terms)))
        steps = []
        for number, micro_batches in enumerate(mini_batches):
            samples = list(chain(*micro_batches))
            targets = pack_targets(samples, self.version, proximal, self.algorithm, self.device)
            loss = partial(policy_loss, read, targets, self.algorithm)
            work = self.work(as_sequences(micro_batches), loss)
            for term in self.terms:
                term.add(self, work, number, targets.divisors)
            # only the first step has the engine's weights, and with --samples not even that
            check = self._check_engine if number == 0 and not self.config.samples else None
            steps.append(PlannedStep(work, names, self._learning_rate(), check))
        return steps

    def metrics_of(self, results: list[dict[str, float]]) -> dict[str, float]:
        return update_metrics(results, self._learning_rate())

    def _learning_rate(self) -> float:
        return learning_rate(self.version, self.config, self.algorithm.critic_warmup)

    def compute_policy_logprobs(self, mini_batches: list[list[list[Sample]]]) -> None:
        """Fill `policy_logprobs` if the KL is part of the reward (collective: a copy's ranks)."""
        if self.algorithm.kl_in == "reward":
            read = self.read_tokens(list(chain(*mini_batches)))
            for sample, logprobs in zip(flat(mini_batches), read, strict=True):
                sample.policy_logprobs = logprobs

    def compute_ref_logprobs(self, mini_batches: list[list[list[Sample]]]) -> None:
        """Fill `reference_logprobs`, with any adapters off (collective: a copy's ranks)."""
        self._switch_adapters(False)
        read = self.read_tokens(list(chain(*mini_batches)))
        self._switch_adapters(True)
        for sample, logprobs in zip(flat(mini_batches), read, strict=True):
            sample.reference_logprobs = logprobs

    def _switch_adapters(self, is_on: bool) -> None:
        for adapter in self.gpt.adapters.values():
            adapter.is_on = is_on

    def _check_samples(self, samples: list[Sample]) -> None:
        """Assert that samples have advantages, and that none is more stale than it may be."""
        oldest = 0 if self.config.over_dispatch > 1 else self.version - self.lag
        for sample in samples:
            assert sample.advantages is not None, "a sample without advantages cannot be trained on"
            fits = all(oldest <= version <= self.version for version in sample.versions)
            assert fits, f"a sample of weights {sample.versions} meets weights {self.version}"

    def _check_engine(self, stats: dict[str, float]) -> None:
        """Raise UserError if trainer and engine differ too much on fresh tokens."""
        mean = engine_difference(stats)
        dtype = self.config.dtype
        most = MAX_LOGPROB_DIFF[dtype]
        if not mean <= most:  # "mean > most" would let NaN pass
            raise UserError(
                f"the trainer's log-probabilities differ from the engine's by {mean:.2e} on average, "
                f"more than --dtype {dtype} allows ({most:.2e})"
            )

    def _proximal_logprobs(self, mini_batches: list[list[list[Sample]]]) -> dict[Key, list[float]]:
        """Return the needed log-probabilities at the start of the step (collective: a copy's ranks)."""
        if len(mini_batches) == 1:
            return {}  # the training pass itself computes them

        def needs_them(sample: Sample) -> bool:
            is_stale = min(sample.versions, default=self.version) < self.version
            return is_stale or (self.algorithm.corrects_mismatch and len(sample.versions) > 0)

        micro_batches = [list(filter(needs_them, samples)) for samples in chain(*mini_batches)]
        wanted = list(chain(*micro_batches))
        if any(sample.policy_logprobs is None for sample in wanted):
            for sample, logprobs in zip(wanted, self.read_tokens(micro_batches), strict=True):
                sample.policy_logprobs = logprobs
        return {sample.key: sample.policy_logprobs for sample in wanted}

    def read_targets(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        """Return the targets' log-probabilities at the sampling temperature: [targets]."""
        return lm_head.read_targets(self.gpt, batch, hidden, self.config.temperature)[0]

    def own_logprobs(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        """Return the targets' log-probabilities at temperature 1: [targets]."""
        return lm_head.read_targets(self.gpt, batch, hidden, 1.0, kept=self.config.kept_chunks)[0]

    def cross_entropy_loss(self, batch: MicroBatch, hidden: Tensor) -> LossSums:
        """Return the mean of -log p(token) over targets, as TRL's SFTTrainer with completion_only_loss."""
        logprobs = self.own_logprobs(batch, hidden)
        return loss_sums(-logprobs.sum(), len(logprobs), {})


@dataclass
class PackedTargets:
    """The columns of a mini-batch's response tokens: [slots], see packing.MicroBatch."""

    engine_logprobs: Tensor  # under the weights that wrote the token
    advantages: Tensor
    stale: Tensor  # whether an earlier step's weights wrote the token
    mean_weights: Tensor  # each token's weight in the sum of the loss: see algorithms.MEANS
    divisors: Tensor  # the sum of the loss is divided by the sum of these
    sequence: Tensor  # index in the mini-batch of the answer that a token belongs to
    lengths: Tensor  # [answers]
    proximal_logprobs: Tensor | None = None  # at the step's start; None: the training pass has them
    reference_logprobs: Tensor | None = None  # None: there is no reference model

    def at(self, slots: Tensor) -> PackedTargets:
        """Return the columns at some slots, in the order of `slots`."""
        columns = {name: column for name, column in vars(self).items() if column is not None}
        del columns["lengths"]
        return replace(self, **{name: column[slots] for name, column in columns.items()})


DTYPES = {"stale": torch.bool, "divisors": torch.int64, "sequence": torch.int64}  # others: float32


def pack_targets(
    samples: list[Sample], version: int, proximal: dict, algorithm: Algorithm, device: torch.device
) -> PackedTargets:
    """Concatenate a mini-batch's samples. proximal: see Actor._proximal_logprobs."""
    names = ("engine_logprobs", "advantages", "stale", "mean_weights", "divisors")
    names += ("sequence", "lengths")
    columns: dict[str, list] = {name: [] for name in names}
    for number, sample in enumerate(samples):
        length = len(sample.response)
        weights, divisors = MEANS[algorithm.mean](length, algorithm.max_new_tokens)
        columns["engine_logprobs"] += sample.logprobs
        columns["advantages"] += sample.advantages
        columns["stale"] += [written < version for written in sample.versions]
        columns["mean_weights"] += weights
        columns["divisors"] += divisors
        columns["sequence"] += [number] * length
        columns["lengths"].append(length)
        if proximal:
            known = proximal.get(sample.key, sample.logprobs)  # never read for a fresh sample
            columns.setdefault("proximal_logprobs", []).extend(known)
        if sample.reference_logprobs is not None:
            columns.setdefault("reference_logprobs", []).extend(sample.reference_logprobs)
    tensors = {}
    for name, column in columns.items():
        dtype = DTYPES.get(name, torch.float32)
        tensors[name] = torch.tensor(column, dtype=dtype, device=device)
    return PackedTargets(**tensors)


def policy_loss(
    read: Callable, targets: PackedTargets, algorithm: Algorithm, batch: MicroBatch, hidden: Tensor
) -> LossSums:
    """Compute a micro-batch's loss, with importance weights, KL and entropy (collective: tp group).

    `plan_steps` gives read (it returns log-probabilities and entropies), the mini-batch's targets, and the
    algorithm; Work.forward gives the batch, and Megatron the last layer's output, hidden: [1, T, hidden].
    The loss is a sum: Work.finalize divides its gradient by the divisors of all ranks.
    """
    targets = targets.at(batch.slots)
    logprobs, entropy = read(batch, hidden)
    from_engine = logprobs.detach() - targets.engine_logprobs  # for statistics only
    old_logprobs, importance = importance_weights(targets, algorithm, logprobs.detach())
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=targets.advantages,
        sequence=targets.sequence,
        lengths=targets.lengths,
    )
    loss, clipped = algorithm.loss(inputs, algorithm)
    check_loss(loss, len(logprobs), algorithm)
    loss = importance * loss
    stats = engine_stats(from_engine[~targets.stale].abs())
    if targets.reference_logprobs is not None:
        reference_kl = algorithm.kl(logprobs - targets.reference_logprobs)
        stats["reference_kl"] = reference_kl.detach().sum()
        if algorithm.kl_in == "loss":
            loss = loss + algorithm.kl_coef * reference_kl
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * entropy
    loss = targets.mean_weights * loss
    stats["tokens"] = torch.tensor(len(logprobs))
    stats["policy_loss"] = loss.detach().sum()
    stats["entropy"] = entropy.detach().sum()
    stats["kl"] = -from_engine.sum()  # k1 estimate of KL(weights that wrote || weights in training)
    stats["clip_frac"] = clipped.sum()
    stats["stale_token_frac"] = targets.stale.sum()
    stats["stale_weight"] = importance[targets.stale].sum()
    return loss_sums(loss.sum(), targets.divisors.sum(), stats)


def check_loss(loss: Tensor, tokens: int, algorithm: Algorithm) -> None:
    """Raise UserError if the loss of a user's row isn't [tokens] with a gradient."""
    if loss.shape != (tokens,) or not loss.requires_grad:
        raise UserError(
            f"--algorithm {algorithm.name}: its loss ({place_of(algorithm.loss)}) has the shape "
            f"{list(loss.shape)} and "
            f"requires_grad={loss.requires_grad}; a number for each of {tokens} tokens, "
            "with a gradient, is needed"
        )


def importance_weights(
    targets: PackedTargets, algorithm: Algorithm, logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    """Correct each target for the weights, and the arithmetic, that it was sampled with.

    Returns the ratio's denominator (old_logprobs), and each target's loss weight: exp(proximal - engine),
    truncated. engine: log-probabilities under the weights that wrote the token, as the engine computed them.
    proximal: under the weights at the step's start, as the trainer computes them; with one mini-batch they
    are `logprobs` (detached), so the ratio is 1. A token is stale if an earlier step's weights wrote it.

        token                      importance                   old_logprobs
        fresh                      1                            engine
        fresh, corrects_mismatch   at most tis_cap              proximal
        stale                      at most behavior_weight_cap  proximal

    Stale tokens: AReaL (arXiv 2505.24298), section 5.2, after Hilton et al. (arXiv 2110.00641). tis_cap: Yao
    et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL (2025).
    """
    stale = targets.stale
    proximal = logprobs if targets.proximal_logprobs is None else targets.proximal_logprobs
    # how much likelier a token is now, due to newer weights, different arithmetic, or both
    likelier = (proximal - targets.engine_logprobs).exp()
    stale_weights = likelier.clamp(max=algorithm.behavior_weight_cap)
    if not algorithm.corrects_mismatch:
        old_logprobs = proximal.where(stale, targets.engine_logprobs)
        return old_logprobs, stale_weights.where(stale, 1.0)
    fresh_weights = likelier.clamp(max=algorithm.tis_cap)
    return proximal, stale_weights.where(stale, fresh_weights)


def engine_stats(differences: Tensor) -> dict[str, Tensor]:
    """Summarize |trainer's - engine's log-probability|. differences: [fresh tokens]."""
    # a maximum over micro-batches and ranks loses NaN, but not infinity
    known = differences.nan_to_num(nan=math.inf, posinf=math.inf)
    return {
        "fresh_tokens": torch.tensor(len(differences)),
        "engine_logprob_diff_sum": differences.sum(),
        "engine_logprob_diff_max": known.max() if len(known) else known.new_zeros(()),
    }


def engine_difference(stats: dict[str, float]) -> float:
    """Return the mean difference between trainer and engine on a token, over all ranks."""
    return stats["engine_logprob_diff_sum"] / max(stats["fresh_tokens"], 1.0)


def learning_rate(version: int, config: Config, warmup: int = 0) -> float:
    """Return the rate of update `version`: linear warmup, then decay. warmup: steps without an update."""
    if version < config.lr_warmup_steps:
        return config.lr * (version + 1) / config.lr_warmup_steps
    decay_steps = config.steps - warmup - config.lr_warmup_steps
    progress = (version - config.lr_warmup_steps + 1) / max(1, decay_steps)
    return config.lr * (1 - min(progress, 1.0) * (1 - config.lr_decay_to))


def rates_around(step: int, steps: int, config: Config) -> tuple[float, float]:
    """Return the last rate before `step` and the next one, if the run before had `steps`.

    While the rate is meant to rise, in warmup, both are 0.
    """
    warmup = algorithm_of(config).critic_warmup
    version = step - warmup
    if version < config.lr_warmup_steps:
        return 0.0, 0.0
    old = learning_rate(version - 1, replace(config, steps=steps), warmup)
    return old, learning_rate(version, config, warmup)


def update_metrics(results: list[dict[str, float]], lr: float) -> dict[str, float]:
    """Return an update's metrics, from the statistics of its optimizer steps."""
    total = totals(results)
    metrics = means(total, TOKEN_MEANS, "tokens")
    for name in ("tokens", "skipped", "not_finite", "grad_norm", "micro_batches"):
        metrics[name] = total[name]
    metrics["lr"] = lr
    metrics["loss"] = total["policy_loss"] / max(total["divisor"], 1.0)
    metrics["seconds_spread"] = (total["slowest_s"] - total["fastest_s"]) / total["slowest_s"]
    stale_tokens = total["stale_token_frac"]
    metrics["stale_weight_mean"] = total["stale_weight"] / stale_tokens if stale_tokens else 1.0
    if results[0]["fresh_tokens"]:  # none is fresh if the batch was served ahead
        metrics["engine_logprob_diff_mean"] = engine_difference(results[0])
        metrics["engine_logprob_diff_max"] = results[0]["engine_logprob_diff_max"]
    if total.get("ptx_tokens"):
        metrics["ptx_loss"] = total["ptx"] / total["ptx_tokens"]
    return {f"train/{name}": value for name, value in metrics.items()}
