"""The index of extras: what the demo doesn't need in partial and full mode. All else is the core.

An extra is a file or folder here. To remove one, delete its row and its files; nothing else has to change.
(Its settings in config.py are unused then.)
The core imports no extra: it calls what extras add at its hooks, which runtime/hooks.py lists. config.py has
all flags; a flag whose group is an extra's name is known only with that extra, and other settings that need
one raise a UserError.
"""

from typing import NamedTuple

from config import GROUPS
from runtime.hooks import HOOKS, added


class Extra(NamedTuple):
    """A row of EXTRAS; its name is also the group of its flags. evaluates: --steps 0 uses these flags."""

    files: str  # paths of its files and folders
    hooks: dict[str, str]  # hook -> module:name
    evaluates: bool = False


EXTRAS = {
    # --placement split, standalone, or ranks in words (PLACEMENTS); --ahead
    "apart": Extra(
        "extras/apart",
        {"rows": "extras.apart.placements", "colocation": "extras.apart.placements:colocation_of"},
    ),
    # --mode fused (MODES, MOVES)
    "fused": Extra("extras/fused", {"rows": "extras.fused.mode"}),
    # pushes of shards to engines of several ranks, with --rollout-tp
    "shards": Extra(
        "extras/shards",
        {"push_kind": "extras.shards.choice:choose", "shard_push": "extras.shards.push:connect"},
    ),
    # --rebalance in partial mode (MOVES)
    "rebalance": Extra("extras/rebalance.py", {"rows": "extras.rebalance"}),
    # --pp above 1, --schedule (SCHEDULES)
    "pipelines": Extra("extras/pipelines", {"rows": "extras.pipelines"}),
    # scalar reward models as judges (FORMATS)
    "scalar judges": Extra("extras/scalar.py", {"rows": "extras.scalar"}),
    # --algorithm ppo and safe_rlhf, --critic
    "critics": Extra(
        "extras/critic.py", {"critic": "extras.critic:Critic", "model_check": "extras.critic:check"}
    ),
    # ptx_data of --algorithm
    "pretraining texts": Extra("extras/ptx.py", {"loss_term": "extras.ptx:term_of"}),
    # --teacher, --algorithm distill
    "teacher": Extra(
        "extras/teacher.py",
        {
            "model_check": "extras.teacher:check",
            "end_tokens": "extras.teacher:ends",
            "sample_columns": "extras.teacher:differences",
        },
    ),
    # --record; --samples, which trains on what an earlier run served
    "replay": Extra(
        "extras/replay.py", {"model_check": "extras.replay:check", "served": "extras.replay:served"}
    ),
    # --lora
    "lora": Extra(
        "extras/lora.py",
        {"model_check": "extras.lora:check", "adapters": "extras.lora:add_adapters"},
    ),
    # models that see, --preset images and video
    "images": Extra(
        "extras/images",
        {
            "image_reader": "extras.images.reader:ImageReader",
            "vision_stage": "extras.images.vision:VisionModel",
            "demo_media": "extras.images.drawing:shown",
            "image_collapse": "extras.images.tokens:collapse",
            "image_packing": "extras.images.vision:with_images",
            "server_patch": "extras.images.reader:patch_server",
        },
        evaluates=True,
    ),
    # --steps 0, OUT/answers.jsonl
    "answers": Extra("extras/answers.py", {"evaluation": "extras.answers:EVALUATION"}),
    # refuses a run that needs too much of a GPU; --recompute -1
    "memory": Extra("extras/memory", {"run_check": "extras.memory.check:settled"}, evaluates=True),
    # --dry-run, --simulate, run.py check
    "dry run": Extra("extras/dry_run.py", {"command": "extras.dry_run:command"}, evaluates=True),
    # a process for the code of rules and environments
    "users' code": Extra("extras/worker.py extras/users.py", {"user_code": "extras.worker:load"}),
    # --environment FILE.py: episodes of several turns
    "environment": Extra(
        "extras/environment", {"environment": "extras.environment.episodes:build"}, evaluates=True
    ),
    # --rule FILE.py
    "rules of users": Extra("extras/rules.py", {"rule_file": "extras.rules:load_file"}),
    # without CUDA engines and `make run`'s ranks are forks, and SGLang's scheduler decodes with compiled code
    "fast CPU": Extra(
        "extras/fast_cpu",
        {
            "cpu_server": "extras.fast_cpu.forked:ForkedServer",
            "launcher": "extras.fast_cpu.ranks:prepare",
        },
    ),
    # a run on GPUs starts only if the tools that it needs are there
    "GPU tools": Extra("extras/gpu_tools.py", {"device_check": "extras.gpu_tools:check"}),
    # OUT/timeline.png
    "figure": Extra("extras/figure.py", {"picture": "extras.figure:last_steps"}),
}


def load() -> None:
    """Let every extra add its flags and hooks. A second call changes nothing."""
    for name, extra in EXTRAS.items():
        GROUPS[name] = extra.evaluates
        for hook, what in extra.hooks.items():
            HOOKS[hook][name] = what
    added("rows")
