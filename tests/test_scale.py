"""What one controller holds and sends does not grow with the number of ranks; what a central one does, grows with them.

The real controllers under fakes at 2, 64 and 1,024 ranks, with as much work for each rank. bench/central.py runs and counts them,
has the central variant, and says what is counted.
"""

import sys
from pathlib import Path
from statistics import fmean

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import central
from central import ANSWERS, MEDIA_BYTES, PROMPTS_A_RANK, RANKS

TRAINED = PROMPTS_A_RANK * ANSWERS  # samples a rank and step


@pytest.fixture(scope="module")
def parallel():
    """Figures of the parallel controllers by number of ranks; `pytest -s` shows them."""
    figures = {ranks: central.measure("parallel", ranks) for ranks in RANKS}
    print("", central.HEADER, *(each.row() for each in figures.values()), sep="\n")
    return figures


def assert_constant(values):
    """Every value is within a tenth of their mean."""
    assert all(abs(value - fmean(values)) <= 0.1 * fmean(values) for value in values), values


def test_samples_held_do_not_grow_with_the_ranks(parallel):
    """The busiest controller's peak is the same on 2, 64 and 1,024 ranks, to a tenth.

    On 2 ranks it is a little lower: half of the samples that a rank trains on are its own, and it holds them once.
    """
    assert_constant([max(tally.peak for tally in figures.tallies) for figures in parallel.values()])
    assert all(tally.peak >= 2 * TRAINED for tally in parallel[1024].tallies)  # what it drew and what it received


def test_bytes_sent_do_not_grow_with_the_ranks(parallel):
    """Samples that a controller deals to ranks, with 1 MB of media each, and its facts: the same for the busiest on any number.

    How much of that goes over the wire depends on how many stay at home: half on 2 ranks, hardly any on 64 and more. So `sent` is
    constant from 64 ranks on, and never more than `dealt`. The facts are below 1 kB and lengthen with the digits of the prompt
    numbers. What a controller hears in all-gathers is everyone's facts: that does grow, by less than 1 kB a rank.
    """
    for figures in parallel.values():
        assert all(tally.received <= 1.01 * TRAINED * MEDIA_BYTES * figures.steps for tally in figures.tallies)
        assert all(tally.sent <= tally.dealt and tally.facts < 1000 * figures.steps for tally in figures.tallies)
    assert_constant([max(tally.dealt + tally.facts for tally in figures.tallies) for figures in parallel.values()])
    assert_constant([max(tally.sent for tally in parallel[ranks].tallies) for ranks in (64, 1024)])


@pytest.mark.parametrize("ranks", RANKS)
def test_media_travel_once_with_samples_that_move(parallel, ranks):
    """All the media of a step's batch is dealt once, and what isn't sent stayed at home, about 1 / ranks of it."""
    figures = parallel[ranks]
    media = ranks * TRAINED * figures.steps * MEDIA_BYTES
    dealt, sent = sum(tally.dealt for tally in figures.tallies), sum(tally.sent for tally in figures.tallies)
    assert media < dealt < 1.01 * media  # the rest is tokens
    assert sent == sum(tally.received for tally in figures.tallies)
    assert sent / dealt == pytest.approx(1 - 1 / ranks, abs=0.15)


def test_uneven_prompts_change_who_sends_but_not_how_much():
    """Where chance decides whose prompts are kept, controllers differ, but a controller's mean stays the same from 2 to 64 ranks."""
    runs = [central.measure("parallel", ranks, steps=4, uneven=True).tallies for ranks in (2, 64)]
    assert_constant([fmean(tally.dealt for tally in tallies) for tallies in runs])
    assert max(tally.dealt for tally in runs[1]) > 1.1 * min(tally.dealt for tally in runs[1])


def test_a_central_controller_grows_with_the_ranks():
    """16 times the ranks: 16 times the samples at once and the bytes through rank 0, to a tenth; other ranks' do not grow."""
    few, many = (central.measure("central", ranks, steps=1).tallies for ranks in (64, 1024))
    for name in ("peak", "sent", "received"):
        assert vars(many[0])[name] / vars(few[0])[name] == pytest.approx(16, rel=0.1), name
        assert_constant([max(vars(tally)[name] for tally in tallies[1:]) for tallies in (few, many)])
