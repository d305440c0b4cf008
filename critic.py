# ruff: noqa: E402
"""A value model: what return to expect from every token on, learned beside the policy. On top of trainer.py.

It is the policy's architecture with one number a token in place of the logits. The value of a response token is that of the state
before the token is written: it is predicted where the policy predicts the token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cpu.megatron import install

install()

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from sample import Sample
from scheduling.balance import flat
from training import hf_weights
from training import model as models
from training.packing import NO_TARGET, MicroBatch
from training.trainer import Trainer, as_sequences

HEAD = "score.weight"  # as transformers' ...ForSequenceClassification calls it, which is what `export` writes
HEADS = (HEAD, "value_head.weight")  # and what is read
# statistics that are summed over targets and ranks; those of returns and errors are of the values before the step
SUMS = ("loss", "clipped", "tokens", "returns", "returns_squared", "errors", "errors_squared")


class ValueHead(torch.nn.Module):
    """[T, 1, hidden] -> [T, 1, 1], in the place of Megatron's output layer. Every tensor-parallel rank holds all of it.

    Under sequence parallelism a rank comes with its part of the tokens and gets all values. Their gradients are the same on all
    ranks, so each takes its part back and nothing is summed.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.tensor_model_parallel = False

    def forward(self, hidden: Tensor, weight: None = None, runtime_gather_output: None = None) -> tuple[Tensor, None]:
        """As Megatron calls an output layer, which may also return a bias."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return F.linear(hidden, self.weight), None


class Critic(Trainer):
    """One rank's part of a value model. `name` says of what: the reward, or a cost. `version` counts the calls of `update`."""

    def __init__(self, config, model_dir: str, name: str = "reward"):
        """As a Trainer, from a value model's directory, or from a policy's: then the head begins at zero."""
        self.name, self.title = name, f"{name} critic"
        self.prefix = "critic" if name == "reward" else f"{name}_critic"  # of the metrics
        super().__init__(config, model_dir)

    def _load_model(self, hf: dict, model_config):
        gpt = models.build_model(hf | {"tie_word_embeddings": False}, model_config)
        if gpt.post_process:
            gpt.output_layer = ValueHead(model_config)
        gpt = gpt.to(self.device)
        weights = hf_weights.HFWeights(self.model_dir, "--critic")
        weights.own["lm_head.weight"] = head_of(weights, hf["hidden_size"])  # which stands in the output layer's place
        hf_weights.load_weights(gpt, weights)
        return gpt

    def appraise(self, mini_batches: list[list[list[Sample]]]) -> None:
        """Fill `values[name]` of samples that come packed. Collective over the model-parallel group."""
        rows = self._read_tokens(list(itertools.chain(*mini_batches)), target_values)
        for sample, row in zip(flat(mini_batches), rows, strict=True):
            sample.values[self.name] = row

    def update(self, mini_batches: list[list[list[Sample]]]) -> dict[str, float]:
        """Learn the `returns[name]` of this data-parallel rank's samples. Collective over all ranks.

        An optimizer step a mini-batch, in each of `critic_epochs` passes. Each sample needs its `values[name]` from before, from
        which values are clipped in all of them. Returns metrics that are the same on every rank. A step whose loss or gradient isn't
        finite is skipped and counted.
        """
        lr = self.config.critic_lr * min(1.0, (self.version + 1) / max(1, self.config.critic_lr_warmup_steps))
        steps = [self._value_step(micro_batches, lr) for _ in range(self.config.critic_epochs) for micro_batches in mini_batches]
        self.version += 1
        return {f"{self.prefix}/{name}": value for name, value in value_metrics(steps, lr).items()}

    def _value_step(self, micro_batches: list[list[Sample]], lr: float) -> dict[str, float]:
        """One optimizer step on one mini-batch. Returns sums over all ranks and the gradient norm."""
        samples = flat([micro_batches])
        returns, old_values = (
            torch.tensor([x for sample in samples for x in row(sample)[self.name]], dtype=torch.float32, device=self.device)
            for row in (lambda sample: sample.returns, lambda sample: sample.values)
        )
        loss = partial(_sum_loss, returns, old_values, self.config.value_clip)
        return self.learn(as_sequences(micro_batches), loss, SUMS, "tokens", lr)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As a Trainer's. The head has its own name."""
        return ((HEAD if name == "lm_head.weight" else name, tensor) for name, tensor in super().named_weights())

    def _hf_config(self, hf: dict) -> dict:
        label = {"id2label": {"0": "value"}, "label2id": {"value": 0}}  # how transformers counts one number
        return super()._hf_config(hf) | label | {"architectures": [f"{hf['model_type'].capitalize()}ForSequenceClassification"]}


def head_of(weights: hf_weights.HFWeights, hidden_size: int) -> Tensor:
    """The value head [1, hidden] that a directory has, zeros if it has none. ValueError for one that isn't a single number's."""
    found = [name for name in HEADS if name in weights.file_of]
    if not found:
        return torch.zeros(1, hidden_size)
    head = weights[found[0]]
    if list(head.shape) != [1, hidden_size] or found[0].replace("weight", "bias") in weights.file_of:
        where = weights.where
        raise ValueError(f"{where}: {found[0]} isn't the head of a value model, [1, {hidden_size}] without a bias")
    return head


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """The clipped squared error of each token, and whether the clip cut its gradient. All tensors: [tokens].

    loss = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2: a value that has moved by more than `clip` towards its
    return since before the step isn't pulled on. Source: PPO's own code (baselines/ppo2), not its paper; without: clip = infinity.
    """
    clipped_values = values.clamp(old_values - clip, old_values + clip)  # bit for bit `values` where they are inside
    plain, clipped = (values - returns) ** 2, (clipped_values - returns) ** 2
    return plain.maximum(clipped) / 2, clipped > plain


def target_values(batch: MicroBatch, output: Tensor) -> Tensor:
    """[1, T, 1] -> those of the micro-batch's targets, [targets] in float32."""
    return output[0, batch.slots != NO_TARGET, 0].float()


def _sum_loss(
    returns: Tensor, old_values: Tensor, clip: float, batch: MicroBatch, output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What Megatron's schedule asks of a loss; `returns` and `old_values` are by slot (see batch.py)."""
    chosen = batch.slots != NO_TARGET
    slots = batch.slots[chosen]
    loss, clipped = value_loss(target_values(batch, output), old_values[slots], returns[slots], clip)
    known, tokens = returns[slots].double(), chosen.sum()
    errors = known - old_values[slots].double()
    stats = {"loss": loss.detach().sum(), "clipped": clipped.sum(), "tokens": tokens, "returns": known.sum()}
    stats |= {"returns_squared": (known**2).sum(), "errors": errors.sum(), "errors_squared": (errors**2).sum()}
    return loss.sum(), tokens.int(), stats


def value_metrics(steps: list[dict[str, float]], lr: float) -> dict[str, float]:
    """The metrics of one update from what its optimizer steps returned: token means, and means over the steps."""
    total = {name: sum(step[name] for step in steps) for name in steps[0]}
    tokens = max(total["tokens"], 1.0)
    of_returns, of_errors = (total[f"{name}_squared"] / tokens - (total[name] / tokens) ** 2 for name in ("returns", "errors"))
    return {
        "value_loss": total["loss"] / tokens,
        # 1: the values before the step told the returns apart perfectly; 0: no better than their mean
        "explained_variance": 1 - of_errors / of_returns if of_returns > 1e-12 else 0.0,
        "return_mean": total["returns"] / tokens,
        "clip_frac": total["clipped"] / tokens,
        "grad_norm": total["grad_norm"] / len(steps),
        "lr": lr,
        "skipped": total["skipped"],
        "not_finite": total["not_finite"],
    }
