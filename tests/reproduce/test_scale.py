"""reproduce/bench/central.py: which counts are flat and which grow; its page is of today's code."""

from itertools import pairwise, product
from statistics import fmean

import pytest

from reproduce.bench import central


@pytest.fixture(scope="module")
def found():
    """Return way -> figures by ranks; each number of ranks is twice the one before."""
    ways = {"parallel": [], "split": [], "central": []}
    for ranks in central.QUICK:
        run, split = central.Scaled(ranks), central.Scaled(ranks, **central.SPLIT)
        run.run()
        split.run()
        for way, busiest in (run.ways() | {"split": split.ways()["parallel"]}).items():
            ways[way].append(busiest)
    return ways


def growth(of_way, name):
    """Return quotients of neighbors: 1 if it is flat, 2 if it grows with the ranks."""
    values = [getattr(busiest, name) for busiest in of_way]
    return [b / a for a, b in pairwise(values)]


def test_what_a_controller_holds_and_sends_is_flat(found):
    """All must be within a tenth of the mean (each of 8 units keeps an eighth), also with split models."""
    for way, name in product(("parallel", "split"), ("samples", "sent")):
        values = [getattr(busiest, name) for busiest in found[way]]
        assert all(abs(value - fmean(values)) < 0.1 * fmean(values) for value in values), name
        assert all(quotient < 1.15 for quotient in growth(found[way], "requests"))
    pairs = zip(found["split"], found["parallel"], strict=True)
    # a sample goes to an actor and a critic, and so do columns
    assert all(2.5 < split.sent / parallel.sent < 4 for split, parallel in pairs)


def test_what_grows_is_counted(found):
    """A central process's counts must grow with the ranks, and also the small facts from other ranks."""
    for name in ("samples", "sent", "received", "requests"):
        assert growth(found["central"], name) == pytest.approx([2.0, 2.0], rel=0.12), name
    assert all(1 < quotient < 1.2 for quotient in growth(found["parallel"], "received"))
    row = central.row_of("parallel", 1024, central.Busiest(1234, 2.5e6, 3e6, 4567))
    assert row == "| parallel | 1,024 | 1,234 | 2.500 | 3.000 | 4,567 |"


def test_the_page_has_what_is_counted_today(found):
    """Its text is the program's, and its rows are those of a quick run, where both have them."""
    page = (central.DOCS / "scale.md").read_text()
    assert page.startswith(f"# {central.__doc__}")
    for way, (few, _, many) in found.items():
        assert central.row_of(way, 64, few) in page
        assert central.row_of(way, 256, many) in page
