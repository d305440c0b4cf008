"""A comparison of the serving modes: full, partial, fused, and partial with a split that moves.

    python reproduce/bench/modes.py --figure FILE       all workloads on 4 ranks -> a table and a picture
    python reproduce/bench/modes.py --sides full "2|2" rebalance       only these sides
    python reproduce/bench/modes.py --workloads resample --sides full "2|2" "fused 0.2" --repeats 1
    --moving 0 \\
        --pace 20,0.1 --compare docs/modes_compared.png      the timelines of a step, one below the other
    python reproduce/bench/modes.py --workloads tail-judged --sides "fused 0.2" --repeats 1 --moving 0
    --steps 7 \\
        --pace 20,1 --compare docs/fusion.png                a timeline with all answers, of a single side

Every rank hosts both real engines. One run on N ranks alternates between all sides, on the same engines and
prompts (served_load.py describes the load). The first step of each side doesn't count, because engines have
just switched roles. For the side whose split moves, only the last half of the steps counts.
"""

import json
import sys
import tempfile
from argparse import Namespace
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))

from config import Config
from extras.figure import INK, UPPER, Picture, add_legend, draw_lanes, make_figure, of_steps
from reproduce.bench.measuring import (
    ROOT,
    column,
    parser_of,
    picture,
    print_table,
    quartiles,
    run_ranks,
)
from reproduce.bench.workloads import WORKLOADS, Side
from runtime.timeline import WORK, of_kind, read

MOVING = "rebalance"  # the side whose split moves; it starts at 1|N-1
OUT = ROOT / "runs" / "bench"
SWAP_S = 0.25  # an engine that switches this soon after another belongs to the same swap
WAYS = {
    "full": "All ranks write, then all judge. In each wave all wait twice for the slowest, and swap.",
    "partial": "Some ranks write while the others judge. Wave 2 begins before wave 1 ends: no swap.",
    "fused": "All ranks write until few answers are left. Then some write these, and the others judge.",
}

Steps = dict[str, list[dict]]  # side -> the metrics of its counted steps


def splits_of(ranks: int) -> list[str]:
    """Return every partial split, formatted as by `Split`."""
    return [f"{rollout}|{ranks - rollout}" for rollout in range(1, ranks)]


def make_sides(given: Namespace) -> list[Side]:
    """Return the sides of each workload, in alternating order; the one whose split moves runs only once."""
    splits = splits_of(given.ranks)
    names = given.sides or ["full", *splits, f"fused {Config().tail:g}", MOVING]
    sides = []
    for repeat in range(given.repeats):
        for workload in given.workloads:
            for name in names[:: -1 if repeat % 2 else 1]:
                if name != MOVING:
                    sides.append(Side(workload, name, repeat, [name], given.steps))
                elif given.moving and splits and repeat == 0:
                    sides.append(Side(workload, name, repeat, splits, given.moving))
    return sides


def run_sides(sides: list[Side], ranks: int, pace: str, port: int = 32000) -> list[dict]:
    """Run all sides in one run; return a row of metrics per step. Its output goes to a log."""
    log = OUT / f"modes-{ranks}.log"
    OUT.mkdir(parents=True, exist_ok=True)
    print(f"{sum(side.steps for side in sides)} steps on {ranks} ranks; log: {log}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "sides.json")
        measured = Path(folder, "measured.json")
        plan.write_text(json.dumps(sides))
        words = ["reproduce/bench/served_load.py", "--sides", plan, "--measured", measured]
        words += ["--out", OUT / f"modes-{ranks}", "--port", port]
        run_ranks(ranks, words, log, env={"BENCH_PACE_MS": pace} if pace else None)
        return json.loads(measured.read_text())


def by_workload(rows: list[dict]) -> dict[str, Steps]:
    """Return the metrics of all counted steps by workload and side."""
    found = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["step"] > 0:
            found[row["workload"]][row["side"]].append(row["metrics"] | {"split": row["split"]})
    for sides in found.values():
        for name in sides.keys() & {MOVING}:
            sides[name] = sides[name][len(sides[name]) // 2 :]
    return found


def print_modes(rows: list[dict], ranks: int) -> None:
    """Print each side's serving seconds for each workload; the other metrics are in runs/bench."""
    table = []
    for workload, sides in by_workload(rows).items():
        for name, steps in sides.items():
            serving = column(steps, "time/serve_s")
            label = f"{workload}: {name}"
            if name == MOVING:
                label += f" (ends in {steps[-1]['split']})"
            gain = ""
            if "full" in sides:
                ratio = median(serving) / median(column(sides["full"], "time/serve_s"))
                gain = f"{100 * (ratio - 1):+.0f} %"
            table.append([label, quartiles(serving), gain])
    print_table([f"{ranks} ranks", "serving, s", "against full"], table)


def draw(workloads: dict[str, Steps], given: Namespace) -> None:
    """Draw a bar per side, grouped by workload; whiskers are quartiles."""
    from matplotlib import colormaps

    names = list(dict.fromkeys(name for sides in workloads.values() for name in sides))
    splits = splits_of(given.ranks)
    colors = dict.fromkeys(names, "#8a4fb0") | {"full": "#9a9a9a", MOVING: "#e08a1e"}
    for number, split in enumerate(splits):
        colors[split] = colormaps["Blues"](0.35 + 0.4 * number / max(1, len(splits) - 1))
    width = 0.8 / len(names)
    pace = f"at a pace of {given.pace} ms" if given.pace else "as fast as they run"
    with picture(given.figure, 1, width=7.5) as (axes,):
        for place, sides in enumerate(workloads.values()):
            for number, name in enumerate(names):
                mode = f"partial {name}" if "|" in name else name
                low, middle, high = quantiles(column(sides[name], "time/serve_s"), n=4)
                x = place + (number - (len(names) - 1) / 2) * width
                label = mode if place == 0 else None
                axes.bar(x, middle, width, color=colors[name], label=label)
                whiskers = [[middle - low], [high - middle]]
                axes.errorbar(x, middle, whiskers, color="black", linewidth=0.8)
        axes.set_title(f"Serving a step on {given.ranks} ranks, real engines {pace}", fontsize=10)
        axes.set(xlabel="workload", ylabel="seconds (median, quartiles)")
        axes.set_xticks(range(len(workloads)), workloads)
        axes.legend(fontsize=8, ncols=2)


def compare(rows: list[dict], given: Namespace) -> None:
    """Draw the middle step of each side of the first workload; of a single side, also its answers."""
    middle = (given.workloads[0], 0, given.steps // 2)
    chosen = [row for row in rows if (row["workload"], row["repeat"], row["step"]) == middle]
    folder = OUT / f"modes-{given.ranks}"
    pictures = [picture_of(row, folder) for row in chosen if row["side"] != MOVING]
    for shown in pictures:
        print(f"{shown.title.partition(':')[0]}: ranks wait {shown.idle:.0%} of the step's time")
    figure = stacked(pictures, given.ranks) if len(pictures) > 1 else make_figure(*pictures)
    figure.axes[-1].set_xlabel("seconds since the step's start", fontsize=9, color=INK, loc="left")
    figure.savefig(given.compare)


def stacked(pictures: list[Picture], ranks: int) -> Figure:
    """Return the lanes of all pictures under one time axis."""
    size = (13, 1.0 + (1.0 + 0.34 * ranks) * len(pictures))
    figure = Figure(size, dpi=150, layout="constrained")
    panels = figure.subplots(len(pictures), sharex=True, squeeze=False)[:, 0]
    for axes, shown in zip(panels, pictures, strict=True):
        draw_lanes(axes, shown)
        for start in swaps_in(shown):
            axes.text(start, UPPER, "swap", fontsize=8.5, color=INK, va="center")
    add_legend(figure, {name for each in pictures for _, name in each.lanes})
    return figure


def picture_of(row: dict, out: Path) -> Picture:
    """Return what ranks did in a row's step; times in seconds since its start."""
    step = row["step"]
    name = row["side"]
    start, end = row["from_to"]
    events = of_kind(read(out / "spans", step, step), *WORK, "pass", "sample", "wave", "tail")
    events = [e for e in of_steps(events, step, step) if start <= e.start < end]
    events = [e._replace(start=e.start - start, end=e.end - start) for e in events]
    mode = f"partial {name}" if "|" in name else name
    title = f"{mode}: training begins after {row['metrics']['time/serve_s']:.1f} s. "
    capacity = json.loads((out / "config.json").read_text())["max_running_requests"]
    return Picture(title + WAYS[mode.split()[0]], events, capacity)


def swaps_in(shown: Picture) -> list[float]:
    """Return when engines of one role make way for the other's: the start of each swap's first switch."""
    writing = min(span.start for span in shown.spans if span.name == "rollout")
    judged = max(span.end for span in shown.spans if span.name == "genrm")
    starts = sorted(span.start for span in shown.spans if span.name == "switch")
    during = [start for start in starts if writing < start < judged]
    return [s for before, s in pairwise([0.0, *during]) if s - before > SWAP_S]


def main() -> None:
    parser = parser_of(__doc__, repeats=3, ranks=4, port=32000)
    parser.add_argument("--workloads", nargs="+", default=[*WORKLOADS], choices=WORKLOADS)
    parser.add_argument(
        "--sides", nargs="+", help="only these sides: full, 1|3, fused 0.1, rebalance, ..."
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="each fixed side's steps; the first isn't counted"
    )
    parser.add_argument(
        "--moving",
        type=int,
        default=20,
        metavar="STEPS",
        help="steps of the side whose split moves; 0 leaves it out",
    )
    parser.add_argument(
        "--pace",
        default="",
        metavar="MS,MS[,MS]",
        help="a decode step, plus each sequence in it, plus each prompt that it reads",
    )
    parser.add_argument("--figure", type=Path, help="draw the medians")
    parser.add_argument("--compare", type=Path, help="draw a step of each side of a workload")
    given = parser.parse_args()
    if 0 < given.moving < 4:
        parser.error("--moving must be 0 or at least 4 steps")
    rows = run_sides(make_sides(given), given.ranks, given.pace, given.port)
    (OUT / f"modes-{given.ranks}.json").write_text(json.dumps(rows))
    print_modes(rows, given.ranks)
    if given.figure:
        draw(by_workload(rows), given)
    if given.compare:
        compare(rows, given)


if __name__ == "__main__":
    main()
