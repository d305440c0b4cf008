"""The actor against plain transformers + torch AdamW: under every kind of parallelism, packing, masking and conversion."""

import copy
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_worker import actor_config
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from batch import NO_TARGET, make_micro_batches, pack, zigzag
from rollout import Sample

VOCAB = 64
CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
LEARNING_RATES = [5e-4, 1e-3, 7.5e-4, 5e-4]  # worked by hand from actor_config: lr 1e-3, 2 warm-up steps, 4 steps, to one half


def make_model(path, family: str, tied: bool, seed: int = 0, **changes) -> str:
    """A tiny random model directory; biases and norms are random too, so that a mixed-up name shows."""
    torch.manual_seed(seed)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    head_dim = {} if family == "qwen2" else {"head_dim": 16}
    settings = {"max_position_embeddings": 128, "rope_parameters": rope, "tie_word_embeddings": tied, "rms_norm_eps": 1e-5}
    config = CONFIGS[family](vocab_size=VOCAB, **{**sizes, **head_dim, **settings, **changes})
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
    return log_softmax[range(len(sample.response)), sample.response], -(log_softmax.exp() * log_softmax).sum(-1)


def make_samples(step: int) -> list[Sample]:
    """16 ragged answers. In step 2 every second one is masked, so that a data-parallel rank has nothing to train on."""
    rng = random.Random(step)
    samples = []
    for index in range(16):
        prompt, response = ([rng.randrange(VOCAB) for _ in range(rng.randint(1, high))] for high in (8, 20))
        sample = Sample(index // 4, index % 4, prompt, response=response, versions=[step] * len(response))
        sample.advantages = [rng.gauss(0, 1)] * len(response)
        if index in (5, 11) or (step == 2 and index % 2):
            sample.advantages = None
        samples.append(sample)
    return samples


def plain_step(model, optimizer, samples: list[Sample], config) -> dict[str, float]:
    kept = [sample for sample in samples if sample.advantages is not None]
    tokens = sum(len(sample.response) for sample in kept)
    sums = dict.fromkeys(("loss", "entropy", "kl", "clip_frac"), 0.0)
    optimizer.zero_grad()
    for sample in kept:
        logprobs, entropy = plain_logprobs(model, sample, config.temperature)
        ratio = (logprobs - torch.tensor(sample.logprobs)).exp()
        advantages = torch.tensor(sample.advantages)
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        loss = -torch.min(ratio * advantages, clipped * advantages)
        (loss.sum() / tokens).backward()
        sums["loss"] += loss.sum().item()
        sums["entropy"] += entropy.sum().item()
        sums["kl"] -= ratio.log().sum().item()
        sums["clip_frac"] += (clipped * advantages < ratio * advantages).sum().item()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad).item()
    optimizer.step()
    return {"train/grad_norm": grad_norm, "train/tokens": tokens, **{f"train/{name}": x / tokens for name, x in sums.items()}}


def plain_reference(model_dir: str) -> dict:
    """Three updates of plain transformers and AdamW; batch 1 is off-policy, so that the clip has work to do."""
    config = actor_config()
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    decayed, not_decayed = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(config.adam_beta1, config.adam_beta2))
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
        metrics.append({**plain_step(model, optimizer, samples, config), "train/lr": LEARNING_RATES[step], "train/skipped": 0.0})
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {"batches": batches, "metrics": metrics, "weights": weights}


# ------------------------------------------------------------------------------------------------------------- parallelism

LAYOUTS = {
    2: {
        "dp2": ("qwen3", {}),
        "tp2": ("qwen3", {"tp": 2}),
        "tp2_tied": ("qwen2", {"tp": 2}),
        "tp2_sp": ("qwen3", {"tp": 2, "sp": True}),
        "pp2": ("qwen3", {"pp": 2}),
        "pp2_tied": ("qwen2", {"pp": 2}),
        "cp2": ("qwen3", {"cp": 2}),
        "dp2_bf16": ("qwen3", {"dtype": "bfloat16"}),
    },
    4: {
        "tp2_pp2": ("qwen3", {"tp": 2, "pp": 2}),
        "tp2_cp2_sp": ("qwen3", {"tp": 2, "cp": 2, "sp": True}),
        "pp2_cp2_tied": ("qwen2", {"pp": 2, "cp": 2}),
    },
}


@pytest.fixture(scope="session")
def case(tmp_path_factory):
    path = tmp_path_factory.mktemp("case")
    model_dirs = {family: make_model(path / family, family, tied=family == "qwen2") for family in ("qwen3", "qwen2")}
    return {"model_dirs": model_dirs, "references": {family: plain_reference(path) for family, path in model_dirs.items()}}


def launch(nproc: int, case_path: Path, result_path: Path) -> None:
    root = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    command += [str(root / "parallel_worker.py"), str(case_path), str(result_path)]
    environment = {**os.environ, "PYTHONPATH": str(root.parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output.decode()[-4000:]


@pytest.mark.parametrize("nproc", [2, 4])
def test_every_layout_trains_as_the_plain_reference(nproc, case, tmp_path):
    torch.save({**case, "layouts": LAYOUTS[nproc]}, tmp_path / "case.pt")
    launch(nproc, tmp_path / "case.pt", tmp_path / "result.pt")
    results = torch.load(tmp_path / "result.pt", weights_only=False)
    assert results.keys() == LAYOUTS[nproc].keys()
    for name, (family, layout) in LAYOUTS[nproc].items():
        result, reference = results[name], case["references"][family]
        tolerance = 5e-2 if layout.get("dtype") == "bfloat16" else 1e-4
        print(name, result["weight_distance"], result["logprob_distance"])
        for step, expected in enumerate(reference["metrics"]):
            got = {metric: result["metrics"][step][metric] for metric in expected}
            print(name, step, {k: f"{got[k]-expected[k]:.1e}" for k in got}, result["metrics"][step]["train/micro_batches"])
            assert got == pytest.approx(expected, abs=tolerance), f"{name}, update {step}"
        assert result["metrics"][1]["train/clip_frac"] > 0.05 and result["metrics"][0]["train/micro_batches"] >= 3
        assert result["weight_distance"] < tolerance, name
        assert result["logprob_distance"] < tolerance * 2, name
        check_export(tmp_path / f"result.pt.{name}", reference["weights"], tolerance)
        group_size = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
        assert sorted(dp_rank for dp_rank, is_head in result["heads"] if is_head) == list(range(nproc // group_size)), name


def check_export(path: Path, weights: dict, tolerance: float) -> None:
    exported = AutoModelForCausalLM.from_pretrained(path)
    assert dict(exported.named_parameters()).keys() == weights.keys()
    for name, param in exported.named_parameters():
        assert torch.allclose(param.float(), weights[name], rtol=0, atol=tolerance), name
    assert (path / "tokenizer_config.json").exists()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
