"""What one controller holds and sends does not grow with the number of ranks; a central one's does.

The real controllers on fakes at 2, 64 and 1,024 ranks, with as much work for each rank. bench/central.py runs
and counts them, has the central variant, and says what is counted.
"""

import sys
from pathlib import Path
from statistics import fmean
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import central
from central import ANSWERS, MEDIA_BYTES, PROMPTS_A_RANK, RANKS

import rollout

TRAINED = PROMPTS_A_RANK * ANSWERS  # samples a rank and step


@pytest.fixture(scope="module")
def parallel():
    """Figures of the parallel controllers by number of ranks; `pytest -s` shows them."""
    figures = {ranks: central.measure("parallel", ranks, steps=1) for ranks in RANKS}
    print("", central.HEADER, *(each.row() for each in figures.values()), sep="\n")
    return figures


def assert_constant(values):
    """Every value is within a tenth of their mean."""
    assert all(abs(value - fmean(values)) <= 0.1 * fmean(values) for value in values), values


def test_samples_held_do_not_grow_with_the_ranks(parallel):
    """The busiest controller's peak is the same on 2, 64 and 1,024 ranks, to a tenth.

    It is a little lower where a rank trains on samples of its own: it holds them once.
    """
    assert_constant([max(tally.peak for tally in figures.tallies) for figures in parallel.values()])
    # what it drew and what it received
    assert all(tally.peak >= 2 * TRAINED for tally in parallel[1024].tallies)


def test_nothing_is_held_of_the_step_before():
    """When a step begins, no controller holds a sample."""
    held, prepare = [], central.prepare

    async def collect(c):
        held.append(c.world.tally.held)
        return await rollout.collect(c)

    def prepare_to_look(c):
        prepare(c)
        c.collect = collect

    with mock.patch.object(central, "prepare", prepare_to_look):
        central.measure("parallel", 8, steps=3)
    assert held == [0] * 8 * 3


def test_bytes_sent_do_not_grow_with_the_ranks(parallel):
    """Samples that the busiest controller deals to ranks, with 1 MB of media each, and its facts.

    What goes over the wire is that but for the samples that stay at home. The facts of all meetings are about
    1 kB and lengthen with the digits of the prompt numbers; the meetings are as many. What a controller hears
    does grow: by the numbers of prompts that finished and the lengths of samples, about 140 bytes a rank.
    """
    for figures in parallel.values():
        received = 1.01 * TRAINED * MEDIA_BYTES * figures.steps
        assert all(tally.received <= received for tally in figures.tallies)
        assert all(tally.sent <= tally.dealt for tally in figures.tallies)
        assert all(tally.facts < 1200 * figures.steps for tally in figures.tallies)
    assert all(tally.heard < 200 * 1024 for tally in parallel[1024].tallies)
    runs = [figures.tallies for figures in parallel.values()]
    assert_constant([max(tally.dealt + tally.facts for tally in tallies) for tallies in runs])
    assert_constant([max(tally.sent for tally in tallies) for tallies in runs])
    assert len({tally.gathers for tallies in runs for tally in tallies}) == 1


@pytest.mark.parametrize("ranks", RANKS)
def test_media_travel_once_with_samples_that_move(parallel, ranks):
    """All the media of a step's batch is dealt once, and what is sent arrives once."""
    figures = parallel[ranks]
    media = ranks * TRAINED * figures.steps * MEDIA_BYTES
    dealt, sent = (sum(vars(tally)[name] for tally in figures.tallies) for name in ("dealt", "sent"))
    assert media < dealt < 1.01 * media  # the rest is tokens
    assert sent == sum(tally.received for tally in figures.tallies)
    assert 0 < sent <= dealt


def test_uneven_prompts_change_who_sends_but_not_how_much():
    """Where chance decides whose prompts are kept, controllers differ.

    A controller's mean stays the same from 2 to 64 ranks.
    """
    runs = [central.measure("parallel", ranks, steps=4, uneven=True).tallies for ranks in (2, 64)]
    assert_constant([fmean(tally.dealt for tally in tallies) for tallies in runs])
    assert max(tally.dealt for tally in runs[1]) > 1.1 * min(tally.dealt for tally in runs[1])


def test_a_central_controller_grows_with_the_ranks():
    """8 times the ranks: 8 times the samples at once and the bytes through rank 0, to a tenth.

    Other ranks' do not grow. On 1,024 ranks, too: `python bench/central.py`.
    """
    few, many = (central.measure("central", ranks, steps=1).tallies for ranks in (64, 512))
    for name in ("peak", "sent", "received"):
        assert vars(many[0])[name] / vars(few[0])[name] == pytest.approx(8, rel=0.1), name
        assert_constant([max(vars(tally)[name] for tally in tallies[1:]) for tallies in (few, many)])
