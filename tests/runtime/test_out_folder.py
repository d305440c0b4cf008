"""The folder of a run: one program at a time writes there; an earlier one's files are moved aside."""

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from runtime import out_folder
from runtime.errors import UserError
from runtime.out_folder import archive, held
from tests import ROOT
from tests.support.patience import wait_for


async def hold(out, say=print, during=None):
    async with held(out, say):
        await (during or asyncio.sleep(0))


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setattr(out_folder, "ENDING_S", 0.2)
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_a_folder_has_one_holder(out):
    """There must be one, whatever the folder's name; the second's error must name the first."""
    (link := out.parent / "link").symlink_to(out)
    who = f"process {os.getpid()} on {socket.gethostname()} is at work there: stop it, or"
    for name in (out, link, link / ".." / "out"):
        with pytest.raises(UserError, match=f"^--out {name}: {who}"):
            asyncio.run(hold(out, during=hold(name)))
    asyncio.run(hold(out, during=hold(out.parent / "other")))
    assert {path.name for path in out.parent.rglob("*")} == {"out", "link", "other", "lock"}


def test_a_lock_goes_with_its_process(out):
    """A killed process must release it. A run's files are moved, but not its lock: nobody else gets in."""
    code = "from pathlib import Path; from tests.runtime.test_out_folder import *; stay = asyncio.sleep(9999)"
    code += f"; asyncio.run(hold(Path('{out}'), print, stay))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as holder:
        wait_for(lambda: (out / "lock").exists() and (out / "lock").read_text())
        (out / "metrics.jsonl").touch()
        archive(out, print, {})
        with pytest.raises(UserError, match=f"process {holder.pid} on .* is at work there"):
            asyncio.run(hold(out))
        holder.kill()
    asyncio.run(hold(out))
    assert os.listdir(out) == ["lock"] and os.listdir(f"{out}-1") == ["metrics.jsonl"]


def test_only_a_run_s_folder_is_moved(out):
    """Other files stay; no setting may name what would move."""
    for name in ("hf_models/actor", "checkpoints", "data"):
        (out / name).mkdir(parents=True)
    archive(out, print, {})
    assert not out.with_name("out-1").exists()
    (out / "hf/step_3").mkdir(parents=True)
    data = f"{out}/data"
    for name, value in {"eval_data": data, "rule": ("right", f"{data}:score")}.items():
        flag = name.replace("_", "-")
        with pytest.raises(UserError, match=f"^--{flag} {data} would be moved aside with the"):
            archive(out, print, {"out": str(out), "steps": 3, "model": "", name: value})
    archive(out, print, {"out": str(out), "data": str(out.parent)})
    assert os.listdir(out) == [] and (out.with_name("out-1") / "data").is_dir()


@pytest.mark.parametrize("name", ["a file/out", "a file"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, name):
    """One line must name it; a folder that can be written is made, with its parents."""
    (tmp_path / "a file").touch()
    with pytest.raises(UserError, match=f"^--out {tmp_path / name} can't be used: .*$"):
        asyncio.run(hold(tmp_path / name))
    asyncio.run(hold(tmp_path / "deep" / "out"))
    assert os.listdir(tmp_path / "deep" / "out") == ["lock"]
