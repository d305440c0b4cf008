"""Rendezvous: how the ranks meet, by default on loopback. They unpickle messages: no stranger may connect."""

import contextlib
import fcntl
import functools
import ipaddress
import os
import shutil
import socket
import tempfile
from datetime import timedelta
from pathlib import Path

import psutil

from runtime import devices
from runtime.devices import Settings
from runtime.errors import UserError
from runtime.world import World

PREFIX = "nanoyatt-"  # a folder for temporary files: this, its owner's process id, and more


def join(config: Settings) -> World:
    """Join the other ranks (collective: all ranks): gloo for controllers and CPU, nccl between GPUs."""
    import torch
    import torch.distributed as dist

    remove_left_folders()
    torch.manual_seed(config.seed)
    cuda = torch.cuda.is_available()
    if not cuda:  # ranks and engines share the cores: more threads would spin against each other
        torch.set_num_threads(1)
    else:
        devices.grow_segments(True)
        # otherwise FlashAttention's backward pass adds in any order
        torch.use_deterministic_algorithms(config.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    timeout = timedelta(seconds=config.timeout_s)
    dist.init_process_group(backend, timeout=timeout, **init_method(config))
    if dist.get_rank() == 0 and not ipaddress.ip_address(config.host).is_loopback:
        print(
            f"--host {config.host}: requests with their key, answers, samples and gradients travel "
            "unencrypted: use a private network",
            flush=True,
        )
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    return World(device, config.timeout_s)


def init_method(config: Settings) -> dict:
    """Return init_process_group's arguments; ranks connect only via --host. Raises UserError if they can't.

    On one machine they meet in a private file, on several in a store on rank 0. torchrun's own store listens
    on every interface, and whoever writes to it can redirect the ranks' connections.
    """
    import torch.distributed as dist

    interface = interface_of(config.host)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without = eth1 would match eth10
    check_interfaces(os.environ["GLOO_SOCKET_IFNAME"])
    # its buffers would stay on the device; SGLang also runs without it
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        store = dist.FileStore(str(private_folder() / "store"), size)
    else:
        store = dist.TCPStore(**store_of_machines(config, rank, size))
    return {"store": store, "rank": rank, "world_size": size}


def store_of_machines(config: Settings, rank: int, size: int) -> dict:
    """Return TCPStore's arguments for several machines: rank 0's --host and the port below --port."""
    host = config.host
    port = config.port - 1
    first = os.environ["MASTER_ADDR"]  # rank 0's address
    if ipaddress.ip_address(host).is_loopback:
        raise UserError(f"--host {host}: several machines can't meet there: name each one's own")
    place = {"host_name": first, "port": port, "world_size": size, "is_master": rank == 0}
    if rank == 0:
        if first != host:
            raise UserError(f"--host {host}: torchrun names {first}: give it --local-addr {host}")
        try:  # a store would listen on every interface by default
            place["master_listen_fd"] = socket.create_server((host, port)).detach()
        except OSError as error:
            raise UserError(f"the ranks' store: {error.strerror}: choose another --port") from None
    return place | {"timeout": timedelta(seconds=config.timeout_s)}


def interface_of(host: str) -> str:
    """Return the network interface that has this address. Raises UserError if this machine has none."""
    found = [(name, entry) for name, entries in psutil.net_if_addrs().items() for entry in entries]
    names = {entry.address: name for name, entry in found if entry.family == socket.AF_INET}
    if host not in names:
        known = ", ".join(sorted(names))
        raise UserError(f"--host {host} is not an IPv4 address of this machine; it has {known}")
    return names[host]


def check_interfaces(names: str) -> None:
    """Raise UserError if GLOO_SOCKET_IFNAME names an interface that this machine lacks."""
    known = psutil.net_if_addrs()
    if not {*names.split(",")} <= known.keys():
        there = ", ".join(known)
        raise UserError(f"GLOO_SOCKET_IFNAME={names} is no interface of this machine: {there}")


def private_folder() -> Path:
    """Return the run's own folder, which nobody else may enter. Raises UserError if somebody else may."""
    folder = launcher_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise UserError(f"{folder} is open to others, and ranks would meet there: remove it")
    hold(folder)
    if not os.access(os.path.expanduser("~"), os.W_OK):  # Matplotlib would make a folder that stays
        os.environ.setdefault("MPLCONFIGDIR", str(folder))
    return folder


def remove_left_folders() -> None:
    """Remove what this user's killed runs left: folders whose owner is gone, and whose lock nobody holds."""
    places = {Path(tempfile.gettempdir()), Path("/tmp")}  # a server's is in /tmp if $TMPDIR is long
    for folder in [folder for place in places for folder in place.glob(f"{PREFIX}*-*")]:
        owner = folder.name.split("-")[1]
        if not owner.isdecimal() or Path("/proc", owner).exists():
            continue
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            descriptor = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def hold(folder: Path) -> int:
    """Share the lock on one of the run's folders until this rank ends; return the descriptor."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


@functools.cache  # the parent changes if the launcher dies
def launcher_folder() -> Path:
    """Return the path that all ranks of one torchrun attempt share; without torchrun, one of our own."""
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # start time in ticks since boot
    born = Path(f"/proc/{launcher}/stat").read_text().rsplit(")", 1)[1].split()[19]
    return Path(tempfile.gettempdir(), f"{PREFIX}{launcher}-{born}-{attempt}")


def close() -> None:
    """Remove the run's own folder if this rank is the last: the others still read there who was late."""
    # even a failed attempt drops the shared lock, so the last rank to try finds no other
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(hold(launcher_folder()), fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(launcher_folder(), ignore_errors=True)
