"""The simulation beside what real engines took, on the set-up of bench/modes.py with a pace."""

import statistics
from itertools import combinations

from papers import measured
from papers.tables import ROOT, Paper, read_constants, read_points

PAPER = Paper(read_points(measured.MEASURED), read_constants(ROOT / "measured.toml"))


def test_the_simulation_says_what_was_measured():
    """One constant, fitted on `short`: the other workloads' seconds, and which of two modes is faster."""
    tables = [measured.FIGURES[name](PAPER) for name in ("tail", "resample", "judge-heavy")]
    rows = [row for table in tables for row in table]
    assert len(rows) == 15 and {row.kind for row in rows} == {"predicted"}
    assert statistics.median(abs(row.error) for row in rows) < 0.10
    pairs = [pair for table in tables for pair in combinations(table, 2)]
    apart = [(a, b) for a, b in pairs if abs(a.published / b.published - 1) > 0.05]
    right = sum((a.published < b.published) == (a.simulated < b.simulated) for a, b in apart)
    assert len(apart) > 20 and right >= 0.8 * len(apart)
