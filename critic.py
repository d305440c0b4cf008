"""A value model: what return to expect from every token on, learned beside the policy.

It is the policy's architecture with one number a token in place of the logits, predicted where the policy
predicts the token: the value of the state before it is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms import algorithm_of
from config import Config, UserError
from engines.reward_model import HEAD
from sample import Sample
from scheduling.balance import flat
from scheduling.pipeline import schedule_of
from training import hf_weights
from training import model as models
from training.executor import Update
from training.packing import NO_TARGET, MicroBatch
from training.trainer import (
    GPTModel,
    LossSums,
    OutputLoss,
    Trainer,
    TransformerConfig,
    as_sequences,
)

# statistics that are summed over targets; those of returns and errors are of the values before the step
STATS = ("clipped", "returns", "returns_squared", "errors", "errors_squared")


class ValueHead(torch.nn.Module):
    """[T, 1, hidden] -> [T, 1, 1], in the place of Megatron's output layer, whole on every rank."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        )
        self.weight.tensor_model_parallel = False

    def forward(self, hidden: Tensor, **unused) -> tuple[Tensor, None]:
        """As Megatron calls an output layer, which may also return a bias."""
        if self.config.sequence_parallel:  # a part of the tokens -> all values, of equal gradients
            gather = models.gather_from_sequence_parallel_region
            hidden = gather(hidden, tensor_parallel_output_grad=False)
        return F.linear(hidden, self.weight), None


class Critic(Trainer):
    """One rank's part of a value model. `name`: of the reward or the cost. `version` counts its updates."""

    def __init__(self, config: Config, model_dir: str, name: str = "reward"):
        """As a Trainer. From a policy's directory the head begins at zero."""
        self.name, self.title = name, f"{name} critic"
        self.prefix = "critic" if name == "reward" else f"{name}_critic"  # of the metrics
        self.algorithm = algorithm_of(config)
        super().__init__(config, model_dir, reverse=schedule_of(config).fuses)

    def _load_chunk(self, hf: dict, model_config: TransformerConfig, number: int) -> GPTModel:
        gpt = models.build_chunk(
            hf | {"tie_word_embeddings": False}, model_config, self.groups, number
        )
        if gpt.post_process:
            gpt.output_layer = ValueHead(model_config)
        gpt = gpt.to(self.device)
        weights = hf_weights.HFWeights(self.model_dir, "--critic")
        # in the output layer's place
        weights.own["lm_head.weight"] = head_of(weights, hf["hidden_size"])
        hf_weights.load_weights(gpt, weights)
        return gpt

    def compute_values(self, mini_batches: list[list[list[Sample]]]) -> None:
        """Fill `values[name]` of samples that come packed (collective over the model-parallel group)."""
        rows = self.read_tokens(list(chain(*mini_batches)), target_values)
        for sample, row in zip(flat(mini_batches), rows, strict=True):
            sample.values[self.name] = row

    def updating(self, mini_batches: list[list[list[Sample]]]) -> Update:
        """Learn `returns[name]` of this data-parallel rank's samples. Returns metrics (collective)."""
        lr = self.config.critic_lr * min(
            1.0, (self.version + 1) / max(1, self.config.lr_warmup_steps)
        )
        steps = []
        for micro_batches in mini_batches * self.algorithm.critic_epochs:
            samples = flat([micro_batches])
            rows = [s.returns[self.name] for s in samples], [s.values[self.name] for s in samples]
            columns = (
                torch.tensor([*chain(*c)], dtype=torch.float32, device=self.device) for c in rows
            )
            loss = returns_loss(*columns, self.algorithm.value_clip)
            steps.append((yield from self.step(as_sequences(micro_batches), loss, STATS, lr)))
        self.version += 1
        return {f"{self.prefix}/{name}": value for name, value in value_metrics(steps, lr).items()}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        named = super().named_weights()
        return ((HEAD if name == "lm_head.weight" else name, tensor) for name, tensor in named)

    def _hf_config(self, hf: dict) -> dict:
        # how transformers counts one number
        label = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
        architecture = f"{hf['model_type'].capitalize()}ForSequenceClassification"
        return super()._hf_config(hf) | label | {"architectures": [architecture]}


def head_of(weights: hf_weights.HFWeights, hidden_size: int) -> Tensor:
    """[1, hidden]: a directory's value head, zeros if it has none. UserError for one of more numbers."""
    if HEAD not in weights.file_of:
        return torch.zeros(1, hidden_size)
    head, wanted = weights[HEAD], f"the head of a value model, [1, {hidden_size}] without a bias"
    if list(head.shape) != [1, hidden_size] or "score.bias" in weights.file_of:
        raise UserError(f"{weights.where}: {HEAD} isn't {wanted}")
    return head


def target_values(batch: MicroBatch, output: Tensor) -> Tensor:
    """[1, T, 1] -> [targets] in float32."""
    return output[0, batch.slots != NO_TARGET, 0].float()


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """The clipped squared error of each token, and whether the clip cut its gradient. All tensors: [tokens].

    loss = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2: a value that has moved by more
    than `clip` towards its return isn't pulled on. Source: PPO's code (baselines/ppo2), not its paper.
    """
    # bit for bit `values` inside
    clipped_values = values.clamp(old_values - clip, old_values + clip)
    plain, clipped = (values - returns) ** 2, (clipped_values - returns) ** 2
    return plain.maximum(clipped) / 2, clipped > plain


def returns_loss(returns: Tensor, old_values: Tensor, clip: float) -> OutputLoss:
    """`value_loss` of a model's output; returns and old_values: [slots], see packing.MicroBatch."""

    def output_loss(batch: MicroBatch, output: Tensor) -> LossSums:
        slots = batch.slots[batch.slots != NO_TARGET]
        loss, clipped = value_loss(
            target_values(batch, output), old_values[slots], returns[slots], clip
        )
        known = returns[slots].double()
        errors = known - old_values[slots].double()
        stats = zip(STATS, (clipped, known, known**2, errors, errors**2), strict=True)
        return loss.sum(), len(slots), {name: stat.sum() for name, stat in stats}

    return output_loss


def value_metrics(steps: list[dict[str, float]], lr: float) -> dict[str, float]:
    """Of one update's optimizer steps: means over tokens, and means and sums over steps."""
    total = {name: sum(step[name] for step in steps) for name in steps[0]}
    mean = {name: total[name] / max(total["divisor"], 1.0) for name in ("loss", *STATS)}
    of_returns = mean["returns_squared"] - mean["returns"] ** 2
    of_errors = mean["errors_squared"] - mean["errors"] ** 2
    return {
        "value_loss": mean["loss"],
        # 1: the values before the step told the returns apart perfectly; 0: no better than their mean
        "explained_variance": 1 - of_errors / of_returns if of_returns > 1e-12 else 0.0,
        "return_mean": mean["returns"],
        "clip_frac": mean["clipped"],
        "grad_norm": total["grad_norm"] / len(steps),
        "lr": lr,
    } | {name: total[name] for name in ("skipped", "not_finite")}
