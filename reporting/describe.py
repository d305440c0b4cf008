"""Descriptions of a run: a text at its start, and in config.json what its numbers depend on."""

import contextlib
import os
import subprocess
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path

from algorithms import Settings, algorithm_of
from config import Config, as_text, dashed, settings_of
from engines import server
from scheduling.layout import Placement
from scheduling.measured import Split

PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "numpy")


def describe(config: Config, placement: Placement, split: Split) -> str:
    """Return a text on what runs where, the size of a step, and the settings that aren't defaults."""
    ranks = len(placement.everyone)
    prompts = config.prompts_per_step
    answers = config.answers_per_prompt
    text = f"nanoYATT: {config.mode} colocation on {ranks} ranks: {placement.in_words(split)}\n"
    text += f"  {config.steps} steps of {prompts * answers} samples: "
    text += f"{answers} answers to each of {prompts} prompts\n"
    if config.evaluates:
        text = f"nanoYATT: evaluates {config.model} on {ranks} ranks\n"
    text += "  settings other than the defaults:"
    for field in settings_of(Config):
        value = vars(config)[field.name]
        if value != field.default:
            text += f" --{dashed(field.name)} {as_text(value)}"
    if placement.push:
        text += f"\n  {placement.push}"
    if split.rollout and (how := server.kind_of(config.device).describe(config)):
        text += f"\n  {how}"
    if config.device == "cuda" and not config.deterministic:
        text += "\n  tokens differ between runs even with one seed; with --deterministic they don't"
        text += ", but engines decode 25 to 45 % slower (SGLang's numbers)"
    return text


def run_metadata(config: Config) -> dict:
    """Return every setting, including the algorithm's, versions and commit."""
    from torch import cuda

    algorithm = vars(algorithm_of(config))
    return asdict(config) | {
        "algorithm_settings": {field.name: algorithm[field.name] for field in fields(Settings)},
        "device_name": cuda.get_device_name() if config.device == "cuda" else "CPU",
        "ranks": int(os.environ["WORLD_SIZE"]),
        "versions": {name: version(name) for name in PACKAGES},
        "commit": commit(),
    }


def commit() -> str:
    """Return this code's commit, whatever GIT_DIR names; "" without git or a repository of its own."""
    repository = Path(__file__).resolve().parents[1] / ".git"
    command = ["git", f"--git-dir={repository}", "rev-parse", "--verify", "HEAD"]
    with contextlib.suppress(OSError):  # git isn't installed
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""
