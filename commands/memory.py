"""The memory that a run takes, about: what each model holds, and whether that fits the devices."""

import os
from collections import Counter
from dataclasses import replace
from math import prod

import psutil

from algorithms import algorithm_of
from config import Config, UserError
from engines import server, wire
from inputs.hf_directory import checkpoint_shapes
from placement import Plan
from runtime import rendezvous
from scheduling.layout import Holders, Shape
from scheduling.pipeline import schedule_of

BYTES = {"float32": 4, "bfloat16": 2}
# of a token in a layer that keeps all for its gradient: bytes for each of hidden, key-value and feed-forward
# columns, measured on a CPU (tests/test_memory.py); on an H100 fused kernels keep less (docs/gpu.md)
KEPT = {("cpu", "float32"): (40, 12, 20), ("cpu", "bfloat16"): (28, 6, 10)}
KEPT |= {("cuda", "float32"): (40, 12, 20), ("cuda", "bfloat16"): (16, 6, 6)}
# of a GPU, by each process on it, asleep or not: context, kernels, CUDA graphs, NCCL's buffers; an estimate
RESIDENT = 2_500_000_000
# of a further rank of an engine on its lead's device, where it reads what is pushed
CONTEXT = 500_000_000
PROCESS = 900_000_000  # about, of libraries: each rank, and each server with its children
ACTIVATIONS = 2_000_000_000  # on a CPU, where a larger micro-batch isn't faster
SERVER = 4_000_000_000  # the same of a server with CUDA, whose children load all anew; an estimate
SIZES = (24e9, 48e9, 80e9, 141e9)  # what is asked about where there is no GPU
HINTS = {  # by the first word of a peak of a device, or of a part of the host's memory
    "serving": "another --mem-fraction, --rollout-tp, --genrm-tp",
    "training": "--recompute, a smaller --max-tokens-per-micro-batch, --tp with --sp",
    "activations": "--recompute, a smaller --max-tokens-per-micro-batch",
    "KV": "a smaller --max-model-len",
}

Shapes = dict[str, list[int]]  # of a model's tensors, by their names in its directory
Parts = dict[str, int]  # bytes
Models = dict[str, Parts]  # by their names


def total(parts: Parts) -> int:
    return sum(parts.values())


def memory(config: Config, plans: list[Plan], ranks: int) -> list[str]:
    """The lines of --dry-run: a rank's part of each trainer, an engine on each of its ranks; if all fits."""
    trainers = trainers_of(config, plans[0].holders)
    engines = engines_of(config)
    lines = ["  about MB of memory, of a rank's part or an engine on each of its ranks:"]
    for name, parts in (trainers | engines).items():
        each = ", ".join(f"{part} {size / 1e6:.1f}" for part, size in parts.items())
        lines.append(f"    {name}: {each}; together {total(parts) / 1e6:.1f}")
    if config.device == "cpu":
        lines.append(f"    libraries: {PROCESS / 1e6:.0f} of the host's for each rank and server")
        needed = total(host_parts(config, plans, ranks)) / 1e9
        free = psutil.virtual_memory().available / 1e9
        fits = "fit into" if needed <= free else "DON'T FIT INTO"
        return [*lines, f"  {needed:.1f} GB {fits} the {free:.1f} GB that are free on this machine"]
    return [*lines, *verdicts(config, plans)]


def trainers_of(config: Config, holders: Holders) -> Models:
    """Each trainer's part of a device while it learns, and what the reference keeps beside them."""
    if config.command == "eval":
        return {}
    algorithm = algorithm_of(config)
    policy = checkpoint_shapes(config.model)
    actor = trainer_parts(policy, config, holders.actor)
    if config.rollout_only:
        return {"actor": actor | {"activations": 0, "loss": 0}}
    rows = {"actor": actor}
    for name in algorithm.critics:
        shapes = checkpoint_shapes(config.critic or config.model)
        rows[f"{name} critic"] = trainer_parts(shapes, config, holders.critic) | {"loss": 0}
    if algorithm.kl_coef:
        parts = trainer_parts(policy, config, holders.reference)
        rows["reference"] = {"weights": parts["weights"]}
    return rows


def trainer_parts(shapes: Shapes, config: Config, shape: Shape) -> Parts:
    """One rank's part, as if tensor and pipeline parallelism cut all tensors evenly."""
    from training.lm_head import CHUNK_BYTES

    config = shape.sized(config)
    size = BYTES[config.dtype]
    count = sum(map(prod, shapes.values())) // (config.tp * config.pp)
    # in float32 and sharded: AdamW's moments, and the weights if the model's own are bfloat16
    states = (8 if config.dtype == "float32" else 12) * count // (shape.dp * config.cp)
    vocabulary, hidden = embedding(shapes)
    head = vocabulary * hidden * size // config.tp
    chunk = min(CHUNK_BYTES, 4 * config.max_tokens_per_micro_batch * vocabulary // config.tp)
    loss = 2 * chunk + 2 * head  # copies of a chunk's logits; gradients of the head
    parts = {"weights": count * size, "gradients": 4 * count, "optimizer": states}
    kept = activations(shapes, config, config.max_tokens_per_micro_batch)
    return parts | {"activations": kept, "loss": loss}


def with_micro_batch(config: Config) -> Config:
    """Lower --max-tokens-per-micro-batch to what ACTIVATIONS hold, but not below a sample, on a CPU."""
    if config.device == "cuda":
        return config
    shapes = checkpoint_shapes(config.model)
    fitting = ACTIVATIONS * config.cp // activations(shapes, config, config.cp)
    tokens = 1 << fitting.bit_length() - 1  # a power of two
    if config.command == "rl":
        tokens = max(tokens, config.max_model_len, config.max_new_tokens + 1)
    tokens = min(tokens, config.max_tokens_per_micro_batch)
    return replace(config, max_tokens_per_micro_batch=tokens)


def activations(shapes: Shapes, config: Config, tokens: int) -> int:
    """Bytes of the micro-batches of so many tokens that a pipeline's first rank keeps, less a tower's."""
    inside = {name: shape[0] for name, shape in shapes.items() if ".layers." in name}
    rows = {name: count for name, count in inside.items() if name.endswith("_proj.weight")}
    layers = sum(name.endswith("k_proj.weight") for name in rows)
    keys = next(n for name, n in rows.items() if "k_proj" in name)
    feed_forward = next(n for name, n in rows.items() if "gate_proj" in name)
    widths = (embedding(shapes)[1], keys, feed_forward)
    whole = config.tp if config.sp else 1  # tensor parallelism doesn't cut all hidden columns
    cuts = (whole, config.tp, config.tp)
    parts = zip(KEPT[config.device, config.dtype], widths, cuts, strict=True)
    kept = sum(size * width // cut for size, width, cut in parts)
    if config.recompute:  # the layers' inputs, and all of the one that is computed again
        kept += layers * BYTES[config.dtype] * widths[0] // whole
        layers = 1
    return kept * layers * tokens // config.cp


def embedding(shapes: Shapes) -> list[int]:
    """The shape [vocabulary, hidden]; where it stands among the names is the family's."""
    return next(shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight"))


def engines_of(config: Config) -> Models:
    """The least that an awake engine needs on each of its ranks. With CUDA its KV cache takes more."""
    if not config.asks_engines:
        return {}
    policy = engine_parts(config.model, config, config.rollout_tp)
    rows = {f"rollout {config.model}": policy}
    for path in config.judge_models:
        rows[f"genrm {path}"] = engine_parts(path, config, config.genrm_tp)
    return rows


def engine_parts(path: str, config: Config, tp: int) -> Parts:
    """A token's keys and values: a number for each row of the weights that make them."""
    shapes = checkpoint_shapes(path)
    kv = ("k_proj.weight", "v_proj.weight")
    rows = sum(shape[0] for name, shape in shapes.items() if name.endswith(kv))
    tokens = server.kv_tokens(server.context_length(path, config), config)
    counts = {"weights": sum(map(prod, shapes.values())), "KV cache": tokens * rows}
    return {name: count * BYTES[config.dtype] // tp for name, count in counts.items()}


def host_parts(config: Config, plans: list[Plan], ranks: int) -> Parts:
    """The bytes that all ranks and engines take without CUDA, if they are on this machine."""
    parts = Counter(libraries=PROCESS * ranks)
    holders = plans[0].holders
    for name, trainer in trainers_of(config, holders).items():
        count = len(ranks_of(name, holders))
        parts.update({part: count * size for part, size in trainer.items()})
    engines = engines_of(config)
    models = Counter(name.split()[0] for name in engines)  # of a role
    for name, engine in engines.items():
        role = name.split()[0]
        leads = {rank for plan in plans for rank in plan.leads(role)}
        count = len(leads) // models[role]
        parts.update({part: count * size for part, size in engine.items()})
        parts["libraries"] += PROCESS * count
    return dict(parts)


def ranks_of(model: str, holders: Holders) -> tuple[int, ...]:
    """The ranks of a row of `trainers_of`."""
    kind = model.split()[-1]  # of reward critic: critic
    return holders._asdict()[kind].ranks


def engines_on_a_device(plans: list[Plan]) -> int:
    """The most engines with a process on one device, in any of the plans; they take turns there."""
    counts = Counter()
    for role in ("rollout", "genrm"):
        counts.update({rank for plan in plans for rank in vars(plan)[role]})
    return max(counts.values(), default=0)


def verdicts(config: Config, plans: list[Plan]) -> list[str]:
    """A line for this machine's devices, or where it has none for each of SIZES."""
    from torch import cuda

    sizes = [cuda.get_device_properties(0).total_memory] if cuda.is_available() else SIZES
    lines = []
    for size in sizes:
        peaks = peaks_of(config, plans, size)
        shown = ", ".join(f"{name} {needed / 1e9:.1f}" for name, needed in peaks.items())
        fits = "takes it" if max(peaks.values()) <= size else "IS TOO SMALL"
        lines.append(f"  a device of {size / 1e9:.0f} GB {fits}, in GB: {shown}")
    return lines


def check_fits(config: Config, plans: list[Plan], ranks: int) -> None:
    """Raise UserError if the run won't fit: each model's peak this rank's GPU, or all of it this machine."""
    if not config.memory_check:
        return
    if config.device == "cuda":
        from torch import cuda

        size = cuda.get_device_properties(int(os.environ["LOCAL_RANK"])).total_memory
        peaks = peaks_of(config, plans, size)
        name = max(peaks, key=peaks.get)
        needed = peaks[name]
        what = f"{name} takes about {needed / 1e9:.1f} GB of a device, which has {size / 1e9:.1f}"
        hint = HINTS.get(name.split()[0], "--tp with --sp") + " or more ranks"
    else:
        parts = host_parts(config, plans, ranks)
        name = max(parts, key=parts.get)
        needed = total(parts) if rendezvous.is_local() else 0
        size = psutil.virtual_memory().available
        most = f"{needed / 1e9:.1f} GB of memory, {parts[name] / 1e9:.1f} of them for {name}"
        what = f"the run takes about {most}, and {size / 1e9:.1f} are free"
        hint = HINTS.get(name.split()[0], "--tp") + " or fewer ranks"
    if needed > size:
        raise UserError(f"{what}: try {hint}; --no-memory-check starts anyway")


def peaks_of(config: Config, plans: list[Plan], device: float) -> dict[str, float]:
    """The peaks of a step on a device of so many bytes, in their order; all others sleep then."""
    holders = plans[0].holders
    trainers = trainers_of(config, holders)
    engines = engines_of(config)
    peaks = {}
    share = config.mem_fraction * device
    for name, parts in engines.items():  # one that needs more than its share doesn't start
        needed = total(parts)
        peaks[f"serving {name}"] = share if needed <= share else needed / config.mem_fraction
    if trainers:
        actor = trainers["actor"]
        states = actor["weights"] + actor["gradients"] + actor["optimizer"]
    if "reference" in trainers and {*holders.reference.ranks} & {*holders.actor.ranks}:
        peaks["the reference's pass"] = states + trainers["reference"]["weights"] + actor["loss"]
    learners = [name for name in trainers if "optimizer" in trainers[name]]
    needs = {f"training the {name}": total(trainers[name]) for name in learners}
    fuses = schedule_of(config).fuses  # then all are awake, each with micro-batches of its own
    peaks |= {"training all models": total(needs)} if fuses else needs
    if engines and trainers:
        # flat, and gathered whole before
        copies = 2 if holders.actor.tp * holders.actor.pp > 1 else 1
        pushed = copies * bucket_bytes(config)
        rollout, *_ = engines.values()
        weights = 0 if holders.is_apart else rollout["weights"]
        peaks["the push"] = states - actor["gradients"] + weights + pushed
    asleep = RESIDENT * (1 + engines_on_a_device(plans)) + CONTEXT * (config.rollout_tp - 1)
    return {name: needed + asleep for name, needed in peaks.items()}


def bucket_bytes(config: Config) -> int:
    """The most weights on their way to an engine: a bucket with its last tensor."""
    shapes = checkpoint_shapes(config.model)
    sizes = [BYTES[config.dtype] * prod(shape) for shape in shapes.values()]
    return min(sum(sizes), wire.BUCKET_BYTES + max(sizes))
