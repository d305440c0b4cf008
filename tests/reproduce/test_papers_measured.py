"""The simulation against measurements of real engines, on the setup of reproduce/bench/modes.py with a
pace."""

import statistics
from itertools import combinations

import pytest

from reproduce.papers import measured
from reproduce.papers.measured import serving_s
from reproduce.papers.tables import ROOT, Paper, read_constants, read_points

PAPER = Paper(read_points(measured.MEASURED), read_constants(ROOT / "measured.toml"))


def test_the_simulation_says_what_was_measured():
    """With one constant, fitted on `short`, it must predict the others' seconds and the faster mode."""
    tables = [measured.FIGURES[name](PAPER) for name in ("tail", "resample", "judge-heavy")]
    rows = [row for table in tables for row in table]
    assert len(rows) == 15 and {row.kind for row in rows} == {"predicted"}
    assert statistics.median(abs(row.error) for row in rows) < 0.10
    pairs = [pair for table in tables for pair in combinations(table, 2)]
    apart = [(a, b) for a, b in pairs if abs(a.published / b.published - 1) > 0.05]
    right = sum((a.published < b.published) == (a.simulated < b.simulated) for a, b in apart)
    assert len(apart) > 20 and right >= 0.8 * len(apart)


BEST = {"short": "2|2", "tail": "2|2", "resample": "2|2", "judge-heavy": "1|3"}


@pytest.mark.slow
@pytest.mark.parametrize("name", BEST)
def test_a_split_that_moves_ends_near_the_best(name):
    """The split must end near the best one, even where each prompt that is read delays generation."""
    last = dict(steps=22, first_counted=14)
    moving = serving_s(PAPER.constants, name, "3|1", rebalance=True, **last)
    assert moving < 1.06 * serving_s(PAPER.constants, name, BEST[name], **last)
