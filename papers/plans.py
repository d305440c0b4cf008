"""What --simulate --like says of other plans than it was told of, beside what these took.

    python papers/plans.py --real [--out DIR]      measure on an idle machine, half an hour, then the rows
    python papers/measured.py                      the rows alone, as part of its page

Four paced ranks (a decode step of 40 ms, and 2 ms a sequence; 0.8 ms to learn from a token forward) run the
demo and PPO under each plan. The folder of one run, `colocate: full`, tells --like all that it knows: its
row is fitted, all others are predicted. A plan that has been measured isn't measured again.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import controller
import run
from bench.measuring import TORCHRUN
from config import Config, parse_config
from controller import Controller, train
from engines.engine import Engine
from papers.tables import COLUMNS, ROOT, Paper, Point, Row, read_points
from runtime.atomic_files import complete_rows
from sample import flat
from scheduling.dealing import MiniBatches
from simulation.finished import Known, read_run
from simulation.plans import Plan, costs_like, simulate

POINTS = ROOT / "published" / "measured_plans.csv"
KNOWN = ROOT / "published" / "measured_plans.json"  # what the runs told that were learnt from
RANKS = 4
STEPS = 7  # the first isn't counted
PACE_MS = "40,2"  # of engines: see bench/paced_server.py
LEARNING_S = 0.0008  # of a token forward
# all steps have one load: nothing is learnt
COMMON = ["--lr", "1e-12", "--save-every", "0", "--eval-every", "1000", "--steps", str(STEPS)]
PPO = ["--algorithm", "ppo"]
APART = ["--mode", "full", "--placement", "standalone"]
PLANS = {  # figure -> plan -> words of run.py; that which comes first is learnt from
    "plans, demo": {
        "colocate: full": ["--mode", "full"],
        **{f"colocate: {n}|{4 - n}": ["--rollout-ranks", str(n)] for n in (1, 2, 3)},
        "colocate: fused 0.2": ["--mode", "fused"],
    },
    "plans, PPO": {
        "colocate: full": [*PPO, "--mode", "full"],
        "colocate: 2|2": PPO,
        "colocate: fused 0.2": [*PPO, "--mode", "fused"],
        "split: full": [*PPO, "--mode", "full", "--placement", "split"],
        "standalone: full": [*PPO, *APART],
        "standalone, ahead: full": [*PPO, *APART, "--ahead", "1"],
    },
}


def config_of(figure: str, name: str, *more: str) -> Config:
    return parse_config([*COMMON, *PLANS[figure][name], *more])


def rows_of(figure: str, paper: Paper) -> list[Row]:
    """The rows of a figure. One that was learnt from is fitted."""
    points = paper.of(figure)
    if not points:
        return []
    known = Known(**json.loads(KNOWN.read_text())[figure])
    rows = []
    for point in points[:: 2 if paper.quick else 1]:
        config = config_of(figure, point.setting)
        costs = costs_like(known, config)
        ours = simulate(costs, RANKS, Plan(point.setting, config)).seconds
        kind = "fitted" if point.setting == next(iter(PLANS[figure])) else "predicted"
        rows.append(paper.row(point, ours, kind))
    return rows


FIGURES = {figure: partial(rows_of, figure) for figure in PLANS}


# ---------------------------------------------------------------- measuring


def at_pace(work: Callable, forwards: int) -> Callable:
    """Make a trainer's work last as long as so many passes forward."""

    def paced_work(mini_batches: MiniBatches, *more: Any) -> Any:
        tokens = sum(len(sample.prompt) + len(sample.response) for sample in flat(mini_batches))
        due = time.perf_counter() + LEARNING_S * forwards * tokens
        result = work(mini_batches, *more)
        time.sleep(max(0.0, due - time.perf_counter()))
        return result

    return paced_work


async def paced(c: Controller) -> bool:
    """Take the place of controller.train: models learn at a pace."""
    for model in (c.devices.actor, *c.devices.critics):
        model.update = at_pace(model.update, 3)
    for critic in c.devices.critics:
        critic.compute_values = at_pace(critic.compute_values, 1)
    return await train(c)


def measure(figure: str, name: str, out: Path, port: int) -> list[float]:
    """Run a plan, unless that was done. Returns the seconds of the steps that count."""
    rows = [*complete_rows(out / "metrics.jsonl")]
    if not rows or rows[-1]["step"] < STEPS:
        words = [*COMMON, *PLANS[figure][name], "--resume", "never", "--out", out, "--port", port]
        command = [TORCHRUN, "--nproc-per-node", RANKS, "--master-port", port - 1, __file__, *words]
        env = os.environ | {"BENCH_PACE_MS": PACE_MS, "OMP_NUM_THREADS": "1"}
        subprocess.run([*map(str, command)], env=env, cwd=ROOT.parent, check=True)
        rows = [*complete_rows(out / "metrics.jsonl")]
    counted = [row for row in rows if 0 < row["step"] < STEPS]
    if "ahead" in name:
        counted.pop()  # the last step serves no other
    return [row["time/step_s"] for row in counted]


def main(arguments: list[str]) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="measure what wasn't measured yet")
    default = Path(tempfile.gettempdir(), "nanoyatt-plans")
    parser.add_argument("--out", type=Path, default=default, help="folder of the runs")
    parser.add_argument("--port", type=int, default=32000)
    parser.add_argument("--figure", nargs="+", choices=PLANS, default=[*PLANS])
    parser.add_argument("--plans", nargs="+", help="these alone")
    given = parser.parse_args(arguments)
    for figure in given.figure if given.real else ():
        for name in given.plans or PLANS[figure]:
            out = given.out / f"{figure} {name}".replace(",", "").replace(" ", "_")
            keep(figure, name, measure(figure, name, out, given.port), out)
    paper = Paper(read_points(POINTS), {})
    for row in [row for figure in given.figure for row in FIGURES[figure](paper)]:
        print(f"{row.figure}, {row.setting}: {row.error:+.1%} {row.kind}")


def keep(figure: str, name: str, seconds: list[float], out: Path) -> None:
    """Write a plan's point, and what its run tells if it is learnt from."""
    points = {point.name: point for point in read_points(POINTS)} if POINTS.exists() else {}
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    middle = statistics.fmean(seconds)  # some steps have one wave more
    what = (figure, "nanoYATT", name, str(RANKS), "step", "s", f"{middle:.3f}")
    how = (f"{(high - low) / middle:.3f}", "RUN", "papers/plans.py --real", "-")
    point = Point(*what, *how, f"{len(seconds)} steps")
    points[point.name] = point
    with POINTS.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS.split(","), *(each[:-1] for each in points.values())])
    if name == next(iter(PLANS[figure])):
        known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
        known[figure] = asdict(read_run(out))
        KNOWN.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    if "RANK" in os.environ:  # of torchrun: a rank of a run
        controller.train = paced
        Engine.module = "bench.paced_server"
        run.main(sys.argv[1:])
    else:
        main(sys.argv[1:])
