"""About how much memory a run takes: what each model holds, and whether that fits the devices."""

from __future__ import annotations

import os
from collections import Counter
from itertools import chain
from math import prod

import psutil

from algorithms import algorithm_of
from config import Config, UserError
from engines import server, wire
from placement import Plan
from scheduling.pipeline import schedule_of

BYTES = {"float32": 4, "bfloat16": 2}
# of a token in a layer that keeps all for its gradient: bytes for each of hidden, key-value and feed-forward
# columns, measured on a CPU (tests/test_memory.py); fused kernels keep less
KEPT = {"float32": (40, 12, 20), "bfloat16": (28, 6, 10)}
# of a GPU, by each process on it, asleep or not: context, kernels, CUDA graphs, NCCL's buffers; an estimate
RESIDENT = 2_500_000_000
# of a further rank of an engine on its lead's device, where it reads what is pushed
CONTEXT = 500_000_000
PROCESS = 1_200_000_000  # about, of libraries: each rank, and each server with its children
SERVER = 4_000_000_000  # the same of a server with CUDA, whose children load all anew; an estimate
SIZES = (24e9, 48e9, 80e9, 141e9)  # what is asked about where there is no GPU
HINTS = {  # by the first word of a peak
    "serving": "another --mem-fraction, --rollout-tp, --genrm-tp",
    "training": "--recompute, a smaller --max-tokens-per-micro-batch, --tp with --sp",
}
REFERENCE = "reference, in the host's memory"

Shapes = dict[str, list[int]]  # of a model's tensors, by their names in its directory
Parts = dict[str, int]  # bytes
Models = dict[str, Parts]  # by their names


def memory(config: Config, plans: list[Plan], ranks: int) -> list[str]:
    """Lines: what a rank's part of each trainer takes, what an engine on each of its ranks; if it fits."""
    trainers, engines = trainers_of(config, ranks), engines_of(config)
    lines = ["  about MB of memory, of a rank's part or an engine on each of its ranks:"]
    for name, parts in (trainers | engines).items():
        each = ", ".join(f"{part} {size / 1e6:.1f}" for part, size in parts.items())
        lines.append(f"    {name}: {each}; together {sum(parts.values()) / 1e6:.1f}")
    if config.device == "cpu":
        lines.append(f"    libraries: {PROCESS / 1e6:.0f} of the host's for each rank and server")
        return [*lines, on_this_machine(plans, ranks, trainers, engines)]
    return [*lines, *verdicts(config, plans, ranks), host_memory(config, plans, trainers, engines)]


def trainers_of(config: Config, ranks: int) -> Models:
    """What each trainer holds of a device while it learns, and the host's copy of the reference."""
    algorithm, dp = algorithm_of(config), ranks // (config.tp * config.cp * config.pp)
    shapes, _ = read_model(config.model, config)
    actor = trainer_parts(shapes, config, dp)
    if config.rollout_only:
        return {"actor": actor | {"activations": 0, "loss": 0}}
    own = read_model(config.critic, config)[0] if config.critic else shapes
    critic = trainer_parts(own, config, dp)
    rows = {"actor": actor} | {f"{name} critic": critic | {"loss": 0} for name in algorithm.critics}
    if algorithm.kl_coef:
        rows[REFERENCE] = {"weights": actor["weights"]}
    return rows


def trainer_parts(shapes: Shapes, config: Config, dp: int) -> Parts:
    """Of one rank, as if tensor and pipeline parallelism cut all tensors evenly."""
    size, count = BYTES[config.dtype], sum(map(prod, shapes.values())) // (config.tp * config.pp)
    # in float32 and sharded: AdamW's moments, and the weights if the model's own are bfloat16
    states = (8 if config.dtype == "float32" else 12) * count // (dp * config.cp)
    from training.lm_head import CHUNK_BYTES

    vocabulary, hidden = embedding(shapes)
    head = vocabulary * hidden * size // config.tp
    chunk = min(CHUNK_BYTES, 4 * config.max_tokens_per_micro_batch * vocabulary // config.tp)
    loss = 2 * chunk + 2 * head  # copies of a chunk's logits; gradients of the head
    parts = {"weights": count * size, "gradients": 4 * count, "optimizer": states}
    return parts | {"activations": activations(shapes, config), "loss": loss}


def activations(shapes: Shapes, config: Config) -> int:
    """Of the full micro-batches that a pipeline's first rank keeps, interleaved more; without a tower's."""
    inside = {name: shape[0] for name, shape in shapes.items() if ".layers." in name}
    rows = {name: count for name, count in inside.items() if name.endswith("_proj.weight")}
    layers = sum(name.endswith("k_proj.weight") for name in rows)
    keys = next(n for name, n in rows.items() if "k_proj" in name)
    feed_forward = next(n for name, n in rows.items() if "gate_proj" in name)
    widths = (embedding(shapes)[1], keys, feed_forward)
    whole = config.tp if config.sp else 1  # tensor parallelism doesn't cut all hidden columns
    cuts = (whole, config.tp, config.tp)
    parts = zip(KEPT[config.dtype], widths, cuts, strict=True)
    kept = sum(size * width // cut for size, width, cut in parts)
    if config.recompute:  # the layers' inputs, and all of the one that is computed again
        kept, layers = layers * BYTES[config.dtype] * widths[0] // whole + kept, 1
    per_rank = schedule_of(config).stages_per_rank
    more = (config.pp - 1) / (config.pp * per_rank) if per_rank > 1 else 0.0
    return int((1 + more) * kept * layers) * config.max_tokens_per_micro_batch // config.cp


def embedding(shapes: Shapes) -> list[int]:
    """[vocabulary, hidden]; where it stands among the names is the family's."""
    return next(shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight"))


def engines_of(config: Config) -> Models:
    """What an awake engine needs at least on each of its ranks. With CUDA its KV cache takes more."""
    if config.train_only:
        return {}
    rows = {}
    for role, path in [("rollout", config.model), *(("genrm", p) for p in config.judge_models)]:
        tp = vars(config)[f"{role}_tp"]
        rows[f"{role} {path}"] = engine_parts(*read_model(path, config), config, tp)
    return rows


def engine_parts(shapes: Shapes, context: int, config: Config, tp: int) -> Parts:
    """A token's keys and values: a number for each row of the weights that make them."""
    kv = ("k_proj.weight", "v_proj.weight")
    rows = sum(shape[0] for name, shape in shapes.items() if name.endswith(kv))
    tokens = max(server.KV_TOKENS, context)
    counts = {"weights": sum(map(prod, shapes.values())), "KV cache": tokens * rows}
    return {name: count * BYTES[config.dtype] // tp for name, count in counts.items()}


def read_model(path: str, config: Config) -> tuple[Shapes, int]:
    """Tensors and context of a model's directory."""
    return server.checkpoint_shapes(path), server.context_length(path, config)


def on_this_machine(plans: list[Plan], ranks: int, trainers: Models, engines: Models) -> str:
    """Of the processes and models of all ranks, if they are on this machine."""
    needed = ranks * (PROCESS + sum(sum(parts.values()) for parts in trainers.values()))
    for role in ("rollout", "genrm"):
        sizes = [sum(parts.values()) for name, parts in engines.items() if name.startswith(role)]
        largest = max(sizes, default=0)
        needed += len({rank for plan in plans for rank in plan.leads(role)}) * (PROCESS + largest)
    free = psutil.virtual_memory().available
    fits = "fit into" if needed <= free else "DON'T FIT INTO"
    return f"  {needed / 1e9:.1f} GB {fits} the {free / 1e9:.1f} GB that are free on this machine"


def host_memory(config: Config, plans: list[Plan], trainers: Models, engines: Models) -> str:
    """Of a rank with CUDA: what sleeps, the copy that a save writes from, processes."""
    states = sum(parts["weights"] + parts.get("optimizer", 0) for parts in trainers.values())
    held = {"pinned": states, "a save's copy": states * bool(config.save_every)}
    for name, parts in engines.items():
        if config.mode != "partial" or name.startswith("genrm"):
            held["pinned"] += parts["weights"]
    held["processes"] = PROCESS + SERVER * engines_on_a_device(plans)
    shown = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in held.items())
    return f"  the host holds for each rank at most {sum(held.values()) / 1e9:.1f} GB: {shown}"


def engines_on_a_device(plans: list[Plan]) -> int:
    """How many engines have a process on a rank's device, in any of the plans; they take turns there."""
    roles = ({rank for plan in plans for rank in vars(plan)[role]} for role in ("rollout", "genrm"))
    return max(Counter(chain(*roles)).values(), default=0)


def verdicts(config: Config, plans: list[Plan], ranks: int) -> list[str]:
    """A line for this machine's devices, or where it has none for each of SIZES."""
    from torch import cuda

    lines, here = [], [cuda.get_device_properties(0).total_memory] if cuda.is_available() else []
    for size in here or SIZES:
        peaks = peaks_of(config, plans, ranks, size)
        shown = ", ".join(f"{name} {needed / 1e9:.1f}" for name, needed in peaks.items())
        fits = "takes it" if max(peaks.values()) <= size else "IS TOO SMALL"
        lines.append(f"  a device of {size / 1e9:.0f} GB {fits}, in GB: {shown}")
    return lines


def check_fits(config: Config, plans: list[Plan], ranks: int) -> None:
    """UserError if this rank's GPU is too small for the loop, as `peaks_of` has it. See --memory-check."""
    if config.device == "cpu" or not config.memory_check:
        return
    from torch import cuda

    size = cuda.get_device_properties(int(os.environ["LOCAL_RANK"])).total_memory
    peaks = peaks_of(config, plans, ranks, size)
    name = max(peaks, key=peaks.get)
    if peaks[name] > size:
        needed = f"about {peaks[name] / 1e9:.1f} GB of a device, which has {size / 1e9:.1f}"
        hint = HINTS.get(name.split()[0], "--tp with --sp")
        raise UserError(
            f"{name} takes {needed}: try {hint} or more ranks; --no-memory-check starts anyway"
        )


def peaks_of(config: Config, plans: list[Plan], ranks: int, device: float) -> dict[str, float]:
    """The peaks of a step on a device of so many bytes, in their order; all others sleep then."""
    trainers, engines = trainers_of(config, ranks), engines_of(config)
    actor = trainers["actor"]
    states = actor["weights"] + actor["gradients"] + actor["optimizer"]
    fraction, peaks = config.mem_fraction, {}
    for name, parts in engines.items():  # one that needs more than its share doesn't start
        needed, share = sum(parts.values()), fraction * device
        peaks[f"serving {name}"] = share if needed <= share else needed / fraction
    if REFERENCE in trainers:
        peaks["the reference's pass"] = states + actor["weights"] + actor["loss"]
    learners = {name: parts for name, parts in trainers.items() if name != REFERENCE}
    needs = {f"training the {name}": sum(parts.values()) for name, parts in learners.items()}
    fuses = schedule_of(config).fuses  # then all are awake, each with micro-batches of its own
    peaks |= {"training all models": sum(needs.values())} if fuses else needs
    if engines:
        copies = 2 if config.tp * config.pp > 1 else 1  # flat, and gathered whole before
        pushed = copies * bucket_bytes(config)
        rollout, *_ = engines.values()
        peaks["the push"] = states - actor["gradients"] + rollout["weights"] + pushed
    asleep = RESIDENT * (1 + engines_on_a_device(plans)) + CONTEXT * (config.rollout_tp - 1)
    return {name: needed + asleep for name, needed in peaks.items()}


def bucket_bytes(config: Config) -> int:
    """Of weights on their way to an engine, at most: a bucket with its last tensor."""
    shapes, _ = read_model(config.model, config)
    sizes = [BYTES[config.dtype] * prod(shape) for shape in shapes.values()]
    return min(sum(sizes), wire.BUCKET_BYTES + max(sizes))
