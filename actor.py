"""The policy: log-probabilities, the loss of packed tokens, the update; the reference of a KL penalty."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from algorithms import KL_ESTIMATORS, MEANS, Algorithm, LossInputs, algorithm_of
from config import Config, UserError
from sample import Key, Sample
from scheduling.balance import flat
from training import ptx
from training.executor import Update
from training.lm_head import LMOutput, output_of, over_context_parallel, read_targets
from training.packing import NO_TARGET, MicroBatch, Sequence
from training.trainer import (
    LossSums,
    OutputLoss,
    Packed,
    TokenLoss,
    Trainer,
    all_reduce,
    as_sequences,
)

# of trainer and engine, the mean over tokens: single ones are far apart in bfloat16, and say little
MAX_LOGPROB_DIFF = {"float32": 1e-4, "bfloat16": 0.05}
# of a histogram: 16 a decade, from 1e-7
DIFF_BINS = tuple(f"diff_bin_{number}" for number in range(130))
# statistics of a micro-batch: sums over its targets, reported as means over tokens, and others
TOKEN_MEANS = ("entropy", "kl", "reference_kl", "clip_frac", "masked_frac", "stale_token_frac")
DIFFS = ("engine_logprob_diff_sum", "engine_logprob_diff_max", *DIFF_BINS)
STATS = (*TOKEN_MEANS, "policy_loss", "tokens", "stale_weight", *DIFFS, *ptx.SUMS)


class Actor(Trainer):
    """One rank's part of the policy. `version` counts its updates: the weights' number in a sample."""

    title = "actor"

    def __init__(self, config: Config, model_dir: str):
        self.algorithm = algorithm_of(config)
        self.texts: list[Sequence] = []  # for the pretraining term, if there is one
        super().__init__(config, model_dir)

    def updating(self, mini_batches: list[list[list[Sample]]]) -> Update:
        """An optimizer step a mini-batch (collective: all ranks). Returns metrics, equal on every rank."""
        self._check_samples(flat(mini_batches))
        lr = learning_rate(self.version, self.config, self.algorithm.critic_warmup)
        proximal = self._proximal_logprobs(mini_batches)
        steps = []
        for number, micro_batches in enumerate(mini_batches):
            targets = pack_targets(
                flat([micro_batches]), self.version, proximal, self.algorithm, self.device
            )
            loss = partial(policy_loss, targets, self.algorithm, over_context_parallel)
            texts, loss = self._add_texts(number, targets, loss)
            packed = as_sequences(micro_batches) + texts
            check = self._check_engine if number == 0 else None
            output_loss = self._output_loss(loss, len(targets.divisors))
            steps.append((yield from self.step(packed, output_loss, STATS, lr, check)))
        self.version += 1
        return update_metrics(steps, lr) | {
            "train/micro_batches": float(sum(map(len, mini_batches)))
        }

    def _check_samples(self, samples: list[Sample]) -> None:
        assert self.awake, "the actor sleeps: wake it before update"
        oldest = 0 if self.config.continues_answers else self.version
        for sample in samples:
            assert sample.advantages is not None, "a sample without advantages cannot be trained on"
            fits = all(oldest <= version <= self.version for version in sample.versions)
            assert fits, f"a sample of weights {sample.versions} meets weights {self.version}"

    def _check_engine(self, stats: dict[str, float]) -> None:
        """UserError if trainer and engine are too far apart on the tokens that the step's weights wrote."""
        mean, dtype = engine_differences(stats)["engine_logprob_diff_mean"], self.config.dtype
        if not mean <= (most := MAX_LOGPROB_DIFF[dtype]):  # NaN isn't
            apart = f"the trainer's log-probabilities differ from the engine's by {mean:.2e} in the mean"
            raise UserError(f"{apart}, more than the {most:.2e} that --dtype {dtype} may make")

    def _proximal_logprobs(self, mini_batches: list[list[list[Sample]]]) -> dict[Key, list[float]]:
        """Log-probabilities at the start of the step, of stale samples or all (collective: its ranks)"""
        samples, every = flat(mini_batches), self.algorithm.corrects_mismatch
        wanted = [
            s for s in samples if every or min(s.versions, default=self.version) < self.version
        ]
        if len(mini_batches) == 1 or not wanted:
            return {}  # the own forward pass of a single mini-batch gives them
        if any(sample.policy_logprobs is None for sample in wanted):
            for sample, row in zip(wanted, self.logprobs(wanted), strict=True):
                sample.policy_logprobs = row
        return {sample.key: sample.policy_logprobs for sample in wanted}

    def _add_texts(
        self, number: int, targets: PackedTargets, loss: TokenLoss
    ) -> tuple[Packed, TokenLoss]:
        """This rank's texts for optimizer step `number`, and the loss with them: see ptx.py (collective)."""
        if not self.texts:
            return [], loss
        step, size = self.version * self.config.updates_per_step + number, self.algorithm.ptx_batch
        mine = ptx.choose(self.texts, step, size, self.config.seed, self.dp_rank, self.dp_size)
        # a data-parallel rank counts as often as its model-parallel group has ranks: only the ratio matters
        counts = {
            "divisor": targets.divisors.sum().item(),
            "tokens": float(sum(len(r) for _, r in mine)),
        }
        total = all_reduce(counts, dist.ReduceOp.SUM)
        loss = ptx.add_texts(
            loss, len(targets.divisors), **total, coefficient=self.algorithm.ptx_coef
        )
        packed = [[mine[index] for index in chosen] for chosen in self.pack(mine)]
        # as many micro-batches on every rank: replicas with other tables would sum gradients in another order
        most = all_reduce({"count": float(len(packed))}, dist.ReduceOp.MAX)
        return packed + [[]] * (int(most["count"]) - len(packed)), loss

    def _output_loss(self, token_loss: TokenLoss, first: int) -> OutputLoss:
        """first: the slot where texts begin. They are read at temperature 1, as ptx.py says."""
        entropy_learns = self.algorithm.entropy_coef > 0

        def output_loss(batch: MicroBatch, output: LMOutput) -> LossSums:
            temperatures = torch.where(batch.slots < first, self.config.temperature, 1.0)
            logprobs, entropy = read_targets(batch, output, temperatures, entropy_learns)
            loss, stats = token_loss(batch.slots[batch.slots != NO_TARGET], logprobs, entropy)
            return loss.sum(), stats.pop("divisor"), stats

        return output_loss

    def _as_output(self, tensor: Tensor) -> LMOutput:
        return output_of(self.chunks[-1], tensor)

    def logprobs(self, samples: list[Sample]) -> list[list[float]]:
        """Of every response token under the current weights (collective over the model-parallel group)."""
        packed = self.pack([(sample.prompt, sample.response) for sample in samples])
        rows = self.packed_logprobs([[samples[index] for index in chosen] for chosen in packed])
        row_of = dict(zip(flat([packed]), rows, strict=True))
        return [row_of[index] for index in range(len(samples))]

    def packed_logprobs(self, micro_batches: list[list[Sample]]) -> list[list[float]]:
        """The same of samples that come packed, in their order."""
        return self.read_tokens(
            micro_batches, partial(target_logprobs, temperature=self.config.temperature)
        )


def target_logprobs(batch: MicroBatch, output: LMOutput, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the targets: [targets] (collective over the tensor-parallel group)."""
    # not a number: CUDA would multiply by its reciprocal, and round otherwise than the pass that trains
    temperatures = torch.full_like(batch.targets, temperature, dtype=torch.float32)
    return read_targets(batch, output, temperatures)[0]


def cross_entropy_loss(batch: MicroBatch, output: LMOutput) -> LossSums:
    """The mean of -log p(token) over all targets, as TRL's SFTTrainer has it with completion_only_loss."""
    logprobs = target_logprobs(batch, output)
    return -logprobs.sum(), len(logprobs), {}


@dataclass
class PackedTargets:
    """What is known of a mini-batch's response tokens before its pass; [slots], see packing.MicroBatch."""

    engine_logprobs: Tensor  # under the weights that wrote the token
    advantages: Tensor
    stale: Tensor  # whether older weights than the step's wrote it
    # under the weights at the start of the step; None: those that train
    proximal_logprobs: Tensor | None
    weights: Tensor  # of each token's loss in the sum: see algorithms.MEANS
    divisors: Tensor  # the sum of the loss is divided by the sum of these
    sequence: Tensor  # the answer that a token belongs to, by its number in the mini-batch
    lengths: Tensor  # [answers]
    reference_logprobs: Tensor | None  # None: there is no reference model


def pack_targets(
    samples: list[Sample],
    version: int,
    proximal: dict[Key, list[float]],
    algorithm: Algorithm,
    device: torch.device,
) -> PackedTargets:
    """The columns of a mini-batch's samples, in their order. proximal: as from `_proximal_logprobs`."""

    def column(rows: list[list], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(list(chain.from_iterable(rows)), dtype=dtype, device=device)

    means = [
        MEANS[algorithm.mean](len(sample.response), algorithm.max_new_tokens) for sample in samples
    ]
    old = [proximal.get(sample.key, sample.logprobs) for sample in samples]
    reference = [
        sample.reference_logprobs for sample in samples if sample.reference_logprobs is not None
    ]
    lengths = [len(sample.response) for sample in samples]
    return PackedTargets(
        engine_logprobs=column([sample.logprobs for sample in samples]),
        advantages=column([sample.advantages for sample in samples]),
        stale=column([[written < version for written in s.versions] for s in samples], torch.bool),
        proximal_logprobs=column(old) if proximal else None,
        weights=column([weights for weights, _ in means]),
        divisors=column([divisors for _, divisors in means], torch.int64),
        sequence=column([[number] * length for number, length in enumerate(lengths)], torch.int64),
        lengths=column([lengths or [0]]),
        reference_logprobs=column(reference) if reference else None,
    )


def policy_loss(
    targets: PackedTargets,
    algorithm: Algorithm,
    total: Callable[[Tensor], Tensor],
    slots: Tensor,
    logprobs: Tensor,
    entropy: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The TokenLoss of an algorithm: its loss, importance weights, KL and entropy. total: see LossInputs."""
    engine_logprobs, stale = targets.engine_logprobs[slots], targets.stale[slots]
    log_ratio = logprobs.detach() - engine_logprobs
    old_logprobs, weights, kept = importance_weights(targets, algorithm, slots, logprobs.detach())
    # 0 times the slope of an infinite ratio would be NaN
    logprobs = logprobs.where(kept, logprobs.detach())
    advantages, sequence = targets.advantages[slots], targets.sequence[slots]
    inputs = LossInputs(logprobs, old_logprobs, advantages, sequence, targets.lengths, total)
    loss, clipped = algorithm.loss(inputs, algorithm)
    loss, stats = weights * loss, {}
    if targets.reference_logprobs is not None:
        reference_kl = KL_ESTIMATORS[algorithm.kl_estimator](
            logprobs - targets.reference_logprobs[slots]
        )
        stats["reference_kl"] = reference_kl.detach().sum()
        if algorithm.kl_in == "loss":
            loss = loss + algorithm.kl_coef * reference_kl
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * entropy
    loss = (targets.weights[slots] * loss).where(kept, 0.0)
    return loss, stats | {
        "divisor": targets.divisors[slots].sum(),
        "tokens": torch.tensor(len(slots)),
        "policy_loss": loss.detach().sum(),
        "entropy": entropy.detach().sum(),
        "kl": -log_ratio.sum(),  # the k1 estimator of KL(those that wrote || those that train)
        "clip_frac": clipped.sum(),
        "masked_frac": (~kept).sum(),
        "stale_token_frac": stale.sum(),
        "stale_weight": weights[stale].sum(),
    } | difference_stats(log_ratio[~stale].abs())


def difference_stats(differences: Tensor) -> dict[str, Tensor]:
    """Sum, maximum and histogram of [tokens], not negative."""
    place = 1 + ((differences.clamp(min=1e-9).log10() + 7) * 16).floor()  # bin 0: below 1e-7
    place = torch.nan_to_num(place, nan=math.inf).clamp(0, len(DIFF_BINS) - 1).long()
    counts = torch.bincount(place, minlength=len(DIFF_BINS))
    # a maximum over ranks may lose NaN
    known = torch.nan_to_num(differences, nan=math.inf, posinf=math.inf)
    most = known.max() if known.numel() else known.new_zeros(())
    stats = {"engine_logprob_diff_sum": differences.sum(), "engine_logprob_diff_max": most}
    return stats | dict(zip(DIFF_BINS, counts.unbind(), strict=True))


def engine_differences(stats: dict[str, float]) -> dict[str, float]:
    """Mean, 99.9th percentile (the end of its bin, up to 15 % above) and maximum, over all ranks' tokens."""
    counts = [stats[name] for name in DIFF_BINS]
    rest, number = 0.001 * sum(counts), len(counts) - 1
    while number and counts[number] <= rest:
        rest, number = rest - counts[number], number - 1
    most = stats["engine_logprob_diff_max"]
    return {
        "engine_logprob_diff_mean": stats["engine_logprob_diff_sum"] / max(sum(counts), 1.0),
        "engine_logprob_diff_p999": min(10 ** (number / 16 - 7), most),
        "engine_logprob_diff_max": most,
    }


def importance_weights(
    targets: PackedTargets, algorithm: Algorithm, slots: Tensor, logprobs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """For each target the log-probability that its ratio is to, its importance weight, whether it is kept.

    What older weights wrote or, with `tis_cap` or `icepop_bound`, all is corrected by exp(proximal - engine),
    truncated; the ratio is then to `proximal`, of the step's start, else to the engine's. AReaL's decoupled
    objective (arXiv 2505.24298), section 5.2, after Hilton et al. (arXiv 2110.00641); engines: Yao et al.,
    Your Efficient RL Framework Secretly Brings You Off-Policy RL (2025); masks: IcePop (arXiv 2510.18855).
    """
    engine_logprobs, stale = targets.engine_logprobs[slots], targets.stale[slots]
    proximal = logprobs if targets.proximal_logprobs is None else targets.proximal_logprobs[slots]
    ratio = (proximal - engine_logprobs).exp()
    weights = ratio.clamp(max=algorithm.behavior_weight_cap)
    if not algorithm.corrects_mismatch:
        return (
            proximal.where(stale, engine_logprobs),
            weights.where(stale, 1.0),
            torch.ones_like(stale),
        )
    most, bound = algorithm.tis_cap or math.inf, algorithm.icepop_bound or math.inf
    kept = stale | ((ratio >= 1 / bound) & (ratio <= bound))
    weights = weights.where(stale, ratio.clamp(max=most))
    return proximal, weights.where(kept, 0.0), kept  # one that isn't kept may be infinite


def learning_rate(version: int, config: Config, warmup: int = 0) -> float:
    """0 for `warmup` updates, linear over `lr_warmup_steps`, then linear to `lr_decay_to` at the last."""
    version, steps = version - warmup, config.steps - warmup
    if version < 0:
        return 0.0
    if version < config.lr_warmup_steps:
        return config.lr * (version + 1) / config.lr_warmup_steps
    progress = (version - config.lr_warmup_steps + 1) / max(1, steps - config.lr_warmup_steps)
    return config.lr * (1 - min(progress, 1.0) * (1 - config.lr_decay_to))


def update_metrics(steps: list[dict[str, float]], lr: float) -> dict[str, float]:
    """Of one update's optimizer steps: means over tokens, and means and sums over steps."""
    total = {name: sum(step[name] for step in steps) for name in steps[0]}
    stale = total["stale_token_frac"]
    metrics = {name: total[name] / max(total["tokens"], 1.0) for name in TOKEN_MEANS}
    metrics |= (
        {name: total[name] for name in ("tokens", "skipped", "not_finite")}
        | {
            "loss": total["policy_loss"] / max(total["divisor"], 1.0),
            "lr": lr,
            "grad_norm": total["grad_norm"] / len(steps),
            "seconds_spread": (total["slowest_s"] - total["fastest_s"]) / total["slowest_s"],
            "stale_weight_mean": total["stale_weight"] / stale if stale else 1.0,
        }
        | engine_differences(steps[0])
    )
    return {f"train/{name}": value for name, value in metrics.items()} | ptx.metrics(steps)


class Reference:
    """The weights that `actor` has now, for good, on the host. For a pass they take the policy's place."""

    def __init__(self, actor: Actor):
        self._actor, has_gpu = actor, actor.device.type == "cuda"
        own = [parameter.detach() for parameter in actor.parameters()]
        self._host = [torch.empty_like(x, device="cpu", pin_memory=has_gpu).copy_(x) for x in own]

    def compute_ref_logprobs(self, mini_batches: list[list[list[Sample]]]) -> None:
        """Fill `reference_logprobs` and, with the KL in the reward, `policy_logprobs` (collective)."""
        assert self._actor.awake, "the actor sleeps: wake it before its reference is asked"
        samples, micro_batches = flat(mini_batches), list(chain(*mini_batches))
        if self._actor.algorithm.kl_in == "reward":
            for sample, row in zip(
                samples, self._actor.packed_logprobs(micro_batches), strict=True
            ):
                sample.policy_logprobs = row
        parameters = self._actor.parameters()
        own = [parameter.data for parameter in parameters]
        for parameter, host in zip(parameters, self._host, strict=True):
            parameter.data = host.to(self._actor.device, non_blocking=True)
        try:
            rows = self._actor.packed_logprobs(micro_batches)
        finally:  # nothing was moved out: beside a pass that keeps no activations there is room for both
            for parameter, data in zip(parameters, own, strict=True):
                parameter.data = data
        for sample, row in zip(samples, rows, strict=True):
            sample.reference_logprobs = row
