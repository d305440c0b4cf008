"""Doors: where the ranks of a run meet, and who else could come in. Loopback only, unless the settings name another address.

The ranks unpickle what other ranks send them, so nobody else may be one. Servers have a key besides (see server.py).
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import tempfile
from pathlib import Path

import psutil


def meeting_point(host: str) -> dict:
    """Where the ranks find each other, as init_process_group takes it; they then connect between addresses of `host` alone.

    A file that nobody else may read. Not torchrun's own store: that listens on every interface, and who writes to it can have the ranks
    connect to him. Ranks of several machines have no other, so don't name a `host` in a network that strangers are in.
    Raises ValueError when `host` isn't an address of this machine, or can't serve for several machines.
    """
    import torch.distributed as dist

    interface = interface_of(host)
    os.environ |= {name: os.environ.get(name, interface) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_loopback = ipaddress.ip_address(host).is_loopback
    if is_loopback and is_local():
        return {"store": dist.FileStore(str(private_folder() / "store"), size), "rank": rank, "world_size": size}
    if is_loopback:
        raise ValueError(f"--host {host}: ranks of several machines can't meet there; name an address of each machine")
    return {}


def is_local() -> bool:
    """Whether all ranks of the run are on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def interface_of(host: str) -> str:
    """The network interface that has this address. Raises ValueError if none of this machine has."""
    addresses = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    if host not in addresses:
        raise ValueError(f"--host {host} is not an address of this machine; it has {', '.join(sorted(addresses))}")
    return addresses[host]


def private_folder() -> Path:
    """The run's own folder, which nobody else may enter. Raises ValueError if somebody else made it first."""
    folder = folder_of_the_launcher()
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise ValueError(f"{folder} is open to others, and the ranks of this run would meet there: remove it")
    return folder


def folder_of_the_launcher() -> Path:
    """The same for all ranks that one launcher started, another one after a restart."""
    launcher, attempt = os.getppid(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    born = Path(f"/proc/{launcher}/stat").read_text().rsplit(")", 1)[1].split()[19]  # in clock ticks since the machine started
    return Path(tempfile.gettempdir(), f"nanoyatt-{launcher}-{born}-{attempt}")


def close() -> None:
    """Remove the run's own folder: nobody looks for anybody any more."""
    shutil.rmtree(folder_of_the_launcher(), ignore_errors=True)
