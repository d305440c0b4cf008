"""Compares what --simulate --like predicts for other plans with how long they took.

    python reproduce/papers/plans.py --real [--out DIR]      measure: half an hour on an idle machine
    python reproduce/papers/measured.py                      make the rows, as part of its page

Four ranks run the demo and PPO under each plan at a set pace: 40 ms for a decode step, 2 ms for each sequence
in it, and 0.8 ms for a token forward in training. --like gets only the folders of the two `colocate: full`
runs. Their rows are fitted; all others are predicted. A plan with a finished run in DIR isn't measured again.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import build
import run
from config import parse_config
from controller import train
from engines.engine import Engine
from reproduce.bench.measuring import parser_of, run_ranks
from reproduce.papers.tables import ROOT, Paper, Row, keep_measured
from reproduce.simulation.finished import Known, read_run
from reproduce.simulation.plans import Plan, costs_like, simulate
from runtime.atomic_files import whole_rows
from sample import flat
from scheduling.dealing import MiniBatches
from state import Controller

POINTS = ROOT / "published" / "measured_plans.csv"
KNOWN = ROOT / "published" / "measured_plans.json"  # figure -> what --like knows
RANKS = 4
STEPS = 7  # the first isn't counted
PACE_MS = "40,2"  # engines' pace: see reproduce/bench/paced_server.py
LEARNING_S = 0.0008  # per token forward
# the learning rate is almost 0, so that all steps have the same load
COMMON = ["--lr", "1e-12", "--save-every", "0", "--eval-every", "1000", "--steps", str(STEPS)]
PPO = ["--algorithm", "ppo"]
APART = ["--mode", "full", "--placement", "standalone"]
PLANS = {  # figure -> plan -> arguments of run.py; --like gets the first one's run
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


def rows_of(figure: str, paper: Paper) -> list[Row]:
    """Return the rows of a figure. The run that --like gets is fitted; the trivial predictor repeats it."""
    known = json.loads(KNOWN.read_text())
    rows = []
    own = {point.setting: float(point.value) for point in paper.of(figure)}
    first = next(iter(PLANS[figure]))
    for point in paper.of(figure)[:: 2 if paper.quick else 1]:
        config = parse_config([*COMMON, *PLANS[figure][point.setting]])
        costs = costs_like(Known(**known[figure]), config)
        ours = simulate(costs, RANKS, Plan(point.setting, config)).seconds
        row = paper.row(point, ours, how="simulated", trivial=own.get(first))
        rows.append(row._replace(kind="fitted") if point.setting == first else row)
    return rows


FIGURES = {figure: partial(rows_of, figure) for figure in PLANS}


# ---------------------------------------------------------------- measuring


def at_pace(work: Callable, forwards: int) -> Callable:
    """Return a trainer's work, slowed down to the time of `forwards` forward passes."""

    def paced_work(mini_batches: MiniBatches, *more: Any) -> Any:
        tokens = sum(len(sample.prompt) + len(sample.response) for sample in flat(mini_batches))
        due = time.perf_counter() + LEARNING_S * forwards * tokens
        result = work(mini_batches, *more)
        time.sleep(max(0.0, due - time.perf_counter()))
        return result

    return paced_work


async def paced(c: Controller) -> bool:
    """Replace controller.train: train like it, but at a set pace."""
    for model in (c.devices.actor, *c.devices.critics):
        model.update = at_pace(model.update, 3)
    for critic in c.devices.critics:
        critic.compute_values = at_pace(critic.compute_values, 1)
    return await train(c)


def measure(figure: str, name: str, out: Path, port: int) -> None:
    """Run a plan unless `out` has its run. Keep its point, and for the first plan also what --like reads."""
    rows = [*whole_rows(out / "metrics.jsonl")]
    if not rows or rows[-1]["step"] < STEPS:
        words = [*COMMON, *PLANS[figure][name], "--resume", "never", "--out", out, "--port", port]
        run_ranks(RANKS, [__file__, *words], env={"BENCH_PACE_MS": PACE_MS})
        rows = [*whole_rows(out / "metrics.jsonl")]
    seconds = [row["time/step_s"] for row in rows if 0 < row["step"] < STEPS]
    if "ahead" in name:
        seconds.pop()  # the last step serves nothing
    what = (figure, "nanoYATT", name, str(RANKS), "step", "s")
    middle = statistics.fmean(seconds)  # some steps have an extra wave
    keep_measured(POINTS, what, seconds, middle, "reproduce/papers/plans.py --real")
    if name == next(iter(PLANS[figure])):
        known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
        known[figure] = asdict(read_run(out))
        KNOWN.write_text(json.dumps(known, indent=1) + "\n")


def main() -> None:
    parser = parser_of(__doc__, port=32000)
    parser.add_argument("--real", action="store_true", required=True, help="measure")
    default = Path(tempfile.gettempdir(), "nanoyatt-plans")
    parser.add_argument("--out", type=Path, default=default, help="folder of the runs")
    given = parser.parse_args()
    for figure, plans in PLANS.items():
        for name in plans:
            out = given.out / f"{figure} {name}".replace(",", "").replace(" ", "_")
            measure(figure, name, out, given.port)


if __name__ == "__main__":
    if "RANK" in os.environ:  # this process is a rank of a run
        build.TRAINING = build.TRAINING._replace(run=paced)
        Engine.module = "reproduce.bench.paced_server"
        run.main(sys.argv[1:])
    else:
        main()
