"""What config.json says of the code that ran."""

import subprocess

from reporting import describe
from tests import ROOT


def test_the_commit_is_that_of_this_code_or_none(tmp_path, monkeypatch):
    """Hooks set GIT_DIR, a copy may lie in somebody's repository, and a slim image lacks git."""
    own = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    who = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    for command in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert describe.commit() == own.stdout.strip()
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.setattr(describe, "__file__", str(tmp_path / "copy" / "reporting" / "describe.py"))
    assert describe.commit() == ""
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe.commit() == ""
