"""The plain command on the demo: real engines and trainers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
NAMES = (
    "reward/mean",
    "reward/unfiltered_mean",
    "reward/zero_std_frac",
    "rollout/response_len_mean",
    "rollout/response_len_max",
    "rollout/truncated_frac",
    "rollout/waves",
    "rollout/aborted",
    "genrm/accept_frac",
    "genrm/failed",
    "genrm/p50_s",
    "genrm/p99_s",
    "genrm/false_positive_frac",
    "train/loss",
    "train/grad_norm",
    "train/entropy",
    "train/kl",
    "train/clip_frac",
    "train/lr",
    "train/engine_logprob_diff_max",
    "balance/max_over_mean",
    "time/step_s",
    "time/serve_s",
    "time/rollout_s",
    "time/genrm_s",
    "time/train_s",
    "time/switch_s",
    "time/sync_s",
    "occupancy/rollout",
    "occupancy/genrm",
    "perf/tokens_per_s",
    "split/rollout_ranks",
)


def train(out, *flags, port):
    """Run the demo; returns what it printed. Leaves no process, whatever happens."""
    command = [
        Path(sys.executable).with_name("torchrun"),
        "--nproc-per-node",
        "2",
        "--master-port",
        str(port + 90),
        "run.py",
    ]
    command += ["--out", out, "--port", str(port), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=900)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed
    commands = {p.pid: " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])}
    left = [
        command
        for command in commands.values()
        if str(out) in command or f"--port {port}" in command
    ]
    assert not left, f"left running: {left}"
    return printed


@pytest.mark.parametrize("mode,port", [("partial", 31000), ("full", 31200)])
def test_the_demo_learns_in_a_few_steps(tmp_path, mode, port):
    """Ten steps: accuracy from at most 0.45 to at least 0.85, and engine and trainer agree.

    Everything that is promised is left behind.
    """
    out = tmp_path / mode
    printed = train(out, "--mode", mode, "--steps", "10", "--eval-every", "10", port=port)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(11))
    assert rows[0]["eval/accuracy"] <= 0.45 and rows[10]["eval/accuracy"] >= 0.85
    for row in rows[:10]:
        assert set(NAMES) <= row.keys()
        assert row["train/engine_logprob_diff_max"] <= 1e-4
    for name in ("config.json", "samples.jsonl", "trace.json", "timeline.png"):
        assert (out / name).stat().st_size > 0 and name in printed
    assert len(list((out / "tensorboard").iterdir())) == 1
    assert "warning" not in printed.lower() and len(printed.splitlines()) < 30
    spans = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {span["pid"] for span in spans} == {0, 1}
    assert {"rollout", "genrm", "train", "sync", "switch"} <= {span["name"] for span in spans}
    roles = {(span["name"], span["pid"]) for span in spans if span["name"] in ("rollout", "genrm")}
    both = {(role, rank) for role in ("rollout", "genrm") for rank in (0, 1)}
    assert roles == ({("rollout", 0), ("genrm", 1)} if mode == "partial" else both)


def test_an_earlier_run_is_moved_aside(tmp_path):
    """The same --out twice: nothing of the first run is lost."""
    out = tmp_path / "again"
    (out / "spans").mkdir(parents=True)
    (out / "metrics.jsonl").write_text('{"step": 0}\n')
    printed = train(
        out, "--steps", "1", "--eval-every", "100", "--prompts-per-step", "2", port=31400
    )
    assert "moved the earlier run" in printed
    assert (tmp_path / "again-1" / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
