"""The folder of a run: one program at a time writes there; what an earlier one left is moved aside."""

import asyncio
import contextlib
import errno
import fcntl
import os
import re
from pathlib import Path

import pytest
from filelock import SoftFileLease

from config import UserError
from runtime import out_folder
from runtime.out_folder import archive, held


async def hold(out, say=print, during=None):
    async with held(out, say):
        await (during or asyncio.sleep(0))


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setattr(out_folder, "ENDING_S", 0.2)
    monkeypatch.setattr(out_folder, "LEASE_S", 0.4)
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_a_folder_has_one_holder(out):
    """Whatever the folder is called; who comes second hears of the first."""
    (link := out.parent / "link").symlink_to(out)
    who = f"process {os.getpid()} on .* is at work there"
    for name in (out, link, link / ".." / "out"):
        with pytest.raises(UserError, match=f"^--out {name}: {who}"):
            asyncio.run(hold(out, during=hold(name)))
    asyncio.run(hold(out, during=hold(out.parent / "other")))
    assert {path.name for path in out.parent.glob(".*")} == {".out.lock", ".other.lock"}
    (out.parent / ".out.lease").touch()  # as a machine that lost power leaves it
    with pytest.raises(UserError, match=r"a run, unless .*/.out.lease is left of a crash, is at"):
        asyncio.run(hold(out))


@pytest.mark.parametrize("lives", [True, False])
def test_a_holder_on_another_machine(out, monkeypatch, lives):
    """A disk may tell nothing of its lock: one is refused while its file gets new times, then replaced."""
    path, sleep = out.parent / ".out.lease", asyncio.sleep
    with SoftFileLease(path, lease_duration=0.4):
        signed = path.read_text()
    path.write_text(re.sub("(?m)^host=.*$", "host=node7", signed))

    async def sleep_beside_a_holder(seconds):
        if lives:
            os.utime(path)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep_beside_a_holder)
    refused = pytest.raises(UserError, match=f"process {os.getpid()} on node7 is at work there")
    with refused if lives else contextlib.nullcontext():
        asyncio.run(hold(out))


def test_a_lock_that_is_lost_is_told(out):
    """Somebody removed its file, or has taken it because there was no sign of life."""
    said, lease = [], out.parent / ".out.lease"

    async def lose():
        lease.unlink()
        while not said:
            await asyncio.sleep(0.01)

    asyncio.run(hold(out, said.append, lose()))
    assert said == [f"LOCK LOST on --out {out}: another run may write there"]


def test_a_disk_without_locks(out, monkeypatch):
    """One line, and the other file alone tells: who is second is refused."""

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    said = []
    with pytest.raises(UserError, match=" is at work there"):
        asyncio.run(hold(out, said.append, hold(out)))
    assert len(said) == 1 and "is on a disk without locks" in said[0]


@pytest.mark.parametrize("name", ["a file/out", "a file"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, name):
    """In one line; a folder that can is made, with those above it, and nothing stays in it."""
    (tmp_path / "a file").touch()
    with pytest.raises(UserError, match=f"^--out {tmp_path / name} can't be used: .*$"):
        asyncio.run(hold(tmp_path / name))
    asyncio.run(hold(tmp_path / "deep" / "out"))
    assert os.listdir(tmp_path / "deep" / "out") == []


def test_a_folder_that_cannot_be_renamed_has_its_lock_in_it(out, monkeypatch):
    """Of a mount point nothing need be writable beside it."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path == out)
    asyncio.run(hold(out))
    assert [path.name for path in out.parent.rglob(".*")] == [".out.lock"] == os.listdir(out)


def test_behind_a_link_the_folder_itself_is_moved(tmp_path):
    """The next run has to write to the disk that the link names."""
    there, link = tmp_path / "large" / "disk", tmp_path / "out"
    there.mkdir(parents=True)
    (there / "metrics.jsonl").touch()
    link.symlink_to(there)
    archive(link, print)
    assert (tmp_path / "large" / "disk-1" / "metrics.jsonl").exists()
    assert link.readlink() == there and not any(link.iterdir())


@pytest.mark.parametrize("name, why", [(".", "it is the working directory"), ("run", "busy")])
def test_what_cannot_be_moved_aside_is_named(out, monkeypatch, name, why):
    """In one line, and nothing is touched. A mount point is busy."""
    monkeypatch.chdir(out)
    Path(name).mkdir(exist_ok=True)
    Path(name, "eval.json").touch()

    def rename(path, target):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(UserError, match=rf"^--out {name}: .*moved aside \(.*{why}\): name"):
        archive(Path(name), print)
    assert Path(name, "eval.json").exists()
