"""TRL's side of vs_trl.py: GRPOTrainer on the same model, problems, reward and batch.

It runs in TRL's own environment and uses nothing of nanoYATT but the meter.
"""

import json
import os
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch
from datasets import Dataset
from measuring import Meter
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class MeasuredTrainer(GRPOTrainer):
    """GRPOTrainer that measures generation, and records when the update begins."""

    meter: Meter  # set after __init__
    update_began: float

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        begin = time.monotonic()
        completions, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.meter.rows[-1] |= {
            "generate_s": time.monotonic() - begin,
            "tokens": sum(map(len, completions)),
            "answers": len(completions),
            "prompt_tokens": sum(map(len, prompt_ids)),
        }
        return completions, logprobs

    def _prepare_inputs(self, generation_batch):
        """Generate and score a batch."""
        inputs = super()._prepare_inputs(generation_batch)
        self.update_began = time.monotonic()
        return inputs


class StepClock(TrainerCallback):
    """Adds a row to the meter for each step: generation, scoring and the update, without logging."""

    def __init__(self, trainer: MeasuredTrainer):
        self._trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        self._trainer.meter.rows.append({})
        self._began = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.monotonic()
        update_s = now - self._trainer.update_began
        self._trainer.meter.rows[-1] |= {"step_s": now - self._began, "update_s": update_s}


def grpo_config(settings: Namespace, folder: str) -> GRPOConfig:
    """Return nanoYATT's settings for TRL: constant learning rate, clip-higher, no KL, one update per step."""
    answers = settings.prompts * settings.answers
    return GRPOConfig(
        output_dir=folder,
        max_steps=settings.steps,
        per_device_train_batch_size=answers // int(os.environ["WORLD_SIZE"]),
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
        gradient_checkpointing=False,  # TRL's default is on; off is faster
        ddp_find_unused_parameters=False,  # the same
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        seed=settings.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def rule(meter: Meter, eos: int) -> Callable:
    """Return the reward of nanoYATT's side: 1 for the exact answer after the last ">" of a finished text."""

    def reward(completions, completion_ids, answer, **columns) -> list[float]:
        rewards = []
        for text, ids, key in zip(completions, completion_ids, answer, strict=True):
            is_right = ids[-1] == eos and ">" in text and text.rsplit(">")[-1] == key
            rewards.append(float(is_right))
        meter.rows[-1]["reward"] = sum(rewards)
        return rewards

    return reward


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--problems", type=Path, required=True, help="JSONL: prompt and answer, in training order"
    )
    for name in ("steps", "prompts", "answers", "max-new-tokens", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    meter = Meter()
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    problems = [json.loads(line) for line in settings.problems.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        trainer = MeasuredTrainer(
            model=AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32),
            reward_funcs=rule(meter, tokenizer.eos_token_id),
            args=grpo_config(settings, folder),
            train_dataset=Dataset.from_list(problems),
            processing_class=tokenizer,
        )
        trainer.meter = meter
        trainer.add_callback(StepClock(trainer))
        meter.start()
        trainer.train()
    meter.write()


if __name__ == "__main__":
    main()
