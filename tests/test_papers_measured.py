"""The simulation beside what real engines took, on the set-up of bench/modes.py with a pace."""

import statistics

import pytest

from papers import measured
from papers.paced import serving_s
from papers.tables import ROOT, Paper, Row, read_constants, read_points

PAPER = Paper(read_points(measured.MEASURED), read_constants(ROOT / "measured.toml"))


def test_the_simulation_says_what_was_measured():
    """One constant, fitted on `short`: the other workloads' seconds, and which of two modes is faster."""
    tables = [measured.FIGURES[name](PAPER) for name in ("tail", "resample", "judge-heavy")]
    rows = [row for table in tables for row in table if row.theirs]
    assert len(rows) == 15 and {row.kind for row in rows} == {"predicted"}
    assert statistics.median(abs(row.error) for row in rows) < 0.10
    right, apart = map(sum, zip(*(measured.ordered(table[:5]) for table in tables), strict=True))
    assert apart > 20 and right >= 0.8 * apart


BEST = [("tail-judged", "fused 0.2"), ("judge-heavy", "full"), ("resample", "fused 0.1")]


@pytest.mark.slow
@pytest.mark.parametrize("name,best", BEST)
def test_auto_ends_near_the_best(name, best):
    """Also where each prompt that is read holds up what is written, so that modes have other paces."""
    at = measured.set_up_of(PAPER.constants)
    of_auto = serving_s(name, "auto", at, steps=22, first_counted=14)
    assert of_auto < 1.05 * serving_s(name, best, at)


def test_pairs_in_order():
    kinds = dict(figure="a", setting="", unit="s", kind="predicted")
    pairs = [(1.0, 5.0), (1.02, 4.0), (2.0, 4.5)]
    rows = [Row(theirs=theirs, ours=ours, **kinds) for theirs, ours in pairs]
    assert measured.ordered(rows) == (1, 2)  # the first two are as good as each other
    assert measured.ordered([rows[0], rows[2]._replace(kind="fitted")]) == (0, 0)
