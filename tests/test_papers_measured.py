"""The simulation beside what real engines took, on the set-up of bench/modes.py with a pace."""

import statistics
from itertools import combinations

import pytest

from papers import measured
from papers.measured import serving_s
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


BEST = [("tail-judged", "fused 0.2"), ("judge-heavy", "full"), ("resample", "fused 0.1")]


@pytest.mark.slow
@pytest.mark.parametrize("name,best", BEST)
def test_auto_ends_near_the_best(name, best):
    """Also where each prompt that is read holds up what is written, so that modes have other paces."""
    of_auto = serving_s(PAPER.constants, name, "auto", steps=22, first_counted=14)
    assert of_auto < 1.05 * serving_s(PAPER.constants, name, best)
