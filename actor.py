# ruff: noqa: E402
"""The policy: log-probabilities and updates, on top of trainer.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor

from cpu.megatron import install

install()

from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from algorithms import get_algorithm
from objective import MAXIMA, SUMS, Known, corrects_all, known_of, learning_rate, policy_loss, update_metrics
from sample import Sample
from scheduling.balance import Key, flat
from training import ptx
from training.packing import NO_TARGET, MicroBatch, Sequence
from training.trainer import Trainer, all_reduce, as_sequences

# (slots, logprobs, entropy), each [targets] -> the loss of each target, and this micro-batch's statistics
TokenLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


class Actor(Trainer):
    """One rank's part of the policy. `version` counts the calls of `update`: the weights' number in every sample."""

    title = "actor"

    def __init__(self, config, model_dir: str):
        """As a Trainer. ValueError if there is no such algorithm, too."""
        self.algorithm = get_algorithm(config.algorithm)
        self.texts: list[Sequence] = []  # for the pretraining term, if there is one
        super().__init__(config, model_dir)

    def update(self, mini_batches: list[list[list[Sample]]]) -> dict[str, float]:
        """Train on this data-parallel rank's samples, which come packed: mini-batches of micro-batches. Collective over all ranks.

        Every mini-batch is one optimizer step, for which all ranks bring the same number of micro-batches; one may be empty. Each
        sample needs `advantages`. Returns metrics that are the same on every rank; the table in the README says what they mean.
        An optimizer step whose loss or gradient isn't finite is skipped and counted. ValueError if the trainer and the engine disagree
        about log-probabilities.
        """
        assert self.awake, "the actor sleeps: wake it before update"
        usable = set(range(self.version + 1)) if self.config.partial_rollout else {self.version}
        for sample in flat(mini_batches):
            assert sample.advantages is not None, "a sample without advantages cannot be trained on"
            assert set(sample.versions) <= usable, f"a sample of weights {sample.versions} meets weights {self.version}"
        lr = learning_rate(self.version, self.config)
        proximal = self._proximal_logprobs(mini_batches)
        steps = [
            self._policy_step(micro_batches, proximal, lr, number)
            for number, micro_batches in enumerate(mini_batches)
        ]
        self.version += 1
        return update_metrics(steps, lr) | ptx.metrics(steps)

    def _proximal_logprobs(self, mini_batches: list[list[list[Sample]]]) -> dict[Key, list[float]]:
        """Log-probabilities at the start of the step, of the samples with stale tokens, or if all are corrected of all.

        Nothing of a single mini-batch, whose own forward pass gives them. Collective over the model-parallel group, which has the
        same samples, so that its ranks agree on whether to run; the other groups take no part.
        """
        samples, all_of_them = flat(mini_batches), corrects_all(self.config)
        wanted = [s for s in samples if all_of_them or min(s.versions, default=self.version) < self.version]
        if len(mini_batches) == 1 or not wanted:
            return {}
        return {(sample.prompt_id, sample.index): row for sample, row in zip(wanted, self.logprobs(wanted), strict=True)}

    def _policy_step(
        self, micro_batches: list[list[Sample]], proximal: dict[Key, list[float]], lr: float, number: int
    ) -> dict[str, float]:
        """Optimizer step `number` of an update, on one mini-batch. Returns sums and extremes over all ranks and the gradient norm."""
        config, packed = self.config, as_sequences(micro_batches)
        mean = (self.algorithm.mean, config.max_new_tokens)
        known = known_of(flat([micro_batches]), self.version, proximal, *mean, self.device)
        token_loss = partial(policy_loss, known, self.algorithm, config, over_context_parallel if config.cp > 1 else lambda sums: sums)
        texts, token_loss = self._add_texts(number, known, token_loss)
        loss = partial(_sum_loss, config.temperature, token_loss, entropy_trains=config.entropy_coef > 0)
        sums, maxima = self._reduce(self._forward_backward(packed + texts, loss), SUMS + ptx.SUMS, MAXIMA)
        is_finite = math.isfinite(sums["loss"] + sums["ptx"])  # the sum over all ranks, so they agree
        facts = {"micro_batches": float(len(packed)), "seconds": self._own_seconds}
        least, most = all_reduce(facts, dist.ReduceOp.MIN), all_reduce(facts, dist.ReduceOp.MAX)
        assert least["micro_batches"] == most["micro_batches"], "ranks have different numbers of micro-batches"
        if number == 0 and is_finite and not maxima["engine_logprob_diff_max"] <= self.config.max_logprob_diff:
            raise ValueError(
                f"the trainer's log-probabilities differ from the engine's by up to {maxima['engine_logprob_diff_max']:.2e}, "
                f"more than --max-logprob-diff {self.config.max_logprob_diff:.2e}"
            )
        grad_norm = self._optimizer_step(lr) if sums["tokens"] > 0 and is_finite else 0.0
        skipped = {"not_finite": float(not (is_finite and math.isfinite(grad_norm)))}
        if skipped["not_finite"]:  # the metrics of a skipped step: nothing that isn't a number
            finite = [{name: value if math.isfinite(value) else 0.0 for name, value in part.items()} for part in (sums, maxima)]
            sums, maxima, grad_norm = *finite, 0.0
        extremes = {"micro_batches": most["micro_batches"], "slowest": most["seconds"], "fastest": least["seconds"]}
        return {**sums, **maxima, **extremes, **skipped, "grad_norm": grad_norm}

    def _add_texts(self, number: int, known: Known, token_loss: TokenLoss) -> tuple[list[list[Sequence]], TokenLoss]:
        """This rank's micro-batches of texts for an optimizer step, and the loss with them: see pretraining.py.

        All ranks bring the same number of micro-batches. Collective over all ranks, if there are texts.
        """
        if not self.texts:
            return [], token_loss
        config, step = self.config, self.version * self.config.updates_per_step + number
        mine = ptx.choose(self.texts, step, config.ptx_batch, config.seed, self.dp_rank, self.dp_size)
        packed = [[mine[index] for index in chosen] for chosen in self._pack(mine)] if mine else []
        most = int(all_reduce({"micro_batches": float(len(packed))}, dist.ReduceOp.MAX)["micro_batches"])
        # every data-parallel rank's own counts as often as its model-parallel group has ranks: only their ratio matters
        counts = {"divisor": known.divisors.sum().item(), "tokens": float(sum(len(response) for _, response in mine))}
        total = all_reduce(counts, dist.ReduceOp.SUM)
        first = len(known.divisors)
        loss = ptx.add_texts(token_loss, first, total["divisor"], total["tokens"], config.ptx_coef)
        return packed + [[]] * (most - len(packed)), loss

    def supervised(self, sequences: list[Sequence], lr: float) -> float:
        """One optimizer step of cross-entropy on the response tokens of (prompt, response) pairs. Collective over all ranks.

        Returns the loss before the step in nats: the mean over the response tokens of all ranks.
        """
        assert self.awake, "the actor sleeps: wake it before supervised"

        def cross_entropy(slots, logprobs, entropy):
            return -logprobs, {"loss": -logprobs.detach().sum()}

        packed = [[sequences[index] for index in chosen] for chosen in self._pack(sequences)]
        sums, _ = self._reduce(self._forward_backward(packed, partial(_sum_loss, 1.0, cross_entropy)), SUMS, MAXIMA)
        assert math.isfinite(self._optimizer_step(lr)), "the gradient isn't finite"
        return sums["loss"] / sums["tokens"]

    def logprobs(self, samples: list[Sample]) -> list[list[float]]:
        """Log-probability of every response token under the current weights. Collective over the model-parallel group."""
        packed = self._pack([(sample.prompt, sample.response) for sample in samples])
        rows = self.packed_logprobs([[samples[index] for index in chosen] for chosen in packed])
        row_of = dict(zip(flat([packed]), rows, strict=True))
        return [row_of[index] for index in range(len(samples))]

    def packed_logprobs(self, micro_batches: list[list[Sample]]) -> list[list[float]]:
        """The same of samples that come packed, in their order. Collective over the model-parallel group."""
        return self._read_tokens(micro_batches, partial(target_logprobs, self.config.temperature))


def _target_logits(temperature: float, batch: MicroBatch, logits: Tensor) -> Tensor:
    """Of a micro-batch's targets: [targets, vocab / tp], a copy in float32.

    log_softmax(logits / temperature) is also what SGLang reports, so that the two can be compared.
    """
    return logits[0, batch.slots != NO_TARGET].float() / temperature


def target_logprobs(temperature: float, batch: MicroBatch, logits: Tensor) -> Tensor:
    """Log-probabilities of the targets: [targets]. Collective over the tensor-parallel group."""
    return -vocab_parallel_cross_entropy(_target_logits(temperature, batch, logits), batch.targets[batch.slots != NO_TARGET])


def _sum_loss(
    temperature: float, token_loss: TokenLoss, batch: MicroBatch, logits: Tensor, entropy_trains: bool = False
) -> tuple[Tensor, Tensor, dict]:
    """What Megatron's schedule asks of a loss: its sum, what the sum over all ranks is divided by, and the statistics to return.

    That divisor is the statistic `normaliser`, if there is one, else the number of targets.
    """
    chosen = batch.slots != NO_TARGET
    logits = _target_logits(temperature, batch, logits)
    entropy = VocabParallelEntropy.apply(logits if entropy_trains else logits.detach())
    logprobs = -vocab_parallel_cross_entropy(logits, batch.targets[chosen])  # overwrites logits
    loss, stats = token_loss(batch.slots[chosen], logprobs, entropy)
    tokens = chosen.sum()
    stats = {"tokens": tokens, "normaliser": tokens} | stats
    return loss.sum(), stats["normaliser"].int(), stats


def over_context_parallel(sums: Tensor) -> Tensor:
    """The sum over the context-parallel group (collective), with a gradient, which is summed likewise."""
    return differentiable.all_reduce(sums, group=mpu.get_context_parallel_group())


class VocabParallelEntropy(torch.autograd.Function):
    """Entropy in nats of softmax(logits) per row; logits [rows, vocab / tp]. Collective over the tensor-parallel group, but not back.

    With Z = sum(exp(l)): H = log(Z) - sum(l * exp(l)) / Z, where l is shifted by its maximum; and dH/dl = -p * (log(p) + H).
    """

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        group = mpu.get_tensor_model_parallel_group()
        maximum = logits.amax(-1, keepdim=True)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
        shifted = logits - maximum
        weights = shifted.exp()
        sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1)])
        dist.all_reduce(sums, group=group)
        entropy = sums[0].log() - sums[1] / sums[0]
        ctx.save_for_backward(shifted, sums[0].log(), entropy)
        return entropy

    @staticmethod
    def backward(ctx, slope: Tensor) -> Tensor:
        shifted, log_z, entropy = (saved if saved.ndim == 2 else saved[:, None] for saved in ctx.saved_tensors)
        logprobs = shifted - log_z
        return -slope[:, None] * logprobs.exp() * (logprobs + entropy)
