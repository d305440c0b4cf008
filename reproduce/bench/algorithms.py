"""Learning curves of every algorithm on the demo: plain run.py, one run after another.

    python reproduce/bench/algorithms.py            seeds 0 1 2, 60 steps -> docs/algorithms.png and a table
    python reproduce/bench/algorithms.py --only ppo gspo --seeds 0      only these algorithms
    python reproduce/bench/algorithms.py --safe     safe_rlhf with and without its multiplier, 150 steps
                                          -> docs/safe_rlhf.png and a table

A run that is complete under runs/algorithms is not repeated; delete its folder to repeat it. An interrupted
run is resumed.
"""

import json
import sys
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parents[2]))

from reproduce.bench.measuring import (
    ROOT,
    column,
    parser_of,
    picture,
    print_table,
    run_ranks,
    spread,
)

PLACE = ROOT / "runs" / "algorithms"
# Settings of each algorithm that differ from the demo's; each row runs once per seed. cispo isn't here: with
# one update per step its weights are all 1, so its run equals grpo's to the last digit.
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
ACCURACY = "eval/accuracy"
REWARD = "reward/unfiltered_mean"
PANELS = {"held-out problems answered right": ACCURACY, "reward, mean of 5 steps": REWARD}
# An answer's cost is its length divided by 72 tokens; without a limit the mean is about 0.5. Answers have to
# get shorter where that costs the least reward. The KL penalty keeps short answers likely, so that the policy
# can follow the multiplier. The multiplier starts high because a constraint is easier to keep than to restore
# once the policy has forgotten short answers.
COST_LIMIT = 0.45
SAFE = ("safe_rlhf", "critic_warmup=2", f"cost_limit={COST_LIMIT}")
SAFE += ("kl_coef=0.1", "kl_in=reward", "kl_estimator=k1")
SAFE_RUNS = {
    "with the multiplier": (*SAFE, "lagrange_init=1.3", "--cost-rule", "length:72"),
    "without": (*SAFE, "lagrange_init=0", "--cost-rule", "length:72"),
}
COST = "cost/mean"
MULTIPLIER = "cost/multiplier"
SAFE_PANELS = {
    "cost of an answer, mean of 5 steps (dotted: the limit)": COST,
    "lambda, which multiplies the cost": MULTIPLIER,
    "reward, mean of 5 steps": REWARD,
}
STEPS = 60
SAFE_STEPS = 150

Rows = list[dict[str, float]]  # a run's metrics, one row a step
Results = dict[str, list[Rows]]  # name -> one run per seed


def run(name: str, settings: tuple[str, ...], seed: int, steps: int) -> Rows:
    """Return the rows of a run's metrics.jsonl; start the run if it isn't complete."""
    out = PLACE / f"{name.replace(', ', '-').replace(' ', '-')}-seed{seed}"
    path = out / "metrics.jsonl"
    if not path.exists() or json.loads(path.read_text().splitlines()[-1]).get("step") != steps:
        out.parent.mkdir(parents=True, exist_ok=True)
        words = ["run.py", "--algorithm", *settings, "--seed", seed, "--steps", steps]
        run_ranks(2, [*words, "--out", out], out.with_suffix(".log"))
        print(f"{name}, seed {seed}: done", flush=True)
    return [json.loads(line) for line in path.open()]


def curve(rows: Rows, metric: str) -> dict[int, float]:
    """Return {step: value} of a metric for the steps that measured it."""
    return {row["step"]: row[metric] for row in rows if metric in row}


def at_step(runs: list[Rows], step: int) -> str:
    """Format held-out accuracy after `step` steps over the seeds."""
    return spread([curve(rows, ACCURACY)[step] for rows in runs], 3)


def last_ten(runs: list[Rows], metric: str) -> list[float]:
    """Return each run's mean of the last ten values of a metric."""
    curves = [list(curve(rows, metric).values()) for rows in runs]
    return [fmean(values[-10:]) for values in curves]


def show(results: Results, steps: int) -> None:
    """Print one table row per algorithm."""
    at = sorted({0, 10, 20, 40, steps} & {*range(steps + 1)})
    table = []
    for name, runs in results.items():
        table.append([name, *(at_step(runs, step) for step in at)])
    print_table(["accuracy", *(f"step {step}" for step in at)], table)


def show_safe(results: Results, steps: int) -> None:
    """Print one table row per kind of run: means of the last ten steps."""
    table = []
    for name, runs in results.items():
        cost = last_ten(runs, COST)
        over = f"{median(cost) / COST_LIMIT - 1:+.1%}"
        multiplier = spread(last_ten(runs, MULTIPLIER), 3)
        reward = spread(last_ten(runs, REWARD), 3)
        table.append([name, spread(cost, 3), over, multiplier, reward, at_step(runs, steps)])
    columns = ["last 10 steps", "cost", f"over the limit of {COST_LIMIT:g}", "multiplier"]
    print_table([*columns, "reward", "accuracy at the end"], table)


def draw(panels: dict[str, str], results: Results, path: Path) -> None:
    """Draw a panel per metric (title -> metric): medians over seeds. "..., full" would hide another line."""
    with picture(path, len(panels), width=5.5) as axes:
        for axis, (title, metric) in zip(axes, panels.items(), strict=True):
            axis.set(title=title, xlabel="updates made" if metric == ACCURACY else "step")
            if metric == COST:
                axis.axhline(COST_LIMIT, color="black", linestyle=":", linewidth=1)
            for name in [name for name in results if not name.endswith(", full")]:
                curves = [curve(rows, metric) for rows in results[name]]
                shared = sorted(set.intersection(*map(set, curves)))
                medians = [median(column(curves, step)) for step in shared]
                if metric != ACCURACY:  # a step's own answers; steps count from 1
                    shared = [step + 1 for step in shared]
                    medians = [fmean(medians[max(0, n - 4) : n + 1]) for n in range(len(medians))]
                axis.plot(shared, medians, label=name, linewidth=1.4)
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}, with --safe {SAFE_STEPS}")
    parser.add_argument("--safe", action="store_true", help="compare safe_rlhf runs instead")
    given = parser.parse_args()
    steps = given.steps or (SAFE_STEPS if given.safe else STEPS)
    chosen = SAFE_RUNS if given.safe else {name: RUNS[name] for name in given.only}
    results: Results = {name: [] for name in chosen}
    for seed in given.seeds:  # seed by seed, so that an early table has all algorithms
        for name, settings in chosen.items():
            results[name].append(run(name, settings, seed, steps))
    if given.safe:
        show_safe(results, steps)
        draw(SAFE_PANELS, results, ROOT / "docs" / "safe_rlhf.png")
    else:
        show(results, steps)
        draw(PANELS, results, ROOT / "docs" / "algorithms.png")


if __name__ == "__main__":
    main()
