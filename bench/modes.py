"""A comparison of who holds the devices when: full, partial, fused, rebalanced and automatic.

    python bench/modes.py                     all workloads on 2 and 4 ranks -> docs/modes.png and tables
    python bench/modes.py --ranks 4 --workloads tail --repeats 1
    python bench/modes.py --sides full "2|2" auto            these sides alone
    python bench/modes.py --ranks 4 --workloads tail-judged --tails 0 0.05 0.1 0.2 0.3 0.5 0.9

Every rank hosts both engines, real ones; one run on N ranks measures all sides in alternation on the same
engines and prompts (served_load.py says what the load is). The first step of each side is left out: engines
have just changed hands. Of a side that chooses its split, the last half counts.
"""

import json
import sys
import tempfile
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.measuring import ROOT, column, parser_of, picture, print_table, quartiles, run_ranks
from bench.workloads import WORKLOADS, Side
from config import Config
from scheduling.fusion import TAILS

MOVING = ("rebalance", "auto")  # sides that choose their split
OUT = ROOT / "runs" / "bench"

Steps = dict[str, list[dict]]  # metrics of the counted steps, by side


def splits_of(ranks: int) -> list[str]:
    """Every partial split, as `Split` is written."""
    return [f"{rollout}|{ranks - rollout}" for rollout in range(1, ranks)]


def moving_plans(ranks: int) -> dict[str, list[str]]:
    """The plans of each side that chooses: rebalance begins in 1|N-1, auto in the middle split."""
    splits = splits_of(ranks)
    middle = splits[(len(splits) - 1) // 2]
    others = [split for split in splits if split != middle]
    tails = dict.fromkeys([Config().tail, *TAILS])
    plans = {"auto": [middle, *others, "full", *(f"fused {tail:g}" for tail in tails)]}
    if others:
        plans = {"rebalance": splits} | plans
    return plans


def make_sides(given: Namespace, ranks: int) -> list[Side]:
    """Full, every partial split and the given tails of each workload, in alternating order.

    Those that choose come after the first round.
    """
    fused = [f"fused {tail:g}" for tail in given.tails]
    static = {name: [name] for name in ("full", *splits_of(ranks), *fused)}
    moving = moving_plans(ranks) if given.moving else {}
    sides = []
    for repeat in range(given.repeats):
        names = [*static] if repeat % 2 == 0 else [*static][::-1]
        if repeat == 0:
            names += moving
        if given.sides:
            names = [name for name in names if name in given.sides]
        for workload in given.workloads:
            for name in names:
                plans = static.get(name) or moving[name]
                steps = given.steps if name in static else given.moving
                sides.append(Side(workload, name, repeat, plans, steps))
    return sides


def run_sides(sides: list[Side], ranks: int, pace: str) -> list[dict]:
    """Run all sides at once; returns a row of metrics for each step."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "sides.json")
        measured = Path(folder, "measured.json")
        plan.write_text(json.dumps(sides))
        words = ["bench/served_load.py", "--sides", plan, "--measured", measured]
        words += ["--mode", "auto", "--out", OUT / f"modes-{ranks}", "--port", 32000]
        run_ranks(ranks, words, env={"BENCH_PACE_MS": pace} if pace else None)
        return json.loads(measured.read_text())


def by_workload(rows: list[dict]) -> dict[str, Steps]:
    """The metrics of all steps that count, by workload and side."""
    found = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["step"] > 0:
            found[row["workload"]][row["side"]].append(row["metrics"] | {"split": row["split"]})
    for sides in found.values():
        for name in sides.keys() & set(MOVING):
            sides[name] = sides[name][len(sides[name]) // 2 :]
    return found


def print_modes(rows: list[dict], ranks: int) -> None:
    """Print seconds of serving of each side of each workload; the other metrics are in runs/bench."""
    table = []
    for workload, sides in by_workload(rows).items():
        for name, steps in sides.items():
            serving = column(steps, "time/serve_s")
            label = f"{workload}: {name}"
            if name in MOVING:
                label += f" (ends in {steps[-1]['split']})"
            gain = ""
            if "full" in sides:
                ratio = median(serving) / median(column(sides["full"], "time/serve_s"))
                gain = f"{100 * (ratio - 1):+.0f} %"
            table.append([label, quartiles(serving), gain])
    print_table([f"{ranks} ranks", "serving, s", "against full"], table)


def draw(results: dict[int, list[dict]], path: Path) -> None:
    """Serving seconds of every side, a panel for each number of ranks."""
    with picture(path, len(results), width=6.5) as panels:
        for (ranks, rows), axes in zip(results.items(), panels, strict=True):
            draw_bars(by_workload(rows), ranks, axes)


def draw_bars(workloads: dict[str, Steps], ranks: int, axes) -> None:
    """One panel: bars by workload; whiskers are quartiles."""
    from matplotlib import colormaps

    names = list(dict.fromkeys(name for sides in workloads.values() for name in sides))
    splits = splits_of(ranks)
    colors = dict.fromkeys(names, "#8a4fb0")
    colors |= {"full": "#9a9a9a", "rebalance": "#e08a1e", "auto": "#3c9d4e"}
    for number, split in enumerate(splits):
        colors[split] = colormaps["Blues"](0.35 + 0.4 * number / max(1, len(splits) - 1))
    width = 0.8 / len(names)
    for place, sides in enumerate(workloads.values()):
        for number, name in enumerate(names):
            low, middle, high = quantiles(column(sides[name], "time/serve_s"), n=4)
            x = place + (number - (len(names) - 1) / 2) * width
            label = name if place == 0 else None
            axes.bar(x, middle, width, color=colors[name], label=label)
            whiskers = [[middle - low], [high - middle]]
            axes.errorbar(x, middle, whiskers, color="black", linewidth=0.8)
    axes.set(title=f"{ranks} ranks", ylabel="serving, seconds a step")
    axes.set_xticks(range(len(workloads)), workloads)
    axes.legend(fontsize=8, ncols=2)


def main() -> None:
    parser = parser_of(__doc__, repeats=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--workloads", nargs="+", default=[*WORKLOADS], choices=WORKLOADS)
    parser.add_argument("--sides", nargs="+", help="full, 1|3, auto, ...: these alone")
    parser.add_argument("--tails", type=float, nargs="+", default=[Config().tail], metavar="TAIL")
    steps = "of a side that doesn't choose; the first isn't counted"
    parser.add_argument("--steps", type=int, default=5, help=steps)
    moving = "of the sides that choose; 0: leave them out"
    parser.add_argument("--moving", type=int, default=20, metavar="STEPS", help=moving)
    pace = "of a decode step at least, of each sequence, and of a prompt that is read"
    parser.add_argument("--pace", default="", metavar="MS,MS[,MS]", help=pace)
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "modes.png")
    given = parser.parse_args()
    if 0 < given.moving < 4:
        parser.error("--moving: 0, or at least 4 steps")
    OUT.mkdir(parents=True, exist_ok=True)
    results = {}
    for ranks in given.ranks:
        results[ranks] = run_sides(make_sides(given, ranks), ranks, given.pace)
        (OUT / f"modes-{ranks}.json").write_text(json.dumps(results[ranks]))
        print_modes(results[ranks], ranks)
    draw(results, given.figure)


if __name__ == "__main__":
    main()
