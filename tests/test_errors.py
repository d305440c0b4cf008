"""A user's error is one line and status 2; any other ValueError shows the place where it was raised."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import config
from images import reader
from runtime import atomic_files

ROOT = Path(__file__).parent.parent

# run.py, where checking the settings meets an error
PROGRAM = """
import sys
import run
from config import UserError

def check_settings(*arguments):
    {}

run.check_settings = check_settings
run.main([])
"""


def ended(code):
    """How a process of run.py ends whose settings are checked by this code."""
    command = [sys.executable, "-c", PROGRAM.format(code)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)


def test_a_users_error_is_one_line():
    end = ended("raise UserError('--steps 0: at least 1 is needed')")
    assert (end.returncode, end.stderr) == (2, "error: --steps 0: at least 1 is needed\n")


def test_any_other_value_error_shows_its_place():
    """A broken invariant is no user's error, though zip(strict=True) raises a ValueError, too."""
    end = ended("list(zip([1], [], strict=True))")
    assert end.returncode not in (0, 2) and "error: zip()" not in end.stderr
    assert "in check_settings" in end.stderr and "ValueError: zip() argument 2" in end.stderr


@pytest.mark.parametrize("text", ["{", '"\udcff"'], ids=["cut off", "not UTF-8"])
def test_a_models_damaged_config_is_a_users_error(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    for setting in ("", "--critic"):
        where = f"{setting} {tmp_path}".strip()
        with pytest.raises(config.UserError, match=f"^{where}: config.json is not valid JSON"):
            reader.read_model_config(tmp_path, setting)


def test_a_damaged_record_of_a_run_is_a_users_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step" 1}\n{"st')
    with pytest.raises(config.UserError, match=r"metrics\.jsonl:2: not valid JSON"):
        list(atomic_files.complete_rows(path))
