"""A user's own images: the plain command with a directory, a rule and 200 pictures on the disk.

The model is a tiny random Qwen3-VL: what is looked at is that all is there, equal, and nowhere else.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from columns import timing_free
from tests.test_demo import train
from vision_models import encoded_picture, make_vision_model

ROOT = Path(__file__).parent.parent
RULE = """
def reward(sample):
    (image,) = sample.media
    assert image.read().startswith(b"\\x89PNG")
    return float(sum(sample.response) % 2)
"""
PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    make_vision_model(folder / "model", "qwen3_vl", layers=2)
    (folder / "pictures").mkdir()
    rows = []
    for number in range(200):
        picture = encoded_picture(32 * (1 + number % 3), 32 * (1 + number % 2), seed=number)
        (folder / f"pictures/{number}.png").write_bytes(picture)
        rows.append({"prompt": "<image>7+5=", "images": [f"pictures/{number}.png"], "answer": 12})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rule.py").write_text(RULE)
    return folder


def flags(folder, *more):
    """A step of 16 answers, a second or two."""
    given = [
        "--model",
        folder / "model",
        "--rule",
        folder / "rule.py",
        "--data",
        folder / "rows.jsonl",
    ]
    given += [
        "--prompts-per-step",
        "4",
        "--answers-per-prompt",
        "4",
        "--max-new-tokens",
        "8",
        "--lr",
        "1e-3",
    ]
    return [str(each) for each in (*given, "--max-model-len", "128", *more)]


def rows_of(out):
    return [timing_free(json.loads(line)) for line in (out / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def whole_run(folder):
    train(folder / "whole", *flags(folder, "--steps", "3", "--save-every", "1"), port=34100)
    return rows_of(folder / "whole")


def test_a_run_on_own_pictures(folder, whole_run):
    """Trainer and engine agree before and after pushes; TensorBoard shows pictures; no file holds one."""
    assert [row["step"] for row in whole_run] == [0, 1, 2, 3]
    assert max(row["train/engine_logprob_diff_max"] for row in whole_run[:-1]) < 1e-5
    assert all(row["train/grad_norm"] > 0 for row in whole_run[:-1])
    board, *_ = (folder / "whole/tensorboard").iterdir()
    assert PNG in board.read_bytes() and b"sample 0" in board.read_bytes()
    kept = [path for path in (folder / "whole").rglob("*") if path.is_file() and path != board]
    kept = [path for path in kept if path.name != "timeline.png"]
    assert any("checkpoints" in path.parts for path in kept)
    assert not [path for path in kept if PNG in path.read_bytes()]


def test_a_killed_run_goes_on_exactly(folder, whole_run):
    """kill -9 of all after a save, in the middle of a step."""
    out = folder / "killed"
    command = [
        Path(sys.executable).with_name("torchrun"),
        "--nproc-per-node",
        "2",
        "--master-port",
        "34390",
    ]
    asked = flags(folder, "--steps", "3", "--save-every", "1")
    command += ["run.py", "--out", out, "--port", "34300", *asked]
    how = dict(cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
    with (folder / "killed.log").open("w") as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, **how)
    try:
        until = time.monotonic() + 300
        while not (out / "checkpoints/step_1").is_dir() and process.poll() is None:
            assert time.monotonic() < until, (folder / "killed.log").read_text()
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert len(rows_of(out)) < len(whole_run)
    train(out, *asked, port=34300)
    assert rows_of(out) == whole_run


def test_a_bad_picture_is_one_line(folder):
    other = folder / "other"
    other.mkdir()
    shutil.copy(folder / "rows.jsonl", other)
    with pytest.raises(
        AssertionError, match=r"error: \S+/rows.jsonl:1: \S+pictures/0.png: no such file"
    ):
        given = flags(folder, "--steps", "1")
        given[given.index("--data") + 1] = str(other / "rows.jsonl")
        train(other / "out", *given, port=34100)
