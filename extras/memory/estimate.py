"""Estimates models' memory: bytes per part on a rank, a device's peaks, and settings that fit."""

import re
from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod
from typing import NamedTuple

from algorithms import algorithm_of
from config import AS_FITS, Config
from engines.server import engine_context, kv_tokens
from engines.wire import BUCKET_BYTES
from inputs.hf_directory import FAMILIES, checkpoint_shapes, has_weights, sees
from runtime.devices import FULL
from scheduling.layout import Placement, Shape
from scheduling.measured import ROLES, Split
from scheduling.pipeline import schedule_of

BYTES = {"float32": 4, "bfloat16": 2}
# bytes that a layer without recomputation keeps per token and hidden, key-value or feed-forward column,
# measured on a CPU (tests/extras/test_memory.py); on an H100 fused kernels keep less (docs/gpu.md)
KEPT = {("cpu", "float32"): (32, 12, 20), ("cpu", "bfloat16"): (28, 6, 10)}
KEPT |= {("cuda", "float32"): (40, 12, 20), ("cuda", "bfloat16"): (16, 6, 6)}
ACTIVATIONS = 2_000_000_000  # for CPUs, where a larger micro-batch isn't faster

# each process on a GPU, asleep or not: context, kernels, CUDA graphs, NCCL's buffers; an estimate
RESIDENT = 2_500_000_000
CONTEXT = 500_000_000  # an engine's other ranks, on their lead's device, where they read pushes

Shapes = dict[str, list[int]]  # tensor name in the model's directory -> shape
Parts = dict[str, float]  # bytes


class Model(NamedTuple):
    """A model's memory on each of its ranks; for engines, on each rank that leads one."""

    ranks: tuple[int, ...]
    parts: Parts

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@cache
def shapes_of(model_dir: str) -> Shapes:
    """Return the shapes of a directory's tensors, by its config.json if it has no weights yet."""
    if has_weights(model_dir):
        return checkpoint_shapes(model_dir)
    from training.model import OUTPUT, read_hf_config, tensor_shapes  # Megatron takes seconds

    hf = read_hf_config(model_dir, learns=False)
    shapes = tensor_shapes(hf)
    writes = hf["whole"].architectures == [FAMILIES[hf["model_type"]].architecture]
    if hf["tie_word_embeddings"] or not writes:
        del shapes[OUTPUT]
    return shapes


def trainers_of(config: Config, placement: Placement) -> dict[str, Model]:
    """Return each trainer's memory while it learns, and the reference's, which has only weights."""
    if config.evaluates:
        return {}
    algorithm = algorithm_of(config)
    policy = shapes_of(config.model)
    parts = trainer_parts(policy, config, placement.actor, config.lora)
    models = {"actor": Model(placement.actor.ranks, parts)}
    for name in algorithm.critics:
        shapes = shapes_of(config.critic or config.model)
        parts = trainer_parts(shapes, config, placement.critic) | {"loss": 0}
        models[f"{name} critic"] = Model(placement.critic.ranks, parts)
    if algorithm.kl_coef and not placement.actor_is_reference(config):
        name = "teacher" if config.teacher else "reference"
        shapes = shapes_of(config.teacher or config.model)
        parts = trainer_parts(shapes, config, placement.reference)
        models[name] = Model(placement.reference.ranks, {"weights": parts["weights"]})
    return models


def engines_of(config: Config, placement: Placement, splits: list[Split]) -> dict[str, Model]:
    """Return the least that an awake engine needs on each of its ranks. With CUDA, KV caches take more."""
    models = {}
    for role, paths in (("rollout", [config.model]), ("genrm", config.judge_models)):
        # there are none when learning from examples
        leads = sorted({rank for split in splits for rank in placement.leads(role, split)})
        for number, path in enumerate(paths if leads else ()):
            parts = engine_parts(path, config, vars(config)[f"{role}_tp"])
            models[f"{role} {path}"] = Model(tuple(leads[number :: len(paths)]), parts)
    return models


def engine_parts(path: str, config: Config, tp: int) -> Parts:
    """Return one rank's part of an engine. A token has one key or value per row of k_proj and v_proj."""
    shapes = shapes_of(path)
    kv = ("k_proj.weight", "v_proj.weight")
    rows = sum(shape[0] for name, shape in shapes.items() if name.endswith(kv))
    tokens = kv_tokens(engine_context(path, config), config)
    counts = {"weights": sum(map(prod, shapes.values())), "KV cache": tokens * rows}
    return {name: count * BYTES[config.dtype] // tp for name, count in counts.items()}


def trainer_parts(shapes: Shapes, config: Config, shape: Shape, lora: int = 0) -> Parts:
    """Return one rank's part of a trainer, as if parallelism split all tensors evenly. lora: LoRA's rank."""
    from training.lm_head import CHUNK_BYTES

    config = shape.sized(config)
    size = BYTES[config.dtype]
    count = sum(map(prod, shapes.values())) // (config.tp * config.pp)
    # sharded, in float32: AdamW's moments, and a copy of the weights if they are bfloat16
    states = (8 if config.dtype == "float32" else 12) * count // shape.dp
    vocabulary, hidden = embedding(shapes)
    head = vocabulary * hidden * size // config.tp
    chunk = min(CHUNK_BYTES, 4 * config.max_tokens_per_micro_batch * vocabulary // config.tp)
    loss = 2 * chunk + 2 * head  # copies of a chunk's logits, gradients of the head
    parts = {"weights": count * size, "gradients": 4 * count, "optimizer": states}
    if lora:
        from extras.lora import memory_of

        parts |= memory_of(shapes, lora, config, shape.dp)
        loss = 2 * chunk
    kept = activations(shapes, config, config.max_tokens_per_micro_batch)
    return parts | {"activations": kept, "loss": loss}


def activations(shapes: Shapes, config: Config, tokens: int) -> int:
    """Return the bytes that micro-batches of `tokens` tokens keep on the first stage, without a tower's."""
    keys = [shape[0] for name, shape in shapes.items() if name.endswith(".k_proj.weight")]
    feed_forward = [n for name, (n, *_) in shapes.items() if re.search("layers.*gate_proj", name)]
    layers = len(keys) // config.pp  # per stage
    widths = (embedding(shapes)[1], keys[0], feed_forward[0])
    whole = config.tp if config.sp else 1  # without sp, hidden columns aren't all split
    cuts = (whole, config.tp, config.tp)
    parts = zip(KEPT[config.device, config.dtype], widths, cuts, strict=True)
    kept = sum(size * width // cut for size, width, cut in parts)
    again = config.recomputed(layers)
    inputs = again * BYTES[config.dtype] * widths[0] // whole
    # the first stage holds `pp` micro-batches, and all of a layer while that is recomputed
    everything = config.pp * (inputs + (layers - again) * kept) + min(again, 1) * kept
    return everything * tokens


def embedding(shapes: Shapes) -> list[int]:
    """Return the shape [vocabulary, hidden]; the tensor's prefix depends on the family."""
    return next(shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight"))


def with_micro_batch(config: Config) -> Config:
    """On a CPU, lower --max-tokens-per-micro-batch to what fits in ACTIVATIONS, but not below one sample."""
    if config.device == "cuda":
        return config
    fitting = ACTIVATIONS // activations(shapes_of(config.model), config, tokens=1)
    tokens = 1 << fitting.bit_length() - 1  # a power of two
    if config.command == "rl":
        tokens = max(tokens, engine_context(config.model, config), config.max_new_tokens + 1)
    tokens = min(tokens, config.max_tokens_per_micro_batch)
    return replace(config, max_tokens_per_micro_batch=tokens)


def with_recompute(
    config: Config, placement: Placement, splits: list[Split], device: float
) -> Config:
    """Replace --recompute -1: recompute as few layers as fit in `device` bytes, then as few logits chunks.

    Models with vision recompute all layers, because their tower's memory isn't counted.
    """
    from training.lm_head import CHUNK_BYTES

    if config.recompute != AS_FITS or not trainers_of(config, placement):
        return config

    def room(layers: int) -> float:
        peaks = peaks_of(replace(config, recompute=layers), placement, splits, device)
        return FULL * device - max(peaks[name] for name in peaks if name.startswith("training"))

    shapes = shapes_of(config.model)
    most = sum(name.endswith(".k_proj.weight") for name in shapes)
    if sees(config.model):
        return replace(config, recompute=most)
    layers = bisect_left(range(most), 0, key=room)
    logits = 4 * config.max_tokens_per_micro_batch * embedding(shapes)[0] // placement.actor.tp
    chunks = min(max(0, room(layers)), logits) // CHUNK_BYTES
    return replace(config, recompute=layers, kept_chunks=int(chunks))


def peaks_of(config: Config, placement: Placement, splits: list[Split], device: float) -> Parts:
    """Return a step's memory peaks on a device of `device` bytes, in order; all other models sleep then."""
    trainers = trainers_of(config, placement)
    engines = engines_of(config, placement, splits)
    peaks = {}
    engine_bytes = config.mem_fraction * device
    for name, model in engines.items():  # above engine_bytes it doesn't start
        needed = model.total
        fits = needed <= engine_bytes
        peaks[f"serving {name}"] = engine_bytes if fits else needed / config.mem_fraction
    if trainers:
        actor = trainers["actor"].parts
        states = actor["weights"] + actor["optimizer"] + actor.get("adapters", 0)
        for name in {"reference", "teacher"} & trainers.keys():
            if {*placement.reference.ranks} & {*placement.actor.ranks}:
                held = states + actor["gradients"] + actor["loss"]
                peaks[f"the {name}'s pass"] = held + trainers[name].total
        learners = {name: model for name, model in trainers.items() if "loss" in model.parts}
        needs = {f"training the {name}": model.total for name, model in learners.items()}
        fuses = schedule_of(config).fuses  # then all are awake, with their own micro-batches
        peaks |= {"training all models": sum(needs.values())} if fuses else needs
        if engines:
            # the bucket, and what is gathered or summed for it
            copies = 2 if placement.actor.copy_size > 1 or config.lora else 1
            rollout = next(iter(engines.values())).parts["weights"]
            weights = 0 if placement.is_apart else rollout
            peaks["the push"] = states + weights + copies * bucket_bytes(config)
            peaks["the push"] += actor.get("sum", 0)
    processes = Counter()  # engines on each rank's device; they take turns
    for role in ROLES:
        processes.update({rank for split in splits for rank in placement.ranks(role, split)})
    asleep = RESIDENT * (1 + max(processes.values(), default=0)) + CONTEXT * (config.rollout_tp - 1)
    return {name: needed + asleep for name, needed in peaks.items()}


def bucket_bytes(config: Config) -> int:
    """Return the most bytes of weights in transit to an engine: a bucket, including its last tensor."""
    shapes = shapes_of(config.model)
    sizes = [BYTES[config.dtype] * prod(shape) for shape in shapes.values()]
    return min(sum(sizes), BUCKET_BYTES + max(sizes))
