"""Where the ranks of a run meet: the address, and a folder of their own."""

import fcntl
import os
import stat
import sys
from pathlib import Path

import pytest

from config import parse_config
from runtime import rendezvous
from runtime.errors import UserError
from tests.support.patience import run_process

GONE = 2**22 + 1  # no process has that id
FOLDER = "from runtime import rendezvous; print(rendezvous.private_folder())"


@pytest.mark.parametrize("names", ["bond7", "bond7,eth0", "eth", ""])
def test_an_interface_of_another_machine_is_named(names, monkeypatch):
    """gloo takes full names."""
    monkeypatch.setattr(rendezvous.psutil, "net_if_addrs", lambda: {"lo": [], "eth0": []})
    rendezvous.check_interfaces("lo,eth0")
    line = f"^GLOO_SOCKET_IFNAME={names} is no interface of this machine: lo, eth0$"
    with pytest.raises(UserError, match=line):
        rendezvous.check_interfaces(names)


def test_the_ranks_of_one_launcher_share_a_folder_of_their_own(tmp_path):
    """All its children must have the same, another after a restart; if others may enter, it is refused."""
    environment = os.environ | {"TMPDIR": str(tmp_path), "TORCHELASTIC_RUN_ID": "1"}

    def child(**more):
        ran = run_process(sys.executable, "-c", FOLDER, env=environment | more)
        return Path(ran.stdout.strip()) if ran.returncode == 0 else ran.stderr

    folder = child()
    assert folder.parent == tmp_path and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert child() == folder != child(TORCHELASTIC_RESTART_COUNT="1")
    folder.chmod(0o770)
    assert "is open to others" in child()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert "is open to others" in child()


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """Set the environment of one rank of this many; remove its folder."""

    def of(size, local_size, first="127.0.0.1"):
        monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(tmp_path))
        environment = {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local_size)}
        environment |= {"MASTER_ADDR": first}
        for name, value in (environment | {"GLOO_SOCKET_IFNAME": "lo"}).items():
            monkeypatch.setenv(name, value)
        for name in ("NCCL_SOCKET_IFNAME", "NCCL_NVLS_ENABLE"):
            monkeypatch.delenv(name, raising=False)

    rendezvous.launcher_folder.cache_clear()
    yield of
    rendezvous.launcher_folder.cache_clear()
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_NVLS_ENABLE"):
        os.environ.pop(name, None)


def test_ranks_of_one_machine_meet_in_a_file(ranks, tmp_path, monkeypatch):
    """It is in their own folder, by the address's interface. The last removes it, killed launcher or not."""
    ranks(2, 2)
    found = rendezvous.init_method(parse_config([]))
    assert (found["rank"], found["world_size"], os.environ["NCCL_SOCKET_IFNAME"]) == (0, 2, "=lo")
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    found["store"].set("key", "value")
    [folder] = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "store").is_file()
    assert f"-{os.getpid()}-" in folder.name  # without a launcher
    monkeypatch.setattr(rendezvous.os, "getppid", lambda: 1)
    other = rendezvous.hold.__wrapped__(folder)
    rendezvous.close()
    assert folder.exists()
    os.close(other)
    rendezvous.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    "owner, lock, is_left",
    [(GONE, None, True), (GONE, fcntl.LOCK_SH, False), (os.getpid(), None, False)],
    ids=["gone", "gone but held", "alive"],  # not by number, which each stream of tests has its own
)
def test_only_what_a_killed_run_left_is_removed(tmp_path, monkeypatch, owner, lock, is_left):
    """Its owner is gone, also from this container, where a process has another id: so nobody has its lock."""
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"nanoyatt-{owner}-x"
    folder.mkdir()
    (folder / "socket").touch()
    (tmp_path / "kept").mkdir()
    (tmp_path / f"nanoyatt-{GONE}-link").symlink_to(tmp_path / "kept")
    descriptor = os.open(folder, os.O_RDONLY)
    if lock:
        fcntl.flock(descriptor, lock)
    rendezvous.remove_left_folders()
    os.close(descriptor)
    assert folder.exists() != is_left and (tmp_path / "kept").exists()
    monkeypatch.setattr(os, "getuid", lambda: 1)  # somebody else's
    folder.mkdir(exist_ok=True)
    rendezvous.remove_left_folders()
    assert folder.exists()


SAID = {
    "127.0.0.1": "several machines can't meet there",
    "203.0.113.7": "is not an IPv4 address of this machine; it has [0-9., ]*127.0.0.1",
    "::1": "is not an IPv4 address of this machine; it has [0-9., ]*127.0.0.1",
    "nowhere.example": "is not an IPv4 address of this machine; it has [0-9., ]*127.0.0.1",
}


@pytest.mark.parametrize("host", SAID)
def test_an_address_where_machines_cannot_meet_is_named(ranks, host):
    ranks(4, 2)
    with pytest.raises(UserError, match=f"--host {host}:? {SAID[host]}"):
        rendezvous.init_method(parse_config(["--host", host]))


KEPT = {
    "node7": "torchrun names node7: give it --local-addr 192.0.2.7$",
    "192.0.2.7": r"the ranks' store: .*'192.0.2.7', 29999\)\): choose another --port$",
}


@pytest.mark.parametrize("first", KEPT)
def test_what_keeps_rank_0_from_its_store_is_said(ranks, monkeypatch, first):
    """Others would look for it elsewhere, or the port is taken. (test_machines.py has a store.)"""
    ranks(2, 1, first)
    monkeypatch.setattr(rendezvous, "interface_of", lambda host: "lo")
    with pytest.raises(UserError, match=KEPT[first]):
        rendezvous.init_method(parse_config(["--host", "192.0.2.7"]))
