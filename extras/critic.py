"""The value model: it learns, along with the policy, which return to expect from each token on.

It has the policy's architecture, with one number per token instead of logits. Where the policy predicts a
token, it predicts the value of the state before that token.
"""

from collections.abc import Iterator
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from algorithms import algorithm_of
from config import Config
from inputs.hf_directory import HEAD
from sample import Sample, flat
from scheduling.layout import Placement
from scheduling.pipeline import schedule_of
from training import hf_weights, lm_head
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

STATS = ("clipped", "returns", "returns_squared", "errors", "errors_squared")  # sums over targets


class ValueHead(torch.nn.Linear):
    """[T, 1, hidden] -> [T, 1, 1]. It replaces Megatron's output layer, and is whole on every rank."""

    def __init__(self, config: models.TransformerConfig, tp: ProcessGroup):
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        self.config = config
        self.tp_group = tp
        self.weight.tensor_model_parallel = False

    def forward(self, hidden: Tensor, **unused) -> tuple[Tensor, None]:
        """Return values, and None in place of the bias that Megatron expects from an output layer."""
        if self.config.sequence_parallel:
            # every rank computes all values, so their gradients are equal and must not be summed
            gather = lm_head.mappings.gather_from_sequence_parallel_region
            hidden = gather(hidden, tensor_parallel_output_grad=False, group=self.tp_group)
        return super().forward(hidden), None


class Critic(Trainer):
    """One rank's part of a value model. `name`: reward or cost. `version` counts its updates."""

    def __init__(
        self, config: Config, model_dir: str, name: str = "reward", groups: Groups | None = None
    ):
        """Load a directory, as a Trainer does. If it is a policy's, the head starts at zero."""
        self.name = name
        self.title = f"{name} critic"
        self.algorithm = algorithm_of(config)
        super().__init__(config, model_dir, groups, reverse=schedule_of(config).fuses)

    def _load_stage(self, hf: dict, model_config: models.TransformerConfig) -> models.GPTModel:
        untied = hf | {"tie_word_embeddings": False}
        gpt = models.build_stage(untied, model_config, self.groups)
        if gpt.post_process:
            gpt.output_layer = ValueHead(model_config, self.groups.tp)
        gpt = gpt.to(self.device)
        weights = hf_weights.HFWeights(self.model_dir)
        head = weights[HEAD] if HEAD in weights.file_of else torch.zeros(1, hf["hidden_size"])
        weights.own["lm_head.weight"] = head  # in the output layer's place
        hf_weights.load_weights(gpt, weights)
        return gpt

    def compute_values(self, mini_batches: list[list[list[Sample]]]) -> None:
        """Fill the samples' `values[name]` (collective: a copy's ranks)."""
        rows = self.read_tokens(list(chain(*mini_batches)))
        for sample, row in zip(flat(mini_batches), rows, strict=True):
            sample.values[self.name] = row

    def plan_steps(self, mini_batches: list[list[list[Sample]]]) -> list[PlannedStep]:
        """Prepare one optimizer step per mini-batch, which learns `returns[name]`. Not collective."""
        steps = []
        for micro_batches in mini_batches:
            samples = list(chain(*micro_batches))
            returns = list(chain(*(sample.returns[self.name] for sample in samples)))
            values = list(chain(*(sample.values[self.name] for sample in samples)))
            columns = torch.tensor([returns, values], dtype=torch.float32, device=self.device)
            work = self.work(as_sequences(micro_batches), partial(self._loss, *columns))
            steps.append(PlannedStep(work, STATS, self._learning_rate()))
        return steps

    def update(self, mini_batches: list, *beside: Trainer) -> dict[str, float]:
        """Learn this rank's samples; return the models' metrics (collective: the models' ranks).

        beside: models that learn the same samples; the passes of all models' n-th steps share a schedule.
        """
        trainers = [self, *beside]
        plans = [trainer.plan_steps(mini_batches) for trainer in trainers]
        results = [[] for _ in trainers]  # a list of take_step's results for each trainer
        self.passes = []
        for steps in zip(*plans, strict=True):
            self.schedule.run([step.work for step in steps])
            for trainer, step, of_trainer in zip(trainers, steps, results, strict=True):
                of_trainer.append(trainer.take_step(*step))
                self.passes += step.work.passes
        metrics = {}
        for trainer, of_trainer in zip(trainers, results, strict=True):
            metrics |= trainer.metrics_of(of_trainer)
            trainer.version += 1
        return metrics

    def metrics_of(self, results: list[dict[str, float]]) -> dict[str, float]:
        metrics = value_metrics(results, self._learning_rate())
        prefix = "critic" if self.name == "reward" else f"{self.name}_critic"
        return {f"{prefix}/{name}": value for name, value in metrics.items()}

    def _learning_rate(self) -> float:
        """Return the rate: it grows to `critic_lr` over `lr_warmup_steps`, then stays there."""
        warmed_up = min(1.0, (self.version + 1) / max(1, self.config.lr_warmup_steps))
        return self.algorithm.critic_lr * warmed_up

    def _loss(self, returns: Tensor, old: Tensor, batch: MicroBatch, output: Tensor) -> LossSums:
        """Compute a micro-batch's loss. returns, old: its mini-batch's, [slots], see packing.MicroBatch."""
        returns = returns[batch.slots]
        old = old[batch.slots]
        values = self.read_targets(batch, output)
        loss, clipped = value_loss(values, old, returns, self.algorithm.value_clip)
        returns = returns.double()  # because a variance is a small difference of large sums
        errors = returns - old.double()
        stats = {
            "clipped": clipped.sum(),
            "returns": returns.sum(),
            "returns_squared": (returns**2).sum(),
            "errors": errors.sum(),
            "errors_squared": (errors**2).sum(),
        }
        return loss_sums(loss.sum(), len(returns), stats)

    def read_targets(self, batch: MicroBatch, values: Tensor) -> Tensor:
        """Return the value of the state before each target: [targets], float32. values: [1, T, 1]."""
        return values[0, batch.reads, 0].float()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        named = super().named_weights()  # now, not on iteration: it asserts that this is awake
        return ((HEAD if name == "lm_head.weight" else name, tensor) for name, tensor in named)

    def _hf_config(self, hf: dict) -> dict:
        # transformers derives the number of outputs from these
        label = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
        architecture = f"{hf['model_type'].capitalize()}ForSequenceClassification"
        return super()._hf_config(hf) | label | {"architectures": [architecture]}


def check(config: Config, placement: Placement) -> None:
    """Raise UserError unless --critic is a value model for the actor's tokens, and the sizes fit."""
    if config.critic:
        actor = models.read_hf_config(config.model)
        hf = models.read_hf_config(config.critic, "--critic")
        models.check_directory(config.critic, "--critic", hf, scores=True, plans=config.dry_run)
        sized = placement.critic.sized(config)
        models.check_reads_policy(sized, config.critic, "--critic", hf, actor)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return each token's clipped squared error, and whether the clip cut its gradient: [tokens].

    loss = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2: a value that has moved by more
    than `clip` toward its return has no gradient. Source: PPO's code (baselines/ppo2).
    """
    clipped_values = values.clamp(old - clip, old + clip)  # inside the limits exactly `values`
    plain = (values - returns) ** 2
    clipped = (clipped_values - returns) ** 2
    return plain.maximum(clipped) / 2, clipped > plain


def value_metrics(results: list[dict[str, float]], lr: float) -> dict[str, float]:
    """Return an update's metrics, from the statistics of its optimizer steps."""
    total = totals(results)
    mean = means(total, ("loss", *STATS), "divisor")
    returns_variance = mean["returns_squared"] - mean["returns"] ** 2
    errors_variance = mean["errors_squared"] - mean["errors"] ** 2
    is_flat = returns_variance <= 1e-12  # False for NaN
    counted = {name: total[name] for name in ("grad_norm", "skipped", "not_finite")}
    return counted | {
        "value_loss": mean["loss"],
        # 1: the values before the step equal the returns; 0: they are no better than the mean return
        "explained_variance": 0.0 if is_flat else 1 - errors_variance / returns_variance,
        "return_mean": mean["returns"],
        "clip_frac": mean["clipped"],
        "lr": lr,
    }
