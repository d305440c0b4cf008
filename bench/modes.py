"""Who should hold the devices when: full, partial, rebalanced and automatic placement on named workloads, in
turns, on real engines.

    python bench/modes.py                                   all workloads on 2 and 4 ranks -> docs/modes.png
    and tables python bench/modes.py --ranks 4 --workloads tail --repeats 1 python bench/modes.py
    --bench-shift                     from the worst split, with a workload that changes in mid-run python
    bench/modes.py --over-dispatch                   the tail: over-dispatch and partial rollout against
    waiting

Every rank hosts both engines; one run on N ranks measures all sides in alternation on the same engines and
prompts (served_load.py says what the load is). The first step of each side is left out: engines have just
changed hands.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles

from launch import ROOT, TORCHRUN, end_with_us, run_to_its_end

STEPS = 5  # of a static side, the first not counted
WORKLOADS = ("short", "tail", "resample", "judge-heavy")


def splits_of(ranks: int) -> list[str]:
    """Every partial split, as `Plan.split` writes it."""
    return [f"{rollout}|{ranks - rollout}" for rollout in range(1, ranks)]


def mode_sides(workload: str, ranks: int, repeat: int, moving_steps: int = 0) -> list[dict]:
    """Full, every partial split, in alternating order; then the sides that choose: rebalance from 1|N-1, auto from the middle split."""
    splits = splits_of(ranks)
    static = [("full", ["full"]), *((split, [split]) for split in splits)]
    static = static[:: -1 if repeat % 2 else 1]
    middle = splits[(len(splits) - 1) // 2]
    moving = [("rebalance", splits)] if len(splits) > 1 else []
    moving.append(("auto", [middle, *(s for s in splits if s != middle), "full"]))
    sides = [dict(side=name, splits=options, steps=STEPS) for name, options in static]
    if repeat == 0 and moving_steps:
        sides += [dict(side=name, splits=options, steps=moving_steps) for name, options in moving]
    return [dict(workload=workload, repeat=repeat, **side) for side in sides]


def tail_sides(ranks: int, repeat: int) -> list[dict]:
    """Waiting for the tail, cutting it off, and continuing it in the next step; in the middle split."""
    middle = [splits_of(ranks)[(ranks - 2) // 2]]
    settings = {"waiting": {}, "continued": {"over_dispatch": 1.25}}
    order = list(settings)[:: -1 if repeat % 2 else 1]
    return [dict(workload="tail", side=s, splits=middle, steps=2 * STEPS, repeat=repeat, settings=settings[s]) for s in order]


def shift_sides(ranks: int, worst: str, workloads: list[str]) -> list[dict]:
    """One long side that starts in `worst`, during which the workload changes."""
    splits = [worst, *(split for split in splits_of(ranks) if split != worst)]
    return [dict(workload="+".join(workloads), side=f"from {worst}", splits=splits, steps=20 * len(workloads), repeat=0)]


def run_sides(sides: list[dict], ranks: int, out: Path, pace: str) -> list[dict]:
    """One run of all sides; returns a row of metrics for each step."""
    with tempfile.TemporaryDirectory() as folder:
        plan, measured = Path(folder, "sides.json"), Path(folder, "measured.json")
        plan.write_text(json.dumps(sides))
        command = [TORCHRUN, "--nproc-per-node", ranks, "--master-port", 29660, ROOT / "bench" / "served_load.py", "--sides", plan]
        command += ["--measured", measured, "--mode", "auto", "--out", out, "--port", 32000]
        run_to_its_end(command, environment={"NANOYATT_PACE_MS": pace} if pace else None)
        return json.loads(measured.read_text())


# ---------------------------------------------------------------- tables


def spread(values: list[float]) -> str:
    """Median (quartiles)."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{median(values):.2f} ({low:.2f}-{high:.2f})"


def by_side(rows: list[dict], first_counted: int = 1) -> dict[str, list[dict]]:
    """The metrics of each side's steps, without those before `first_counted` in each repeat."""
    sides = defaultdict(list)
    for row in rows:
        if row["step"] >= first_counted:
            sides[row["side"]].append(row["metrics"] | {"split": row["split"]})
    return sides


def print_modes(rows: list[dict], ranks: int) -> None:
    """Serving and whole-step seconds, occupancy and swaps of each side of each workload, and the gain over full."""
    print(f"\n| {ranks} ranks | serving, s | against full | step, s | occupancy rollout, genrm | swaps | waves | CPU-s a step |")
    print("|---" * 8 + "|")
    for workload in dict.fromkeys(row["workload"] for row in rows):
        sides = by_side([row for row in rows if row["workload"] == workload])
        settled = {name: steps[len(steps) // 2 :] if name in ("rebalance", "auto") else steps for name, steps in sides.items()}
        full = median(step["time/serve_s"] for step in settled["full"])
        for name, steps in settled.items():
            serve = [step["time/serve_s"] for step in steps]
            shown = f"{name} (ends in {steps[-1]['split']})" if name in ("rebalance", "auto") else name
            both = [f"{median(step[f'occupancy/{role}'] for step in steps):.2f}" for role in ("rollout", "genrm")]
            counts = [f"{median(step[key] for step in steps):.0f}" for key in ("split/swaps", "rollout/waves")]
            step_s, cpu_s = (spread([step[key] for step in steps]) for key in ("time/step_s", "time/cpu_s"))
            gain = f"{100 * (median(serve) / full - 1):+.0f} %"
            print(f"| {workload}: {shown} | {spread(serve)} | {gain} | {step_s} | {', '.join(both)} | {' | '.join(counts)} | {cpu_s} |")


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
    columns = ("serving, s", "mean length trained on", "tokens written", "trained", "filtered", "carried", "cut off", "stale")
    print(f"\n| tail, {ranks} ranks | {' | '.join(columns)} |")
    print("|---" * 9 + "|")
    every_step = by_side(rows, first_counted=0)  # tokens are counted in all of them, so that the sum is right
    for name, steps in by_side(rows).items():
        totals = [sum(step[f"rollout/{key}"] for step in every_step[name]) for key in ("tokens", "tokens_trained", "tokens_filtered")]
        length = sum(step["rollout/trained_len_mean"] for step in steps) / len(steps)
        carried, stale = steps[-1]["rollout/tokens_carried"], median(step.get("train/stale_token_frac", 0.0) for step in steps)
        counts = " | ".join(f"{n:.0f}" for n in (*totals, carried, sum(step["rollout/aborted"] for step in every_step[name])))
        print(f"| {name} | {spread([step['time/serve_s'] for step in steps])} | {length:.1f} | {counts} | {stale:.2f} |")


def draw(results: dict[int, list[dict]], path: Path) -> None:
    """Serving seconds of every side, a panel per number of ranks, bars by workload; whiskers are quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(6.5 * len(results), 3.6), squeeze=False, constrained_layout=True)
    for (ranks, rows), axes in zip(results.items(), panels[0], strict=True):
        workloads = list(dict.fromkeys(row["workload"] for row in rows))
        names, splits = list(dict.fromkeys(row["side"] for row in rows)), splits_of(ranks)
        colors = {"full": "#9a9a9a", "rebalance": "#e08a1e", "auto": "#3c9d4e"}
        colors |= {split: plt.cm.Blues(0.35 + 0.4 * i / max(1, len(splits) - 1)) for i, split in enumerate(splits)}
        for place, workload in enumerate(workloads):
            sides = by_side([row for row in rows if row["workload"] == workload])
            for number, name in enumerate(names):
                steps = sides[name][len(sides[name]) // 2 :] if name in ("rebalance", "auto") else sides[name]
                low, middle, high = quantiles([step["time/serve_s"] for step in steps], n=4)
                left = place + (number - (len(names) - 1) / 2) * 0.8 / len(names)
                axes.bar(left, middle, 0.8 / len(names), color=colors[name], label=name if place == 0 else None)
                axes.errorbar(left, middle, [[middle - low], [high - middle]], color="black", linewidth=0.8)
        axes.set(title=f"{ranks} ranks", ylabel="serving, seconds a step")
        axes.set_xticks(range(len(workloads)), workloads)
        axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=110)


# ---------------------------------------------------------------- commands


def worst_split(rows: list[dict], workload: str, ranks: int) -> str:
    """The split that served this workload slowest."""
    sides = by_side([row for row in rows if row["workload"] == workload])
    return max(splits_of(ranks), key=lambda split: median(step["time/serve_s"] for step in sides[split]))


def compare_modes(given, out: Path) -> None:
    """All modes on all workloads."""
    results = {}
    for ranks in given.ranks:
        rounds = [(repeat, name) for repeat in range(given.repeats) for name in given.workloads]
        sides = [side for repeat, name in rounds for side in mode_sides(name, ranks, repeat, given.moving)]
        results[ranks] = run_sides(sides, ranks, out / f"modes-{ranks}", given.pace)
        (out / f"modes-{ranks}.json").write_text(json.dumps(results[ranks]))
        print_modes(results[ranks], ranks)
        print_moves(results[ranks])
    draw(results, given.figure)


def compare_tail(given, out: Path) -> None:
    """Over-dispatch and partial rollout."""
    for ranks in given.ranks:
        sides = [side for repeat in range(given.repeats) for side in tail_sides(ranks, repeat)]
        rows = run_sides(sides, ranks, out / f"tail-{ranks}", given.pace)
        (out / f"tail-{ranks}.json").write_text(json.dumps(rows))
        print_tail(rows, ranks)


def compare_shift(given, out: Path) -> None:
    """Every static split of two workloads, then a run from the worst, in whose middle one becomes the other."""
    ranks, workloads = max(given.ranks), ["tail", "judge-heavy"]
    static = [dict(workload=w, side=s, splits=[s], steps=STEPS, repeat=0) for w in workloads for s in splits_of(ranks)]
    rows = run_sides(static, ranks, out / "shift-static", given.pace)
    worst = worst_split(rows, workloads[0], ranks)
    moved = run_sides(shift_sides(ranks, worst, workloads), ranks, out / "shift", given.pace)
    (out / "shift.json").write_text(json.dumps(rows + moved))
    for workload in workloads:
        sides = by_side([row for row in rows if row["workload"] == workload])
        print(workload + ": " + ", ".join(f"{name} {spread([s['time/serve_s'] for s in steps])} s" for name, steps in sides.items()))
    print_moves(moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--moving", type=int, default=20, metavar="STEPS", help="of the sides that may move; 0: leave them out")
    parser.add_argument("--pace", default="", metavar="MS,MS", help="a decode step lasts at least so long, plus so long a sequence")
    parser.add_argument("--bench-shift", action="store_true")
    parser.add_argument("--over-dispatch", action="store_true")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "modes.png")
    given = parser.parse_args()
    if 0 < given.moving < 4:
        parser.error("--moving: 0, or at least 4 steps")
    end_with_us()
    out = ROOT / "runs" / "bench"
    out.mkdir(parents=True, exist_ok=True)
    command = compare_shift if given.bench_shift else compare_tail if given.over_dispatch else compare_modes
    command(given, out)


if __name__ == "__main__":
    main()
