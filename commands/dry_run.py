"""Checks before a run. `--dry-run`: who would run where, in how much memory; `check`: what is free here."""

import os
import platform
import re
import shutil
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

import psutil

from commands.memory import PROCESS, SERVER, bucket_bytes, memory, with_micro_batch
from config import Config, as_text
from cpu import compiler
from genrm import formats_of
from placement import Plan, make_plans
from reporting.describe import describe
from runtime import devices, rendezvous, supported
from scheduling.layout import Shape

DISK_MB = 1000  # of what a run leaves
SHARED_MB = 16  # besides weights on their way
NCCL_MB = 128  # of shared memory, for each rank with CUDA; an estimate
PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "safetensors", "aiohttp", "psutil")


def dry_run(config: Config, plans: list[Plan], ranks: int) -> None:
    """Print the resolved run on rank 0. Raises UserError for what can't run, as the run would."""
    from training import model

    rendezvous.interface_of(config.host)
    model.check_models(config, plans[0].holders, formats_of(config))
    config = with_micro_batch(config)
    lines = device_map(config, plans, ranks) + memory(config, plans, ranks)
    if os.environ.get("RANK", "0") == "0":
        print(describe(config, plans, ranks), *lines, "nothing was started", sep="\n", flush=True)


def device_map(config: Config, plans: list[Plan], ranks: int) -> list[str]:
    """A line a rank: its part of each model, and the servers that it owns in any of the plans."""
    holders = plans[0].holders
    lines = [f'  --placement "{holders}"']
    if others := [str(plan.split) for plan in plans[1:]]:
        lines.append(f"  may move to {', '.join(others)}")
    for rank in range(ranks):
        parts = []
        for name, shape in holders.shapes.items():
            if rank in shape.ranks:
                place = [f"{kind} {number}" for kind, number in grid(rank, shape).items()]
                parts.append(f"{name} {', '.join(place)}")
        for offset, role in enumerate(("rollout", "genrm")):
            if any(rank in plan.leads(role) for plan in plans):
                parts.append(f"{role} on port {config.port + 2 * rank + offset}")
        lines.append(f"  rank {rank}: {'; '.join(parts)}")
    return lines


def grid(rank: int, shape: Shape) -> dict[str, int]:
    """The place of a rank in a model, in Megatron's order: tensor-parallel ranks are neighbours."""
    rest, tp = divmod(shape.ranks.index(rank), shape.tp)
    rest, cp = divmod(rest, shape.cp)
    pp, dp = divmod(rest, shape.dp)
    return {"dp": dp, "tp": tp, "pp": pp, "cp": cp}


class Row(NamedTuple):
    """A line of `check`; one that isn't good is marked, and a run can't start."""

    name: str
    text: str
    is_good: bool = True


def check(config: Config) -> int:
    """Print what is installed and what is free, with ! before what a run would miss. Returns a status."""
    from torch import cuda

    rendezvous.interface_of(config.host)
    count = cuda.device_count() if config.device == "cuda" else 0
    ranks = int(os.environ.get("WORLD_SIZE", count or 2))
    rows = packages()
    pushed = 0  # bytes of weights on their way through /dev/shm at once, to all engines
    if all(row.is_good for row in rows):  # else nothing reads a model's directory
        from training import model

        plans = make_plans(config, ranks)
        model.check_models(config, plans[0].holders, formats_of(config))
        engines = max(len(plan.leads("rollout")) for plan in plans)
        pushed = bucket_bytes(config) * engines
    rows += graphics(config)
    if config.device == "cpu":
        rows.append(Row("rollout runs", compiler.program_for(config.model, config.dtype)))
    ports = range(config.port, config.port + 2 * ranks)
    connections = psutil.net_connections("tcp")
    listening = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    taken = sorted(listening & {*ports})
    state = f": {as_text(taken)} taken, choose another --port" if taken else " are free"
    rows.append(Row("ports", f"{ports[0]}-{ports[-1]} on {config.host}{state}", not taken))
    rows += space(config, ranks, pushed)
    for row in rows:
        print(f"{' ' if row.is_good else '!'} {row.name:14} {row.text}")
    missing = [row.name for row in rows if not row.is_good]
    print(f"missing: {', '.join(missing)}" if missing else f"a run of {ranks} ranks can start")
    return int(bool(missing))


def space(config: Config, ranks: int, pushed: int) -> list[Row]:
    """The room on the disk, in memory and in shared memory; pushed: bytes of weights on their way."""
    shared = 1e6 * SHARED_MB + pushed
    memory = PROCESS * ranks
    if config.device == "cuda":
        shared = 1e6 * NCCL_MB * ranks
        memory = (PROCESS + 2 * SERVER) * ranks
    out = Path(config.out).absolute()
    folder = next(path for path in (out, *out.parents) if path.exists())
    hint = f" in /dev/shm; {shared / 1e6:.0f} MB are needed (docker run --shm-size)"
    rows = []
    for name, free, needed, where in (
        ("disk", shutil.disk_usage(folder).free, 1e6 * DISK_MB, f" in {folder}"),
        ("memory", psutil.virtual_memory().available, memory, ""),
        ("shared memory", shutil.disk_usage("/dev/shm").free, shared, hint),
    ):
        rows.append(Row(name, f"{free / 1e9:.1f} GB free{where}", free >= needed))
    return rows


def packages() -> list[Row]:
    """The rows of Python, of packages beside their pins (the adapters in cpu/ need those), of the GPUs."""
    python = f"{sys.version.split()[0]}, {' '.join(platform.libc_ver())}"
    reason = supported.lacks()
    rows = [Row("Python, libc", reason or python, not reason)]
    requirements = Path(__file__).parents[1].joinpath("requirements.txt").read_text()
    found = {package.name: package.version for package in distributions()}
    for name, pin in re.findall(r"^([\w-]+)([=>].+)$", requirements, re.MULTILINE):
        if name in PACKAGES:
            version = found.get(name, "not installed")
            rows.append(Row(name, f"{version} (pinned: {pin})", name in found))
    if "torch" in found:
        from torch import cuda

        # it counts what torch can't use, too
        count = cuda.device_count() if cuda.is_available() else 0
        names = [cuda.get_device_name(number) for number in range(count)]
        rows.append(Row("accelerator", ", ".join(names) or f"none, but {os.cpu_count()} cores"))
    return rows


def graphics(config: Config) -> list[Row]:
    """The rows of a run on GPUs: whether torch can use them, their mode, what compiles kernels."""
    if config.device == "cpu":
        return []
    from torch import cuda

    modes = sorted({*devices.compute_modes()})
    is_there = cuda.is_available()
    state = devices.why_unusable() or ("torch can use it" if is_there else "there is none")
    rows = [Row("GPU", state, is_there)]
    rows.append(Row("compute mode", as_text(modes) or "unknown", "Exclusive_Process" not in modes))
    for tool in devices.tools(config):
        rows.append(Row(tool.name, "there" if tool.is_there else tool.install, tool.is_there))
    return rows
