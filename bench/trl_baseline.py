"""TRL's side of vs_trl.py: GRPOTrainer on the same model, problems, reward and batch. Runs in TRL's own
environment.

    OMP_NUM_THREADS=1 .venv-trl/bin/torchrun --nproc-per-node 2 bench/trl_baseline.py --model DIR --measure
    DIR
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch
from datasets import Dataset
from meter import Meter
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import data
from recipes.addition import task


class MeasuredTrainer(GRPOTrainer):
    """GRPOTrainer that tells the meter when generation, and all that comes before the update, begins and ends."""

    meter: Meter  # set after __init__

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        begin = self.meter.mark()
        completions, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        counts = {"tokens": sum(map(len, completions)), "answers": len(completions), "prompt_tokens": sum(map(len, prompt_ids))}
        self.meter.rows[-1] |= {"generate": begin.to(self.meter.mark())} | counts
        return completions, logprobs

    def _prepare_inputs(self, generation_batch):
        """Generates and scores a batch."""
        inputs = super()._prepare_inputs(generation_batch)
        self.update_began = self.meter.mark()
        return inputs


class StepClock(TrainerCallback):
    """A row of the meter per step, from on_step_begin to on_step_end: generation, scoring and the update, without logging."""

    def __init__(self, trainer: MeasuredTrainer):
        self.trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.meter.rows.append({})
        self.began = self.trainer.meter.mark()

    def on_step_end(self, args, state, control, **kwargs):
        now = self.trainer.meter.mark()
        self.trainer.meter.rows[-1] |= {"step": self.began.to(now), "update_s": self.trainer.update_began.to(now)["wall"]}


def grpo_config(settings: argparse.Namespace, folder: str) -> GRPOConfig:
    """nanoYATT's settings in TRL's words: constant learning rate, clip-higher, no KL term, one update a step."""
    return GRPOConfig(
        output_dir=folder,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.prompts * settings.answers // int(os.environ["WORLD_SIZE"]),
        num_generations=settings.answers,
        max_completion_length=settings.max_new_tokens,
        temperature=1.0,
        shuffle_dataset=False,  # problem number d is the same on both sides
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        gradient_checkpointing=False,  # on by default; off is faster
        ddp_find_unused_parameters=False,  # on by default; off is faster
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        seed=settings.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def rule(meter: Meter, eos: int):
    """The same reward as nanoYATT's side: 1 for the exact answer of a finished completion."""

    def reward(completions, completion_ids, answer, **columns) -> list[float]:
        right = [
            ids[-1] == eos and task.addition_answer(text) == key
            for text, ids, key in zip(completions, completion_ids, answer, strict=True)
        ]
        meter.rows[-1]["reward"] = float(sum(right))
        return [float(r) for r in right]

    return reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--measure", type=Path, required=True, help="folder for rank<r>.json")
    parser.add_argument("--launched", type=float, default=time.monotonic(), help="time.monotonic() at the launch")
    for name, default in (("steps", 5), ("prompts", 16), ("answers", 8), ("max-new-tokens", 72), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=5e-4)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    meter = Meter(settings.measure, int(os.environ["RANK"]), settings.launched)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    problems = task.Addition(settings.seed, lambda question: data.encode(tokenizer, question))
    draws = [problems.training(draw) for draw in range(settings.prompts * settings.steps)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = MeasuredTrainer(
            model=AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32),
            reward_funcs=rule(meter, tokenizer.eos_token_id),
            args=grpo_config(settings, folder),
            train_dataset=Dataset.from_list([{"prompt": draw.question, "answer": draw.answer_key} for draw in draws]),
            processing_class=tokenizer,
        )
        trainer.meter = meter
        trainer.add_callback(StepClock(trainer))
        meter.start()
        trainer.train()
    meter.write()


if __name__ == "__main__":
    main()
