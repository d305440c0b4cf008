"""Learning curves of every algorithm on the demo: through the plain command, one run after another.

    python bench/algorithms.py                             the table below, seeds 0 1 2, 60 steps ->
    docs/algorithms.png and a table python bench/algorithms.py --only ppo gspo --seeds 0   some of its rows
    python bench/algorithms.py --beyond                    ppo, where a third of the prompts is beyond the
    policy: a table python bench/algorithms.py --safe                      safe_rlhf with and without its
    multiplier, 150 steps -> docs/safe_rlhf.png

A run that is complete under runs/algorithms is not repeated; delete its folder to have it again. One that was
cut off is gone on with.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parent.parent))

from launch import ROOT, TORCHRUN, end_with_us, run_to_its_end

from recipes.addition import task

PLACE = ROOT / "runs" / "algorithms"
TARGET = 0.9  # accuracy, of which the table says when it was reached
# What an algorithm needs other than the demo's settings; each row is a run for every seed. No cispo: with one
# update a step its weights are all 1, and its run is grpo's to the last digit.
NEAR = ("--clip-low", "3e-4", "--clip-high", "4e-4")  # of GSPO's paper: the ratio of a whole answer
CRITIC = ("--critic-warmup", "2")
RUNS = {
    "grpo": ("grpo",),
    "grpo, full": ("grpo", "--mode", "full"),
    "dr_grpo": ("dr_grpo",),
    "rloo": ("rloo",),
    "reinforce++": ("reinforce++",),
    "remax": ("remax",),
    "gspo": ("gspo", *NEAR),
    "ppo": ("ppo", *CRITIC),
    "ppo, full": ("ppo", *CRITIC, "--mode", "full"),
}
# The cost of an answer is its length over 72 tokens; without a limit it comes to about 0.5. Answers have to
# get shorter where that costs the least reward. The KL keeps the start's habit of short answers alive, so
# that the policy can follow the multiplier, which begins high: a constraint is easier kept than won back from
# a policy that has forgotten the alternative.
SAFE = ("safe_rlhf", *CRITIC, "--cost-rule", "length:72", "--cost-limit", "0.45", "--kl-coef", "0.1", "--kl-in", "reward")
SAFE += ("--kl-estimator", "k1")
SAFE_RUNS = {"with the multiplier": (*SAFE, "--lagrange-init", "1.3"), "without": (*SAFE, "--lagrange-init", "0")}
STEPS, SAFE_STEPS = 60, 150


def run(name: str, settings: tuple[str, ...], seed: int, steps: int) -> list[dict]:
    """The rows of a run's metrics.jsonl, made if they aren't there."""
    out = PLACE / f"{name.replace(', ', '-').replace(' ', '-')}-seed{seed}"
    path = out / "metrics.jsonl"
    if not path.exists() or json.loads(path.read_text().splitlines()[-1]).get("step") != steps:
        out.parent.mkdir(parents=True, exist_ok=True)
        command = [TORCHRUN, "--nproc-per-node", 2, "--master-port", 29690, "run.py", "--algorithm", *settings]
        run_to_its_end([*command, "--seed", seed, "--steps", steps, "--out", out], out.with_suffix(".log"))
        print(f"{name}, seed {seed}: done", flush=True)
    return [json.loads(line) for line in path.open()]


def beyond(seed: int) -> tuple[str, ...]:
    """Settings for prompts of which every third is beyond the policy: sums of 8 or 9 digits, too long to show within an answer."""
    run("ppo", RUNS["ppo"], seed, STEPS)  # whose models they are for
    made = json.loads((PLACE / f"ppo-seed{seed}" / "config.json").read_text())
    path, rng = PLACE / "beyond.jsonl", random.Random("beyond")
    with path.open("w") as file:
        for number in range(4096):
            digits = rng.choice((8, 9))
            beyond = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in "ab")  # drawn only if it is taken
            a, b = task.training_problem(rng) if number % 3 else beyond
            file.write(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n")
    return ("--data", str(path), "--model", made["model"], "--judge", *made["judge"], "--judge-format", "addition")


def curve(rows: list[dict], column: str) -> dict[int, float]:
    """A column over steps, where it was measured."""
    return {row["step"]: row[column] for row in rows if column in row}


def spread(values: list[float], digits: int = 3) -> str:
    """Median, smallest and largest."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def print_table(results: dict[str, list[list[dict]]], steps: int) -> None:
    """One line an algorithm: medians over seeds."""
    at = [step for step in (0, 10, 20, 40) if step < steps] + [steps]
    columns = ["algorithm", *(f"step {step}" for step in at), f"{TARGET:g} after steps", "false positives of the judge, last 10"]
    columns += ["largest logprob difference", "explained variance, last 10", "s/step"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for name, runs in results.items():
        curves = [curve(rows, "eval/accuracy") for rows in runs]
        accuracy = " | ".join(spread([c[step] for c in curves]) for step in at)
        reached = [min((step for step, value in c.items() if value >= TARGET), default=-1) for c in curves]
        when = ", ".join(str(step) if step >= 0 else "never" for step in reached)
        fooled, explained = (
            [list(curve(rows, column).values())[-10:] for rows in runs]
            for column in ("genrm/false_positive_frac", "critic/explained_variance")
        )  # fmt: skip
        difference = max(max(curve(rows, "train/engine_logprob_diff_max").values()) for rows in runs)
        critic = spread([median(values) for values in explained]) if all(explained) else "-"
        seconds = median(median(curve(rows, "time/step_s").values()) for rows in runs)
        print(f"| {name} | {accuracy} | {when} | {spread(list(map(fmean, fooled)))} | {difference:.1e} | {critic} | {seconds:.1f} |")


def print_safe(results: dict[str, list[list[dict]]], limit: float) -> None:
    """One line a kind of run: means of the last ten steps, medians over seeds."""
    columns = ["last 10 steps", "cost", f"over the limit of {limit:g}", "multiplier", "reward", "accuracy at the end"]
    columns += ["explained variance, reward", "cost"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for name, runs in results.items():
        cost, multiplier, reward, explained, cost_explained = (
            [fmean(list(curve(rows, column).values())[-10:]) for rows in runs]
            for column in ("cost/mean", "cost/multiplier", "reward/unfiltered_mean", "critic/explained_variance",
                           "cost_critic/explained_variance")
        )  # fmt: skip
        over = median(cost) / limit - 1
        accuracy = [list(curve(rows, "eval/accuracy").values())[-1] for rows in runs]
        cells = [spread(cost), f"{over:+.1%}", *map(spread, (multiplier, reward, accuracy, explained, cost_explained))]
        print(f"| {name} | {' | '.join(cells)} |")


def draw(panels: dict[str, str], results: dict[str, list[list[dict]]], path: Path, line: tuple[str, float] | None = None) -> None:
    """A panel for each column (title -> column): medians over seeds, a line for each name; `line`: a column's limit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 3.6), constrained_layout=True)
    colors = plt.get_cmap("tab10").colors
    for axis, (title, column) in zip(axes, panels.items(), strict=True):
        for color, (name, runs) in zip(colors, results.items(), strict=False):
            curves = [curve(rows, column) for rows in runs]
            shared = [step for step in curves[0] if all(step in c for c in curves)]
            style = {"color": color, "linestyle": "--" if name.endswith(", full") else "-", "linewidth": 1.4}
            axis.plot(shared, [median(c[step] for c in curves) for step in shared], label=name, **style)
        if line and column == line[0]:
            axis.axhline(line[1], color="black", linestyle=":", linewidth=1)
        axis.set(title=title, xlabel="step")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}, with --safe {SAFE_STEPS}")
    parser.add_argument("--beyond", action="store_true", help="ppo on harder prompts instead of the table")
    parser.add_argument("--safe", action="store_true", help="safe_rlhf instead of the table")
    given = parser.parse_args()
    end_with_us()
    steps = given.steps or (SAFE_STEPS if given.safe else STEPS)
    runs, more = {name: RUNS[name] for name in given.only}, lambda seed: ()
    if given.safe:
        runs = SAFE_RUNS
    elif given.beyond:
        runs, more = {"ppo, a third beyond it": RUNS["ppo"]}, beyond
    results = {name: [] for name in runs}
    for seed in given.seeds:  # seed by seed, so that an early table has all algorithms
        for name, settings in runs.items():
            results[name].append(run(name, (*settings, *more(seed)), seed, steps))
    docs = ROOT / "docs"
    if given.safe:
        limit = float(SAFE[SAFE.index("--cost-limit") + 1])
        print_safe(results, limit)
        panels = {"cost of an answer": "cost/mean", "multiplier": "cost/multiplier", "reward": "reward/unfiltered_mean"}
        draw(panels, results, docs / "safe_rlhf.png", ("cost/mean", limit))
        return
    print_table(results, steps)
    if not given.beyond:
        panels = {"accuracy on held-out problems, greedy": "eval/accuracy", "reward of sampled answers": "reward/unfiltered_mean"}
        draw(panels, results, docs / "algorithms.png")


if __name__ == "__main__":
    main()
