"""What a run is: for people, once, at its start; and in config.json, to make its numbers again."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

from algorithms import Settings, algorithm_of
from config import Config, as_text, dashed
from placement import Plan

PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "numpy")


def describe(config: Config, plans: list[Plan], ranks: int) -> str:
    dp = ranks // (config.tp * config.pp * config.cp)
    samples = config.prompts_per_step * config.answers_per_prompt
    model, *judges = (path or "the demo's" for path in (config.model, *config.judge_models))
    values = [(field, vars(config)[field.name]) for field in dataclasses.fields(config)]
    settings = " ".join(as_option(field.name, value) for field, value in values if value != field.default)
    return (
        f"nanoYATT: {config.mode} colocation on {ranks} ranks: {plans[0]}\n"
        f"  model {model}\n"
        f"  judge {as_text(judges) or 'none'}\n"
        f"  data  {config.data or 'built-in addition task'}\n"
        f"  {config.steps} steps of {samples} samples ({config.prompts_per_step} prompts x "
        f"{config.answers_per_prompt} answers) for {dp} data-parallel ranks (tp {config.tp}, pp {config.pp}, "
        f"cp {config.cp}), packed into micro-batches of up to {config.max_tokens_per_micro_batch} tokens\n"
        f"  settings other than the defaults: {settings}"
    )


def as_option(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{dashed(name)}" if value else f"--no-{dashed(name)}"
    return f"--{dashed(name)} {as_text(value)}"


def run_metadata(config: Config) -> dict:
    in_git = dict(cwd=Path(__file__).parent, capture_output=True, text=True)
    algorithm = vars(algorithm_of(config))
    return dataclasses.asdict(config) | {
        "algorithm_settings": {field.name: algorithm[field.name] for field in dataclasses.fields(Settings)},
        "ranks": int(os.environ["WORLD_SIZE"]),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], **in_git).stdout.strip(),
    }
