"""Preview: what can be said before a run begins. `--dry-run`: who would run where, and the memory it takes; `check`: what is here.

Neither starts anything. Sizes come from the headers of the models' safetensors files, so they are exact where the text says no "about".
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shutil
import socket
import sys
import textwrap
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path

import algorithms
import placement
from config import Config, as_text, check_batch, dashed
from engines import server
from runtime import rendezvous

BYTES = {"float32": 4, "bfloat16": 2}
PROCESS_MB = 1200  # about, of libraries: each rank, and each server with its children. The demo's 2 and 2 take 4,700 MB on a CPU
PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "safetensors", "aiohttp", "psutil", "tensorboard")
HEAD = "score.weight"  # of a value model
LEAST = {"disk": 1000, "memory": PROCESS_MB, "shared memory": 64}  # MB free; memory: for each rank. Weights are pushed by shared memory

Shapes = dict[str, list[int]]  # of the tensors of a Hugging Face directory, by name


# ---------------------------------------------------------------- --dry-run


def dry_run(config: Config) -> None:
    """Print the resolved run on rank 0. Raises ValueError for what can't run, as the run would."""
    import run

    ranks = int(os.environ.get("WORLD_SIZE", 2))
    plans = check_batch(config, ranks)
    rendezvous.interface_of(config.host)
    model, judges = shapes_of(config)
    if os.environ.get("RANK", "0") == "0":
        lines = [run.describe(config, plans, ranks), *settings(config), *device_map(config, plans, ranks)]
        lines += [*memory(config, model, judges, ranks), "nothing was started"]
        print("\n".join(lines), flush=True)


def settings(config: Config) -> list[str]:
    """All of them."""
    text = "  ".join(f"{dashed(name)} {as_text(value)}" for name, value in dataclasses.asdict(config).items())
    lines = textwrap.wrap(text, 132, break_long_words=False, break_on_hyphens=False)
    return ["  all settings:", *(f"    {line}" for line in lines)]


def shapes_of(config: Config) -> tuple[Shapes, list[Shapes]]:
    """The tensors of the actor and of each judge; the demo's are known before they are made."""
    from training import model

    if not config.model:
        from recipes.addition import warmstart

        shape = warmstart.SHAPE | {"vocab_size": warmstart.RECIPE["vocab"]}
        model.check_sizes(shape, config)
        return qwen3_shapes(shape), [qwen3_shapes(shape)]
    model.check_sizes(model.read_hf_config(config.model), config)
    if config.critic:
        model.check_critic(config)
    return server.checkpoint_shapes(config.model), [server.checkpoint_shapes(judge) for judge in config.judge]


def qwen3_shapes(shape: dict[str, int]) -> Shapes:
    """The tensors of a Qwen3 with tied embeddings, from the sizes of its config.json."""
    hidden, mlp, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    attention = {"q_proj": [queries, hidden], "k_proj": [keys, hidden], "v_proj": [keys, hidden], "o_proj": [hidden, queries]}
    layer = {f"self_attn.{name}": size for name, size in (attention | {"q_norm": [dim], "k_norm": [dim]}).items()}
    layer |= {"mlp.gate_proj": [mlp, hidden], "mlp.up_proj": [mlp, hidden], "mlp.down_proj": [hidden, mlp]}
    layer |= {"input_layernorm": [hidden], "post_attention_layernorm": [hidden]}
    layers = range(shape["num_hidden_layers"])
    shapes = {f"model.layers.{i}.{name}.weight": size for i in layers for name, size in layer.items()}
    return {"model.embed_tokens.weight": [shape["vocab_size"], hidden]} | shapes | {"model.norm.weight": [hidden]}


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the actor's grid."""

    tp: int
    cp: int
    dp: int
    pp: int

    @staticmethod
    def of(rank: int, config, ranks: int) -> Place:
        """Megatron's order: tensor-parallel ranks are neighbours, then context, data and pipeline."""
        dp = ranks // (config.tp * config.cp * config.pp)
        rest, tp = divmod(rank, config.tp)
        rest, cp = divmod(rest, config.cp)
        return Place(tp, cp, rest % dp, rest // dp)


def device_map(config, plans: list[placement.Plan], ranks: int) -> list[str]:
    """A line a rank: its part of the actor, and the servers that it owns."""
    lines = [f"  may move to {', '.join(plan.split for plan in plans[1:])}"] if len(plans) > 1 else []
    for rank in range(ranks):
        place, servers = Place.of(rank, config, ranks), []
        for offset, role in enumerate(("rollout", "genrm")):
            leading = [plan.split for plan in plans if rank in plan.leads(role)]
            if leading and not config.train_only:
                awake = f" in {len(leading)} of {len(plans)} plans" if len(plans) > 1 else ""
                servers.append(f"{role} at {config.host}:{config.port + 2 * rank + offset}{awake}")
        actor = f"actor dp {place.dp}, tp {place.tp}, pp {place.pp}, cp {place.cp}"
        lines.append(f"  rank {rank}: {'; '.join([actor, *servers])}")
    return lines


def critic_shapes(config, model: Shapes) -> Shapes:
    """The tensors of a value model: a policy's, with one row in place of the output layer."""
    shapes = server.checkpoint_shapes(config.critic) if config.critic else model
    body = {name: shape for name, shape in shapes.items() if name not in ("lm_head.weight", "value_head.weight")}
    return body | {HEAD: [1, *shapes["model.norm.weight"]]}


def memory(config, model: Shapes, judges: list[Shapes], ranks: int) -> list[str]:
    """What a rank's part of the actor takes, by pipeline stage, so critics and reference, and what an engine takes."""
    dp = ranks // (config.tp * config.cp * config.pp)
    lines = ["  memory in MB, of a rank's part or of an engine on each of its ranks; activations come on top:"]
    names = () if config.rollout_only else algorithms.get_algorithm(config.algorithm).critics
    trainers = [("actor", model), *((f"{name} critic", critic_shapes(config, model)) for name in names)]
    for (name, shapes), stage in itertools.product(trainers, range(config.pp)):
        at = f", stage {stage} of {config.pp}" if config.pp > 1 else ""
        lines.append(f"    {name}{at}: {as_mb(trainer_bytes(shapes, config, dp, stage))}")
    if config.kl_coef and not config.rollout_only:
        most = max(parameters(model, config.tp, config.pp, stage) for stage in range(config.pp))
        lines.append(f"    reference, in the host's memory: {as_mb({'weights': most * BYTES[config.dtype]})}")
    if not config.train_only:
        names = [f"genrm of {judge}" for judge in config.judge] or ["genrm"] * config.judges  # the demo's judge isn't named
        engines = [("rollout", model, config.rollout_tp)]
        engines += [(name, judge, config.genrm_tp) for name, judge in zip(names, judges, strict=True)]
        lines += [f"    {name}: {as_mb(engine_bytes(shapes, config, tp))}" for name, shapes, tp in engines]
        lines.append(f"    with CUDA the KV cache is cut to what --mem-fraction {config.mem_fraction} of the device leaves")
    return [*lines, f"    libraries: about {PROCESS_MB} for each rank and each server"]


def trainer_bytes(shapes: Shapes, config, dp: int, stage: int) -> dict[str, int]:
    """Bytes of one rank of a pipeline stage. AdamW's two states are fp32 and shared out over data- and context-parallel ranks.

    In bfloat16 it also keeps the weights in fp32. Logits: one copy, of a full micro-batch, which only the last stage has,
    and no critic.
    """
    count = parameters(shapes, config.tp, config.pp, stage)
    states = 8 if config.dtype == "float32" else 12
    parts = {"weights": count * BYTES[config.dtype], "gradients": 4 * count, "optimizer": states * count // (dp * config.cp)}
    if stage == config.pp - 1 and HEAD not in shapes:
        tokens, vocab = config.max_tokens_per_micro_batch // config.cp, shapes["model.embed_tokens.weight"][0]
        parts["logits"] = 4 * tokens * vocab // config.tp
    return parts


def parameters(shapes: Shapes, tp: int, pp: int, stage: int) -> int:
    """Parameters of one rank of a pipeline stage: layers are dealt to the stages, all but norms and value heads is cut by tensor
    parallelism.
    """
    layer_of = {name: int(found[1]) for name in shapes if (found := re.search(r"\.layers\.(\d+)\.", name))}
    a_stage = (1 + max(layer_of.values())) // pp
    is_tied = not {"lm_head.weight", HEAD} & shapes.keys()

    def is_here(name: str) -> bool:
        if name in layer_of:
            return layer_of[name] // a_stage == stage
        is_embedding = "embed_tokens" in name
        return (is_embedding and stage == 0) or ((is_tied or not is_embedding) and stage == pp - 1)  # tied: a copy on the last stage

    return sum(prod(shape) // (1 if "norm" in name or name == HEAD else tp) for name, shape in shapes.items() if is_here(name))


def engine_bytes(shapes: Shapes, config, tp: int) -> dict[str, int]:
    """Bytes of an engine on each of its ranks. A token's keys and values are as many numbers as k_proj and v_proj have rows."""
    per_token = sum(shape[0] for name, shape in shapes.items() if name.endswith(("k_proj.weight", "v_proj.weight")))
    size = BYTES[config.dtype]
    weights = sum(map(prod, shapes.values())) * size // tp
    return {"weights": weights, "KV cache": config.max_total_tokens * per_token * size // tp}


def as_mb(parts: dict[str, int]) -> str:
    """Each part, and all of them."""
    listed = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in parts.items())
    return f"{listed}; together {sum(parts.values()) / 1e6:.1f}"


# ---------------------------------------------------------------- run.py check


def check(config: Config) -> int:
    """Print one screen: what is installed and what is free, with ! before what a run would miss. Returns the exit status."""
    ranks = int(os.environ.get("WORLD_SIZE", 2))
    facts = [*installed(), accelerator(), free_ports(config, ranks), *room(config, ranks)]
    for name, text, is_good in facts:
        print(f"{' ' if is_good else '!'} {name:14} {text}")
    missing = [name for name, _, is_good in facts if not is_good]
    print(f"missing: {', '.join(missing)}" if missing else f"a run of {ranks} ranks can start")
    return int(bool(missing))


Fact = tuple[str, str, bool]  # what, how it is, whether a run can start with it


def installed() -> list[Fact]:
    """Python and the packages, each beside the version that is pinned: the adapters in cpu/ are made for those."""
    pins = dict(re.findall(r"^([\w-]+)(==.+|>=.+)$", Path(__file__).with_name("requirements.txt").read_text(), re.MULTILINE))
    facts = [("Python", sys.version.split()[0], sys.version_info >= (3, 11))]
    for name in PACKAGES:
        try:
            facts.append((name, f"{version(name)} (pinned: {pins[name]})", True))
        except PackageNotFoundError:
            facts.append((name, f"not installed (pinned: {pins[name]})", False))
    return facts


def accelerator() -> Fact:
    """The GPUs that torch sees. None is fine: then the engines run on the CPU."""
    try:
        import torch
    except ImportError:
        return "accelerator", "torch can't be imported", False
    if not torch.cuda.is_available():
        return "accelerator", f"none: the engines run on the CPU ({os.cpu_count()} cores)", True
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return "accelerator", ", ".join(f"{device.name} {device.total_memory >> 30} GB" for device in devices), True


def free_ports(config: Config, ranks: int) -> Fact:
    """The ports that the servers would listen on."""
    wanted, taken = range(config.port, config.port + 2 * ranks), []
    for port in wanted:
        with socket.socket() as probe:
            if probe.connect_ex((config.host, port)) == 0:
                taken.append(port)
    text = f"{wanted[0]}-{wanted[-1]} on {config.host}"
    return "ports", f"{text}: {as_text(tuple(taken))} taken, choose another --port" if taken else f"{text} are free", not taken


def room(config: Config, ranks: int) -> list[Fact]:
    """Disk where the run leaves its files, memory, and shared memory."""
    import psutil

    out = Path(config.out).absolute()
    folder = next(path for path in (out, *out.parents) if path.exists())
    free = {"disk": shutil.disk_usage(folder).free, "memory": psutil.virtual_memory().available}
    free["shared memory"] = shutil.disk_usage("/dev/shm").free
    least = LEAST | {"memory": LEAST["memory"] * ranks}
    where = {"disk": f" in {folder}", "memory": "", "shared memory": " in /dev/shm"}
    return [(name, f"{size / 1e9:.1f} GB free{where[name]}", size >= least[name] * 1e6) for name, size in free.items()]
