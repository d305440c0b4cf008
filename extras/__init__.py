"""The index of extras: what the demo doesn't need in partial and full mode. All else is the core.

An extra is a file or folder here. To remove one, delete its row and its files; nothing else has to change.
The core names no extra: an extra adds rows to the core's tables when `load` imports it. Without it, its flags
are unknown, and other settings that need it raise a UserError.
"""

from importlib import import_module
from typing import NamedTuple

from config import EVALUATION, GROUPS


class Extra(NamedTuple):
    """hooks: the module that adds rows to the core's tables. evaluates: --steps 0 uses its settings."""

    files: str  # paths of its files and folders
    hooks: str
    evaluates: bool = False


EXTRAS = {
    # PLACEMENTS: split, standalone, any ranks; --ahead
    "apart": Extra("extras/apart", "extras.apart.placements"),
    # MODES, MOVES: --mode fused
    "fused": Extra("extras/fused", "extras.fused.mode"),
    # MOVES: --rebalance in partial mode
    "rebalance": Extra("extras/rebalance.py", "extras.rebalance"),
    # SCHEDULES: --pp above 1, --schedule
    "pipelines": Extra("extras/pipelines", "extras.pipelines"),
    # KINDS, DIRECTORIES: --algorithm ppo and safe_rlhf, --critic
    "critics": Extra("extras/critic", "extras.critic"),
    # TERMS: ptx_data of --algorithm
    "pretraining texts": Extra("extras/ptx", "extras.ptx"),
    # DIRECTORIES, DETAILS: --teacher, --algorithm distill
    "teacher": Extra("extras/teacher", "extras.teacher"),
    # KINDS, DIRECTORIES: --lora
    "lora": Extra("extras/lora", "extras.lora"),
    # READERS, SHOWS, PATCHES: vision models, --preset images and video
    "images": Extra("extras/images", "extras.images.hooks", evaluates=True),
    # WORKS: --steps 0, OUT/answers.jsonl
    "answers": Extra("extras/answers.py", "extras.answers"),
    # CHECKS: refuse a run that needs too much memory; --recompute -1
    "memory": Extra("extras/memory", "extras.memory.check", evaluates=True),
    # COMMANDS: --dry-run, --simulate, run.py check
    "dry run": Extra("extras/dry_run.py", "extras.dry_run", evaluates=True),
    # ENVIRONMENTS: --environment FILE.py, multi-turn episodes
    "environment": Extra("extras/environment", "extras.environment.episodes", evaluates=True),
    # FILES: --rule FILE.py
    "rules of users": Extra("extras/rules.py", "extras.rules"),
    # FORMATS: scalar reward models as judges
    "scalar judges": Extra("extras/scalar.py", "extras.scalar"),
    # SERVERS: forked engines on CPUs, with compiled decoding in SGLang's scheduler
    "fast CPU": Extra("extras/fast_cpu", "extras.fast_cpu.forked"),
    # PREFLIGHT: checks at the start of a GPU run for the tools that it needs
    "GPU tools": Extra("extras/gpu_tools.py", "extras.gpu_tools"),
    # PICTURES: OUT/timeline.png
    "figure": Extra("extras/figure", "extras.figure"),
}


def has(name: str) -> bool:
    """Return whether an extra is there, for other extras."""
    return name in EXTRAS


def load() -> None:
    """Let every extra add its flags and its rows."""
    for name, extra in EXTRAS.items():
        if name not in GROUPS:
            GROUPS.append(name)
            EVALUATION.extend([name] * extra.evaluates)
        import_module(extra.hooks)
