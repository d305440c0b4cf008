"""Learning curves of every algorithm on the demo: through the plain command, one run after another.

    python bench/algorithms.py            seeds 0 1 2, 60 steps -> docs/algorithms.png and a table
    python bench/algorithms.py --only ppo gspo --seeds 0      some of its rows
    python bench/algorithms.py --beyond   ppo, where a third of the prompts is beyond the policy: a table
    python bench/algorithms.py --safe     safe_rlhf with and without its multiplier, 150 steps
                                          -> docs/safe_rlhf.png and a table

A run that is complete under runs/algorithms is not repeated; delete its folder to have it again. One that was
cut off is gone on with.
"""

from __future__ import annotations

import json
import random
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parent.parent))

from launch import ROOT, TORCHRUN, end_with_us, run_to_its_end
from tables import picture, print_table, spread

from config import DEMO_MODELS
from recipes.addition.task import training_problem

PLACE, DOCS = ROOT / "runs" / "algorithms", ROOT / "docs"
TARGET = 0.9  # accuracy, of which the table says when it was reached
# What an algorithm needs other than the demo's settings; each row is a run for every seed. No cispo: with one
# update a step its weights are all 1, and its run is grpo's to the last digit.
PPO = ("ppo", "critic_warmup=2")
RUNS = {
    "grpo": ("grpo",),
    "grpo, full": ("grpo", "--mode", "full"),
    "dr_grpo": ("dr_grpo",),
    "rloo": ("rloo",),
    "reinforce++": ("reinforce++",),
    "remax": ("remax",),
    "gspo": ("gspo",),
    "ppo": PPO,
    "ppo, full": (*PPO, "--mode", "full"),
}
# The cost of an answer is its length over 72 tokens; without a limit it comes to about 0.5. Answers have to
# get shorter where that costs the least reward. The KL keeps the start's habit of short answers alive, so
# that the policy can follow the multiplier, which begins high: a constraint is easier kept than won back from
# a policy that has forgotten the alternative.
COST_LIMIT = 0.45
SAFE = ("safe_rlhf", "critic_warmup=2", f"cost_limit={COST_LIMIT}")
SAFE += ("kl_coef=0.1", "kl_in=reward", "kl_estimator=k1")
SAFE_RUNS = {
    "with the multiplier": (*SAFE, "lagrange_init=1.3", "--cost-rule", "length:72"),
    "without": (*SAFE, "lagrange_init=0", "--cost-rule", "length:72"),
}
STEPS, SAFE_STEPS = 60, 150

Row = dict[str, float]  # a step's metrics
Results = dict[str, list[list[Row]]]  # by the run's name, for each seed its rows


# ---------------------------------------------------------------- runs


def run(name: str, settings: tuple[str, ...], seed: int, steps: int) -> list[Row]:
    """The rows of a run's metrics.jsonl, made if they aren't there."""
    out = PLACE / f"{name.replace(', ', '-').replace(' ', '-')}-seed{seed}"
    path = out / "metrics.jsonl"
    if not path.exists() or json.loads(path.read_text().splitlines()[-1]).get("step") != steps:
        out.parent.mkdir(parents=True, exist_ok=True)
        command = [TORCHRUN, "--nproc-per-node", 2, "--master-port", 29690, "run.py"]
        command += ["--algorithm", *settings, "--seed", seed, "--steps", steps, "--out", out]
        run_to_its_end(command, out.with_suffix(".log"))
        print(f"{name}, seed {seed}: done", flush=True)
    return [json.loads(line) for line in path.open()]


def beyond(seed: int) -> tuple[str, ...]:
    """Settings for prompts of which every third is beyond the policy.

    Sums of 8 or 9 digits, too long to show within an answer.
    """
    path, rng = PLACE / "beyond.jsonl", random.Random("beyond")
    with path.open("w") as file:
        for number in range(4096):
            digits = rng.choice((8, 9))
            if number % 3:
                a, b = training_problem(rng)
            else:
                a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in "ab")
            file.write(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n")
    actor, judge = (str(DEMO_MODELS / "written" / name) for name in ("actor", "judge"))
    models = ("--model", actor, "--judge", judge, "--judge-format", "addition")
    return ("--preset", "tiny", "--data", str(path), *models)


def run_all(given: Namespace) -> Results:
    """Every run that is asked for."""
    steps = given.steps or (SAFE_STEPS if given.safe else STEPS)
    runs, more = {name: RUNS[name] for name in given.only}, lambda seed: ()
    if given.safe:
        runs = SAFE_RUNS
    elif given.beyond:
        runs, more = {"ppo, a third beyond it": RUNS["ppo"]}, beyond
    results: Results = {name: [] for name in runs}
    for seed in given.seeds:  # seed by seed, so that an early table has all algorithms
        for name, settings in runs.items():
            results[name].append(run(name, (*settings, *more(seed)), seed, steps))
    return results


# ---------------------------------------------------------------- tables and pictures


def curve(rows: list[Row], column: str) -> dict[int, float]:
    """A column over steps, where it was measured."""
    return {row["step"]: row[column] for row in rows if column in row}


def last_ten(runs: list[list[Row]], column: str) -> list[list[float]]:
    """The last values of a column, of each run."""
    return [list(curve(rows, column).values())[-10:] for rows in runs]


def table_row(name: str, runs: list[list[Row]], at: list[int]) -> list[str]:
    """Of an algorithm: accuracy after `at` steps, and how it came there; medians over seeds."""
    curves = [curve(rows, "eval/accuracy") for rows in runs]
    reached = [
        min((step for step, value in c.items() if value >= TARGET), default=-1) for c in curves
    ]
    fooled = last_ten(runs, "genrm/false_positive_frac")
    difference = max(max(curve(rows, "train/engine_logprob_diff_max").values()) for rows in runs)
    explained = last_ten(runs, "critic/explained_variance")
    seconds = median(median(curve(rows, "time/step_s").values()) for rows in runs)
    return [
        name,
        *(spread([c[step] for c in curves], 3) for step in at),
        ", ".join(str(step) if step >= 0 else "never" for step in reached),
        spread([fmean(values) for values in fooled], 3),
        f"{difference:.1e}",
        spread([median(values) for values in explained], 3) if all(explained) else "-",
        f"{seconds:.1f}",
    ]


def show(results: Results, draws: bool) -> None:
    """The table of all algorithms, a line each; docs/algorithms.png."""
    steps = max(row["step"] for runs in results.values() for row in runs[0])
    at = [step for step in (0, 10, 20, 40) if step < steps] + [steps]
    columns = ["algorithm", *(f"step {step}" for step in at), f"{TARGET:g} after steps"]
    columns += ["false positives of the judge, last 10", "largest logprob difference"]
    columns += ["explained variance, last 10", "s/step"]
    print_table(columns, [table_row(name, runs, at) for name, runs in results.items()])
    if draws:
        panels = {"accuracy on held-out problems, greedy": "eval/accuracy"}
        panels["reward of sampled answers"] = "reward/unfiltered_mean"
        draw(panels, results, DOCS / "algorithms.png")


def show_safe(results: Results) -> None:
    """One line a kind of run: means of the last ten steps, medians over seeds; docs/safe_rlhf.png."""
    columns = ["last 10 steps", "cost", f"over the limit of {COST_LIMIT:g}", "multiplier", "reward"]
    columns += ["accuracy at the end", "explained variance, reward", "cost"]
    table = []
    for name, runs in results.items():
        cost = [fmean(values) for values in last_ten(runs, "cost/mean")]
        cells = [spread(cost, 3), f"{median(cost) / COST_LIMIT - 1:+.1%}"]
        for column in ("cost/multiplier", "reward/unfiltered_mean"):
            cells.append(spread([fmean(values) for values in last_ten(runs, column)], 3))
        cells.append(spread([values[-1] for values in last_ten(runs, "eval/accuracy")], 3))
        for column in ("critic/explained_variance", "cost_critic/explained_variance"):
            cells.append(spread([fmean(values) for values in last_ten(runs, column)], 3))
        table.append([name, *cells])
    print_table(columns, table)
    panels = {"cost of an answer": "cost/mean", "multiplier": "cost/multiplier"}
    panels["reward"] = "reward/unfiltered_mean"
    draw(panels, results, DOCS / "safe_rlhf.png", limits={"cost/mean": COST_LIMIT})


def draw(panels: dict[str, str], results: Results, path: Path, limits: Row | None = None) -> None:
    """A panel for each column (title -> column): medians over seeds, a line for each name.

    limits: of a column, a line across.
    """
    from matplotlib import colormaps

    with picture(path, len(panels), width=5.5) as axes:
        for axis, (title, column) in zip(axes, panels.items(), strict=True):
            for color, (name, runs) in zip(
                colormaps["tab10"].colors, results.items(), strict=False
            ):
                curves = [curve(rows, column) for rows in runs]
                shared = [step for step in curves[0] if all(step in c for c in curves)]
                middle = [median(c[step] for c in curves) for step in shared]
                line = "--" if name.endswith(", full") else "-"
                axis.plot(shared, middle, label=name, color=color, linestyle=line, linewidth=1.4)
            if limits and column in limits:
                axis.axhline(limits[column], color="black", linestyle=":", linewidth=1)
            axis.set(title=title, xlabel="step")
        axes[0].legend(fontsize=7)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}, with --safe {SAFE_STEPS}")
    parser.add_argument(
        "--beyond", action="store_true", help="ppo on harder prompts instead of the table"
    )
    parser.add_argument("--safe", action="store_true", help="safe_rlhf instead of the table")
    given = parser.parse_args()
    end_with_us()
    results = run_all(given)
    if given.safe:
        show_safe(results)
    else:
        show(results, draws=not given.beyond)


if __name__ == "__main__":
    main()
