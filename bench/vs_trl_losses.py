"""The losses of SFT, reward models and DPO beside TRL's, on the same rows and weights.

    python bench/vs_trl_losses.py        exit status 1 if one of them differs by more than 1e-4

Rows are the demo's, in the files that `run.py sft|rm|dpo` would read; models are the demo's architecture with
random weights, DPO's reference another one than its policy. Each side tokenizes the rows by itself. TRL
evaluates them by SFTTrainer, RewardTrainer and DPOTrainer, in the environment that vs_trl.py makes,
.venv-trl.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import TYPE_CHECKING

from launch import ROOT, end_with_us, run_to_its_end
from tables import print_table

sys.path.insert(0, str(ROOT))
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

if TYPE_CHECKING:
    from datasets import Dataset

OUT = ROOT / "runs" / "vs_trl_losses"
MODELS = {"sft": "policy", "rm": "scorer", "dpo": "policy"}
ROWS, BETA, TOLERANCE = 64, 0.1, 1e-4
LIMIT_S = 900.0

Figures = dict[str, dict[str, float]]  # by command: loss, accuracy, margin


# ---------------------------------------------------------------- nanoYATT


def make_inputs() -> None:
    """Two policies, a reward model whose head isn't zeros, and a file of rows for each command."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from examples.make_demo import models
    from recipes.addition.pairs import example_rows

    for seed, name in enumerate(("policy", "reference")):
        models.new_model(OUT / name, seed)
    scorer = AutoModelForSequenceClassification.from_pretrained(OUT / "policy", num_labels=1)
    torch.nn.init.normal_(scorer.score.weight, std=0.1, generator=torch.Generator().manual_seed(2))
    scorer.save_pretrained(OUT / "scorer")
    AutoTokenizer.from_pretrained(OUT / "policy").save_pretrained(OUT / "scorer")
    for command in MODELS:
        rows = example_rows(command, seed=0, count=ROWS)
        (OUT / f"{command}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def our_losses() -> Figures:
    """Of all rows of each command, on one rank; in micro-batches that need not hold all of them."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {command: our_loss(command, OUT / name) for command, name in MODELS.items()}
    dist.destroy_process_group()
    return found


def our_loss(command: str, model: Path) -> dict[str, float]:
    """As run.py measures held-out examples."""
    import data
    from actor import Actor
    from commands import finetune
    from config import parse_config
    from scheduling.balance import flat

    settings = ["--max-tokens-per-micro-batch", "512", "--dpo-beta", str(BETA)]
    config = parse_config([command, "--model", str(model), *settings])
    tokenizer, parse = data.load_tokenizer(config.model), finetune.TASKS[command].parse
    rows = finetune.read_examples(OUT / f"{command}.jsonl", parse, tokenizer, config)
    if command == "dpo":
        other, samples = Actor(config, str(OUT / "reference")), flat([rows])
        for sample, logprobs in zip(samples, other.logprobs(samples), strict=True):
            sample.reference_logprobs = logprobs  # a sample that has them keeps them
        other.close()
    learner = finetune.Learner(config)
    figures = learner.measure(rows)
    learner.trainer.close()
    return figures


# ---------------------------------------------------------------- TRL, in its own environment


def their_losses() -> Figures:
    """One evaluation of each trainer on all rows in one batch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    common = dict(
        output_dir=str(OUT / "trl"), per_device_eval_batch_size=ROWS, use_cpu=True, bf16=False
    )
    common |= dict(report_to=[], gradient_checkpointing=False, dataloader_pin_memory=False)
    common |= dict(disable_tqdm=True, max_length=None)

    def policy(name: str):
        return AutoModelForCausalLM.from_pretrained(OUT / name, dtype=torch.float32)

    def inputs(command: str) -> dict:
        rows, tokenizer = rows_of(command), AutoTokenizer.from_pretrained(OUT / "policy")
        return dict(train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)

    of_scorer = dict(num_labels=1, dtype=torch.float32)
    scorer = AutoModelForSequenceClassification.from_pretrained(OUT / "scorer", **of_scorer)
    sft, dpo = SFTConfig(**common, completion_only_loss=True), DPOConfig(**common, beta=BETA)
    trainers = {
        "sft": SFTTrainer(policy("policy"), sft, **inputs("sft")),
        "rm": RewardTrainer(scorer, RewardConfig(**common), **inputs("rm")),
        "dpo": DPOTrainer(policy("policy"), policy("reference"), dpo, **inputs("dpo")),
    }
    names = {"sft": {}, "rm": {"accuracy": "eval_accuracy", "margin": "eval_margin"}}
    names["dpo"] = {"accuracy": "eval_rewards/accuracies", "margin": "eval_rewards/margins"}
    found = {}
    for command, trainer in trainers.items():
        figures = trainer.evaluate()
        named = {
            ours: figures[theirs] for ours, theirs in names[command].items() if theirs in figures
        }
        found[command] = {"loss": figures["eval_loss"]} | named
    return found


def rows_of(command: str) -> Dataset:
    """A file's rows with TRL's names."""
    from datasets import Dataset

    rows = [json.loads(line) for line in (OUT / f"{command}.jsonl").read_text().splitlines()]
    names = {"response": "completion"}
    return Dataset.from_list(
        [{names.get(name, name): text for name, text in row.items()} for row in rows]
    )


# ---------------------------------------------------------------- side by side


def compare() -> None:
    """A table, and the exit status."""
    from vs_trl import TRL_VENV, make_trl_environment

    end_with_us()
    make_trl_environment()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    make_inputs()
    ours, command = our_losses(), [TRL_VENV / "bin" / "python", "bench/vs_trl_losses.py"]
    run_to_its_end([*command, "--trl", OUT / "trl.json"], OUT / "trl.log", LIMIT_S)
    theirs: Figures = json.loads((OUT / "trl.json").read_text())
    (OUT / "results.json").write_text(
        json.dumps({"nanoYATT": ours, "TRL": theirs}, indent=1) + "\n"
    )
    table, largest = [], 0.0
    for name, figures in theirs.items():
        for figure, value in figures.items():
            own = ours[name][figure]
            difference = abs(own - value)
            table.append([f"{name} {figure}", f"{own:.6f}", f"{value:.6f}", f"{difference:.1e}"])
            largest = max(largest, difference) if figure == "loss" else largest
    print_table(["", "nanoYATT", "TRL", "difference"], table)
    if not largest <= TOLERANCE:
        sys.exit(f"a loss differs by more than {TOLERANCE:g}")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, help=SUPPRESS)  # TRL's side: where its figures go
    settings = parser.parse_args()
    if settings.trl:
        settings.trl.write_text(json.dumps(their_losses()))
    else:
        compare()


if __name__ == "__main__":
    main()
