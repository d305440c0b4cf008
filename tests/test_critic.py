"""The critic against plain transformers + torch AdamW under every kind of parallelism; the value loss; the reference model."""

import copy
import gc
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from critic_worker import critic_config
from hypothesis import given
from hypothesis import strategies as st
from parallel_worker import balanced
from test_actor import make_model, make_samples, save
from transformers import AutoModelForSequenceClassification

from balance import flat
from rollout import Sample

LEARNING_RATES = [1e-3, 2e-3, 2e-3]  # worked by hand from critic_config: critic_lr 2e-3 after 2 steps of warm-up


def make_value_model(path: Path, family: str, tied: bool) -> str:
    """A tiny random value model's directory."""
    model = AutoModelForSequenceClassification.from_pretrained(make_model(path / "policy", family, tied), num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(path / "critic")
    (path / "critic" / "tokenizer_config.json").write_text("{}")
    return str(path / "critic")


def plain_values(model, sample: Sample) -> torch.Tensor:
    """Of every response token, one sequence at a time: that of the state before it is written."""
    ids = torch.tensor([sample.prompt + sample.response])
    return model.score(model.model(ids).last_hidden_state)[0, len(sample.prompt) - 1 : -1, 0]


def plain_update(model, optimizer, samples: list[Sample], config) -> dict[str, float]:
    """One step token by token; and the metrics from their definitions."""
    tokens = [token for sample in samples for token in zip(sample.returns["reward"], sample.old_values, strict=True)]
    loss, cut, clip = 0.0, 0, config.value_clip
    optimizer.zero_grad()
    for sample in samples:
        for value, target, old in zip(plain_values(model, sample), sample.returns["reward"], sample.old_values, strict=True):
            near = value if old - clip <= value <= old + clip else torch.tensor(old + math.copysign(clip, value.item() - old))
            loss = loss + max((value - target) ** 2, (near - target) ** 2) / 2
            cut += ((near - target) ** 2 > (value - target) ** 2).item()
    (loss / len(tokens)).backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad).item()
    optimizer.step()
    of_errors = statistics.pvariance([target - old for target, old in tokens])
    explained = 1 - of_errors / statistics.pvariance([target for target, _ in tokens])
    means = {"value_loss": loss.item() / len(tokens), "clip_frac": cut / len(tokens), "explained_variance": explained}
    means["return_mean"] = statistics.fmean(target for target, _ in tokens)
    return {f"critic/{name}": value for name, value in (means | {"grad_norm": grad_norm, "skipped": 0.0}).items()}


def with_returns(samples: list[Sample], values: list[list[float]], seed: int) -> list[Sample]:
    """Random returns around the values, and `old_values` up to 0.5 away from them, as if the critic had moved since."""
    noise = random.Random(seed)
    for sample, row in zip(samples, values, strict=True):
        sample.true_values = row
        sample.old_values = [value + noise.uniform(-0.5, 0.5) for value in row]
        sample.returns = {"reward": [value + noise.gauss(0, 0.5) for value in row]}
        sample.values = {"reward": sample.old_values}
    return samples


def trained_on(step: int) -> list[Sample]:
    return [sample for sample in make_samples(step) if sample.advantages is not None]


def plain_optimizer(model, config) -> torch.optim.AdamW:
    decayed, not_decayed = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(config.adam_beta1, config.adam_beta2))


def plain_reference(model_dir: str) -> dict:
    """Three updates of plain transformers and AdamW."""
    config = critic_config()
    model = AutoModelForSequenceClassification.from_pretrained(model_dir)
    optimizer, batches, metrics = plain_optimizer(model, config), [], []
    for step in range(3):
        samples = trained_on(step)
        samples = with_returns(samples, [plain_values(model, sample).tolist() for sample in samples], step)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATES[step]
        batches.append(copy.deepcopy(samples))
        metrics.append({**plain_update(model, optimizer, samples, config), "critic/lr": LEARNING_RATES[step]})
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {"batches": batches, "metrics": metrics, "weights": weights}


LAYOUTS = {  # name -> family, ranks, sizes
    "dp2": ("qwen3", 2, {}),
    "dp2_bf16": ("qwen3", 2, {"dtype": "bfloat16"}),
    "tp2": ("qwen3", 2, {"tp": 2}),
    "tp2_sp": ("qwen3", 2, {"tp": 2, "sp": True}),
    "tp2_sp_tied": ("qwen2", 2, {"tp": 2, "sp": True}),
    "pp2_tied": ("qwen2", 2, {"pp": 2}),
    "cp2": ("qwen3", 2, {"cp": 2}),
    "tp2_pp2_sp": ("qwen3", 4, {"tp": 2, "pp": 2, "sp": True}),
    "tp2_cp2_sp": ("qwen3", 4, {"tp": 2, "cp": 2, "sp": True}),
    "tp2_dp2": ("qwen3", 4, {"tp": 2}),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> dict:
    """By family: the value model's directory, and what plain training makes of it."""
    path = tmp_path_factory.mktemp("models")
    model_dirs = {family: make_value_model(path / family, family, tied=family == "qwen2") for family in ("qwen3", "qwen2")}
    return {"model_dirs": model_dirs, "references": {family: plain_reference(path) for family, path in model_dirs.items()}}


@pytest.fixture(scope="module")
def layouts_path(references, tmp_path_factory) -> Path:
    """Trains under every layout, in processes that are gone afterwards. Returns what all result paths begin with."""
    path, root = tmp_path_factory.mktemp("layouts"), Path(__file__).parent
    torch.save({**references, "layouts": LAYOUTS}, path / "case.pt")
    command = [sys.executable, str(root / "critic_worker.py"), str(path / "case.pt"), str(path / "result")]
    environment = {**os.environ, "PYTHONPATH": str(root.parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output.decode()[-4000:]
    return path / "result"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_learns_as_the_plain_reference(name, references, layouts_path):
    family, ranks, layout = LAYOUTS[name]
    reference = references["references"][family]
    result = torch.load(f"{layouts_path}.{ranks}", weights_only=False)[name]
    tolerance = 5e-2 if layout.get("dtype") == "bfloat16" else 1e-5
    for step, expected in enumerate(reference["metrics"]):
        assert result["metrics"][step] == pytest.approx(expected, rel=tolerance, abs=tolerance), f"update {step}"
    assert 0.1 < reference["metrics"][0]["critic/clip_frac"] < 0.9 and abs(reference["metrics"][0]["critic/explained_variance"]) < 0.99
    assert result["value_distance"] < 4 * tolerance
    assert result["weight_distance"] < 5 * tolerance
    exported = AutoModelForSequenceClassification.from_pretrained(f"{layouts_path}.{name}")
    assert dict(exported.named_parameters()).keys() == reference["weights"].keys()
    for weight, param in exported.named_parameters():
        assert torch.allclose(param.float(), reference["weights"][weight], rtol=0, atol=5 * tolerance), weight
