"""Rendezvous: how the ranks meet, on loopback by default. They unpickle what others send: no stranger may."""

from __future__ import annotations

import functools
import ipaddress
import os
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path

import psutil

from config import Config
from runtime.world import World


def join(config: Config) -> World:
    """Join the other ranks (collective): gloo for controllers and CPU, nccl between GPUs."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(config.seed)
    cuda = torch.cuda.is_available()
    if not cuda:
        torch.set_num_threads(1)  # ranks and engines share the cores: more threads spin on each other's
    backend, timeout = "cpu:gloo,cuda:nccl" if cuda else "gloo", timedelta(seconds=config.timeout_s)
    dist.init_process_group(backend, timeout=timeout, **init_method(config.host))
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    return World(device, config.timeout_s, private_folder() if is_local() else None)


def init_method(host: str) -> dict:
    """How init_process_group finds the ranks, which then connect between addresses of `host` alone.

    Through a file that nobody else may read, not torchrun's own store: that listens on every interface, and
    who writes to it can have the ranks connect to him. Ranks of several machines have no other: don't name a
    `host` in a network that strangers are in. Raises ValueError if the ranks can't meet at `host`.
    """
    import torch.distributed as dist

    interface = interface_of(host)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)
    if not ipaddress.ip_address(host).is_loopback:
        return {}
    if not is_local():
        raise ValueError(f"--host {host}: ranks of several machines can't meet there, name one of each")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {"store": dist.FileStore(str(private_folder() / "store"), size), "rank": rank, "world_size": size}


def is_local() -> bool:
    """Whether all ranks of the run are on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def interface_of(host: str) -> str:
    """The network interface that has this address. Raises ValueError if none of this machine has."""
    names = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    if host not in names:
        known = ", ".join(sorted(names))
        raise ValueError(f"--host {host} is not an address of this machine; it has {known}")
    return names[host]


def private_folder() -> Path:
    """The run's own folder, which nobody else may enter. Raises ValueError if somebody else made it first."""
    folder = launcher_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise ValueError(f"{folder} is open to others, and the ranks of this run would meet there: remove it")
    return folder


@functools.cache  # a rank whose launcher died has another parent
def launcher_folder() -> Path:
    """The same for all ranks that one launcher started, another one after a restart."""
    launcher, attempt = os.getppid(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    born = Path(f"/proc/{launcher}/stat").read_text().rsplit(")", 1)[1].split()[19]  # ticks since the boot
    return Path(tempfile.gettempdir(), f"nanoyatt-{launcher}-{born}-{attempt}")


def close() -> None:
    """Remove the run's own folder: nobody looks for anybody any more."""
    shutil.rmtree(launcher_folder(), ignore_errors=True)
