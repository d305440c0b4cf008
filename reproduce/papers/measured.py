"""Runs the same workloads on real engines and on the virtual clock, and compares their times.

    python reproduce/papers/measured.py  compare reproduce/papers/published/measured_*.csv with the simulation
    python reproduce/papers/measured.py --real     measure again first: about 20 minutes on an idle machine

Four ranks serve reproduce/bench/modes.py's workloads at a set pace (20 ms for a decode step, and 1 ms for
each sequence
in it). One constant was fitted, only on the workload `short`. Paced engines test scheduling, not hardware.
The page also has the figures of reproduce/papers/plans.py, which measures them itself.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from reproduce.bench.measuring import column
from reproduce.bench.modes import by_workload, run_sides
from reproduce.bench.workloads import ANSWERS, PROMPTS, WORKLOADS, Side, is_kept, length_of
from reproduce.papers import plans
from reproduce.papers.tables import (
    ROOT,
    Constants,
    Paper,
    Row,
    command,
    keep_measured,
    read_constants,
)
from reproduce.simulation.cluster import Cluster, Lengths, Simulation, Workload
from reproduce.simulation.costs import Decode, Passes
from reproduce.simulation.engine import Moves
from rollout import MEETING_INTERVAL_S

MEASURED = ROOT / "published" / "measured_modes.csv"
NAMES = ("short", "tail", "resample", "judge-heavy")
SIDES = ("full", "1|3", "2|2", "3|1", "fused 0.2")
RANKS = 4
STEPS = 5  # the first isn't counted
MOST = 200  # tokens in an answer


@dataclass(frozen=True)
class GivenLengths(Lengths):
    """The answer lengths of a workload in reproduce/bench/modes.py."""

    name: str = "short"

    def of(self, *text: object) -> int:
        return length_of(self.name, *text[-2:])


@dataclass(frozen=True)
class GivenWork(Workload):
    """A workload in reproduce/bench/modes.py. The same answers are right here and there."""

    name: str = "short"

    def is_right(self, prompt_id: int, index: int) -> bool:
        return bool(index % 2) or not is_kept(self.name, prompt_id)


def serving_s(
    constants: Constants,
    name: str,
    side: str,
    steps: int = STEPS,
    first_counted: int = 1,
    rebalance: bool = False,
) -> float:
    """Return the median seconds that serving a step takes. side: a name in reproduce/bench/modes.py."""
    at = constants["set_up"]
    read_s = at["fixed"] + at["each"]
    decode = Decode(at["fixed"], at["each"], read=read_s, apart=at["apart"])
    roles = dict.fromkeys(("rollout", "genrm"), decode)
    half_s = constants["engine"]["swap_s"] / 2
    moves = dict.fromkeys(roles, Moves(half_s, half_s))
    cluster = Cluster(roles, Passes(0.0), moves=moves, meeting_s=MEETING_INTERVAL_S)
    load = WORKLOADS[name]
    answer = GivenLengths(0, 0, MOST, name)
    critique = Lengths(load.critique, 0, load.critique)
    work = GivenWork(at["prompt"], answer, critique, load.keep, name=name)
    settings = dict(prompts_per_step=PROMPTS, answers_per_prompt=ANSWERS)
    settings |= dict(steps=steps, rebalance=rebalance)
    mode, _, tail = side.partition(" ")
    if tail:
        settings["tail"] = float(tail)
    if "|" in side:
        mode = "partial"
        settings["rollout_ranks"] = int(side.partition("|")[0])
    counted = Simulation(mode, RANKS, work, cluster, **settings).run()[first_counted:]
    return statistics.median(step.seconds["serve"] for step in counted)


def rows_of(name: str, paper: Paper) -> list[Row]:
    """Return the rows of a workload."""
    known = {(point.figure, point.setting): float(point.value) for point in paper.points}
    rows = []
    for point in paper.of(name)[:: 2 if paper.quick else 1]:
        ours = serving_s(paper.constants, name, point.setting)
        # the trivial predictor knows more: this workload's `full`, and how `short` compares with its own
        sides = [
            known.get(each)
            for each in ((name, "full"), ("short", point.setting), ("short", "full"))
        ]
        trivial = sides[0] * sides[1] / sides[2] if point.setting != "full" and all(sides) else None
        rows.append(paper.row(point, ours, how="simulated", trivial=trivial))
    return rows


def measure(quick: bool) -> None:
    """Measure as reproduce/bench/modes.py does; if quick, only the first workload."""
    at = read_constants(ROOT / "measured.toml")["set_up"]
    pace = f"{1000 * at['fixed']:g},{1000 * at['each']:g}"
    loads = NAMES[: 1 if quick else None]
    sides = [Side(name, side, 0, [side], STEPS) for name in loads for side in SIDES]
    for name, found in by_workload(run_sides(sides, RANKS, pace)).items():
        for side, steps in found.items():
            took = column(steps, "time/serve_s")
            what = (name, "nanoYATT", side, str(RANKS), "serving", "s")
            middle = statistics.median(took)
            keep_measured(MEASURED, what, took, middle, "reproduce/papers/measured.py --real")


FIGURES = {name: partial(rows_of, name) for name in NAMES} | plans.FIGURES

if __name__ == "__main__":
    sys.exit(command("measured", __doc__, FIGURES, sys.argv[1:], measure=measure))
