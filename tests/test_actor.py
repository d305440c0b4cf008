"""The actor against plain transformers + torch AdamW: under every kind of parallelism, packing, masking
and conversion."""

import copy
import gc
import json
import math
import random
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from algorithms import Algorithm, algorithm_of
from parallel_worker import actor_config, balanced, set_constants, set_overlap, supervised
from sample import Sample
from scheduling.balance import pack, packed_length
from test_attention import varlen
from training import ptx
from training.packing import NO_TARGET, make_micro_batches, zigzag
from workers import run_worker

VOCAB = 64
NEAR = {"float32": 1e-4}  # how far trainer and engine may be apart, where a test is about it
CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
CLIP_GRAD = 0.5  # as in set_constants
# worked by hand from actor_config: lr 1e-3, 2 warm-up steps, 4 steps, to one half
LEARNING_RATES = [5e-4, 1e-3, 7.5e-4, 5e-4]


def make_model(path, family: str, tied: bool, seed: int = 0, **changes) -> str:
    """A tiny random model directory; biases and norms are random too, so that a mixed-up name shows."""
    torch.manual_seed(seed)
    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    head_dim = {} if family == "qwen2" else {"head_dim": 16}
    settings = {
        "max_position_embeddings": 128,
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-5,
    }
    sizes |= head_dim | settings | {"vocab_size": VOCAB} | changes
    config = CONFIGS[family](**sizes)
    model = AutoModelForCausalLM.from_config(config)
    for name, param in model.named_parameters():
        torch.nn.init.normal_(param, mean=float("norm" in name), std=0.15)
    model.save_pretrained(path)
    Path(path, "tokenizer_config.json").write_text("{}")
    return str(path)


def plain_logprobs(model, sample: Sample, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of every response token, one sequence at a time."""
    ids = torch.tensor([sample.prompt + sample.response])
    log_softmax = F.log_softmax(model(ids).logits[0, len(sample.prompt) - 1 : -1] / temperature, -1)
    return log_softmax[range(len(sample.response)), sample.response], -(
        log_softmax.exp() * log_softmax
    ).sum(-1)


def make_samples(step: int) -> list[Sample]:
    """16 ragged answers, two of them padding.

    In step 2 all but one are, so that data-parallel ranks have nothing to train on.
    """
    rng = random.Random(step)
    samples = []
    for index in range(16):
        prompt, response = (
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, high))] for high in (8, 20)
        )
        sample = Sample(
            index // 4, index % 4, prompt, response=response, versions=[step] * len(response)
        )
        sample.advantages = [rng.gauss(0, 1)] * len(response)
        if index in (5, 11) or (step == 2 and index != 6):
            sample.advantages = None
        samples.append(sample)
    return samples


def plain_step(model, optimizer, samples: list[Sample], config) -> dict[str, float]:
    algorithm = algorithm_of(config)
    kept = [sample for sample in samples if sample.advantages is not None]
    tokens = sum(len(sample.response) for sample in kept)
    sums = dict.fromkeys(("loss", "entropy", "kl", "clip_frac"), 0.0)
    optimizer.zero_grad()
    for sample in kept:
        logprobs, entropy = plain_logprobs(model, sample, config.temperature)
        ratio = (logprobs - torch.tensor(sample.logprobs)).exp()
        advantages = torch.tensor(sample.advantages)
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        loss = -torch.min(ratio * advantages, clipped * advantages)
        (loss.sum() / tokens).backward()
        sums["loss"] += loss.sum().item()
        sums["entropy"] += entropy.sum().item()
        sums["kl"] -= ratio.log().sum().item()
        sums["clip_frac"] += (clipped * advantages < ratio * advantages).sum().item()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD).item()
    optimizer.step()
    return {
        "train/grad_norm": grad_norm,
        "train/tokens": tokens,
        **{f"train/{name}": x / tokens for name, x in sums.items()},
    }


def plain_optimizer(model) -> torch.optim.AdamW:
    """With the weight decay of actor_config, of matrices alone."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATES[0], betas=(0.9, 0.95))


def plain_reference(model_dir: str) -> dict:
    """Three updates of plain transformers and AdamW.

    Batch 1 is off-policy, so that the clip has work to do.
    """
    config = actor_config()
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    optimizer = plain_optimizer(model)
    batches, metrics = [], []
    for step in range(3):
        samples, noise = make_samples(step), random.Random(step)
        for sample in samples:
            with torch.no_grad():
                sample.true_logprobs = plain_logprobs(model, sample, config.temperature)[0].tolist()
            sample.logprobs = [x + (step == 1) * noise.gauss(0, 0.3) for x in sample.true_logprobs]
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATES[step]
        batches.append(copy.deepcopy(samples))
        metrics.append(
            {**plain_step(model, optimizer, samples, config), "train/lr": LEARNING_RATES[step]}
        )
        metrics[-1] |= {"train/skipped": 0.0, "train/not_finite": 0.0}
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {"batches": batches, "metrics": metrics, "weights": weights}


# ------------------------------------------------------------------------------------------------ parallelism

LAYOUTS = {  # name -> family, ranks, sizes
    "dp2": ("qwen3", 2, {}),
    "dp2_contiguous": ("qwen3", 2, {"arrange": "contiguous"}),
    "dp4": ("qwen3", 4, {}),
    "dp4_contiguous": ("qwen3", 4, {"arrange": "contiguous"}),
    "dp2_bf16": ("qwen3", 2, {"dtype": "bfloat16", "tis_cap": 0.0}),
    "tp2": ("qwen3", 2, {"tp": 2}),
    "tp2_tied": ("qwen2", 2, {"tp": 2}),
    "tp2_sp": ("qwen3", 2, {"tp": 2, "sp": True}),
    "pp2": ("qwen3", 2, {"pp": 2}),
    "pp2_tied": ("qwen2", 2, {"pp": 2}),
    "cp2": ("qwen3", 2, {"cp": 2}),
    "tp2_pp2": ("qwen3", 4, {"tp": 2, "pp": 2}),
    "tp2_cp2_sp": ("qwen3", 4, {"tp": 2, "cp": 2, "sp": True}),
    "pp2_cp2_tied": ("qwen2", 4, {"pp": 2, "cp": 2}),
    "tp2_dp2": ("qwen3", 4, {"tp": 2}),
    "dp2_overlapped": ("qwen3", 2, {"bucket": 2000}),
    "pp2_dp2_tied_overlapped": ("qwen2", 4, {"pp": 2, "bucket": 2000}),
}


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> dict:
    """By family: the model directory, and what plain training makes of it."""
    path = tmp_path_factory.mktemp("models")
    model_dirs = {
        family: make_model(path / family, family, tied=family == "qwen2")
        for family in ("qwen3", "qwen2")
    }
    return {
        "model_dirs": model_dirs,
        "references": {family: plain_reference(path) for family, path in model_dirs.items()},
    }


@pytest.fixture(scope="session")
def layouts_path(references, tmp_path_factory) -> Path:
    """Trains under every layout, in processes that are gone afterwards.

    Returns what all result paths begin with.
    """
    path = tmp_path_factory.mktemp("layouts")
    torch.save({**references, "layouts": LAYOUTS}, path / "case.pt")
    run_worker("parallel_worker.py", path / "case.pt", path / "result")
    return path / "result"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_the_plain_reference(name, references, layouts_path):
    family, ranks, layout = LAYOUTS[name]
    reference = references["references"][family]
    result = torch.load(f"{layouts_path}.{ranks}", weights_only=False)[name]
    tolerance = 5e-2 if layout.get("dtype") == "bfloat16" else 1e-5
    for step, expected in enumerate(reference["metrics"]):
        got = {metric: result["metrics"][step][metric] for metric in expected}
        assert got == pytest.approx(expected, abs=tolerance), f"update {step}"
    assert (
        result["metrics"][0]["train/micro_batches"] >= 2
        and result["metrics"][1]["train/clip_frac"] > 0.05
    )
    assert result["logprob_distance"] < 2 * tolerance
    assert (
        result["weight_distance"] < 5 * tolerance
    )  # Adam makes much of a rounding error where a gradient is almost zero
    check_export(Path(f"{layouts_path}.{name}"), reference["weights"], 5 * tolerance)
    group_size = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
    assert result["heads"] == list(range(ranks // group_size))


@pytest.mark.parametrize("ranks", [2, 4])
def test_balanced_micro_batches_train_as_contiguous_ones(ranks, layouts_path):
    """Which rank trains on what, and in which micro-batch, changes neither loss nor gradient nor weights,
    though it is not the same."""
    results = torch.load(f"{layouts_path}.{ranks}", weights_only=False)
    ours, plain = results[f"dp{ranks}"], results[f"dp{ranks}_contiguous"]
    for shares, others in zip(ours["shares"], plain["shares"], strict=True):
        assert shares[0] != others[0]
    for step, (got, expected) in enumerate(zip(ours["metrics"], plain["metrics"], strict=True)):
        for name in (
            "train/loss",
            "train/grad_norm",
            "train/entropy",
            "train/kl",
            "train/clip_frac",
            "train/tokens",
        ):
            assert got[name] == pytest.approx(expected[name], abs=1e-5), f"update {step}: {name}"
    for step, (gradient, other) in enumerate(
        zip(ours["gradients"], plain["gradients"], strict=True)
    ):
        assert gradient.abs().max() > 1e-3 and torch.allclose(gradient, other, rtol=0, atol=1e-5), (
            f"update {step}"
        )
    for name, weight in ours["weights"].items():
        assert torch.allclose(weight, plain["weights"][name], rtol=0, atol=5e-5), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_stale_answer_under_every_layout(name, layouts_path):
    """Only the ranks that train on it look back to the start of the step, and none is left waiting.

    The update is the same.
    """
    family, ranks, layout = LAYOUTS[name]
    got = torch.load(f"{layouts_path}.{ranks}", weights_only=False)[name]["stale"]
    expected = torch.load(f"{layouts_path}.2", weights_only=False)[
        {"qwen3": "tp2", "qwen2": "tp2_tied"}[family]
    ]["stale"]
    assert (
        0 < expected["train/stale_token_frac"] < 0.2
        and abs(expected["train/stale_weight_mean"] - 1) > 0.01
    )
    for metric in ("loss", "grad_norm", "kl", "tokens", "stale_token_frac", "stale_weight_mean"):
        tolerance = 0.1 if layout.get("dtype") == "bfloat16" else 1e-4
        assert got[f"train/{metric}"] == pytest.approx(
            expected[f"train/{metric}"], abs=tolerance
        ), metric


@pytest.mark.parametrize("name", LAYOUTS)
def test_sequence_ratios_and_the_entropy_s_gradient_under_every_layout(name, layouts_path):
    """GSPO's ratio is a mean over tokens that cp cuts, the entropy a sum over logits that tp does.

    Beside them texts are learned, which every data-parallel rank has its share of.
    """
    family, ranks, layout = LAYOUTS[name]
    got = torch.load(f"{layouts_path}.{ranks}", weights_only=False)[name]["sequences"]
    expected = torch.load(f"{layouts_path}.2", weights_only=False)[
        {"qwen3": "dp2", "qwen2": "pp2_tied"}[family]
    ]["sequences"]
    assert expected["train/clip_frac"] > 0.05 and expected["train/reference_kl"] > 0.01
    for metric in (
        "loss",
        "ptx_loss",
        "grad_norm",
        "entropy",
        "kl",
        "reference_kl",
        "clip_frac",
        "tokens",
    ):
        tolerance = (
            0.1 if layout.get("dtype") == "bfloat16" else 1e-3
        )  # five updates have made more of rounding errors
        assert got[f"train/{metric}"] == pytest.approx(
            expected[f"train/{metric}"], abs=tolerance
        ), metric


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_without_sequences_takes_part_under_every_layout(name, layouts_path):
    """One rank has all of them, in several micro-batches."""
    family, ranks, layout = LAYOUTS[name]
    got = torch.load(f"{layouts_path}.{ranks}", weights_only=False)[name]["uneven"]
    plain = {"qwen3": "tp2", "qwen2": "tp2_tied"}[family]
    expected = torch.load(f"{layouts_path}.2", weights_only=False)[plain]["uneven"]
    assert expected > 1 and got == pytest.approx(
        expected, abs=0.1 if layout.get("dtype") == "bfloat16" else 1e-3
    )


@pytest.mark.parametrize("name", ["dp2", "dp2_overlapped"])
def test_the_spread_of_seconds_is_of_a_rank_s_own_work(layouts_path, name):
    """A rank that takes a second more than the others shows, although they wait for it in the sum of the
    gradients."""
    result = torch.load(f"{layouts_path}.2", weights_only=False)[name]
    assert all(0 <= metrics["train/seconds_spread"] < 1 for metrics in result["metrics"])
    assert result["spread_with_a_slow_rank"] > 0.5


def check_export(path: Path, weights: dict, tolerance: float) -> None:
    exported = AutoModelForCausalLM.from_pretrained(path)
    assert dict(exported.named_parameters()).keys() == weights.keys()
    for name, param in exported.named_parameters():
        assert torch.allclose(param.float(), weights[name], rtol=0, atol=tolerance), name
    assert (path / "tokenizer_config.json").exists()


# ---------------------------------------------------------------------------------- one rank, in this process


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    set_constants(monkeypatch.setattr)


@pytest.fixture
def make_actor():
    """Builds an actor of a single rank, after taking the one before it down."""
    from actor import Actor
    from training.trainer import mpu

    actors = []

    def take_down() -> None:
        while actors:
            actors.pop().close()
        mpu.destroy_model_parallel()  # that of a constructor that raised, too
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()

    def make(model_dir: str, **overrides):
        take_down()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        actors.append(Actor(actor_config(**overrides), model_dir))
        return actors[0]

    yield make
    take_down()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


def on_policy_samples(actor) -> list[Sample]:
    samples = [sample for sample in make_samples(0) if sample.advantages is not None]
    for sample, logprobs in zip(samples, actor.logprobs(samples), strict=True):
        sample.logprobs, sample.versions = logprobs, [actor.version] * len(logprobs)
    return samples


def update(actor, samples: list[Sample]) -> dict[str, float]:
    return actor.update(balanced(samples, actor))


def weights_of(actor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.named_weights()}


def gradient(actor, samples, monkeypatch) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(actor, "_apply_gradients", lambda lr: 0.0)
        update(actor, samples)
    actor.version -= 1
    return actor.ddps[0].buffers[0].grad_data.clone()


def test_the_split_into_micro_batches_does_not_change_the_gradient(
    make_actor, model_dir, monkeypatch
):
    actor = make_actor(model_dir)
    samples = on_policy_samples(actor)
    gradients, counts = [], []
    for budget in (1000, 120, 60, 27):
        actor.config = replace(actor.config, max_tokens_per_micro_batch=budget)
        gradients.append(gradient(actor, samples, monkeypatch))
        counts.append(len(balanced(samples, actor)[0]))
    assert counts[:3] == [1, 2, 4] and counts[3] > 6
    assert gradients[0].abs().max() > 1e-3
    for other in gradients[1:]:
        assert torch.allclose(gradients[0], other, rtol=0, atol=1e-6)


def test_attention_in_one_call_gives_the_same_gradient(make_actor, model_dir, monkeypatch):
    """As on CUDA, by the fake in test_attention.py."""
    actor = make_actor(model_dir)
    samples = on_policy_samples(actor)
    expected = gradient(actor, samples, monkeypatch)
    calls = []
    monkeypatch.setattr(
        "training.model.varlen_attn", lambda *a, **b: calls.append(a) or varlen(*a, **b)
    )
    monkeypatch.setattr("training.model.has_varlen", lambda query: True)
    assert torch.allclose(gradient(actor, samples, monkeypatch), expected, rtol=0, atol=1e-6)
    assert len(calls) >= actor.chunks[0].config.num_layers


def test_the_fused_swiglu_gives_the_same_gradient_and_keeps_less(
    make_actor, model_dir, monkeypatch
):
    """As on CUDA, where it is compiled. Of [tokens, ffn]: 3 instead of 5, with the next layer's input."""
    actor = make_actor(model_dir)
    samples = on_policy_samples(actor)
    gradients, kept = [], []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[-1][tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for fused in (False, True):
        monkeypatch.setattr(actor.chunks[0].config, "bias_activation_fusion", fused)
        gradients.append(gradient(actor, samples, monkeypatch))
        x = torch.randn(7, 1, actor.chunks[0].config.hidden_size)
        kept.append({})
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            alive = actor.chunks[0].decoder.layers[0].mlp(x)  # noqa: F841
    assert torch.allclose(*gradients, rtol=0, atol=1e-6)
    before, after = (sum(storages.values()) for storages in kept)
    assert before - after == 2 * 7 * actor.chunks[0].config.ffn_hidden_size * 4


@pytest.mark.parametrize("row", ["gspo", "dr_grpo", "cispo"])
def test_an_update_of_a_row_is_that_of_plain_transformers(make_actor, model_dir, row):
    """With a KL to a reference and the entropy in the loss.

    Off-policy, in two optimizer steps of several micro-batches each.
    """
    changes = {
        "kl_coef": 0.3,
        "entropy_coef": 0.2,
        "updates_per_step": 2,
        "max_tokens_per_micro_batch": 60,
    }
    changes |= {"clip_low": 0.2, "clip_high": 0.28}  # gspo's own would cut everything
    actor, rng = make_actor(model_dir, row=row, **changes), random.Random(0)
    samples = on_policy_samples(actor)
    for sample in samples:
        sample.logprobs = [logprob + rng.gauss(0, 0.2) for logprob in sample.logprobs]
        sample.reference_logprobs = [logprob + rng.gauss(0, 0.3) for logprob in sample.logprobs]
    metrics = update(actor, samples)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    optimizer, losses = plain_optimizer(model), []
    for part in (samples[0::2], samples[1::2]):
        optimizer.zero_grad()
        losses.append(plain_row_loss(model, part, actor.config, actor.algorithm))
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
    sizes = [
        len(part) if row != "cispo" else sum(len(sample.response) for sample in part)
        for part in (samples[0::2], samples[1::2])
    ]
    mean = sum(loss.item() * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    assert metrics["train/loss"] == pytest.approx(mean, abs=1e-5)
    expected = dict(model.named_parameters())
    for name, weight in actor.named_weights():
        assert torch.allclose(weight, expected[name], rtol=0, atol=5e-5), name


def test_texts_are_learned_beside_the_policy_s_loss(make_actor, model_dir):
    """Policy's mean + ptx_coef * mean over the texts' tokens, in one optimizer step.

    Other texts in each of two steps.
    """
    texts = [([1, 2], [3, 4, 5]), ([6], [7] * 9), ([8, 9, 10], [11, 12]), ([13], [14, 15, 16, 17])]
    changes = {
        "ptx_coef": 0.5,
        "ptx_batch": 2,
        "updates_per_step": 2,
        "max_tokens_per_micro_batch": 60,
    }
    actor = make_actor(
        model_dir, row="cispo", kl_coef=0.3, ptx_data="texts", temperature=1.0, **changes
    )
    samples = on_policy_samples(actor)
    for sample in samples:
        sample.reference_logprobs = [logprob - 0.1 for logprob in sample.logprobs]
    actor.texts = texts
    metrics = update(actor, samples)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    optimizer, losses = plain_optimizer(model), []
    for number, part in enumerate((samples[0::2], samples[1::2])):
        chosen = ptx.choose(texts, number, 2, actor.config.seed, 0, 1)
        examples = [Sample(0, 0, prompt, response=response) for prompt, response in chosen]
        losses.append(-torch.cat([plain_logprobs(model, example, 1.0)[0] for example in examples]))
        optimizer.zero_grad()
        (
            plain_row_loss(model, part, actor.config, actor.algorithm) + 0.5 * losses[-1].mean()
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
    assert metrics["train/ptx_loss"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)
    assert metrics["train/tokens"] == sum(len(sample.response) for sample in samples)
    expected = dict(model.named_parameters())
    for name, weight in actor.named_weights():
        assert torch.allclose(weight, expected[name], rtol=0, atol=5e-5), name


def plain_row_loss(model, samples: list[Sample], config, algorithm: Algorithm) -> torch.Tensor:
    """Of one optimizer step, an answer at a time."""
    total, tokens, row = 0.0, 0, config.algorithm[0]
    for sample in samples:
        logprobs, entropy = plain_logprobs(model, sample, config.temperature)
        log_ratio, advantages = (
            logprobs - torch.tensor(sample.logprobs),
            torch.tensor(sample.advantages),
        )
        ratio = (log_ratio.mean() if row == "gspo" else log_ratio).exp()
        cut = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        loss = -torch.min(ratio * advantages, cut * advantages)
        if row == "cispo":
            loss = -cut.detach() * advantages * logprobs
        off = torch.tensor(sample.reference_logprobs) - logprobs
        loss = loss + algorithm.kl_coef * (off.exp() - 1 - off) - algorithm.entropy_coef * entropy
        divided = {"gspo": len(sample.response), "dr_grpo": config.max_new_tokens, "cispo": 1}[row]
        total, tokens = total + loss.sum() / divided, tokens + len(sample.response)
    return total / (tokens if row == "cispo" else len(samples))


def test_an_empty_micro_batch_adds_exactly_nothing(make_actor, model_dir):
    """Not even to the embedding's gradient, and not to the number of tokens that the loss is divided by."""
    from actor import cross_entropy_loss

    actor = make_actor(model_dir)
    sequences = [(sample.prompt, sample.response) for sample in make_samples(0)[:3]]
    gradients = []
    for packed in ([sequences], [[], sequences, []]):
        actor._passes(packed, cross_entropy_loss)
        gradients.append(actor.ddps[0].buffers[0].grad_data.clone())
    assert torch.equal(gradients[0], gradients[1]) and gradients[0].abs().max() > 0


def test_a_batch_of_padding_skips_the_optimizer_step(make_actor, model_dir):
    actor = make_actor(model_dir)
    update(
        actor, on_policy_samples(actor)
    )  # so that Adam has momentum, which would move the weights
    before, samples = weights_of(actor), on_policy_samples(actor)
    for sample in samples:
        sample.advantages = None
    metrics = update(actor, samples)
    assert (
        metrics["train/skipped"],
        metrics["train/tokens"],
        metrics["train/grad_norm"],
        metrics["train/loss"],
    ) == (1, 0, 0, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in actor.named_weights())
    assert actor.version == 2


def test_updates_per_step_deals_the_samples_to_optimizer_steps(make_actor, model_dir, monkeypatch):
    monkeypatch.setattr("actor.LR_DECAY_TO", 1.0)
    constant = {"lr_warmup_steps": 0}
    actor = make_actor(model_dir, updates_per_step=2, **constant)
    samples = on_policy_samples(actor)
    metrics, together = update(actor, samples), weights_of(actor)
    actor = make_actor(model_dir, **constant)
    parts = [update(actor, samples[0::2])]
    actor.version = 0
    parts.append(update(actor, samples[1::2]))
    assert all(torch.equal(together[name], tensor) for name, tensor in actor.named_weights())
    assert metrics["train/tokens"] == sum(part["train/tokens"] for part in parts)
    assert metrics["train/grad_norm"] == pytest.approx(
        sum(part["train/grad_norm"] for part in parts) / 2
    )
    assert (
        metrics["train/engine_logprob_diff_max"] < 1e-5 < parts[1]["train/engine_logprob_diff_max"]
    )


def test_a_step_of_cross_entropy_is_that_of_plain_transformers(make_actor, model_dir):
    """At temperature 1, whatever the answers are sampled at; it is no update."""
    actor = make_actor(model_dir)
    sequences = [(sample.prompt, sample.response) for sample in make_samples(0)]
    loss = supervised(actor, sequences, lr=1e-2)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    plain = [plain_logprobs(model, sample, temperature=1.0)[0] for sample in make_samples(0)]
    assert loss == pytest.approx(-torch.cat(plain).mean().item(), abs=1e-5)
    assert supervised(actor, sequences, lr=1e-2) < loss
    assert actor.version == 0


def test_a_disagreement_with_the_engine_stops_before_the_weights_move(
    make_actor, model_dir, monkeypatch
):
    monkeypatch.setattr("actor.MAX_LOGPROB_DIFF", NEAR)
    actor = make_actor(model_dir)
    samples, before = on_policy_samples(actor), weights_of(actor)
    samples[3].logprobs[0] += 1e-3  # one token may be far off
    update(make_actor(model_dir), samples)
    actor = make_actor(model_dir)
    for sample in samples:
        sample.logprobs = [logprob + 0.01 for logprob in sample.logprobs]
    with pytest.raises(
        ValueError, match=r"by 1.00e-02 in the mean, more than the 1.00e-04 that --dtype fl"
    ):
        update(actor, samples)
    assert all(torch.equal(before[name], tensor) for name, tensor in actor.named_weights())


def optimizer_state(actor) -> list[torch.Tensor]:
    (only,) = actor.optimizer.chained_optimizers
    return [value.clone() for state in only.optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_an_update_that_is_not_finite_is_skipped(make_actor, model_dir, monkeypatch, where, value):
    """Weights and AdamW's state stay bit-equal, it is counted, and the next update is what it would have
    been."""
    actor = make_actor(model_dir)
    update(actor, on_policy_samples(actor))
    samples, weights, adam = on_policy_samples(actor), weights_of(actor), optimizer_state(actor)
    if where == "loss":
        samples[3].advantages = [float(value)] * len(samples[3].advantages)
    else:
        hook = next(iter(actor.parameters())).register_hook(
            lambda gradient: gradient * float(value)
        )
    metrics = update(actor, samples)
    assert (metrics["train/not_finite"], metrics["train/skipped"], metrics["train/grad_norm"]) == (
        1,
        1,
        0,
    )
    assert all(map(math.isfinite, metrics.values())) and actor.version == 2
    assert all(torch.equal(weights[name], tensor) for name, tensor in actor.named_weights())
    assert len(adam) > 10 and all(
        torch.equal(*pair) for pair in zip(adam, optimizer_state(actor), strict=True)
    )
    if where == "gradient":
        hook.remove()
    assert update(actor, on_policy_samples(actor))["train/not_finite"] == 0
    assert not all(torch.equal(weights[name], tensor) for name, tensor in actor.named_weights())


def test_a_step_is_megatron_s_own_and_takes_the_norm_once(make_actor, model_dir, monkeypatch):
    """Its `step()` would copy the gradients and sum their norm over all ranks a second time."""
    from megatron.core.optimizer import optimizer as megatron

    def whole_step(optimizer, lr: float) -> float:
        optimizer.config.clip_grad = CLIP_GRAD
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = lr, 0.1 * group["wd_mult"]
        return optimizer.step()[1]

    sequences = [(sample.prompt, sample.response) for sample in make_samples(0)]
    actor, norms, norm = make_actor(model_dir), [], megatron.get_grad_norm_fp32
    with monkeypatch.context() as patch:
        count = lambda *args, **group: norms.append(norm(*args, **group)) or norms[-1]  # noqa: E731
        patch.setattr(megatron, "get_grad_norm_fp32", count)
        supervised(actor, sequences, lr=1e-2)
    weights = weights_of(actor)
    actor = make_actor(model_dir)
    monkeypatch.setattr(actor, "_apply_gradients", partial(whole_step, actor.optimizer))
    supervised(actor, sequences, lr=1e-2)
    assert len(norms) == 1 and norms[0] > CLIP_GRAD
    assert all(torch.equal(weights[name], tensor) for name, tensor in actor.named_weights())


def test_stale_samples_and_a_sleeping_actor_are_refused(make_actor, model_dir):
    actor = make_actor(model_dir)
    samples = on_policy_samples(actor)
    update(actor, samples)
    with pytest.raises(AssertionError, match="meets weights 1"):
        update(actor, samples)
    actor.sleep()
    for call in (
        actor.sleep,
        lambda: update(actor, samples),
        lambda: actor.logprobs(samples),
        actor.named_weights,
    ):
        with pytest.raises(AssertionError):
            call()
    actor.wake()
    assert actor.logprobs(samples)


def test_padding_is_refused(make_actor, model_dir):
    """The plan leaves it out; given to the actor all the same, it is an error."""
    actor = make_actor(model_dir)
    samples = on_policy_samples(actor)
    samples[1].advantages = None
    with pytest.raises(AssertionError, match="without advantages"):
        actor.update([[samples]])


# ------------------------------------------------------------------------------ partial rollout: stale tokens

STALE = {"over_dispatch": 1.5, "behavior_weight_cap": 1.5, "lr_warmup_steps": 0}


def with_stale_tokens(actor, samples: list[Sample]) -> tuple[list[Sample], list[float]]:
    """At version 1: every third answer gets a first half from weights 0, likelier or less likely by up to e.

    Also returns the same answers as if fresh, whose advantages have the weights that the loss of stale tokens
    should have.
    """
    actor.version, rng, weights = 1, random.Random(0), []
    for sample, logprobs in zip(samples, actor.logprobs(samples), strict=True):
        sample.logprobs, sample.versions = logprobs, [1] * len(logprobs)
    stale, fresh = copy.deepcopy(samples), copy.deepcopy(samples)
    for sample, plain in list(zip(stale, fresh, strict=True))[::3]:
        for token in range(-(-len(sample.response) // 2)):
            distance = rng.uniform(-1, 1)
            sample.versions[token] = 0
            sample.logprobs[token] -= distance
            weights.append(min(torch.tensor(distance).exp().item(), STALE["behavior_weight_cap"]))
            plain.advantages[token] *= weights[-1]
    assert min(weights) < 0.5 and weights.count(1.5) > 2
    return stale, fresh, weights


def test_the_gradient_of_a_stale_token_has_its_importance_weight(
    make_actor, model_dir, monkeypatch
):
    """At ratio 1 a loss with a weight is the loss of an advantage with it.

    Only fresh tokens are compared with the engine.
    """
    monkeypatch.setattr("actor.MAX_LOGPROB_DIFF", NEAR)
    actor = make_actor(model_dir, **STALE)
    stale, fresh, weights = with_stale_tokens(actor, on_policy_samples(actor))
    expected = gradient(actor, fresh, monkeypatch)
    assert expected.abs().max() > 1e-3
    assert torch.allclose(gradient(actor, stale, monkeypatch), expected, rtol=0, atol=1e-6)
    metrics = update(actor, stale)
    assert metrics["train/stale_token_frac"] == len(weights) / sum(
        len(sample.response) for sample in stale
    )
    assert metrics["train/stale_weight_mean"] == pytest.approx(
        sum(weights) / len(weights), abs=1e-5
    )
    assert metrics["train/engine_logprob_diff_max"] < 1e-5 and metrics["train/clip_frac"] == 0


@pytest.mark.parametrize("step_size", [1e-3, 3e-2])
def test_stale_tokens_are_held_to_the_start_of_the_step(
    make_actor, model_dir, monkeypatch, step_size
):
    """With two updates: the second's ratio is to the weights before the first, whether or not the clip
    then cuts it."""
    monkeypatch.setattr("actor.MAX_LOGPROB_DIFF", NEAR)
    weights, metrics = [], []
    for which in range(2):
        actor = make_actor(model_dir, updates_per_step=2, lr=step_size, **STALE)
        samples = with_stale_tokens(actor, on_policy_samples(actor))[which]
        metrics.append(update(actor, samples))
        weights.append(weights_of(actor))
    assert (metrics[0]["train/clip_frac"] > 0.05) == (step_size == 3e-2)
    assert metrics[0]["train/clip_frac"] == pytest.approx(metrics[1]["train/clip_frac"])
    assert metrics[0]["train/loss"] == pytest.approx(metrics[1]["train/loss"], abs=1e-5)
    assert all(
        torch.allclose(weights[0][name], weights[1][name], rtol=0, atol=5e-5) for name in weights[0]
    )


@pytest.mark.parametrize("updates", [1, 2])
def test_the_engine_s_other_numbers_are_corrected_for(make_actor, model_dir, updates):
    """Truncated: as if the engine had the trainer's numbers and every advantage its weight.

    Masked: that of some tokens is 0.
    """
    for settings in (
        {"tis_cap": 1.5},
        {"icepop_bound": 2.0},
        {"tis_cap": 1.5, "icepop_bound": 2.0},
    ):
        metrics = []  # not the weights: AdamW's first step makes lr of a gradient that is a rounding error
        for corrected in (True, False):
            changes = settings if corrected else {}
            actor, rng = (
                make_actor(
                    model_dir, updates_per_step=updates, lr=3e-2, lr_warmup_steps=0, **changes
                ),
                random.Random(0),
            )
            samples, masked = on_policy_samples(actor), 0
            for sample in samples:
                for token in range(len(sample.response)):
                    weight = math.exp(rng.uniform(-1, 1))
                    sample.logprobs[token] -= math.log(weight) * corrected
                    kept = 1 / 2 <= weight <= 2 or "icepop_bound" not in settings
                    sample.advantages[token] *= (
                        1.0 if corrected else min(weight, settings.get("tis_cap", 9)) * kept
                    )
                    masked += not kept
            metrics.append(update(actor, samples))
        assert (metrics[0]["train/clip_frac"] > 0.05) == (updates == 2)
        assert metrics[0]["train/masked_frac"] * metrics[0]["train/tokens"] == pytest.approx(masked)
        for name in ("train/loss", "train/grad_norm"):
            assert metrics[0][name] == pytest.approx(metrics[1][name], abs=1e-4), name


@pytest.mark.parametrize("updates", [1, 2])
def test_continued_answers_change_nothing_of_a_fresh_batch(make_actor, model_dir, updates):
    """Bit for bit: weights and metrics."""
    weights, metrics = [], []
    for over_dispatch in (1.0, 1.5):
        actor = make_actor(model_dir, updates_per_step=updates, over_dispatch=over_dispatch)
        metrics.append(update(actor, on_policy_samples(actor)) | {"train/seconds_spread": 0.0})
        weights.append(weights_of(actor))
    assert (
        metrics[0] == metrics[1]
        and metrics[0]["train/stale_token_frac"] == 0
        and metrics[0]["train/stale_weight_mean"] == 1
    )
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_versions_that_cannot_be_are_refused(make_actor, model_dir):
    """Older weights where no answer is continued, weights to come where answers are."""
    actor = make_actor(model_dir)
    stale, _, _ = with_stale_tokens(actor, on_policy_samples(actor))
    with pytest.raises(AssertionError, match="meets weights 1"):
        update(actor, stale)
    actor = make_actor(model_dir, **STALE)
    stale[0].versions[-1] = 1
    with pytest.raises(AssertionError, match="meets weights 0"):
        update(actor, stale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sleep_and_wake_as_on_a_gpu_lose_nothing(make_actor, model_dir, monkeypatch, dtype):
    """The CUDA branch on CPU tensors: their storages are emptied just the same, but nothing is pinned."""
    weights = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    for naps in (False, True):
        actor = make_actor(model_dir, dtype=dtype)
        for step in range(3):
            if naps:
                monkeypatch.setattr(actor, "device", torch.device("cuda"))
                actor.sleep()
                assert actor.ddps[0].buffers[0].param_data.untyped_storage().size() == 0
                actor.wake()
                monkeypatch.setattr(actor, "device", torch.device("cpu"))
            supervised(
                actor, [(sample.prompt, sample.response) for sample in make_samples(step)], lr=1e-3
            )
        weights.append(weights_of(actor))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_who_holds_the_memory_that_the_actor_needs(monkeypatch):
    """On a GPU with 30 of 80 GiB free, of which this rank holds 8."""
    from training.model import check_room

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 8 << 30)
    check_room(30 << 30, "the actor")
    with pytest.raises(
        ValueError,
        match=r"the actor needs 31.0 GiB .* 30.0 of 80.0 GiB .* holds 8.0 GiB, .* others 42.0 GiB",
    ):
        check_room(31 << 30, "the actor")


def test_a_closed_actor_leaves_no_model_and_no_thread(make_actor, model_dir):
    """Where the process goes on: 50 threads of process groups would wake up all the time."""
    from actor import Actor

    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # the fixture takes it down
    threads = []
    for _ in range(3):
        actor = Actor(actor_config(), model_dir)
        actor.close()
        gone, actor = weakref.ref(actor.ddps[0]), None
        gc.collect()
        assert gone() is None
        threads.append(psutil.Process().num_threads())
    assert threads[1] == threads[2]


def test_learning_rate_of_every_update():
    from actor import learning_rate

    assert [learning_rate(version, actor_config()) for version in range(4)] == pytest.approx(
        LEARNING_RATES
    )
    assert learning_rate(9, actor_config()) == pytest.approx(5e-4)
    assert learning_rate(0, actor_config(lr_warmup_steps=0, steps=1)) == pytest.approx(5e-4)
    late = actor_config(steps=7)  # the critic learns alone, and then all is as without
    assert [learning_rate(version, late, 3) for version in range(7)] == pytest.approx(
        [0, 0, 0, *LEARNING_RATES]
    )
    assert learning_rate(0, actor_config(lr_warmup_steps=0), 1) == 0


def test_the_actor_stands_still_while_the_critic_learns_alone(make_actor, model_dir, monkeypatch):
    """Bit for bit, weight decay and a momentum from before included.

    Its versions go on, and the engine is compared with.
    """
    monkeypatch.setattr("actor.MAX_LOGPROB_DIFF", NEAR)
    actor = make_actor(model_dir, row="ppo", critic_warmup=2)
    before = weights_of(actor)
    for _ in range(2):
        metrics = update(actor, on_policy_samples(actor))
        assert metrics["train/lr"] == 0 and metrics["train/grad_norm"] > 0
        assert all(torch.equal(before[name], tensor) for name, tensor in actor.named_weights())
    assert actor.version == 2 and update(actor, on_policy_samples(actor))["train/lr"] > 0
    assert not all(torch.equal(before[name], tensor) for name, tensor in actor.named_weights())


# --------------------------------------------------------------------------------- the Hugging Face directory

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "family, changes",
    [("qwen2", {}), ("qwen3", {}), ("llama", {}), ("llama", {"rope_parameters": LLAMA3_ROPE})],
)
def test_a_model_goes_in_and_out_bit_for_bit_and_computes_the_same(
    make_actor, tmp_path, family, changes, tied
):
    path = make_model(tmp_path / "in", family, tied, **changes)
    actor = make_actor(path)
    plain = AutoModelForCausalLM.from_pretrained(path)
    expected = dict(plain.named_parameters())
    assert dict(actor.named_weights()).keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actor.named_weights())
    actor.export(str(tmp_path / "out"))
    check_export(tmp_path / "out", expected, tolerance=0.0)
    samples = make_samples(0)
    for sample, logprobs in zip(samples, actor.logprobs(samples), strict=True):
        with torch.no_grad():
            assert logprobs == pytest.approx(
                plain_logprobs(plain, sample, temperature=0.8)[0].tolist(), abs=1e-5
            )


@pytest.mark.parametrize("family", CONFIGS)
def test_the_cost_of_a_sequence_is_its_matrix_products(tmp_path, family):
    """torch's flop counter on transformers' model: 2 a multiply-add, and attention whole, where
    `forward_cost` takes half."""
    from torch.utils.flop_counter import FlopCounterMode

    from training.model import forward_cost, read_hf_config

    path = make_model(tmp_path / "model", family, tied=True)
    hf, plain = (
        read_hf_config(path),
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager"),
    )
    quadratic = (forward_cost(hf, 200) - 2 * forward_cost(hf, 100)) / 20_000
    for tokens in (1, 10, 100):
        with FlopCounterMode(display=False) as counter:
            plain(torch.zeros(1, tokens, dtype=torch.int64))
        assert counter.get_total_flops() == 2 * (forward_cost(hf, tokens) + quadratic * tokens**2)


def damage(path: Path, how: str) -> None:
    config = json.loads((path / "config.json").read_text())
    weights = path / "model.safetensors"
    if how == "no weights":
        weights.unlink()
    elif how == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "cut very short":
        weights.write_bytes(weights.read_bytes()[:100])
    elif how == "more layers":
        config["num_hidden_layers"], config["layer_types"] = 3, ["full_attention"] * 3
    elif how == "other shape":
        config["intermediate_size"] = 64
    elif how != "not JSON":
        config.update(json.loads(how))
    (path / "config.json").write_text("{" * (how == "not JSON") + json.dumps(config))


@pytest.mark.parametrize(
    "how, message",
    [
        ("no weights", "no \\*.safetensors"),
        ("cut short", "model.safetensors is damaged"),
        ("cut very short", "model.safetensors is damaged"),
        ("more layers", "lack model.layers.2.input_layernorm.weight"),
        ("not JSON", "config.json is not valid JSON"),
        ("other shape", "does not have the shape"),
        ('{"model_type": "gpt2"}', "'gpt2' is not supported, only qwen2, qwen3, llama"),
        ('{"attention_bias": true}', "not supported: attention_bias"),
        (
            '{"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0, "factor": 2.0}}',
            "rope_type 'linear'",
        ),
    ],
)
def test_a_directory_that_cannot_be_used_is_named(make_actor, tmp_path, how, message):
    path = make_model(tmp_path / "model", "qwen3", tied=False)
    damage(Path(path), how)
    with pytest.raises(ValueError, match=message) as error:
        make_actor(path)
    assert f"--model {path}" in str(error.value) and "\n" not in str(error.value)


def test_settings_that_cannot_be_used_are_named(make_actor, tmp_path, model_dir):
    from training.model import read_hf_config, transformer_config

    with pytest.raises(
        ValueError, match=f"--model {tmp_path}/nothing: not a Hugging Face model directory"
    ):
        make_actor(f"{tmp_path}/nothing")
    with pytest.raises(ValueError, match="--tp 4 does not divide num_key_value_heads = 2"):
        transformer_config(read_hf_config(model_dir), actor_config(tp=4))
    with pytest.raises(ValueError, match="--algorithm a2c is unknown; choose one of: grpo"):
        make_actor(model_dir, row="a2c")
    actor = make_actor(model_dir, max_tokens_per_micro_batch=20, max_new_tokens=10)
    with pytest.raises(ValueError, match="does not fit into --max-tokens-per-micro-batch 20"):
        actor.logprobs([Sample(0, 0, [1] * 10, response=[1] * 12)])


# ------------------------------------------------------------------------------------------------ checkpoints


def save(actor, path: Path) -> None:
    path.mkdir()
    write, complete = actor.snapshot(path)
    complete([write()])


def adam_steps(actor) -> list[float]:
    states = actor.optimizer.chained_optimizers[0].optimizer.state.values()
    return [state["step"].item() for state in states]


def with_bug(patch, method: str) -> None:
    """Put Megatron's own method back in the place of ours."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from cpu.megatron import original

    patch.setattr(DistributedOptimizer, method, original[method])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_continues_as_if_nothing_had_happened(
    make_actor, model_dir, tmp_path, monkeypatch, dtype
):
    sequences = [(sample.prompt, sample.response) for sample in make_samples(0)]
    actor = make_actor(model_dir, dtype=dtype)
    losses = [supervised(actor, sequences, 1e-2) for _ in range(2)]
    actor.version = 7
    save(actor, tmp_path / "checkpoint")
    losses += [supervised(actor, sequences, 1e-2) for _ in range(2)]

    actor = make_actor(model_dir, dtype=dtype)
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        with_bug(patch, "state_dict")  # bug 1: no state before the first step
        actor.restore(tmp_path / "checkpoint")
    with monkeypatch.context() as patch, pytest.raises((KeyError, RuntimeError)):
        with_bug(
            patch, "_set_main_param_and_optimizer_states"
        )  # bug 2: 'step', or an in-place write to a leaf
        actor.restore(tmp_path / "checkpoint")
    with monkeypatch.context() as patch:
        with_bug(patch, "load_state_dict")  # bug 3: one step tensor for all
        actor.restore(tmp_path / "checkpoint")
        supervised(actor, sequences, 1e-2)
        assert min(adam_steps(actor)) > 10

    actor = make_actor(model_dir, dtype=dtype)
    actor.restore(tmp_path / "checkpoint")
    assert actor.version == 7
    assert [supervised(actor, sequences, 1e-2) for _ in range(2)] == losses[2:]
    assert set(adam_steps(actor)) == {4.0}


def test_a_fused_adamw_is_adamw_and_so_are_its_checkpoints(
    make_actor, model_dir, tmp_path, monkeypatch
):
    """Written by either, read by either, from several buckets."""
    sequences = [(sample.prompt, sample.response) for sample in make_samples(0)]
    weights, losses = {}, {}
    for saver in (None, 2000):
        set_overlap(saver, monkeypatch.setattr)
        actor = make_actor(model_dir)
        assert (len(actor.ddps[0].buffers[0].buckets) > 2) == bool(saver)
        for _ in range(2):
            supervised(actor, sequences, 1e-2)
        save(actor, tmp_path / f"{saver}")
        losses[saver, saver] = supervised(actor, sequences, 1e-2)
        weights[saver, saver] = weights_of(actor)
        reader = 2000 if saver is None else None
        set_overlap(reader, monkeypatch.setattr)
        actor = make_actor(model_dir)
        actor.restore(tmp_path / f"{saver}")
        losses[saver, reader] = supervised(actor, sequences, 1e-2)
        weights[saver, reader] = weights_of(actor)
        assert {group["fused"] for group in actor.optimizer.param_groups} == {reader is not None}
        assert set(adam_steps(actor)) == {3.0}
    assert list(losses.values()) == pytest.approx([losses[None, None]] * 4, abs=1e-5)
    for other in weights.values():
        assert all(
            torch.allclose(other[n], x, rtol=0, atol=1e-5) for n, x in weights[None, None].items()
        )


def test_a_fresh_actor_can_be_saved(make_actor, model_dir, tmp_path):
    actor = make_actor(model_dir)
    save(actor, tmp_path / "checkpoint")
    actor.restore(tmp_path / "checkpoint")


# ---------------------------------------------------------------------------------------------- micro-batches


@given(
    sequences=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), max_size=12),
    cp=st.sampled_from([1, 2, 4]),
    tp_with_sp=st.sampled_from([1, 2]),
)
def test_every_response_token_is_a_target_on_exactly_one_context_parallel_rank(
    sequences, cp, tp_with_sp
):
    """In micro-batches of which some are empty.

    A micro-batch has the tokens that packing counted, and few more for sp.
    """
    counter = iter(range(1, 10_000))  # every token is different, so that a wrong shift cannot hide
    sequences = [
        ([next(counter) for _ in range(p)], [next(counter) for _ in range(r)]) for p, r in sequences
    ]
    lengths = [packed_length(len(prompt) + len(response), cp) for prompt, response in sequences]
    packed = [[sequences[index] for index in chosen] for chosen in [[], *pack(lengths, 64), []]]
    responses = [token for chosen in packed for _, response in chosen for token in response]
    seen = []
    for rank in range(cp):
        batches = make_micro_batches(packed, cp=cp, cp_rank=rank, tp_with_sp=tp_with_sp)
        for batch, chosen_sequences in zip(batches, packed, strict=True):
            counted = sum(
                packed_length(len(prompt) + len(response), cp)
                for prompt, response in chosen_sequences
            )
            total = sum(queries for queries, _ in batch.lengths) * cp
            assert counted <= total <= max(counted, 1) + tp_with_sp * (2 * cp if cp > 1 else 1) - 1
            chosen = batch.slots != NO_TARGET
            assert batch.tokens.shape[1] % tp_with_sp == 0 and batch.tokens.shape[1] * cp == total
            assert torch.equal(batch.tokens[0][chosen] + 1, batch.targets[chosen])
            assert [responses[slot] for slot in batch.slots[chosen]] == batch.targets[
                chosen
            ].tolist()
            seen += batch.slots[chosen].tolist()
    assert sorted(seen) == list(range(len(responses)))


def test_zigzag_by_hand():
    assert zigzag([8, 4], cp=2, rank=0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag([8, 4], cp=2, rank=1).tolist() == [2, 3, 4, 5, 9, 10]


def test_the_import_hook_stays_out_where_cuda_is(monkeypatch):
    from cpu import megatron as cpu_megatron

    monkeypatch.setattr(
        sys,
        "meta_path",
        [finder for finder in sys.meta_path if not isinstance(finder, cpu_megatron._Finder)],
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = list(sys.meta_path)
    cpu_megatron.install()
    assert sys.meta_path == before
