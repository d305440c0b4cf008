"""Who should hold the devices when: full, partial, fused, rebalanced and automatic, on named workloads.

    python bench/modes.py                     all workloads on 2 and 4 ranks -> docs/modes.png and tables
    python bench/modes.py --ranks 4 --workloads tail --repeats 1
    python bench/modes.py --sides full "2|2" auto            these sides alone
    python bench/modes.py --ranks 4 --workloads tail-judged --tails 0 0.05 0.1 0.2 0.3 0.5 0.9
    python bench/modes.py --bench-shift       from the worst split, with a workload that changes in mid-run
    python bench/modes.py --over-dispatch     the tail: answers that are continued, against waiting for all

Every rank hosts both engines, real ones; one run on N ranks measures all sides in alternation on the same
engines and prompts (served_load.py says what the load is). The first step of each side is left out: engines
have just changed hands.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median, quantiles

sys.path.insert(0, str(Path(__file__).parent.parent))

from launch import ROOT, TORCHRUN, end_with_us, run_to_its_end
from tables import picture, print_table, quartile_spread
from workloads import WORKLOADS

from config import Config
from scheduling.fusion import TAILS

STEPS = 5  # of a static side, the first not counted
# those are papers/wechat_yatt.py's
OWN = [name for name in WORKLOADS if not name.startswith("yatt")]
FUSED = [f"fused {tail:g}" for tail in (0, *TAILS)]
# choose their split; their first half isn't counted
MOVING = ("rebalance", "auto", "from 0.05", "from 0.9")


# ---------------------------------------------------------------- sides


def splits_of(ranks: int) -> list[str]:
    """Every partial split, as `Plan.split` writes it."""
    return [f"{rollout}|{ranks - rollout}" for rollout in range(1, ranks)]


def make_sides(given: Namespace, ranks: int) -> list[dict]:
    """Full, every partial split and the given tails of each workload, in alternating order.

    After the first round those that choose: rebalance from 1|N-1, auto from the middle split, tails from both
    ends if there are several.
    """
    splits = splits_of(ranks)
    names = ["full", *splits, *(f"fused {tail:g}" for tail in given.tails)]
    static = [(name, [name]) for name in names if name in (given.sides or names)]
    middle, default = splits[(len(splits) - 1) // 2], f"fused {Config().tail:g}"
    moving = [("rebalance", splits)] if len(splits) > 1 else []
    fused = dict.fromkeys([default, *FUSED[1:]])
    moving.append(("auto", [middle, *(s for s in splits if s != middle), "full", *fused]))
    if len(given.tails) > 1:
        moving += [("from 0.05", FUSED[1:]), ("from 0.9", FUSED[:0:-1])]
    moving = [(name, options) for name, options in moving if name in (given.sides or MOVING)]
    sides = []
    for repeat in range(given.repeats):
        for workload in given.workloads:
            labels = dict(workload=workload, repeat=repeat, swap_s=given.swap)
            order = static[:: -1 if repeat % 2 else 1]
            sides += [
                labels | dict(side=name, splits=options, steps=given.steps)
                for name, options in order
            ]
            if repeat == 0 and given.moving:
                sides += [labels | dict(side=s, splits=o, steps=given.moving) for s, o in moving]
    return sides


def tail_sides(ranks: int, repeat: int) -> list[dict]:
    """Waiting for the tail, and continuing it in the next step; in the middle split."""
    middle = [splits_of(ranks)[(ranks - 2) // 2]]
    settings = {"waiting": {}, "continued": {"over_dispatch": 1.25}}
    order = list(settings)[:: -1 if repeat % 2 else 1]
    labels = dict(workload="tail", splits=middle, steps=2 * STEPS, repeat=repeat)
    return [labels | dict(side=side, settings=settings[side]) for side in order]


def shift_sides(ranks: int, worst: str, workloads: list[str]) -> list[dict]:
    """One long side that starts in `worst`, during which the workload changes."""
    splits = [worst, *(split for split in splits_of(ranks) if split != worst)]
    labels = dict(workload="+".join(workloads), side=f"from {worst}", repeat=0)
    return [labels | dict(splits=splits, steps=20 * len(workloads))]


def run_sides(sides: list[dict], ranks: int, out: Path, pace: str) -> list[dict]:
    """One run of all sides; returns a row of metrics for each step."""
    with tempfile.TemporaryDirectory() as folder:
        plan, measured = Path(folder, "sides.json"), Path(folder, "measured.json")
        plan.write_text(json.dumps(sides))
        command = [
            TORCHRUN,
            "--nproc-per-node",
            ranks,
            "--master-port",
            29660,
            "bench/served_load.py",
        ]
        command += [
            "--sides",
            plan,
            "--measured",
            measured,
            "--mode",
            "auto",
            "--out",
            out,
            "--port",
            32000,
        ]
        run_to_its_end(command, environment={"BENCH_PACE_MS": pace} if pace else None)
        return json.loads(measured.read_text())


# ---------------------------------------------------------------- tables


def by_side(rows: list[dict], workload: str = "", first_counted: int = 1) -> dict[str, list[dict]]:
    """The metrics of each side's steps, without those before `first_counted` in each repeat.

    Of sides that move only the last half. workload: default all.
    """
    sides = defaultdict(list)
    for row in rows:
        if row["step"] >= first_counted and row["workload"] == (workload or row["workload"]):
            sides[row["side"]].append(row["metrics"] | {"split": row["split"]})
    return {
        name: steps[len(steps) // 2 :] if name in MOVING else steps for name, steps in sides.items()
    }


def workloads_in(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["workload"] for row in rows))


def seconds(steps: list[dict]) -> list[float]:
    """Serving times."""
    return [step["time/serve_s"] for step in steps]


def print_modes(rows: list[dict], ranks: int) -> None:
    """Seconds of serving and of the whole step, occupancy and swaps of each side of each workload."""
    columns = [
        f"{ranks} ranks",
        "serving, s",
        "against full",
        "step, s",
        "occupancy rollout, genrm",
    ]
    columns += ["swaps", "waves", "CPU-s a step"]
    table = []
    for workload in workloads_in(rows):
        sides = by_side(rows, workload)
        for name, steps in sides.items():
            gain = (
                median(seconds(steps)) / median(seconds(sides["full"])) - 1
                if "full" in sides
                else None
            )
            ends = f" (ends in {steps[-1]['split']})" if name in MOVING else ""
            busy = [
                median(step[f"occupancy/{role}"] for step in steps) for role in ("rollout", "genrm")
            ]
            counts = [
                median(step[key] for step in steps) for key in ("split/swaps", "rollout/waves")
            ]
            step_s, cpu_s = ([step[key] for step in steps] for key in ("time/step_s", "time/cpu_s"))
            table.append(
                [
                    f"{workload}: {name}{ends}",
                    quartile_spread(seconds(steps)),
                    "" if gain is None else f"{100 * gain:+.0f} %",
                    quartile_spread(step_s),
                    ", ".join(f"{part:.2f}" for part in busy),
                    *(f"{count:.0f}" for count in counts),
                    quartile_spread(cpu_s),
                ]
            )
    print_table(columns, table)


def print_moves(rows: list[dict]) -> None:
    """Each side's splits step by step, and why they changed."""
    for side in dict.fromkeys((row["workload"], row["side"]) for row in rows):
        steps = [row for row in rows if (row["workload"], row["side"]) == side]
        moves = [move for row in steps for move in row["moves"]]
        if moves:
            print(f"\n{side[0]}, {side[1]}: {' '.join(row['split'] for row in steps)}")
            print("\n".join(f"    {move}" for move in moves))


def print_tail(rows: list[dict], ranks: int) -> None:
    """What over-dispatch gains, what it costs, and where every token went."""
    columns = [f"tail, {ranks} ranks", "serving, s", "mean length trained on", "tokens generated"]
    columns += ["trained", "filtered", "carried", "cut off", "stale"]
    # tokens are counted in all of them: the sum is right
    every_step = by_side(rows, first_counted=0)
    table = []
    for name, steps in by_side(rows).items():
        counted = ("tokens", "tokens_trained", "tokens_filtered")
        counts = [sum(step[f"rollout/{key}"] for step in every_step[name]) for key in counted]
        counts += [steps[-1]["rollout/tokens_carried"]]
        counts += [sum(step["rollout/aborted"] for step in every_step[name])]
        length = fmean(step["rollout/trained_len_mean"] for step in steps)
        stale = median(step.get("train/stale_token_frac", 0.0) for step in steps)
        cells = [
            quartile_spread(seconds(steps)),
            f"{length:.1f}",
            *(f"{count:.0f}" for count in counts),
        ]
        table.append([name, *cells, f"{stale:.2f}"])
    print_table(columns, table)


# ---------------------------------------------------------------- the picture


def draw(results: dict[int, list[dict]], path: Path) -> None:
    """Serving seconds of every side, a panel per number of ranks, bars by workload; whiskers: quartiles."""
    with picture(path, len(results), width=6.5) as panels:
        for (ranks, rows), axes in zip(results.items(), panels, strict=True):
            draw_bars(rows, ranks, axes)


def draw_bars(rows: list[dict], ranks: int, axes) -> None:
    """One panel."""
    from matplotlib import colormaps

    workloads, names = workloads_in(rows), list(dict.fromkeys(row["side"] for row in rows))
    splits = splits_of(ranks)
    colors = {"full": "#9a9a9a", "rebalance": "#e08a1e", "auto": "#3c9d4e"}
    colors |= dict.fromkeys(names, "#8a4fb0") | colors
    for number, split in enumerate(splits):
        colors[split] = colormaps["Blues"](0.35 + 0.4 * number / max(1, len(splits) - 1))
    width = 0.8 / len(names)
    for place, workload in enumerate(workloads):
        sides = by_side(rows, workload)
        for number, name in enumerate(names):
            low, middle, high = quantiles(seconds(sides[name]), n=4)
            x, label = place + (number - (len(names) - 1) / 2) * width, name if place == 0 else None
            axes.bar(x, middle, width, color=colors[name], label=label)
            axes.errorbar(
                x, middle, [[middle - low], [high - middle]], color="black", linewidth=0.8
            )
    axes.set(title=f"{ranks} ranks", ylabel="serving, seconds a step")
    axes.set_xticks(range(len(workloads)), workloads)
    axes.legend(fontsize=8, ncols=2)


# ---------------------------------------------------------------- commands


def compare_modes(given: Namespace, out: Path) -> None:
    """All modes on all workloads."""
    results = {}
    for ranks in given.ranks:
        results[ranks] = run_sides(
            make_sides(given, ranks), ranks, out / f"modes-{ranks}", given.pace
        )
        (out / f"modes-{ranks}.json").write_text(json.dumps(results[ranks]))
        print_modes(results[ranks], ranks)
        print_moves(results[ranks])
    draw(results, given.figure)


def compare_tail(given: Namespace, out: Path) -> None:
    """Over-dispatch."""
    for ranks in given.ranks:
        sides = [side for repeat in range(given.repeats) for side in tail_sides(ranks, repeat)]
        rows = run_sides(sides, ranks, out / f"tail-{ranks}", given.pace)
        (out / f"tail-{ranks}.json").write_text(json.dumps(rows))
        print_tail(rows, ranks)


def compare_shift(given: Namespace, out: Path) -> None:
    """Every static split of two workloads; then from the worst, in mid-run one becomes the other."""
    ranks, workloads = max(given.ranks), ["tail", "judge-heavy"]
    each = [(workload, split) for workload in workloads for split in splits_of(ranks)]
    static = [
        dict(workload=w, side=split, splits=[split], steps=STEPS, repeat=0) for w, split in each
    ]
    rows = run_sides(static, ranks, out / "shift-static", given.pace)
    sides = by_side(rows, workloads[0])
    worst = max(sides, key=lambda split: median(seconds(sides[split])))
    moved = run_sides(shift_sides(ranks, worst, workloads), ranks, out / "shift", given.pace)
    (out / "shift.json").write_text(json.dumps(rows + moved))
    for workload in workloads:
        shown = [
            f"{name} {quartile_spread(seconds(s))} s" for name, s in by_side(rows, workload).items()
        ]
        print(f"{workload}: {', '.join(shown)}")
    print_moves(moved)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--workloads", nargs="+", default=OWN, choices=WORKLOADS)
    parser.add_argument(
        "--sides", nargs="+", metavar="SIDE", help="full, 1|3, auto, ...: these alone"
    )
    tails = "of fused mode, each a side; of several also --rebalance from both ends"
    parser.add_argument("--tails", type=float, nargs="+", default=[Config().tail], help=tails)
    parser.add_argument("--repeats", type=int, default=3)
    steps = "of a side that doesn't move; the first isn't counted"
    parser.add_argument("--steps", type=int, default=STEPS, help=steps)
    swap = "seconds more that two roles take to change places"
    parser.add_argument("--swap", type=float, default=0.0, help=swap)
    moving = "of the sides that may move; 0: leave them out"
    parser.add_argument("--moving", type=int, default=20, metavar="STEPS", help=moving)
    pace = "a decode step lasts at least so long, plus so long a sequence, and more for a prompt that is "
    pace += "read; behind a semicolon the judge's"
    parser.add_argument("--pace", default="", metavar="MS,MS[,MS][;...]", help=pace)
    parser.add_argument("--bench-shift", action="store_true")
    parser.add_argument("--over-dispatch", action="store_true")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "modes.png")
    given = parser.parse_args()
    if 0 < given.moving < 4:
        parser.error("--moving: 0, or at least 4 steps")
    end_with_us()
    out = ROOT / "runs" / "bench"
    out.mkdir(parents=True, exist_ok=True)
    command = (
        compare_shift
        if given.bench_shift
        else compare_tail
        if given.over_dispatch
        else compare_modes
    )
    command(given, out)


if __name__ == "__main__":
    main()
