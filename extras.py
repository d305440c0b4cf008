"""The index of extras: what the demo in partial and full mode does without. All else is the core.

To do without an extra, delete its row and its files. No other line has to change: an extra adds rows to
tables of the core when it is imported, or the core looks here before it imports one. A flag of an extra that
is gone is unknown, and what else asks for one is refused in a line.
"""

from importlib import import_module
from typing import NamedTuple

from runtime.errors import UserError


class Extra(NamedTuple):
    """files: with folders, seen from here. adds: the module that adds rows to the core's tables."""

    files: str
    adds: str = ""


EXTRAS = {
    # PLACEMENTS: split, standalone, ranks in words; --ahead
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
    # models that see: --preset images and video
    "images": Extra("images training/vision.py demo/drawing.py"),
    # saves, --resume, exports; without them a run that ends is over
    "checkpoints": Extra(
        "checkpoint.py training/sharded_checkpoint.py runtime/checkpoint_files.py"
        " runtime/background_writer.py"
    ),
    # --steps 0: OUT/answers.jsonl
    "answers": Extra("reporting/answers.py"),
    # CHECKS: a run that needs more memory than there is doesn't start; --recompute -1
    "memory": Extra(
        "commands/memory.py training/memory.py runtime/free_memory.py", "commands.memory"
    ),
    # --dry-run, --simulate, run.py check
    "dry run": Extra("commands/dry_run.py"),
    # --environment FILE.py: episodes of several turns
    "environment": Extra("environment"),
    # --rule FILE.py
    "rules of users": Extra("scoring/rules.py"),
    # FORMATS: scalar reward models as judges
    "scalar judges": Extra("scoring/scalar.py", adds="scoring.scalar"),
    # without CUDA: engines are forked, and SGLang's scheduler decodes with compiled code
    "fast CPU": Extra("cpu/fast engines/forked.py"),
    # what a GPU run needs beside the GPU is looked for at its start
    "GPU tools": Extra("runtime/gpu_tools.py", adds="runtime.gpu_tools"),
    # OUT/timeline.png
    "figure": Extra("reporting/figure.py"),
}


def has(name: str) -> bool:
    return name in EXTRAS


def need(name: str, asked: str) -> None:
    """Raise UserError if an extra is gone. asked: what asks for it, as people write it."""
    if name not in EXTRAS:
        raise UserError(f"{asked}: extras.py has no row {name!r} any more")


def load() -> None:
    """Have every extra add its rows."""
    for extra in EXTRAS.values():
        if extra.adds:
            import_module(extra.adds)
