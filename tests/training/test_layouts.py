"""Actor and critic under every kind of parallelism against plain transformers + torch AdamW."""

import copy
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from algorithms import ALGORITHMS, algorithm_of
from extras.ptx import Texts
from sample import Sample, flat
from tests.extras.test_critic import trained_on, with_returns
from tests.support.plain import (
    LEARNING_RATES,
    check_export,
    copies,
    make_model,
    make_samples,
    make_value_model,
    plain_logprobs,
    plain_steps,
    plain_values,
)
from tests.workers import parallel
from tests.workers.parallel import (
    actor_config,
    balanced,
    critic_config,
    far,
    gathered,
    train_on,
    weights_of,
)
from tests.workers.start import trained_by_tier

CRITIC_RATES = [1e-3, 2e-3, 2e-3]  # by hand from critic_config: 2e-3 after 2 steps of warm-up
ONE = {"one": ("qwen3", 1, {}), "one_tied": ("qwen2", 1, {})}
FIRST = ONE | {  # name -> family, ranks, sizes; bucket: see parallel.set_overlap
    "tp2_sp_dp2": ("qwen3", 4, {"tp": 2, "sp": True, "bucket": 2000}),
    "pp2_dp2_tied": ("qwen2", 4, {"pp": 2, "bucket": 2000}),
}
OTHERS = {
    "dp4": ("qwen3", 4, {"max_tokens_per_micro_batch": 30}),
    "dp2_bf16": ("qwen3", 2, {"dtype": "bfloat16", "tis_cap": 0.0}),
    "tp2": ("qwen3", 2, {"tp": 2}),
    "tp2_sp_tied": ("qwen2", 2, {"tp": 2, "sp": True}),
    "pp2": ("qwen3", 2, {"pp": 2}),
    "tp2_pp2_sp": ("qwen3", 4, {"tp": 2, "pp": 2, "sp": True}),
}
LAYOUTS = OTHERS | FIRST
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]
LEARNS = dict(entropy_coef=0.2, kl_coef=0.3)  # besides the clipped loss


def plain_loss(
    model, config, metrics: list, samples: list[Sample], logprobs_of=plain_logprobs
) -> torch.Tensor:
    """Return the mean of the policy's loss over tokens; add up its metrics."""
    algorithm = algorithm_of(config)
    kept = [sample for sample in samples if sample.advantages is not None]
    sums, losses = dict.fromkeys(("entropy", "kl", "clip_frac"), 0.0), []
    for sample in kept:
        logprobs, entropy = logprobs_of(model, sample, config.temperature)
        ratio = (logprobs - torch.tensor(sample.logprobs)).exp()
        advantages = torch.tensor(sample.advantages)
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        loss = -torch.min(ratio * advantages, clipped * advantages)
        if algorithm.kl_coef:
            off = torch.tensor(sample.reference_logprobs) - logprobs
            loss = loss + algorithm.kl_coef * (off.exp() - 1 - off)
        losses.append(loss - algorithm.entropy_coef * entropy)
        sums["entropy"] += entropy.sum().item()
        sums["kl"] -= ratio.log().sum().item()
        sums["clip_frac"] += (clipped * advantages < ratio * advantages).sum().item()
    tokens = sum(len(sample.response) for sample in kept)
    metrics.append({f"train/{name}": x / tokens for name, x in sums.items()})
    metrics[-1] |= {"train/tokens": tokens, "train/skipped": 0.0, "train/not_finite": 0.0}
    return torch.cat(losses).mean()


def plain_actor(model_dir: str) -> dict:
    """Make three updates of plain transformers and AdamW. Batch 1 is off-policy, so that the clip acts.

    No ratio is near a clip's edge: in bfloat16 log-probabilities differ by 0.1, and a token that only one
    side clips changes the gradient's norm by several percent."""
    config = actor_config(**LEARNS)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    batches, metrics = [], []

    def loss_of(step: int) -> torch.Tensor:
        samples, noise = make_samples(step), random.Random(step)
        for sample in samples:
            with torch.no_grad():
                sample.true_logprobs = plain_logprobs(model, sample, config.temperature)[0].tolist()
            sample.logprobs = [
                x + (step == 1) * noise.choice((-0.6, -0.1, 0.1, 0.6)) for x in sample.true_logprobs
            ]
            sample.reference_logprobs = [x + noise.gauss(0, 0.3) for x in sample.true_logprobs]
        batches.append(samples)
        return plain_loss(model, config, metrics, samples)

    rates = LEARNING_RATES[:3]
    steps = zip(metrics, plain_steps(model, range(3), loss_of), rates, strict=True)
    for row, (loss, norm), lr in steps:
        row |= {"train/loss": loss, "train/grad_norm": norm, "train/lr": lr}
    assert metrics[1]["train/clip_frac"] > 0.05
    known = {"model_dir": model_dir, "batches": batches, "metrics": metrics}
    return known | {"weights": copies(model)}


def plain_value_loss(model, metrics: list, samples: list[Sample]) -> torch.Tensor:
    """Compute the value loss token by token, and the metrics by definition."""
    losses, cut, clip, known = [], 0, 0.2, []
    for sample in samples:
        columns = (plain_values(model, sample), sample.returns["reward"], sample.old_values)
        for value, target, old in zip(*columns, strict=True):
            edge = torch.tensor(old + math.copysign(clip, value.item() - old))
            near = value if old - clip <= value <= old + clip else edge
            losses.append(max((value - target) ** 2, (near - target) ** 2) / 2)
            cut += ((near - target) ** 2 > (value - target) ** 2).item()
            known.append((target, old))
    of_errors = statistics.pvariance([target - old for target, old in known])
    of_returns = statistics.pvariance([target for target, _ in known])
    row = dict(clip_frac=cut / len(known), explained_variance=1 - of_errors / of_returns)
    row |= dict(return_mean=statistics.fmean(target for target, _ in known))
    row |= dict(skipped=0.0, not_finite=0.0)
    metrics.append({f"critic/{name}": value for name, value in row.items()})
    return torch.stack(losses).mean()


def plain_critic(model_dir: str) -> dict:
    model = AutoModelForSequenceClassification.from_pretrained(model_dir)
    batches, metrics = [], []

    def loss_of(step: int) -> torch.Tensor:
        samples = trained_on(step)
        values = [plain_values(model, sample).tolist() for sample in samples]
        batches.append(with_returns(samples, values, step))
        return plain_value_loss(model, metrics, copy.deepcopy(samples))

    found = plain_steps(model, range(3), loss_of, CRITIC_RATES)
    steps = zip(metrics, found, CRITIC_RATES, strict=True)
    for row, (loss, norm), lr in steps:
        row |= {"critic/value_loss": loss, "critic/grad_norm": norm, "critic/lr": lr}
    assert 0.1 < metrics[0]["critic/clip_frac"] < 0.9
    known = {"model_dir": model_dir, "batches": batches, "metrics": metrics}
    return known | {"weights": copies(model)}


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("models")
    found = {}
    for family, tied in (("qwen3", False), ("qwen2", True)):
        actor = plain_actor(make_model(path / family, family, tied))
        critic = plain_critic(make_value_model(path / f"{family}_values", family, tied))
        found[family] = {"actor": actor, "critic": critic}
    return found


@pytest.fixture(scope="session")
def result_of(references, tmp_path_factory):
    return trained_by_tier(
        "tests.training.test_layouts", tmp_path_factory, FIRST, OTHERS, references
    )


def mixed_update(actor, batch: list) -> dict[str, float]:
    """Return metrics of two optimizer steps with all that crosses ranks.

    They are off-policy by the ratio of sequences, train KL and entropy, have an answer half by older
    weights, and a number of texts that no number of ranks divides, in several micro-batches."""
    actor.config = replace(actor.config, over_dispatch=2.0, updates_per_step=2)
    settings = dict(kl_coef=0.3, entropy_coef=0.2, ptx_coef=0.7, ptx_batch=5)
    actor.algorithm = replace(ALGORITHMS["gspo"], **settings, clip_low=0.2, clip_high=0.28)
    texts = [([n], [(7 * n + k) % 60 for k in range(3 + 5 * n)]) for n in range(1, 6)]
    actor.terms = [Texts(texts)]
    batch = [replace(sample, versions=[actor.version] * len(sample.response)) for sample in batch]
    for sample in batch:
        pairs = zip(sample.response, sample.logprobs, strict=True)
        sample.reference_logprobs = [x - 0.2 * (token % 3) for token, x in pairs]
    half = -(-len(batch[0].response) // 2)
    batch[0].versions[:half] = [actor.version - 1] * half
    return actor.update(balanced(batch, actor))


def train_actor(reference: dict, sizes: dict, export_to: str) -> dict:
    from actor import Actor
    from examples.make_demo.closing import close

    actor = Actor(actor_config(**LEARNS, **sizes), reference["model_dir"])
    metrics, distance = train_on(actor, reference["batches"])
    for row in metrics:
        row.pop("train/seconds_spread")
    actor.export(export_to)
    everyone = gathered((metrics, distance, far(weights_of(actor), reference["weights"])))
    leads = gathered((actor.is_lead, actor.dp_rank))
    mixed = mixed_update(actor, reference["batches"][1])
    close(actor)
    leads = sorted(dp_rank for is_lead, dp_rank in leads if is_lead)
    return summary(everyone) | {"mixed": mixed, "leads": leads}


def train_critic(reference: dict, sizes: dict, export_to: str) -> dict:
    from examples.make_demo.closing import close
    from extras.critic import Critic

    critic, metrics, distance = Critic(critic_config(**sizes), reference["model_dir"]), [], 0.0
    for batch in reference["batches"]:
        mine = balanced(batch, critic)
        critic.compute_values(mine)
        for sample in flat(mine):
            pairs = zip(sample.values["reward"], sample.true_values, strict=True)
            distance = max([distance, *(abs(value - true) for value, true in pairs)])
            sample.values["reward"] = sample.old_values
        metrics.append(critic.update(mine))
    critic.export(export_to)
    everyone = gathered((metrics, distance, far(weights_of(critic), reference["weights"])))
    close(critic)
    return summary(everyone)


def summary(everyone: list[tuple]) -> dict:
    """Summarize every rank's metrics and distances from the reference, before and after the updates."""
    metrics = everyone[0][0]
    assert all(other[0] == metrics for other in everyone), "metrics differ between ranks"
    distance, weight_distance = (max(rank[column] for rank in everyone) for column in (1, 2))
    return {"metrics": metrics, "distance": distance, "weight_distance": weight_distance}


def train(references: dict, layout: dict, path: str) -> dict:
    """Train both models under one layout: Megatron's sizes, and `bucket`, see `set_overlap`."""
    sizes = dict(layout)
    parallel.set_overlap(sizes.pop("bucket", None))
    actor = train_actor(references["actor"], sizes, f"{path}/actor")
    critic = train_critic(references["critic"], sizes, f"{path}/critic")
    return {"actor": actor, "critic": critic, "path": Path(path)}


@pytest.mark.parametrize("name", [*FIRST, *SLOW])
def test_an_actor_trains_as_the_plain_reference(name, references, result_of):
    """It must also in step 2, where all but one rank have nothing to train on."""
    family, ranks, layout = LAYOUTS[name]
    reference, results = references[family]["actor"], result_of(name)
    result, tolerance = results["actor"], 5e-2 if "dtype" in layout else 1e-5
    for step, expected in enumerate(reference["metrics"]):
        got = {metric: result["metrics"][step][metric] for metric in expected}
        assert got == pytest.approx(expected, rel=tolerance, abs=tolerance), f"update {step}"
    assert result["metrics"][0]["train/micro_batches"] >= 2
    assert result["distance"] < 2 * tolerance
    # Adam magnifies a rounding error where a gradient is almost zero
    assert result["weight_distance"] < 5 * tolerance
    check_export(results["path"] / "actor", reference["weights"], 5 * tolerance)
    group_size = layout.get("tp", 1) * layout.get("pp", 1)
    assert result["leads"] == list(range(ranks // group_size))


@pytest.mark.parametrize("name", [*FIRST, *SLOW])
def test_a_critic_learns_as_the_plain_reference(name, references, result_of):
    family, _, layout = LAYOUTS[name]
    reference, results = references[family]["critic"], result_of(name)
    result, tolerance = results["critic"], 5e-2 if "dtype" in layout else 1e-5
    for step, expected in enumerate(reference["metrics"]):
        got = dict(result["metrics"][step])
        if abs(got["critic/clip_frac"] - expected["critic/clip_frac"]) > 1e-3:
            got["critic/grad_norm"] = expected["critic/grad_norm"]  # others are cut: it jumps
        assert got == pytest.approx(expected, rel=tolerance, abs=tolerance), f"update {step}"
    assert result["distance"] < 4 * tolerance
    assert result["weight_distance"] < 5 * tolerance
    kind = AutoModelForSequenceClassification
    check_export(results["path"] / "critic", reference["weights"], 5 * tolerance, kind)


MIXED = ("loss", "ptx_loss", "grad_norm", "entropy", "kl", "reference_kl", "clip_frac", "tokens")
MIXED += ("stale_token_frac", "stale_weight_mean")


@pytest.mark.parametrize("name", [*sorted(FIRST.keys() - ONE.keys()), *SLOW])
def test_what_crosses_ranks_is_that_of_one(name, result_of):
    """Entropy over logits that tp cuts, GSPO's means, stale answers and texts must agree."""
    family, _, layout = LAYOUTS[name]
    got = result_of(name)["actor"]["mixed"]
    one = {"qwen3": "one", "qwen2": "one_tied"}[family]
    expected = result_of(one)["actor"]["mixed"]
    assert expected["train/clip_frac"] > 0.05 and expected["train/reference_kl"] > 0.01
    assert 0 < expected["train/stale_token_frac"] < 0.2
    assert abs(expected["train/stale_weight_mean"] - 1) > 0.01
    tolerance = 0.1 if "dtype" in layout else 1e-3  # updates have magnified rounding errors
    for metric in (f"train/{metric}" for metric in MIXED):
        assert got[metric] == pytest.approx(expected[metric], rel=tolerance, abs=tolerance), metric
