"""An estimate of a run's memory; a run that needs more than there is ends before it starts anything."""

import math
import os
import shutil
from collections import Counter
from math import ceil
from pathlib import Path
from typing import NamedTuple

from config import Config
from engines import server
from extras.memory.free import free_memory
from runtime.devices import FULL, free_bytes
from runtime.errors import UserError
from runtime.world import World
from scheduling.layout import Placement
from scheduling.measured import ROLES, Split
from scheduling.pipeline import schedule_of

# bytes of libraries on the host: once, per rank, per engine on a rank. On a CPU engines are forks of one
# process, so what they share counts once (measured); with CUDA each loads its own (an estimate)
LIBRARIES = {"cpu": (740e6, 345e6, 170e6), "cuda": (200e6, 900e6, 4e9)}
SHARED = 16e6  # bytes of /dev/shm besides the data that passes through
NCCL = 128e6  # bytes of it per rank with CUDA; an estimate
# sizes of devices, tried in order if there is none here; torch finds 85.0 GB in one sold as 80
SIZES = (24e9, 48e9, 85e9, 141e9)
PASSES = "--recompute -1, a smaller --max-tokens-per-micro-batch or --max-model-len, --tp with --sp"
HINTS = {"memory": f"fewer ranks, {PASSES}", "/dev/shm": "docker run --shm-size"}
HINTS["a host"] = "--mode partial, a larger --genrm-tp, --save-every 0"
HINTS["the disk of --out"] = "a smaller --keep, --save-every 0, another --out"
# the place of a GPU's need; `with_recompute` fills the same part of it
DEVICE = f"{FULL} of a device"
HINTS[DEVICE] = f"more ranks, another --mem-fraction, {PASSES}"


class Need(NamedTuple):
    """The bytes that a run needs at a place and that are free there. parts: by purpose, or phase of a GPU."""

    place: str
    needed: float
    free: float
    parts: dict[str, float]

    def __str__(self) -> str:
        each = ", ".join(f"{part} {gb(size)}" for part, size in self.parts.items())
        room = "TOO LITTLE" if self.needed > self.free else "enough"
        room = f"{gb(self.free)} is {room}" if self.free < math.inf else "unknown here"
        return f"{self.place}: {gb(self.needed)} ({each}); {room}"


def gb(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 5e7 else f"{size / 1e9:.2g}"


def host_parts(config: Config, placement: Placement, splits: list[Split], here: set[int]) -> dict:
    """Return the bytes of memory that the ranks of one machine and their engines take."""
    from extras.memory.estimate import engines_of, trainers_of

    once, rank, engine = LIBRARIES[config.device]
    parts = Counter({"libraries": once + rank * len(here.intersection(placement.everyone))})
    saves = config.command == "rl" and config.save_every > 0
    models = trainers_of(config, placement) | engines_of(config, placement, splits)
    for name, model in models.items():
        role = name.split()[0]
        holders = len(here.intersection(model.ranks))
        if role in ROLES:
            holders *= placement.tp(role)  # all of an engine's ranks, not only its lead
            parts["libraries"] += engine * holders
        waits = role != "rollout" or server.backs_up(role, config)
        for part, size in model.parts.items():
            size *= holders
            is_state = part in ("weights", "adapters", "optimizer")
            # models train in turn, in the memory of the previous one's passes
            takes_turns = part in ("activations", "loss") and not schedule_of(config).fuses
            # CUDA: sleeping weights and states are in the host's pinned memory
            if config.device == "cpu" or (waits and is_state):
                parts[part] = max(parts[part], size) if takes_turns else parts[part] + size
            # a saving process copies what the rank changes; with adapters, weights don't change
            is_saved = is_state and not (part == "weights" and "adapters" in model.parts)
            if saves and is_saved and "optimizer" in model.parts:
                shape = placement.critic if name.endswith("critic") else placement.actor
                # a rank copies from its GPU only the weights that no other rank saves
                is_share = part == "weights" and config.device == "cuda"
                parts["checkpoints"] += size / shape.dp if is_share else size
    return dict(parts)


def checkpoint_bytes(config: Config, placement: Placement) -> float:
    """Return the bytes of a checkpoint: what each trainer learns, and its optimizer's states."""
    from extras.memory.estimate import trainers_of

    size = 0.0
    for name, model in trainers_of(config, placement).items():
        if "optimizer" in model.parts:
            shape = placement.critic if name.endswith("critic") else placement.actor
            learned = model.parts.get("adapters", model.parts["weights"])
            size += shape.tp * shape.pp * (learned + shape.dp * model.parts["optimizer"])
    return size


def disk_need(config: Config, placement: Placement) -> Need:
    """Return the need for checkpoints: the kept ones and the one being written; a short run has fewer."""
    each = checkpoint_bytes(config, placement) if config.save_every else 0.0
    due = ceil(config.steps / max(1, config.save_every))  # the last step is always saved
    most = min(config.keep + 1, due)
    out = Path(config.out).absolute()
    folder = next(path for path in (out, *out.parents) if path.exists())
    needed = most * each
    # a resumed run replaces existing ones
    there = sum(file.stat().st_size for file in out.glob("checkpoints/**/*"))
    free = shutil.disk_usage(folder).free + min(there, needed)
    return Need("the disk of --out", needed, free, {"checkpoints": needed})


def needs_of(config: Config, placement: Placement, splits: list[Split]) -> list[Need]:
    """Return a run's needs on this machine, place by place; without CUDA here, on another machine."""
    from torch import cuda

    from extras.memory.estimate import bucket_bytes, peaks_of

    is_elsewhere = config.device == "cuda" and not cuda.is_available()
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", len(placement.everyone)))
    here = {*range(first, first + ranks)}
    parts = host_parts(config, placement, splits, here)
    shared = {"NCCL": NCCL * ranks}
    if config.device == "cpu":
        leads = [here.intersection(placement.leads("rollout", split)) for split in splits]
        engines = max(map(len, leads), default=0)
        shared = {"weights on their way": bucket_bytes(config) * engines}
    free = (free_memory(), shutil.disk_usage("/dev/shm").free)
    memory, shm = (math.inf, math.inf) if is_elsewhere else free
    place = "memory" if config.device == "cpu" else "a host"
    needs = [Need(place, sum(parts.values()), memory, parts)]
    needs.append(Need("/dev/shm", SHARED + sum(shared.values()), shm, shared))
    if config.command == "rl" and not is_elsewhere:
        needs.append(disk_need(config, placement))
    if config.device == "cuda":
        for size in SIZES if is_elsewhere else [free_bytes()]:
            peaks = peaks_of(config, placement, splits, size)
            need = Need(DEVICE, max(peaks.values()), FULL * size, peaks)
            if need.needed <= need.free:
                break
        needs.append(need)
    return needs


def table(config: Config, placement: Placement, splits: list[Split]) -> list[str]:
    """Return the lines of --dry-run: a rank's part of each model, then what each place needs."""
    from extras.memory.estimate import engines_of, trainers_of, with_recompute

    lines = ["  estimated MB of memory, for a rank's part or for an engine on each of its ranks:"]
    trainers = trainers_of(config, placement)
    for name, model in (trainers | engines_of(config, placement, splits)).items():
        each = ", ".join(f"{part} {size / 1e6:.1f}" for part, size in model.parts.items())
        lines.append(f"    {name}: {each}; together {model.total / 1e6:.1f}")
    lines.append("  estimated GB that are needed, by purpose, and whether enough are free:")
    needs = needs_of(config, placement, splits)
    lines += [f"    {need}" for need in needs]
    if config.device == "cuda":
        size = needs[-1].free / FULL
        there = with_recompute(config, placement, splits, size)
        again = f"--recompute {there.recompute} and {there.kept_chunks} chunks of logits kept"
        lines.append(f"  if {size / 1e9:.1f} GB of a device are free: {again}")
    return lines


def check_fits(config: Config, placement: Placement, splits: list[Split]) -> None:
    """Raise UserError, naming the place, if the run won't fit."""
    for need in needs_of(config, placement, splits) if config.memory_check else ():
        if need.needed > need.free:
            name = max(need.parts, key=need.parts.get)
            raise UserError(
                f"{need.place}: the run needs about {gb(need.needed)} GB, {gb(need.parts[name])} "
                f"for {name}, and {gb(need.free)} are free: try {HINTS[need.place]}; "
                "--no-memory-check starts anyway"
            )


async def settled(
    config: Config, placement: Placement, splits: list[Split], world: World
) -> Config:
    """Check the run, and return settings that fit its smallest GPU (collective: all ranks)."""
    from extras.memory.estimate import with_micro_batch, with_recompute

    config = await world.run(with_micro_batch, config)
    check_fits(config, placement, splits)
    if config.device == "cpu":
        return config
    return with_recompute(config, placement, splits, min(await world.gather(free_bytes())))
