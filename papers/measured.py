"""The same workloads on real engines and on the virtual clock: does the simulation say what was measured?

    python papers/measured.py            published/measured_modes.csv beside the simulation of that set-up
    python papers/measured.py --real     measure again, about 20 minutes of an idle machine, then the same

Four ranks serve bench/modes.py's workloads with a pace (a decode step of 20 ms, and 1 ms a sequence). One
constant was fitted, on the workload `short` alone; the others are predicted, in seconds of serving a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.paced import SetUp, command_of, measure, serving_s
from papers.tables import ROOT, Constants, Paper, Row, command
from scheduling.costs import Decode

MEASURED = ROOT / "published" / "measured_modes.csv"
NAMES, SIDES = ("short", "tail", "resample", "judge-heavy"), ("full", "1|3", "2|2", "3|1", "fused 0.2")
PAIR = 0.05  # two sides that differ by less are as good as each other


def set_up_of(constants: Constants) -> SetUp:
    """Of this page."""
    own = constants["set_up"]
    decode = Decode(own["fixed"], own["each"], read=own["fixed"] + own["each"], apart=own["apart"])
    roles = dict.fromkeys(("rollout", "genrm"), decode)
    return SetUp(roles, constants["engine"]["swap_s"], own["prompt"], (200, 32))


def figure(name: str) -> Callable[[Paper], list[Row]]:
    """What makes the rows of a workload."""

    def rows(paper: Paper) -> list[Row]:
        points = paper.of(name)[:: 2 if paper.quick else 1]
        own = []
        for point in points:
            ours = serving_s(name, point.setting, set_up_of(paper.constants))
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


def measure_modes(quick: bool) -> None:
    line = command_of("--pace", "20,1", "--sides", *SIDES, "--workloads", *NAMES[: 1 if quick else None])
    measure([line], MEASURED, lambda _, workload, side: (workload, side))


FIGURES = {name: figure(name) for name in NAMES}

if __name__ == "__main__":
    sys.exit(command("measured", __doc__, FIGURES, sys.argv[1:], measure=measure_modes))
