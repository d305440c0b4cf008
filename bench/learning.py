"""Learning curves of the demo: every seed in every mode, one after another, through the plain command.

    python bench/learning.py                       seeds 0 1 2, modes partial and full -> docs/learning.png and a table
    python bench/learning.py --seeds 0 --modes partial --steps 10

A run that is complete under runs/learning is not repeated; delete its folder to have it again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from launch import ROOT, TORCHRUN, end_with_us, run_to_its_end


def is_complete(out: Path, steps: int) -> bool:
    """Whether the run's last evaluation is there."""
    path = out / "metrics.jsonl"
    return path.exists() and json.loads(path.read_text().splitlines()[-1]).get("step") == steps


def run_once(mode: str, seed: int, steps: int, out: Path) -> None:
    """One run of the plain command."""
    command = [TORCHRUN, "--nproc-per-node", 2, "--master-port", 29650, "run.py", "--mode", mode, "--seed", seed]
    run_to_its_end([*command, "--steps", steps, "--out", out])


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
        "step_s": median(row["time/step_s"] for row in trained),
        "tokens_per_s": median(row["perf/tokens_per_s"] for row in trained),
    }


def print_table(results: dict[tuple[str, int], dict]) -> None:
    """One line a run."""
    steps = sorted(next(iter(results.values()))["accuracy"])
    columns = ["mode", "seed", *(f"step {step}" for step in steps)]
    columns += ["false positives, last 10", "logprob diff max", "s/step, median", "tokens/s, median"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for (mode, seed), run in results.items():
        accuracy = "".join(f" {run['accuracy'][step]:.3f} |" for step in steps)
        print(
            f"| {mode} | {seed} |{accuracy} {run['false_positive_frac']:.3f} | {run['logprob_diff_max']:.1e} | {run['step_s']:.1f} | "
            f"{run['tokens_per_s']:.0f} |"
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
    end_with_us()
    results = {}
    for seed in settings.seeds:
        for mode in settings.modes:
            out = ROOT / "runs" / "learning" / f"{mode}-seed{seed}"
            if not is_complete(out, settings.steps):
                run_once(mode, seed, settings.steps, out)
            results[mode, seed] = measure(out)
    print_table(results)
    draw(results, settings.figure)
    (ROOT / "runs" / "learning" / "results.json").write_text(json.dumps({f"{m}-{s}": r for (m, s), r in results.items()}, indent=1))


if __name__ == "__main__":
    main()
