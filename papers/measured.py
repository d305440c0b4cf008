"""The same workloads on real engines and on the virtual clock: does the simulation say what was measured?

    python papers/measured.py            published/measured_modes.csv beside the simulation of that set-up
    python papers/measured.py --real     measure again, about 20 minutes of an idle machine, then the same

Four ranks serve bench/modes.py's workloads with a pace (a decode step of 20 ms, and 1 ms a sequence). One
constant was fitted, on the workload `short` alone; the others are predicted, in seconds of serving a step.
"""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.workloads import CRITIQUE, WORKLOADS, is_kept, length_of
from papers.tables import ROOT, Paper, Point, Row, command
from rollout import MEETING_INTERVAL_S
from scheduling.costs import Decode, Passes
from simulation.cluster import Cluster, Lengths, Simulation, StepFacts, Workload
from simulation.costs import Moves

RANKS, STEPS = 4, 5  # the first step isn't counted
MEASURED = ROOT / "published" / "measured_modes.csv"
SIDES = ("full", "1|3", "2|2", "3|1", "fused 0.2")
BENCH = ["bench/modes.py", "--ranks", str(RANKS), "--pace", "20,1", "--moving", "0", "--repeats", "1"]
BENCH += ["--figure", "runs/bench/measured.png", "--sides", *SIDES]
PAIR = 0.05  # two sides that differ by less are as good as each other


@dataclass(frozen=True)
class Given(Workload):
    """A workload of bench/modes.py, whose answers are as long as there."""

    name: str = "short"

    def is_right(self, prompt_id: int, index: int) -> bool:
        return bool(index % 2) or not is_kept(self.name, prompt_id)


@dataclass(frozen=True)
class GivenLengths(Lengths):
    name: str = "short"

    def of(self, seed: int, prompt_id: int, index: int) -> int:
        return length_of(self.name, prompt_id, index)


def simulate(name: str, side: str, constants: dict[str, dict], steps: int) -> list[StepFacts]:
    """A workload on the measured set-up. side: as bench/modes.py names it."""
    set_up, swap_s = constants["set_up"], constants["engine"]["swap_s"]
    fixed, each = set_up["fixed"], set_up["each"]
    decode = Decode(fixed, each, read=fixed + each, apart=set_up["apart"])
    roles, moves = ("rollout", "genrm"), Moves(swap_s / 2, swap_s / 2)
    how = dict(moves=dict.fromkeys(roles, moves), meeting_s=MEETING_INTERVAL_S)
    cluster = Cluster(dict.fromkeys(roles, decode), Passes(0.0), **how)
    lengths, keep = (GivenLengths(0, 0, 200, name), Lengths(CRITIQUE, 0, CRITIQUE)), WORKLOADS[name].keep
    work = Given(set_up["prompt"], *lengths, keep, name=name)
    mode, _, tail = side.partition(" ")
    choice = dict(tail=float(tail)) if tail else {}
    if "|" in side:
        mode, choice = "partial", dict(rollout_ranks=int(side.partition("|")[0]))
    sizes = dict(prompts_per_step=16, answers_per_prompt=8, judgements=WORKLOADS[name].judgements)
    return Simulation(mode, RANKS, work, cluster, steps=steps, **sizes, **choice).run()


def serving_s(name: str, side: str, constants: dict[str, dict], steps=STEPS, first_counted=1) -> float:
    """Seconds of serving a step, in the median."""
    counted = simulate(name, side, constants, steps)[first_counted:]
    return statistics.median(step.seconds["serve"] for step in counted)


def figure(name: str) -> Callable[[Paper], list[Row]]:
    """What makes the rows of a workload."""

    def rows(paper: Paper) -> list[Row]:
        points = paper.of(name)[:: 2 if paper.quick else 1]
        own = []
        for point in points:
            ours = serving_s(name, point.setting, paper.constants)
            own.append(paper.row(point, ours)._replace(setting=f"{point.setting}, serving"))
        right, apart = ordered(own)
        order = f"in their order, of pairs measured more than {PAIR:.0%} apart"
        return own + [Row(name, order, None, right, f"of {apart}", "predicted")] * bool(apart)

    return rows


def ordered(rows: list[Row]) -> tuple[int, int]:
    """Of pairs of predicted rows that were measured more than PAIR apart: those in order, and all."""
    pairs = combinations([row for row in rows if row.kind == "predicted"], 2)
    apart = [(a, b) for a, b in pairs if abs(a.theirs / b.theirs - 1) > PAIR]
    return sum((a.theirs < b.theirs) == (a.ours < b.ours) for a, b in apart), len(apart)


def measure() -> None:
    """Run bench/modes.py, and keep the medians of what it measured."""
    subprocess.run([sys.executable, *BENCH, "--workloads", *FIGURES], cwd=ROOT.parent, check=True)
    seconds = defaultdict(list)
    for row in json.loads((ROOT.parent / "runs" / "bench" / f"modes-{RANKS}.json").read_text()):
        if row["step"]:
            seconds[row["workload"], row["side"]].append(row["metrics"]["time/serve_s"])
    with MEASURED.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(Point._fields[:-1])
        for (name, side), each in seconds.items():
            low, middle, high = statistics.quantiles(each, n=4)
            what = (name, "nanoYATT", side, str(RANKS), "serving", "s", f"{middle:.3f}")
            spread = f"{(high - low) / middle:.3f}"
            table.writerow([*what, spread, "RUN", "papers/measured.py --real", "-", f"{len(each)} steps"])


FIGURES = {name: figure(name) for name in WORKLOADS if name != "tail-judged"}

if __name__ == "__main__":
    sys.exit(command("measured", __doc__, FIGURES, sys.argv[1:], measure=measure))
