"""Learning curves of the demo: every seed in every mode, one after another, through the plain command.

    python bench/learning.py                       seeds 0 1 2, modes partial and full -> docs/learning.png and a table
    python bench/learning.py --seeds 0 --modes partial --steps 10
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_once(mode: str, seed: int, steps: int, out: Path) -> dict:
    """One run in a process group of its own; returns wall seconds and CPU seconds of all its processes."""
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [torchrun, "--nproc-per-node", "2", "--master-port", "29650", "run.py", "--mode", mode, "--seed", str(seed)]
    command += ["--steps", str(steps), "--out", str(out)]
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True)
    try:
        status = process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    if status:
        sys.exit(f"{mode} colocation, seed {seed}: exit status {status}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": time.monotonic() - start, "cpu_s": cpu}


def measure(out: Path) -> dict:
    """What the table shows, from the run's metrics.jsonl."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    trained = [row for row in rows if "train/loss" in row]
    last = trained[-10:]
    return {
        "accuracy": {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row},
        "reward": {row["step"]: row["reward/unfiltered_mean"] for row in trained},
        "false_positive_frac": sum(row["genrm/false_positive_frac"] for row in last) / len(last),
        "logprob_diff_max": max(row["train/engine_logprob_diff_max"] for row in trained),
        "step_s": sum(row["time/step_s"] for row in trained) / len(trained),
        "tokens_per_s": sum(row["perf/tokens_per_s"] for row in trained) / len(trained),
    }


def print_table(results: dict[tuple[str, int], dict]) -> None:
    """One line a run."""
    steps = sorted(next(iter(results.values()))["accuracy"])
    columns = ["mode", "seed", *(f"step {step}" for step in steps)]
    columns += ["false positives, last 10", "logprob diff max", "s/step", "tokens/s", "wall s"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for (mode, seed), run in results.items():
        accuracy = "".join(f" {run['accuracy'][step]:.3f} |" for step in steps)
        print(
            f"| {mode} | {seed} |{accuracy} {run['false_positive_frac']:.3f} | {run['logprob_diff_max']:.1e} | {run['step_s']:.1f} | "
            f"{run['tokens_per_s']:.0f} | {run['wall_s']:.0f} |"
        )


def draw(results: dict[tuple[str, int], dict], path: Path) -> None:
    """Held-out greedy accuracy and the judge's reward over steps, a line per run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = {"partial": "#2a78b8", "full": "#e08a1e"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), constrained_layout=True)
    for (mode, seed), run in results.items():
        style = dict(color=colors[mode], linestyle=("-", "--", ":")[seed % 3], label=f"{mode}, seed {seed}")
        left.plot(run["accuracy"].keys(), run["accuracy"].values(), marker="o", markersize=3, **style)
        right.plot(run["reward"].keys(), run["reward"].values(), linewidth=1, **style)
    left.set(title="accuracy on held-out problems, greedy", xlabel="step", ylim=(0, 1.02))
    right.set(title="reward: the judge's verdict on sampled answers", xlabel="step", ylim=(0, 1.02))
    left.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--modes", nargs="+", default=["partial", "full"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "learning.png")
    settings = parser.parse_args()
    results = {}
    for seed in settings.seeds:
        for mode in settings.modes:
            out = ROOT / "runs" / "learning" / f"{mode}-seed{seed}"
            cost = run_once(mode, seed, settings.steps, out)
            results[mode, seed] = measure(out) | cost
            print_table(results)
    draw(results, settings.figure)
    (ROOT / "runs" / "learning" / "results.json").write_text(json.dumps({f"{m}-{s}": r for (m, s), r in results.items()}, indent=1))


if __name__ == "__main__":
    main()
