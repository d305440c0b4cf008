"""The losses of SFT, reward models and DPO beside TRL's, on the same rows and weights: equal within 1e-4, or
exit status 1.

    python bench/vs_trl_losses.py

Rows are the demo's, in the files that `run.py sft|rm|dpo` would read; models are the demo's architecture with
random weights, DPO's reference another one than its policy. Each side tokenizes the rows by itself. TRL
evaluates them by SFTTrainer, RewardTrainer and DPOTrainer, in the environment that vs_trl.py makes,
.venv-trl.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from launch import ROOT, end_with_us, run_to_its_end

sys.path.insert(0, str(ROOT))
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

OUT = ROOT / "runs" / "vs_trl_losses"
MODELS = {"sft": "policy", "rm": "scorer", "dpo": "policy"}
ROWS, BETA, TOLERANCE = 64, 0.1, 1e-4
LIMIT_S = 900.0


# ---------------------------------------------------------------- nanoYATT


def make_inputs() -> None:
    """Two policies, a reward model whose head isn't zeros, and a file of rows for each command."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from recipes.addition import warmstart

    for seed, name in enumerate(("policy", "reference")):
        warmstart.new_model(OUT / name, seed)
    scorer = AutoModelForSequenceClassification.from_pretrained(OUT / "policy", num_labels=1)
    torch.nn.init.normal_(scorer.score.weight, std=0.1, generator=torch.Generator().manual_seed(2))
    scorer.save_pretrained(OUT / "scorer")
    AutoTokenizer.from_pretrained(OUT / "policy").save_pretrained(OUT / "scorer")
    for command in MODELS:
        rows = warmstart.example_rows(command, seed=0, count=ROWS)
        (OUT / f"{command}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def our_losses() -> dict[str, dict[str, float]]:
    """Of all rows of each command, on one rank; in micro-batches that need not hold all of them."""
    import torch.distributed as dist

    import data
    from actor import Actor
    from commands import finetune
    from config import parse_config
    from scheduling.balance import flat

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    for command, name in MODELS.items():
        config = parse_config([command, "--model", str(OUT / name), "--max-tokens-per-micro-batch", "512", "--dpo-beta", str(BETA)])
        tokenizer, path = data.load_tokenizer(config.model), OUT / f"{command}.jsonl"
        parse, config = finetune.TASKS[command].parse, replace(config, eval_prompts=0)
        examples = finetune.read_examples(path, parse, tokenizer, config)
        rows = examples.batch(0, ROWS)
        if command == "dpo":
            other = Actor(config, str(OUT / "reference"))
            samples = flat([rows])
            for sample, logprobs in zip(samples, other.logprobs(samples), strict=True):
                sample.reference_logprobs = logprobs  # a sample that has them keeps them
            other.close()
        learner = finetune.Learner(config)
        found[command] = learner.measure(rows)
        learner.trainer.close()
    dist.destroy_process_group()
    return found


# ---------------------------------------------------------------- TRL, in its own environment


def their_losses() -> dict[str, dict[str, float]]:
    """One evaluation of each trainer on all rows in one batch."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(OUT / "policy")
    common = dict(output_dir=str(OUT / "trl"), per_device_eval_batch_size=ROWS, use_cpu=True, bf16=False, report_to=[])
    common |= dict(gradient_checkpointing=False, dataloader_pin_memory=False, disable_tqdm=True, max_length=None)

    def rows_of(command: str) -> Dataset:
        rows = [json.loads(line) for line in (OUT / f"{command}.jsonl").read_text().splitlines()]
        renamed = [{"completion" if name == "response" else name: text for name, text in row.items()} for row in rows]
        return Dataset.from_list(renamed)

    def policy(name: str):
        return AutoModelForCausalLM.from_pretrained(OUT / name, dtype=torch.float32)

    scorer = AutoModelForSequenceClassification.from_pretrained(OUT / "scorer", num_labels=1, dtype=torch.float32)
    data = {command: {"train_dataset": rows, "eval_dataset": rows} for command in MODELS for rows in [rows_of(command)]}
    with_tokenizer = {"processing_class": tokenizer}
    trainers = {
        "sft": SFTTrainer(policy("policy"), SFTConfig(**common, completion_only_loss=True), **data["sft"], **with_tokenizer),
        "rm": RewardTrainer(scorer, RewardConfig(**common), **data["rm"], **with_tokenizer),
        "dpo": DPOTrainer(policy("policy"), policy("reference"), DPOConfig(**common, beta=BETA), **data["dpo"], **with_tokenizer),
    }
    names = {"sft": {}, "rm": {"accuracy": "eval_accuracy", "margin": "eval_margin"}}
    names["dpo"] = {"accuracy": "eval_rewards/accuracies", "margin": "eval_rewards/margins"}
    found = {}
    for command, trainer in trainers.items():
        figures = trainer.evaluate()
        named = {ours: figures[theirs] for ours, theirs in names[command].items() if theirs in figures}
        found[command] = {"loss": figures["eval_loss"]} | named
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)  # TRL's side: where its figures go
    settings = parser.parse_args()
    if settings.trl:
        settings.trl.write_text(json.dumps(their_losses()))
        return
    from vs_trl import TRL_VENV, make_trl_environment

    end_with_us()
    make_trl_environment()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    make_inputs()
    ours = our_losses()
    run_to_its_end([TRL_VENV / "bin" / "python", "bench/vs_trl_losses.py", "--trl", OUT / "trl.json"], OUT / "trl.log", LIMIT_S)
    theirs = json.loads((OUT / "trl.json").read_text())
    print("| | nanoYATT | TRL | difference |\n|---|--:|--:|--:|")
    for command, figures in theirs.items():
        for name, value in figures.items():
            print(f"| {command} {name} | {ours[command][name]:.6f} | {value:.6f} | {abs(ours[command][name] - value):.1e} |")
    (OUT / "results.json").write_text(json.dumps({"nanoYATT": ours, "TRL": theirs}, indent=1) + "\n")
    if not all(abs(ours[command]["loss"] - theirs[command]["loss"]) <= TOLERANCE for command in MODELS):
        sys.exit(f"a loss differs by more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
