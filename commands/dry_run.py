"""Before a run. `--dry-run`: who would run where, in how much memory; `check`: what is here, what is free."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
import sys
import textwrap
from importlib.metadata import distributions
from math import gcd, prod
from pathlib import Path

import psutil

from algorithms import algorithm_of
from commands.memory import PROCESS, SERVER, bucket_bytes, embedding, memory, read_model
from config import Config, as_text, dashed, why_unusable
from placement import Plan, make_plans
from reporting.describe import describe
from runtime import devices, rendezvous, supported
from scheduling import mapping
from scheduling.costs import Device, Model

# data sheet; 8 a machine share 8 x 200 Gbit/s of network, and a host that gives each 20 GB/s: assumptions
A100 = Device(312e12, 80e9, 2.04e12, 25e9, 20e9, 300e9)
END = "nothing was started"
DISK_MB, SHARED_MB = 1000, 16  # of what a run leaves; besides weights on their way, see `pushed`
NCCL_MB = 128  # of shared memory, for each rank with CUDA; an estimate
PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "safetensors", "aiohttp", "psutil")


def dry_run(config: Config, plans: list[Plan], ranks: int, maps: bool = False) -> None:
    """Print the resolved run on rank 0. Raises UserError for what can't run, as the run would."""
    from training import model

    rendezvous.interface_of(config.host)
    hf = model.check_models(config)
    lines = device_map(config, plans, ranks)
    lines += [*memory(config, plans, ranks), *(placements(config, ranks, hf) if maps else [])]
    values = dataclasses.asdict(config).items()
    text = "  ".join(f"{dashed(name)} {as_text(value)}" for name, value in values)
    settings = textwrap.wrap(text, 106, break_on_hyphens=False)
    if os.environ.get("RANK", "0") == "0":
        lines = [describe(config, plans, ranks), "  all settings:", *settings, *lines, END]
        print(*lines, sep="\n", flush=True)


def device_map(config: Config, plans: list[Plan], ranks: int) -> list[str]:
    """A line a rank: its part of the actor, and the servers that it owns in any of the plans."""
    others = ", ".join(str(plan.split) for plan in plans[1:])
    lines = [f"  may move to {others}"] if others else []
    for rank in range(ranks):
        place = ", ".join(f"{kind} {number}" for kind, number in grid(rank, config, ranks).items())
        lines.append(f"  rank {rank}: actor {place}")
        for offset, role in enumerate(("rollout", "genrm")):
            if any(rank in plan.leads(role) for plan in plans):
                lines[-1] += f"; {role} on port {config.port + 2 * rank + offset}"
    return lines


def placements(config: Config, ranks: int, hf: dict) -> list[str]:
    """--map: HybridFlow's search for the run's models, on devices as a data sheet has them."""
    from torch import cuda

    memory = cuda.get_device_properties(0).total_memory if cuda.is_available() else A100.memory
    answer, count = config.max_new_tokens, config.prompts_per_step * config.answers_per_prompt
    prompt = min(answer, config.max_tokens_per_micro_batch - answer)
    task = mapping.Task(count, prompt, answer, prompt + answer, config.updates_per_step)
    speeds = mapping.Speeds(A100._replace(memory=memory))
    found = mapping.search(models_by_role(config, hf), ranks, task, speeds)
    what = f"{ranks} devices of {memory / 1e9:.0f} GB, as fast as an A100's data sheet says (an assumption)"
    lines = [f"  HybridFlow's mapping by closed forms, for {what}:"]
    lines += [
        f"    a step has {count} sequences of {prompt} + {answer} tokens; judges only read them"
    ]
    lines += [
        "    sizes are stages-shards-copies, of the actor also ranks of an engine; | parts the devices"
    ]
    indents = dict(initial_indent=4 * " ", subsequent_indent=8 * " ", break_on_hyphens=False)
    for each in found:
        lines += textwrap.wrap(mapping.as_text(each), 106, **indents)
    run = "here every model trains on all ranks: only a line without | can be run: --mode full"
    lines.append(f"    {run if found else 'nothing fits'}")
    for sizes in (each.choices[0].sizes["actor"] for each in found if len(each.choices) == 1):
        lines[-1] += f" --pp {sizes.pp} --tp {sizes.tp} --rollout-tp {sizes.parts}"
    return lines


def models_by_role(config: Config, hf: dict) -> dict[str, Model]:
    """What takes part in a step, as closed forms see it; a judge reads, whether it writes or not."""
    from training.model import SPLIT_BY_TP

    algorithm, models = algorithm_of(config), {}
    paths = dict.fromkeys(["actor", *["reference"] * bool(algorithm.kl_coef)], config.model)
    paths |= {f"{name} critic": config.critic or config.model for name in algorithm.critics}
    cuts = gcd(*(hf[name] for name in SPLIT_BY_TP))
    judges = {f"judge {n}": path for n, path in enumerate(config.judge_models, 1)}
    for role, path in (paths | judges).items():
        shapes, _ = read_model(path, config)
        keys = [shape[0] for name, shape in shapes.items() if name.endswith("k_proj.weight")]
        params, hidden = sum(map(prod, shapes.values())), embedding(shapes)[1]
        models[role] = Model(params, len(keys), hidden, keys[0], cuts=cuts * (role in paths))
    return models


def grid(rank: int, config: Config, ranks: int) -> dict[str, int]:
    """Where a rank stands in the actor, in Megatron's order: tensor-parallel ranks are neighbours."""
    rest, tp = divmod(rank, config.tp)
    rest, cp = divmod(rest, config.cp)
    pp, dp = divmod(rest, ranks // (config.tp * config.cp * config.pp))
    return {"dp": dp, "tp": tp, "pp": pp, "cp": cp}


def check(config: Config) -> int:
    """Print what is installed and what is free, with ! before what a run would miss. Returns a status."""
    from torch import cuda

    out, count = Path(config.out).absolute(), cuda.device_count() if config.device == "cuda" else 0
    ranks = int(os.environ.get("WORLD_SIZE", count or 2))
    ports = range(config.port, config.port + 2 * ranks)
    connections = psutil.net_connections("tcp")
    listening = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    taken = sorted(listening & {*ports})
    state = f": {as_text(taken)} taken, choose another --port" if taken else " are free"
    folder = next(path for path in (out, *out.parents) if path.exists())
    python, libc = sys.version.split()[0], " ".join(platform.libc_ver())
    reason = supported.lacks()
    rows = [("Python, libc", reason or f"{python}, {libc}", not reason), *packages()]
    can_read = all(is_good for *_, is_good in rows)  # the shapes of a model's tensors
    shared = SHARED_MB + (pushed(config, ranks) / 1e6 if can_read else 0)
    memory_mb = PROCESS / 1e6
    if config.device == "cuda":
        shared, memory_mb = NCCL_MB * ranks, (PROCESS + 2 * SERVER) / 1e6
    rows += graphics(config)
    hint = f" in /dev/shm; {shared:.0f} MB are needed (docker run --shm-size)"
    space = (
        ("disk", shutil.disk_usage(folder).free, DISK_MB, f" in {folder}"),
        ("memory", psutil.virtual_memory().available, memory_mb * ranks, ""),
        ("shared memory", shutil.disk_usage("/dev/shm").free, shared, hint),
    )
    rows.append(("ports", f"{ports[0]}-{ports[-1]} on {config.host}{state}", not taken))
    for name, free, least, where in space:
        rows.append((name, f"{free / 1e9:.1f} GB free{where}", free >= least * 1e6))
    for name, text, is_good in rows:
        print(f"{' ' if is_good else '!'} {name:14} {text}")
    missing = [name for name, _, is_good in rows if not is_good]
    print(f"missing: {', '.join(missing)}" if missing else f"a run of {ranks} ranks can start")
    return int(bool(missing))


def pushed(config: Config, ranks: int) -> int:
    """Bytes of weights on their way through /dev/shm at once, to all engines."""
    engines = max(len(plan.leads("rollout")) for plan in make_plans(config, ranks))
    return bucket_bytes(config) * engines


def packages() -> list[tuple[str, str, bool]]:
    """Each beside its pin, for the adapters in cpu/ are made for those; and the GPUs."""
    requirements = Path(__file__).parents[1].joinpath("requirements.txt").read_text()
    found, rows = {package.name: package.version for package in distributions()}, []
    for name, pin in re.findall(r"^([\w-]+)([=>].+)$", requirements, re.MULTILINE):
        if name in PACKAGES:
            version = found.get(name, "not installed")
            rows.append((name, f"{version} (pinned: {pin})", name in found))
    if "torch" in found:
        from torch import cuda

        # it counts what torch can't use, too
        count = cuda.device_count() if cuda.is_available() else 0
        names = [cuda.get_device_name(number) for number in range(count)]
        rows.append(("accelerator", ", ".join(names) or f"none, but {os.cpu_count()} cores", True))
    return rows


def graphics(config: Config) -> list[tuple[str, str, bool]]:
    """The rows of a run on GPUs: whether torch can use them, their mode, what compiles kernels."""
    if config.device == "cpu":
        return []
    from torch import cuda

    modes = sorted({*devices.compute_modes()})
    reason = why_unusable()
    is_there = cuda.is_available()
    rows = [("GPU", reason or ("torch can use it" if is_there else "there is none"), is_there)]
    rows.append(("compute mode", as_text(modes) or "unknown", "Exclusive_Process" not in modes))
    for tool in devices.tools(config):
        rows.append((tool.name, "there" if tool.is_there else tool.install, tool.is_there))
    return rows
