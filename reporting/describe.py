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

NOT_DETERMINISTIC = (
    "tokens differ from run to run, also of one seed; --deterministic: they don't, and engines decode 25 to "
    "45 % slower (SGLang's figures)"
)
PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "numpy")


def describe(config: Config, plans: list[Plan], ranks: int) -> str:
    """Who runs where, what a step is, and the settings that were chosen."""
    samples = config.prompts_per_step * config.answers_per_prompt
    values = [(field, vars(config)[field.name]) for field in dataclasses.fields(config)]
    changed = [f"--{dashed(f.name)} {as_text(value)}" for f, value in values if value != f.default]
    varies = config.device == "cuda" and not config.deterministic
    return (
        f"nanoYATT: {config.mode} colocation on {ranks} ranks: {plans[0]}\n"
        f"  {config.steps} steps of {samples} samples: {config.answers_per_prompt} answers to each of "
        f"{config.prompts_per_step} prompts\n"
        f"  settings other than the defaults: {' '.join(changed)}"
        + f"\n  {NOT_DETERMINISTIC}"
        * varies
    )


def run_metadata(config: Config) -> dict:
    """Every setting, those of the algorithm, versions and commit."""
    in_git = dict(cwd=Path(__file__).parent, capture_output=True, text=True)
    algorithm = vars(algorithm_of(config))
    return dataclasses.asdict(config) | {
        "algorithm_settings": {
            field.name: algorithm[field.name] for field in dataclasses.fields(Settings)
        },
        "ranks": int(os.environ["WORLD_SIZE"]),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], **in_git).stdout.strip(),
    }
