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
    "apart": Extra("apart", adds="apart.placements"),
    # MODES, MOVES: --mode fused
    "fused": Extra("fused/mode.py fused/tail.py", adds="fused.mode"),
    # MOVES: --rebalance in partial mode
    "rebalance": Extra("scheduling/rebalance.py", adds="scheduling.rebalance"),
    # SCHEDULES: --schedule fused
    "fused pipelines": Extra("fused/pipelines.py", adds="fused.pipelines"),
    # --algorithm ppo and safe_rlhf
    "critics": Extra("critic.py"),
    # ptx_data of --algorithm
    "pretraining texts": Extra("training/ptx.py"),
    # --teacher, --algorithm distill
    "teacher": Extra("training/teacher.py"),
    # --lora
    "lora": Extra("training/lora.py"),
    # vision models: --preset images and video
    "images": Extra("images training/vision.py demo/drawing.py"),
    # saves, --resume, exports
    "checkpoints": Extra(
        "checkpoint.py training/sharded_checkpoint.py runtime/checkpoint_files.py"
        " runtime/background_writer.py"
    ),
    # --steps 0: OUT/answers.jsonl
    "answers": Extra("reporting/answers.py"),
    # CHECKS: refuse a run that needs too much memory; --recompute -1
    "memory": Extra(
        "commands/memory.py training/memory.py runtime/free_memory.py", "commands.memory"
    ),
    # --dry-run, --simulate, run.py check
    "dry run": Extra("commands/dry_run.py"),
    # --environment FILE.py: multi-turn episodes
    "environment": Extra("environment"),
    # --rule FILE.py
    "rules of users": Extra("scoring/rules.py"),
    # FORMATS: scalar reward models as judges
    "scalar judges": Extra("scoring/scalar.py", adds="scoring.scalar"),
    # forked engines on CPUs, and compiled decoding in SGLang's scheduler
    "fast CPU": Extra("cpu/fast engines/forked.py"),
    # checks at the start of a GPU run for the tools that it needs
    "GPU tools": Extra("runtime/gpu_tools.py", adds="runtime.gpu_tools"),
    # OUT/timeline.png
    "figure": Extra("reporting/figure.py"),
}


def has(name: str) -> bool:
    return name in EXTRAS


def need(name: str, asked: str) -> None:
    """Raise UserError if an extra was removed. asked: the setting that needs it, as the user typed it."""
    if name not in EXTRAS:
        raise UserError(f"{asked}: extras.py no longer has the row {name!r}")


def load() -> None:
    """Let every extra add its rows."""
    for extra in EXTRAS.values():
        if extra.adds:
            import_module(extra.adds)
