"""The same workloads on real engines and on the virtual clock: does the simulation say what was measured?

    python papers/measured.py            papers/published/measured_modes.csv beside what the clock says
    python papers/measured.py --real     measure again, about 20 minutes of an idle machine, then the same

Four ranks serve bench/modes.py's workloads with a pace (a decode step of 20 ms, and 1 ms a sequence). One
constant was fitted, on the workload `short` alone. Paced engines test scheduling, not hardware.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from papers import plans
from papers.paced import SetUp, command_of, measure, serving_s
from papers.tables import ROOT, Constants, Paper, Row, command, read_constants
from simulation.engine import EngineCosts

MEASURED = ROOT / "published" / "measured_modes.csv"
NAMES = ("short", "tail", "resample", "judge-heavy")
SIDES = ("full", "1|3", "2|2", "3|1", "fused 0.2")


def set_up_of(constants: Constants) -> SetUp:
    """The set-up of this page."""
    own = constants["set_up"]
    read_s = own["fixed"] + own["each"]
    decode = EngineCosts(own["fixed"], own["each"], read=read_s, apart=own["apart"])
    roles = dict.fromkeys(("rollout", "genrm"), decode)
    return SetUp(roles, own["prompt"], (200, 32), constants["engine"]["swap_s"])


def rows_of(name: str, paper: Paper) -> list[Row]:
    """The rows of a workload."""
    points = paper.of(name)[:: 2 if paper.quick else 1]
    at = set_up_of(paper.constants)
    return [paper.row(point, serving_s(name, point.setting, at)) for point in points]


def measure_modes(quick: bool) -> None:
    """Measure with bench/modes.py, in a quick run the first workload alone."""
    at = set_up_of(read_constants(ROOT / "measured.toml"))
    names = NAMES[: 1 if quick else None]
    sides = ["--moving", 0, "--sides", *SIDES, "--workloads", *names]
    line = command_of(at, dict.fromkeys(at.decode, at.prompt), *sides)
    measure([line], MEASURED, lambda _, workload, side: (workload, side))


FIGURES = {name: partial(rows_of, name) for name in NAMES} | plans.FIGURES

if __name__ == "__main__":
    sys.exit(command("measured", __doc__, FIGURES, sys.argv[1:], measure=measure_modes))
