"""The references for trainers: small random models, and plain transformers with torch's AdamW."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from sample import Sample

VOCAB = 64
CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
CLIP_GRAD = 0.5  # as in set_constants
# by hand from actor_config: lr 1e-3, 2 warm-up steps, 4 steps, decay to one half
LEARNING_RATES = [5e-4, 1e-3, 7.5e-4, 5e-4]


def make_model(path, family: str, tied: bool, seed: int = 0, **changes) -> str:
    """Make a tiny random model directory; biases and norms are also random, so that a mixed-up name shows."""
    torch.manual_seed(seed)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=VOCAB)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5)
    sizes |= dict(max_position_embeddings=128, tie_word_embeddings=tied)
    sizes |= dict(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    sizes |= ({} if family == "qwen2" else {"head_dim": 16}) | changes
    config = CONFIGS[family](**sizes)
    model = AutoModelForCausalLM.from_config(config)
    for name, param in model.named_parameters():
        torch.nn.init.normal_(param, mean=float("norm" in name), std=0.15)
    model.save_pretrained(path)
    Path(path, "tokenizer_config.json").write_text("{}")
    return str(path)


def plain_logprobs(model, sample: Sample, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and entropy of every response token, one sequence at a time."""
    ids = torch.tensor([sample.prompt + sample.response])
    log_softmax = F.log_softmax(model(ids).logits[0, len(sample.prompt) - 1 : -1] / temperature, -1)
    logprobs = log_softmax[range(len(sample.response)), sample.response]
    return logprobs, -(log_softmax.exp() * log_softmax).sum(-1)


def make_samples(step: int) -> list[Sample]:
    """Return 16 ragged answers, two of them padding; in step 2 all but one, so that most ranks have none."""
    rng = random.Random(step)
    samples = []
    for index in range(16):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
        response = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        sample = Sample(index // 4, index % 4, prompt, response=response)
        sample.versions = [step] * len(response)
        sample.advantages = [rng.gauss(0, 1)] * len(response)
        if index in (5, 11) or (step == 2 and index != 6):
            sample.advantages = None
        samples.append(sample)
    return samples


def plain_optimizer(model) -> torch.optim.AdamW:
    """Return AdamW with actor_config's weight decay for matrices only."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATES[0], betas=(0.9, 0.95))


def plain_steps(model, batches: list, loss_of: Callable, rates=LEARNING_RATES) -> list[tuple]:
    """Make steps of AdamW with the loss `loss_of(batch)`; return (loss, gradient norm) of each."""
    optimizer, found = plain_optimizer(model), []
    for batch, lr in zip(batches, rates, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def copies(model) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def check_export(path: Path, weights: dict, tolerance: float, kind=AutoModelForCausalLM) -> None:
    exported = kind.from_pretrained(path)
    assert dict(exported.named_parameters()).keys() == weights.keys()
    for name, param in exported.named_parameters():
        assert torch.allclose(param.float(), weights[name], rtol=0, atol=tolerance), name
    assert (path / "tokenizer_config.json").exists()


def make_value_model(path: Path, family: str, tied: bool) -> str:
    policy = make_model(path / "policy", family, tied)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(path / "critic")
    (path / "critic" / "tokenizer_config.json").write_text("{}")
    return str(path / "critic")


def plain_values(model, sample: Sample) -> torch.Tensor:
    """Return each response token's value, one sequence at a time: the value of the state before the token."""
    ids = torch.tensor([sample.prompt + sample.response])
    return model.score(model.model(ids).last_hidden_state)[0, len(sample.prompt) - 1 : -1, 0]
