"""Checks before a run: --dry-run prints what runs where, --simulate how fast, `check` what is free."""

import os
import platform
import re
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

import psutil

import build
import extras
from config import Config, as_text, parse_config
from engines import server
from genrm import formats_of
from modes import lay_out
from reporting.describe import describe
from rewards import load_rules
from runtime import devices, rendezvous, supported
from runtime.errors import UserError, printable
from scheduling.layout import Placement
from scheduling.measured import ROLES, Split

PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "safetensors", "aiohttp", "psutil")


def command(arguments: list[str], usage: str) -> str | None:
    """Do what the command line asks for instead of a run. Returns None if it asks for a run."""
    if arguments[:1] == ["check"]:
        sys.exit(check(parse_config(arguments[1:], usage)))
    if "--simulate" in arguments:
        return simulate(arguments)
    if "--dry-run" in arguments:
        return read_all(arguments, usage)
    return None


def read_all(arguments: list[str], usage: str) -> str:
    """Read and check everything that a run reads before engines start, and print the run, on rank 0."""
    config = parse_config(arguments, usage)
    placement, splits = build.placed(config)
    if is_first():
        build.check_directories(config, placement)
        if "memory" in extras.EXTRAS:
            from extras.memory.estimate import with_micro_batch

            config = with_micro_batch(config)
        try:
            build.load_inputs(config, load_rules(config), lambda line: print(printable(line)))
        finally:
            rendezvous.close()  # removes the rows' file
        dry_run(config, placement, splits)
    return ""


def is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def dry_run(config: Config, placement: Placement, splits: list[Split]) -> None:
    """Print the resolved run. Raises UserError if --host isn't this machine's."""
    rendezvous.interface_of(config.host)
    lines = device_map(config, placement, splits)
    if "memory" in extras.EXTRAS:
        from extras.memory import check as memory

        lines += memory.table(config, placement, splits)
    words = describe(config, placement, splits[0])
    print(printable("\n".join([words, *lines, "nothing was started"])), flush=True)


def device_map(config: Config, placement: Placement, splits: list[Split]) -> list[str]:
    """Return a line per rank: its part of each model, and the servers that it owns in any of the splits."""
    lines = [f'  --placement "{placement}"']
    if others := list(map(str, splits[1:])):
        lines.append(f"  may move to {', '.join(others)}")
    shapes = {} if config.evaluates else placement.shapes
    for rank in placement.everyone:
        parts = []
        for name, shape in shapes.items():
            if rank in shape.ranks:
                # Megatron's order: tensor-parallel ranks are neighbors
                rest, tp = divmod(shape.ranks.index(rank), shape.tp)
                pp, dp = divmod(rest, shape.dp)
                parts.append(f"{name} dp {dp}, tp {tp}, pp {pp}")
        for role in ROLES:
            if any(rank in placement.leads(role, split) for split in splits):
                parts.append(f"{role} on port {server.port_of(config, rank, role)}")
        lines.append(f"  rank {rank}: {'; '.join(parts)}")
    return lines


def simulate(arguments: list[str]) -> str:
    """Become the process that prints how long the run would take under each plan."""
    if not is_first():
        return ""
    if "--dry-run" not in arguments:
        raise UserError("--simulate needs --dry-run: it starts nothing")
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.execv(sys.executable, [sys.executable, "-m", "reproduce.simulation.plans", *arguments])


class Row(NamedTuple):
    """A line of `check`. If it isn't good, it is marked, and a run can't start."""

    name: str
    text: str
    is_good: bool = True


def check(config: Config) -> int:
    """Print what is installed and what is free, with ! before what a run lacks. Return an exit status."""
    from torch import cuda

    rendezvous.interface_of(config.host)
    count = cuda.device_count() if config.device == "cuda" else 0
    ranks = build.launched("WORLD_SIZE") or count or 2
    rows = packages()
    if all(row.is_good for row in rows):  # otherwise nothing can read a model's directory
        from training import model

        placement, _ = lay_out(config, ranks)
        model.check_models(config, placement, formats_of(config))
    rows += graphics(config)
    if config.device == "cpu" and "fast CPU" in extras.EXTRAS:
        from extras.fast_cpu.decoder import rates_of

        rows.append(Row("rollout runs", rates_of(config.model, config.dtype)))
    ports = range(config.port, server.port_of(config, ranks, "rollout"))
    connections = psutil.net_connections("tcp")
    listening = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    taken = sorted(listening & {*ports})
    state = f": {as_text(taken)} taken, choose another --port" if taken else " are free"
    rows.append(Row("ports", f"{ports[0]}-{ports[-1]} on {config.host}{state}", not taken))
    for row in rows:
        print(printable(f"{' ' if row.is_good else '!'} {row.name:14} {row.text}"))
    missing = [row.name for row in rows if not row.is_good]
    print(f"missing: {', '.join(missing)}" if missing else f"a run of {ranks} ranks can start")
    return int(bool(missing))


def packages() -> list[Row]:
    """Return the rows on Python, packages and their pins (the adapters in cpu/ need these), and GPUs."""
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

        # device_count includes GPUs that torch can't use
        count = cuda.device_count() if cuda.is_available() else 0
        names = [cuda.get_device_name(number) for number in range(count)]
        rows.append(Row("accelerator", ", ".join(names) or f"none, but {os.cpu_count()} cores"))
    return rows


def graphics(config: Config) -> list[Row]:
    """Return the rows of a run on GPUs: if torch can use them, their mode, what compiles kernels."""
    if config.device == "cpu":
        return []
    from torch import cuda

    is_there = cuda.is_available()
    state = "torch can use it" if is_there else "there is none"
    try:
        devices.check_usable()
    except UserError as error:
        state = str(error)
    rows = [Row("GPU", state, is_there)]
    if "GPU tools" not in extras.EXTRAS:
        return rows
    from extras import gpu_tools

    modes = sorted({*gpu_tools.compute_modes()})
    rows.append(Row("compute mode", as_text(modes) or "unknown", "Exclusive_Process" not in modes))
    for tool in gpu_tools.tools(config):
        rows.append(Row(tool.name, tool.found if tool.is_there else tool.install, tool.is_there))
    return rows
