"""The index of extras: files that the demo doesn't need in partial and full mode. The rest is the core.

To remove an extra, delete its row and its files. Nothing else has to change: an extra adds rows to the core's
tables when it is imported, or the core checks here before it imports the extra. Then the extra's flags are
unknown, and other settings that need it raise a UserError.
"""

from importlib import import_module
from typing import NamedTuple

from runtime.errors import UserError


class Extra(NamedTuple):
    """files: paths of its files and folders. adds: the module that adds rows to the core's tables."""

    files: str
    adds: str = ""


EXTRAS = {
    # PLACEMENTS: split, standalone, any ranks; --ahead
    "apart": Extra("extras/apart", adds="extras.apart.placements"),
    # MODES, MOVES: --mode fused
    "fused": Extra("extras/fused/mode.py extras/fused/tail.py", adds="extras.fused.mode"),
    # MOVES: --rebalance in partial mode
    "rebalance": Extra("extras/rebalance.py", adds="extras.rebalance"),
    # SCHEDULES: --schedule fused
    "fused pipelines": Extra("extras/fused/pipelines.py", adds="extras.fused.pipelines"),
    # --algorithm ppo and safe_rlhf
    "critics": Extra("extras/critic.py"),
    # ptx_data of --algorithm
    "pretraining texts": Extra("extras/ptx.py"),
    # --teacher, --algorithm distill
    "teacher": Extra("extras/teacher.py"),
    # --lora
    "lora": Extra("extras/lora.py"),
    # vision models: --preset images and video
    "images": Extra("extras/images"),
    # saves, --resume, exports
    "checkpoints": Extra(
        "checkpoint.py training/sharded_checkpoint.py runtime/checkpoint_files.py"
        " runtime/background_writer.py"
    ),
    # --steps 0: OUT/answers.jsonl
    "answers": Extra("extras/answers.py"),
    # CHECKS: refuse a run that needs too much memory; --recompute -1
    "memory": Extra(
        "extras/memory/check.py extras/memory/estimate.py extras/memory/free.py",
        "extras.memory.check",
    ),
    # --dry-run, --simulate, run.py check
    "dry run": Extra("extras/dry_run.py"),
    # --environment FILE.py: multi-turn episodes
    "environment": Extra("extras/environment"),
    # --rule FILE.py
    "rules of users": Extra("extras/rules.py"),
    # FORMATS: scalar reward models as judges
    "scalar judges": Extra("extras/scalar.py", adds="extras.scalar"),
    # forked engines on CPUs, and compiled decoding in SGLang's scheduler
    "fast CPU": Extra("extras/fast_cpu"),
    # checks at the start of a GPU run for the tools that it needs
    "GPU tools": Extra("extras/gpu_tools.py", adds="extras.gpu_tools"),
    # OUT/timeline.png
    "figure": Extra("extras/figure.py"),
}


def has(name: str) -> bool:
    return name in EXTRAS


def need(name: str, asked: str) -> None:
    """Raise UserError if an extra was removed. asked: the setting that needs it, as the user typed it."""
    if name not in EXTRAS:
        raise UserError(f"{asked}: extras/__init__.py no longer has the row {name!r}")


def load() -> None:
    """Let every extra add its rows."""
    for extra in EXTRAS.values():
        if extra.adds:
            import_module(extra.adds)
